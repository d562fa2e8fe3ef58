//! Consistent copies of a database, made while others may be writing to it.
//!
//! A copy is made by a connection that only reads. It sees one commit and nothing of later ones, and in WAL
//! mode no writer waits for it. Later writes stay in the log beside the database until the copy is complete.

use crate::{StoreError, schema};
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, SqliteConnection, query, query_as,
    sqlite::SqliteConnectOptions,
};
use std::{path::Path, time::Duration};

/// The content of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Number of steps that the schema of the copy has taken; see [`known_schema`].
    pub schema: i64,
    pub agents: u64,
    pub sessions: u64,
    /// Number of turns that waited or ran.
    pub open_turns: u64,
    /// Number of events in flight.
    pub deliveries: u64,
    /// Number of batches that had not ended.
    pub batches: u64,
}

/// Returns the newest schema that this build can read.
pub fn known_schema() -> i64 {
    schema::KNOWN
}

/// Writes a copy of the database at `from` to the file `to`, which must not exist. The copy has no log beside
/// it and no free pages.
pub async fn snapshot(from: &Path, to: &Path) -> Result<Snapshot, StoreError> {
    let mut source = open(from).await?;
    // The schema is that of the host that used the database last. The file of another program has no version.
    let schema = schema::version(&mut source).await?;
    if schema == 0 {
        return Err(StoreError::Foreign);
    }
    copy_into(&mut source, to).await?;
    source.close().await.map_err(StoreError::while_it("closed the database"))?;
    inspect(to).await
}

/// Writes what a connection reads to the file `to`, which must be empty or not exist.
pub(crate) async fn copy_into(connection: &mut SqliteConnection, to: &Path) -> Result<(), StoreError> {
    let statement = format!("VACUUM INTO '{}'", to.to_string_lossy().replace('\'', "''"));
    let copied = query(AssertSqlSafe(statement)).execute(connection).await;
    copied.map(drop).map_err(StoreError::while_it("copied the database"))
}

/// Checks that a copy is intact, and counts its content.
async fn inspect(path: &Path) -> Result<Snapshot, StoreError> {
    let mut copy = open(path).await?;
    let failed = || StoreError::while_it("checked the copy of the database");
    let schema = schema::version(&mut copy).await?;
    let (agents, sessions, open_turns, deliveries, batches): (i64, i64, i64, i64, i64) = query_as(
        "SELECT (SELECT COUNT(*) FROM agents), (SELECT COUNT(*) FROM sessions),
             (SELECT COUNT(*) FROM turns WHERE ended_at_ms IS NULL),
             (SELECT COUNT(*) FROM deliveries WHERE state IN (0, 1)),
             (SELECT COUNT(*) FROM batches WHERE ended_at_ms IS NULL)",
    )
    .fetch_one(&mut copy)
    .await
    .map_err(failed())?;
    copy.close().await.map_err(failed())?;
    let count = |count: i64| count.max(0) as u64;
    Ok(Snapshot {
        schema,
        agents: count(agents),
        sessions: count(sessions),
        open_turns: count(open_turns),
        deliveries: count(deliveries),
        batches: count(batches),
    })
}

async fn open(path: &Path) -> Result<SqliteConnection, StoreError> {
    let options =
        SqliteConnectOptions::new().filename(path).read_only(true).busy_timeout(Duration::from_secs(10));
    options.connect().await.map_err(|error| StoreError::opening(path, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AgentRow, Durability, StateChange, Store, TurnCommit};
    use std::sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    };

    fn agent() -> AgentRow {
        AgentRow {
            name: "a".into(),
            manifest: String::new(),
            digest: "d".into(),
            deployed_at_ms: 1,
            deployed_by: "ann".into(),
        }
    }

    fn commit(turn: u64) -> TurnCommit {
        TurnCommit {
            agent: "a".into(),
            session: "s".into(),
            turn,
            // Each turn changes both keys, so that a copy with half a commit would be noticed.
            state: ["left", "right"]
                .map(|key| StateChange { key: key.into(), value: Some(turn.to_be_bytes().to_vec()) })
                .into(),
            ..Default::default()
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_copy_under_load_contains_all_earlier_commits_and_no_partial_commit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("skep.db");
        let store = Store::open(&path, Durability::Process).await.unwrap();
        store.put_agent(&agent(), &vec![7; 8 << 20], &[]).await.unwrap();
        let (ends, committed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let writing = {
            let (store, ends, committed) = (store.clone(), ends.clone(), committed.clone());
            tokio::spawn(async move {
                let mut turn = 0;
                while !ends.load(Ordering::Relaxed) {
                    turn += 1;
                    store.commit_turn(commit(turn)).await.unwrap();
                    committed.store(turn, Ordering::Relaxed);
                }
            })
        };
        for number in 0..5 {
            while committed.load(Ordering::Relaxed) < 20 * (number + 1) {
                tokio::task::yield_now().await;
            }
            let before = committed.load(Ordering::Relaxed);
            let to = folder.path().join(format!("it's copy {number}"));
            let copy = snapshot(&path, &to).await.unwrap();
            assert_eq!((copy.agents, copy.sessions, copy.schema), (1, 1, known_schema()));
            let copy = Store::open(&to, Durability::Process).await.unwrap();
            let session = copy.session("a", "s").await.unwrap().unwrap();
            let turns = session.row.turns;
            assert!(turns >= before, "{turns} of {before}");
            assert!(session.state.iter().all(|(_, value)| *value == turns.to_be_bytes()), "{session:?}");
            copy.close().await;
        }
        ends.store(true, Ordering::Relaxed);
        writing.await.unwrap();
    }

    #[tokio::test]
    async fn copies_an_unused_database_and_refuses_other_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("skep.db");
        let store = Store::open(&path, Durability::Process).await.unwrap();
        store.put_agent(&agent(), b"component", &[]).await.unwrap();
        store.close().await;
        let to = folder.path().join("copy");
        assert_eq!(snapshot(&path, &to).await.unwrap().agents, 1);
        let again = snapshot(&path, &to).await.expect_err("the file is there");
        assert!(again.to_string().contains("copied the database"), "{again}");
        let other = folder.path().join("other");
        std::fs::write(&other, b"not a database, but long enough to look like one in its head").unwrap();
        snapshot(&other, &folder.path().join("none")).await.expect_err("the file is not a database");
        snapshot(&folder.path().join("absent"), &folder.path().join("none")).await.expect_err("not there");
    }
}
