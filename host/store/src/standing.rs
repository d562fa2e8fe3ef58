//! How the database itself stands: whether it can be written, how much work is open in it, and what room it takes.

use crate::{Store, StoreError, writer::Write};
use sqlx::{SqliteConnection, query, query_as};
use std::path::Path;

/// The histogram of the time that commits of turns take, in seconds. It is described by whoever has a recorder.
pub const COMMIT_TIME: &str = "skep_store_commit_seconds";

/// Work that is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenWork {
    /// Turns that wait or run.
    pub turns: u64,
    /// Calls of open turns that nobody has decided about.
    pub approvals: u64,
    /// Deliveries that failed for good.
    pub dead_letters: u64,
}

/// Bytes on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskUse {
    pub database: u64,
    /// Commits that are not in the database's own file yet.
    pub wal: u64,
    /// Of the file system, as far as this process may use it; `None` where the system does not say.
    pub free: Option<u64>,
}

impl Store {
    /// Resolves when a write of a few bytes is durable, behind all that were asked for before it.
    pub async fn check_writable(&self) -> Result<(), StoreError> {
        self.group.write(Write::Check).await.map(|_| ())
    }

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

    /// `None` of a database in memory.
    pub fn disk_use(&self) -> Option<DiskUse> {
        let path = self.path.as_ref()?;
        let bytes = |path: &Path| std::fs::metadata(path).map_or(0, |found| found.len());
        let mut wal = path.clone().into_os_string();
        wal.push("-wal");
        Some(DiskUse { database: bytes(path), wal: bytes(wal.as_ref()), free: free_bytes(path) })
    }
}

/// Writes what is written already: SQLite has a number in its first page for the program that a file belongs to.
pub(crate) async fn check(connection: &mut SqliteConnection) -> Result<(), StoreError> {
    // "SKEP"
    let write = query("PRAGMA application_id = 0x534b4550").execute(connection).await;
    write.map(|_| ()).map_err(StoreError::while_it("checked that it can write"))
}

#[cfg(unix)]
fn free_bytes(path: &Path) -> Option<u64> {
    let folder = path.parent()?;
    let system = rustix::fs::statvfs(folder).ok()?;
    Some(system.f_bavail.saturating_mul(system.f_frsize))
}

#[cfg(not(unix))]
fn free_bytes(_path: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Durability;

    #[tokio::test]
    async fn a_check_is_a_write_that_changes_no_table() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("skep.db");
        let store = Store::open(&path, Durability::Process).await.unwrap();
        let before = store.disk_use().unwrap();
        store.check_writable().await.unwrap();
        store.check_writable().await.unwrap();
        let after = store.disk_use().unwrap();
        assert!(after.wal > before.wal, "{before:?} {after:?}");
        assert!(after.free > Some(0) || cfg!(not(unix)));
        assert_eq!(store.open_work().await.unwrap(), OpenWork { turns: 0, approvals: 0, dead_letters: 0 });
        store.close().await;
        Store::open(&path, Durability::Process).await.expect("it is a database as before");
    }

    #[tokio::test]
    async fn what_cannot_be_written_is_told() {
        let store = Store::in_memory().await.unwrap();
        store.check_writable().await.unwrap();
        assert_eq!(store.disk_use(), None);
        query("PRAGMA query_only = ON").execute(&store.writer).await.unwrap();
        let error = store.check_writable().await.expect_err("nothing can be written");
        assert!(error.to_string().contains("checked that it can write"), "{error}");
        query("PRAGMA query_only = OFF").execute(&store.writer).await.unwrap();
        store.check_writable().await.expect("it can be written again");
    }
}
