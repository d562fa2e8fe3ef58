//! The disk under the database: whether it accepts a write, and how much space it has.

use crate::{
    Store, StoreError, files,
    sql::{query, query_scalar},
};

/// Size of a check write: more than the last free bytes that a small commit would still fit into.
const CHECK_BYTES: usize = 32 << 10;
/// If less space than this is free, a failed write is attributed to a full disk.
const FULL_BELOW_BYTES: u64 = 1 << 20;

impl Store {
    /// Writes a small row and commits it in the same way as a turn. The error says why nothing can be written
    /// at present.
    pub async fn check(&self) -> Result<(), StoreError> {
        self.write_common((), |connection, ()| {
            Box::pin(async move {
                let failed = || StoreError::while_it("checked whether it can write");
                // The new row is written beside the previous one, whose pages are not free yet, so the file
                // has to grow or must have room inside.
                let id: i64 = query_scalar("INSERT INTO checks (at, filler) VALUES (0, ?) RETURNING id")
                    .bind(vec![0; CHECK_BYTES])
                    .fetch_one(&mut *connection)
                    .await
                    .map_err(failed())?;
                let others = query("DELETE FROM checks WHERE id != ?").bind(id).execute(connection);
                others.await.map(drop).map_err(failed())
            })
        })
        .await
    }

    /// Returns the space that the file system of the database has left for it. `None` means that the database
    /// is in memory, or that the space is unknown.
    pub fn free_bytes(&self) -> Option<u64> {
        files::free_bytes(self.path.as_ref()?)
    }

    /// Recognizes a full disk. Not every part of SQLite reports it as such; some only report that they could
    /// not write.
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
    async fn a_full_disk_is_reported_and_writes_succeed_again_once_there_is_space() {
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
        // Other writes of the same group, which need no space, succeed.
        let (small, large) =
            tokio::join!(store.commit_turn(commit(2, 1)), store.commit_turn(commit(3, 100_000)));
        small.expect("it is small");
        assert!(large.expect_err("it is large").is_full());
        let session = store.session("a", "s").await.unwrap().unwrap();
        assert_eq!((session.row.turns, session.state.len()), (2, 2), "the refused write left nothing");
        store.leave_room(None).await.unwrap();
        store.commit_turn(commit(3, 100_000)).await.expect("there is room again");
        store.check().await.expect("there is room again");
    }
}
