//! Status of the database: open work and disk usage.

use crate::{
    Store, StoreError,
    sql::{query, query_as},
};
use std::path::Path;

/// Open work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenWork {
    /// Number of turns that wait or run.
    pub turns: u64,
    /// Number of undecided calls of open turns.
    pub approvals: u64,
    /// Number of deliveries that failed permanently.
    pub dead_letters: u64,
}

/// The sessions of a database and the work in its queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuedWork {
    pub sessions: u64,
    /// Number of turns that run, including those that wait for a person.
    pub running_turns: u64,
    /// Number of open turns that wait for a person's decision.
    pub parked_turns: u64,
    /// Number of sessions that accept nothing, because the host was restored and a turn of theirs is held.
    pub held_sessions: u64,
    /// Number of alarms that are due or whose turn runs.
    pub alarms: u64,
    /// Number of events that are on their way to sessions.
    pub events: u64,
    /// Number of events that are on their way to webhooks.
    pub webhooks: u64,
    /// Number of batches that have not ended.
    pub batches: u64,
    /// Number of requests of these batches that have no result.
    pub batch_requests: u64,
}

/// Numbers and sizes of what is kept for clients for a while.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptSizes {
    /// Number of batches, ended ones included.
    pub batches: u64,
    /// Size of their requests and results.
    pub batch_bytes: u64,
    pub files: u64,
    pub file_bytes: u64,
    pub response_bytes: u64,
}

/// Disk usage in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskUse {
    pub database: u64,
    /// Size of the commits that are not in the database file yet.
    pub wal: u64,
    /// Free space of the file system that this process may use; `None` if the system does not report it.
    pub free: Option<u64>,
}

impl Store {
    /// Counts open turns, undecided calls and dead deliveries at one moment.
    pub async fn open_work(&self) -> Result<OpenWork, StoreError> {
        let (turns, approvals, dead_letters): (i64, i64, i64) = query_as(
            "SELECT
                (SELECT COUNT(*) FROM turns WHERE ended_at_ms IS NULL),
                (SELECT COUNT(*) FROM approvals JOIN turns ON turns.key = turn
                 WHERE verdict IS NULL AND turns.ended_at_ms IS NULL),
                (SELECT COUNT(*) FROM deliveries WHERE state = 2)",
        )
        .fetch_one(&self.readers)
        .await
        .map_err(StoreError::while_it("counted open work"))?;
        let count = |count: i64| count.max(0) as u64;
        Ok(OpenWork { turns: count(turns), approvals: count(approvals), dead_letters: count(dead_letters) })
    }

    /// Counts the sessions and the work in the queues. Alarms are due if their time is `now_ms` or earlier.
    pub async fn queued_work(&self, now_ms: u64) -> Result<QueuedWork, StoreError> {
        let counts: [i64; 9] = query(
            "SELECT
                (SELECT COUNT(*) FROM sessions WHERE session IS NOT NULL),
                (SELECT COUNT(*) FROM turns WHERE ended_at_ms IS NULL AND state = 1 AND NOT held),
                (SELECT COUNT(DISTINCT turns.key) FROM approvals JOIN turns ON turns.key = turn
                 WHERE verdict IS NULL AND turns.ended_at_ms IS NULL),
                (SELECT COUNT(*) FROM (SELECT DISTINCT agent, session FROM turns
                 WHERE held AND ended_at_ms IS NULL) AS held),
                (SELECT COUNT(*) FROM schedules WHERE state = 0 AND wake_ms <= ?)
                    + (SELECT COUNT(*) FROM schedules WHERE state = 1),
                (SELECT COUNT(*) FROM deliveries WHERE state IN (0, 1) AND webhook IS NULL),
                (SELECT COUNT(*) FROM deliveries WHERE state IN (0, 1) AND webhook IS NOT NULL),
                (SELECT COUNT(*) FROM batches WHERE ended_at_ms IS NULL AND complete),
                (SELECT COUNT(*) FROM batch_items WHERE state = 0)
                    + (SELECT COUNT(*) FROM batch_items WHERE state = 1)",
        )
        .bind(now_ms as i64)
        .fetch_one(&self.readers)
        .await
        .map(|row| std::array::from_fn(|column| row.get(column)))
        .map_err(StoreError::while_it("counted the work in its queues"))?;
        let [
            sessions,
            running_turns,
            parked_turns,
            held_sessions,
            alarms,
            events,
            webhooks,
            batches,
            requests,
        ] = counts.map(|count| count.max(0) as u64);
        Ok(QueuedWork {
            sessions,
            running_turns,
            parked_turns,
            held_sessions,
            alarms,
            events,
            webhooks,
            batches,
            batch_requests: requests,
        })
    }

    /// Counts what is kept for clients.
    pub async fn kept_sizes(&self) -> Result<KeptSizes, StoreError> {
        let (batches, batch_bytes, files, file_bytes, response_bytes): (i64, i64, i64, i64, i64) = query_as(
            "SELECT
                (SELECT COUNT(*) FROM batches),
                (SELECT CAST(COALESCE(SUM(bytes), 0) AS BIGINT) FROM batches),
                (SELECT COUNT(*) FROM files),
                (SELECT CAST(COALESCE(SUM(bytes), 0) AS BIGINT) FROM files),
                (SELECT CAST(COALESCE(SUM(bytes), 0) AS BIGINT) FROM response_sizes)",
        )
        .fetch_one(&self.readers)
        .await
        .map_err(StoreError::while_it("counted what it keeps for clients"))?;
        let count = |count: i64| count.max(0) as u64;
        Ok(KeptSizes {
            batches: count(batches),
            batch_bytes: count(batch_bytes),
            files: count(files),
            file_bytes: count(file_bytes),
            response_bytes: count(response_bytes),
        })
    }

