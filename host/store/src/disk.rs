//! The disk under the database: whether it takes a write, and how much room it has.

use crate::{Store, StoreError};
use sqlx::{query, query_scalar};

/// What a check writes: more than the last free bytes that a small commit would still find.
const CHECK_BYTES: i64 = 32 << 10;
/// With less room than this, what could not be written had no room.
const FULL_BELOW_BYTES: u64 = 1 << 20;

impl Store {
    /// Writes a little, and commits it as a turn is committed. An error says why nothing can be written now.
    pub async fn check(&self) -> Result<(), StoreError> {
        self.write((), |connection, ()| {
            Box::pin(async move {
                let failed = || StoreError::while_it("checked whether it can write");
                // Beside the one before, whose pages are not free yet: the file has to grow, or has room inside.
                let id: i64 = query_scalar(
                    "INSERT INTO checks (at, filler) VALUES (unixepoch(), zeroblob(?)) RETURNING id",
                )
                .bind(CHECK_BYTES)
                .fetch_one(&mut *connection)
                .await
                .map_err(failed())?;
                let others = query("DELETE FROM checks WHERE id != ?").bind(id).execute(connection);
                others.await.map(drop).map_err(failed())
            })
        })
        .await
    }

    /// What the file system of the database has left for it. `None`: the database is in memory, or nobody can say.
    pub fn free_bytes(&self) -> Option<u64> {
        let room = rustix::fs::statvfs(self.path.as_ref()?.as_path()).ok()?;
        Some(room.f_bavail.saturating_mul(room.f_frsize))
    }

    /// Not every part of the database says that the disk is full: some say that they could not write.
    pub(crate) fn diagnosed(&self, error: StoreError) -> StoreError {
        match error {
            StoreError::Query { doing, .. } if error.is_io() => match self.free_bytes() {
                Some(free) if free < FULL_BELOW_BYTES => StoreError::Full { doing },
                _ => error,
            },
            _ => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AgentRow, Durability, StateChange, TurnCommit};

    #[tokio::test]
    async fn a_full_disk_is_told_as_such_and_everything_goes_on_when_there_is_room() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&folder.path().join("skep.db"), Durability::Process).await.unwrap();
        let agent = AgentRow {
            name: "a".into(),
            manifest: String::new(),
            digest: "d".into(),
            deployed_at_ms: 1,
            deployed_by: "ann".into(),
        };
        store.put_agent(&agent, b"component", &[]).await.unwrap();
        store.check().await.expect("there is room");
        assert!(store.free_bytes().unwrap() > 0);
        let commit = |turn, bytes| TurnCommit {
            agent: "a".into(),
            session: "s".into(),
            turn,
            state: vec![StateChange { key: turn.to_string(), value: Some(vec![7; bytes]) }],
            ..Default::default()
        };
        store.commit_turn(commit(1, 1)).await.unwrap();
        store.leave_room(Some(2)).await.unwrap();
        for _ in 0..3 {
            let full = store.commit_turn(commit(2, 100_000)).await.expect_err("the disk is full");
            assert!(full.is_full(), "{full}");
            assert!(full.to_string().contains("free space on the disk"), "{full}");
        }
        assert!(store.check().await.expect_err("the disk is full").is_full());
        // Others of the same group, which need no room, are written.
        let (small, large) =
            tokio::join!(store.commit_turn(commit(2, 1)), store.commit_turn(commit(3, 100_000)));
        small.expect("it is small");
        assert!(large.expect_err("it is large").is_full());
        let session = store.session("a", "s").await.unwrap().unwrap();
        assert_eq!((session.row.turns, session.state.len()), (2, 2), "nothing of what was refused is there");
        store.leave_room(None).await.unwrap();
        store.commit_turn(commit(3, 100_000)).await.expect("there is room again");
        store.check().await.expect("there is room again");
    }
}
