//! Work that a restored database holds back.
//!
//! Work that was in flight when a backup was taken may have been done after that by the old host, with
//! effects outside. None of it continues automatically: open turns, deliveries, due schedules and batches are
//! held until the operator resumes or drops them, all at once. Work that is created later is not held.

use crate::{
    OpenTurn, Store, StoreError,
    notices::{self, NoticeKind},
    sql::{AssertSqlSafe, Connection, Row, query, query_as, raw_sql},
    turns,
};

/// Everything that is held since a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The time at which the backup was taken.
    pub backup_at_ms: u64,
    pub restored_at_ms: u64,
    /// Number of turns that waited or ran.
    pub turns: u64,
    /// Number of events in flight to sessions and webhooks.
    pub deliveries: u64,
    /// Number of schedules that were due by the time of the restore.
    pub schedules: u64,
    /// Number of batches that had not finished.
    pub batches: u64,
}

/// A held turn, with its idempotency key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldTurn {
    pub turn: OpenTurn,
    pub idempotency_key: Option<String>,
}

/// The decision about held deliveries and schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// They continue where they were.
    Resume,
    /// Deliveries become dead letters. Repeating schedules continue with their next due time; the others
    /// fail.
    Drop,
}

// The statements below write the states of held rows as numbers. Nothing that looks for work selects these
// states: 3 is a delivery, and 4 and 5 are schedules (see `schedules::HELD`).

/// Maximum number of rows per write.
const ROWS: u32 = 200;
const DROPPED: &str = "it was in flight when the backup was taken, and was dropped after the restore";

impl Store {
    /// Holds all work in flight, in a restored database that no host uses.
    pub async fn hold_all(&self, backup_at_ms: u64, now_ms: u64) -> Result<(), StoreError> {
        self.write((backup_at_ms, now_ms), |connection, (backup_at_ms, now_ms)| {
            Box::pin(hold_all(connection, *backup_at_ms, *now_ms))
        })
        .await
    }

    /// Returns the held work. `None` means that the database was not restored, or that nothing is held any
    /// more.
    pub async fn held(&self) -> Result<Option<Held>, StoreError> {
        let row: Option<(i64, i64, i64, i64, i64, i64)> = query_as(
            "SELECT backup_at_ms, at_ms, (SELECT COUNT(*) FROM turns WHERE held AND ended_at_ms IS NULL),
                 (SELECT COUNT(*) FROM deliveries WHERE state = 3),
                 (SELECT COUNT(*) FROM schedules WHERE state IN (4, 5)),
                 (SELECT COUNT(*) FROM batches WHERE held AND ended_at_ms IS NULL)
             FROM restores ORDER BY key DESC LIMIT 1",
        )
        .fetch_optional(&self.readers)
        .await
        .map_err(StoreError::while_it("looked for what is held since a restore"))?;
        let count = |count: i64| count.max(0) as u64;
        Ok(row.map(|(backup, at, turns, deliveries, schedules, batches)| Held {
            backup_at_ms: count(backup),
            restored_at_ms: count(at),
            turns: count(turns),
            deliveries: count(deliveries),
            schedules: count(schedules),
            batches: count(batches),
        }))
    }

    /// Returns the open turns that are held, running ones first.
    pub async fn held_turns(&self) -> Result<Vec<HeldTurn>, StoreError> {
        let rows = query(
            "SELECT key, id, agent, session, state, losses, length(input), idempotency_key FROM turns
             WHERE held AND ended_at_ms IS NULL ORDER BY state DESC, key",
        )
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed turns that are held"))?;
        let held =
            |row: &Row| Ok(HeldTurn { turn: turns::open_turn(row)?, idempotency_key: row.try_get(7)? });
        Ok(crate::rows::readable(&rows, "turn", held))
    }