    /// Returns the disk usage, or `None` if the database is not in a folder of this machine.
    pub fn disk_use(&self) -> Option<DiskUse> {
        let path = self.path.as_ref()?;
        let bytes = |path: &Path| std::fs::metadata(path).map_or(0, |found| found.len());
        let mut wal = path.as_os_str().to_owned();
        wal.push("-wal");
        Some(DiskUse { database: bytes(path), wal: bytes(wal.as_ref()), free: self.free_bytes() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        AgentRow, BatchRoom, Durability, NewDelivery, NewEvent, NewFile, NewSchedule, NewTurn, Queued,
        Target, TurnCommit, WebhookRow,
    };

    #[tokio::test]
    async fn a_file_database_reports_its_disk_use_and_open_work() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&folder.path().join("skep.db"), Durability::Process).await.unwrap();
        let before = store.disk_use().unwrap();
        store.check().await.unwrap();
        let after = store.disk_use().unwrap();
        assert!(after.wal > before.wal, "{before:?} {after:?}");
        assert!(after.free > Some(0) || cfg!(not(unix)));
        assert_eq!(store.open_work().await.unwrap(), OpenWork { turns: 0, approvals: 0, dead_letters: 0 });
        assert_eq!(Store::for_tests().await.unwrap().disk_use(), None);
    }

    #[tokio::test]
    async fn what_is_kept_for_clients_is_counted() {
        let store = Store::for_tests().await.unwrap();
        assert_eq!(store.kept_sizes().await.unwrap(), KeptSizes::default());
        let file = |id: &str, body: &[u8]| NewFile {
            id: id.into(),
            principal: "p".into(),
            name: "f".into(),
            purpose: "batch".into(),
            at_ms: 1,
            expires_at_ms: 2,
            body: body.to_vec().into(),
        };
        let room = BatchRoom { bytes: 1_000, batches: 10, share: None };
        for (id, body) in [("one", &b"12345"[..]), ("two", b"678")] {
            assert_eq!(store.store_file(file(id, body), room).await.unwrap(), Queued::New);
        }
        let expected = KeptSizes { files: 2, file_bytes: 8, ..KeptSizes::default() };
        assert_eq!(store.kept_sizes().await.unwrap(), expected);
    }

    #[tokio::test]
    async fn the_work_in_each_queue_is_counted() {
        let store = Store::for_tests().await.unwrap();
        assert_eq!(store.queued_work(10).await.unwrap(), QueuedWork::default());
        let agent = AgentRow {
            name: "a".into(),
            manifest: String::new(),
            digest: "d".into(),
            deployed_at_ms: 1,
            deployed_by: "ann".into(),
        };
        let schedule = |name: &str, due_ms| NewSchedule {
            id: name.into(),
            name: name.into(),
            target: "s".into(),
            principal: "p".into(),
            timing: String::new(),
            repeats: false,
            data: None,
            tries: 1,
            due_ms,
        };
        let schedules = [schedule("due", 10), schedule("later", 11)];
        store.put_agent(&agent, b"component", &schedules).await.unwrap();
        let turn = |id: &str, number| NewTurn {
            id: id.into(),
            agent: "a".into(),
            session: id.into(),
            idempotency_key: None,
            digest: "d".into(),
            input: Vec::new(),
            seed: Vec::new(),
            accepted_at_ms: 1,
            number,
        };
        for (id, number) in [("waits", None), ("runs", Some(1)), ("runs too", Some(1))] {
            store.accept_turn(turn(id, number)).await.unwrap();
        }
        let commit = TurnCommit { agent: "a".into(), session: "s".into(), turn: 1, ..Default::default() };
        store.commit_turn(commit).await.unwrap();
        let webhook = WebhookRow {
            id: "w".into(),
            url: "https://example.com".into(),
            topics: "*".into(),
            sealed_secret: "s".into(),
            configured: false,
            created_at_ms: 1,
            disabled: None,
            last_try: None,
        };
        store.put_webhook(&webhook).await.unwrap();
        let to = |target| NewDelivery { target, undeliverable: None };
        let session = || Target::Session { agent: "a".into(), session: "s".into() };
        let event = NewEvent {
            source: "shop".into(),
            id: "1".into(),
            topic: "t".into(),
            data: None,
            principal: "p".into(),
            hops: 0,
            at_ms: 1,
            deliveries: vec![to(session()), to(session()), to(Target::Webhook("w".into()))],
        };
        store.publish(&event, 1).await.unwrap();
        let expected = QueuedWork {
            sessions: 1,
            running_turns: 2,
            alarms: 1,
            events: 2,
            webhooks: 1,
            ..QueuedWork::default()
        };
        assert_eq!(store.queued_work(10).await.unwrap(), expected);
    }
}
