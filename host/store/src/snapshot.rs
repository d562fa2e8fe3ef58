//! A copy of a database as it is at one moment, made while others may be writing to it.
//!
//! It is made by a connection that only reads: it sees one commit and nothing of later ones, and in the mode in which the
//! files are, nobody who writes waits for it. What is written meanwhile stays in the log beside the database until the copy
//! is complete.

use crate::{StoreError, schema};
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, SqliteConnection, query, query_as,
    sqlite::SqliteConnectOptions,
};
use std::{path::Path, time::Duration};

/// What is in a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// How many steps its schema has taken; see [`known_schema`].
    pub schema: i64,
    pub agents: u64,
    pub sessions: u64,
    /// Turns that waited or ran.
    pub open_turns: u64,
    /// Events on their way.
    pub deliveries: u64,
}

/// The newest schema that this build can read.
pub fn known_schema() -> i64 {
    schema::KNOWN
}

/// Writes a copy of the database at `from` to the file `to`, which must not be there. The copy has no log beside it, and no
/// free pages.
pub async fn snapshot(from: &Path, to: &Path) -> Result<Snapshot, StoreError> {
    let mut source = open(from).await?;
    // Its schema is that of a host that has used it; a file of something else has no version.
    let schema = schema::version(&mut source).await?;
    if schema == 0 {
        return Err(StoreError::Foreign);
    }
    query(AssertSqlSafe(format!("VACUUM INTO '{}'", to.to_string_lossy().replace('\'', "''"))))
        .execute(&mut source)
        .await
        .map_err(StoreError::while_it("copied the database"))?;
    source.close().await.map_err(StoreError::while_it("closed the database"))?;
    inspect(to).await
}

/// Whether a copy is whole, and what is in it.
async fn inspect(path: &Path) -> Result<Snapshot, StoreError> {
    let mut copy = open(path).await?;
    let failed = || StoreError::while_it("looked at the copy of the database");
    let schema = schema::version(&mut copy).await?;
    let (agents, sessions, open_turns, deliveries): (i64, i64, i64, i64) = query_as(
        "SELECT (SELECT COUNT(*) FROM agents), (SELECT COUNT(*) FROM sessions),
             (SELECT COUNT(*) FROM turns WHERE ended_at_ms IS NULL),
             (SELECT COUNT(*) FROM deliveries WHERE state IN (0, 1))",
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
            // Each turn changes both, so that a copy between them would show.
            state: ["left", "right"]
                .map(|key| StateChange { key: key.into(), value: Some(turn.to_be_bytes().to_vec()) })
                .into(),
            ..Default::default()
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_copy_under_load_has_everything_that_was_committed_before_and_no_half_of_a_commit() {
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
    async fn a_database_that_nobody_uses_is_copied_and_one_that_is_none_is_refused() {
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
        snapshot(&other, &folder.path().join("none")).await.expect_err("no database");
        snapshot(&folder.path().join("absent"), &folder.path().join("none")).await.expect_err("not there");
    }
}