    /// Returns the ids of held batches, each with its principal.
    pub async fn held_batches(&self) -> Result<Vec<(String, String)>, StoreError> {
        query_as("SELECT principal, id FROM batches WHERE held AND ended_at_ms IS NULL ORDER BY key")
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("listed batches that are held"))
    }

    /// Releases deliveries and schedules, some at a time.
    pub async fn release(&self, how: Release, now_ms: u64) -> Result<(), StoreError> {
        while self
            .write_common((how, now_ms), |connection, (how, now_ms)| {
                Box::pin(release_some(connection, *how, *now_ms))
            })
            .await?
        {}
        Ok(())
    }

    /// Releases held turns and batches, some at a time.
    pub async fn release_work(&self) -> Result<(), StoreError> {
        while self.write_common((), |connection, ()| Box::pin(release_work(connection))).await? {}
        Ok(())
    }

    /// Ends the hold after everything that was held has been resumed or dropped.
    pub async fn end_hold(&self) -> Result<(), StoreError> {
        self.write_common((), |connection, ()| {
            Box::pin(async move {
                let ended = query("DELETE FROM restores").execute(&mut *connection).await;
                ended.map_err(StoreError::while_it("ended the hold of a restore"))?;
                notices::raise(connection, NoticeKind::Held).await
            })
        })
        .await
    }
}

async fn hold_all(connection: &mut Connection, backup_at_ms: u64, now_ms: u64) -> Result<(), StoreError> {
    let script = format!(
        // The turns and batch items were not lost by a process, so they must not count as lost.
        "UPDATE turns SET held = TRUE, runs = FALSE WHERE ended_at_ms IS NULL;
         UPDATE deliveries SET state = 3, restored = TRUE WHERE state IN (0, 1);
         UPDATE schedules SET state = CASE state WHEN 2 THEN 5 ELSE 4 END
             WHERE state IN (1, 2) OR (state = 0 AND wake_ms <= {now_ms});
         UPDATE batch_items SET state = 0 WHERE state = 1;
         UPDATE batches SET held = TRUE, running = 0 WHERE ended_at_ms IS NULL;
         DELETE FROM restores;
         INSERT INTO restores (backup_at_ms, at_ms) VALUES ({backup_at_ms}, {now_ms});"
    );
    let held = raw_sql(AssertSqlSafe(script), connection).await;
    held.map(drop).map_err(StoreError::while_it("held the work in flight of a restored database"))
}

/// Releases some rows. Returns whether there may be more.
async fn release_some(connection: &mut Connection, how: Release, now_ms: u64) -> Result<bool, StoreError> {
    let failed = || StoreError::while_it("released work held since a restore");
    let (delivery, schedule) = match how {
        Release::Resume => (
            "state = 0, wake_ms = ?1".to_owned(),
            "state = CASE state WHEN 5 THEN 2 ELSE 0 END, wake_ms = CASE state WHEN 5 THEN wake_ms ELSE ?1 END"
                .to_owned(),
        ),
        Release::Drop => (
            format!("state = 2, wake_ms = ?1, error = '{DROPPED}'"),
            // Continue from now on, as if the due times in between had passed.
            format!(
                "state = CASE WHEN repeats THEN 2 ELSE 3 END, due_ms = CASE WHEN due_ms > ?1 THEN due_ms ELSE ?1 END, error = '{DROPPED}'"
            ),
        ),
    };
    let mut changed = 0;
    for sql in [
        format!(
            "UPDATE deliveries SET {delivery} WHERE key IN (SELECT key FROM deliveries WHERE state = 3 LIMIT ?2)"
        ),
        format!(
            "UPDATE schedules SET {schedule} WHERE key IN (SELECT key FROM schedules WHERE state IN (4, 5) LIMIT ?2)"
        ),
    ] {
        let done = query(AssertSqlSafe(sql)).bind(now_ms as i64).bind(ROWS).execute(&mut *connection);
        changed += done.await.map_err(failed())?.rows_affected();
    }
    if changed > 0 {
        notices::raise(connection, NoticeKind::Deliveries).await?;
    }
    Ok(changed > 0)
}

async fn release_work(connection: &mut Connection) -> Result<bool, StoreError> {
    let mut changed = 0;
    for sql in [
        "UPDATE turns SET held = FALSE WHERE key IN (SELECT key FROM turns WHERE held LIMIT ?)",
        "UPDATE batches SET held = FALSE WHERE key IN (SELECT key FROM batches WHERE held LIMIT ?)",
    ] {
        let done = query(AssertSqlSafe(sql)).bind(ROWS).execute(&mut *connection).await;
        changed += done.map_err(StoreError::while_it("released work held since a restore"))?.rows_affected();
    }
    if changed > 0 {
        notices::raise(connection, NoticeKind::Held).await?;
    }
    Ok(changed > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::query_scalar;
    use crate::{Acceptance, AgentRow, NewDelivery, NewEvent, NewSchedule, NewTurn, Target, WebhookRow};

    async fn with_work() -> Store {
        let store = Store::for_tests().await.unwrap();
        let agent = AgentRow {
            name: "a".into(),
            manifest: String::new(),
            digest: "d".into(),
            deployed_at_ms: 1,
            deployed_by: "ann".into(),
        };
        let schedule = |(id, repeats, due_ms): (&str, bool, u64)| NewSchedule {
            id: id.into(),
            name: id.into(),
            target: "s".into(),
            principal: "local".into(),
            timing: "timing".into(),
            repeats,
            data: None,
            tries: 1,
            due_ms,
        };
        let schedules = [("once", false, 5), ("often", true, 5), ("later", false, 1_000)].map(schedule);
        store.put_agent(&agent, b"component", &schedules).await.unwrap();
        let turn = NewTurn {
            id: "t".into(),
            agent: "a".into(),
            session: "s".into(),
            idempotency_key: Some("k".into()),
            digest: "d".into(),
            input: b"input".to_vec(),
            seed: b"seed".to_vec(),
            accepted_at_ms: 1,
            number: None,
        };
        assert!(matches!(store.accept_turn(turn).await.unwrap(), Acceptance::New(_)));
        let webhook = WebhookRow {
            id: "w".into(),
            url: "https://example.com".into(),
            topics: "*".into(),
            sealed_secret: String::new(),
            configured: false,
            created_at_ms: 1,
            disabled: None,
            last_try: None,
        };
        store.put_webhook(&webhook).await.unwrap();
        let event = NewEvent {
            source: "x".into(),
            id: "e".into(),
            topic: "t".into(),
            data: None,
            principal: "local".into(),
            hops: 0,
            at_ms: 1,
            deliveries: vec![NewDelivery { target: Target::Webhook("w".into()), undeliverable: None }],
        };
        store.publish(&event, 1).await.unwrap();
        store
    }

    async fn states(store: &Store) -> Vec<(String, i64)> {
        query_as("SELECT id, state FROM schedules ORDER BY key").fetch_all(&store.readers).await.unwrap()
    }

    #[tokio::test]
    async fn held_work_continues_only_after_it_is_resumed() {
        let store = with_work().await;
        store.hold_all(10, 20).await.unwrap();
        let held = store.held().await.unwrap().expect("the database was restored");
        assert_eq!((held.turns, held.deliveries, held.schedules, held.batches), (1, 1, 2, 0), "{held:?}");
        assert_eq!((held.backup_at_ms, held.restored_at_ms), (10, 20));
        assert!(store.open_turns().await.unwrap().is_empty());
        assert!(store.due_deliveries(500, 9).await.unwrap().is_empty());
        assert!(store.due_schedules(500, 9).await.unwrap().is_empty());
        assert_eq!(store.held_turns().await.unwrap()[0].idempotency_key.as_deref(), Some("k"));

        store.release(Release::Resume, 30).await.unwrap();
        store.release_work().await.unwrap();
        store.end_hold().await.unwrap();
        assert_eq!(store.held().await.unwrap(), None);
        assert_eq!(store.open_turns().await.unwrap().len(), 1);
        let delivery = &store.due_deliveries(500, 9).await.unwrap()[0];
        assert!(delivery.restored, "the delivery says that it may have been made before");
        assert_eq!(states(&store).await, [("once".into(), 0), ("often".into(), 0), ("later".into(), 0)]);
    }

    #[tokio::test]
    async fn dropped_deliveries_become_dead_letters_and_repeating_schedules_continue() {
        let store = with_work().await;
        store.hold_all(10, 20).await.unwrap();
        store.release(Release::Drop, 30).await.unwrap();
        let dead = store.dead_deliveries(None, 9).await.unwrap();
        assert!(dead[0].error.as_deref().unwrap().contains("backup"), "{dead:?}");
        assert_eq!(states(&store).await, [("once".into(), 3), ("often".into(), 2), ("later".into(), 0)]);
        let due: i64 = query_scalar("SELECT due_ms FROM schedules WHERE id = 'often'")
            .fetch_one(&store.readers)
            .await
            .unwrap();
        assert_eq!(due, 30);
    }
}
