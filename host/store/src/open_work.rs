//! Status of the database: open work and disk usage.

use crate::{Store, StoreError};
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, query_as, query_scalar, sqlite::SqliteConnectOptions,
};
use std::{collections::BTreeMap, path::Path};

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

    /// Returns the disk usage, or `None` for an in-memory database.
    pub fn disk_use(&self) -> Option<DiskUse> {
        let path = self.path.as_ref()?;
        let bytes = |path: &Path| std::fs::metadata(path).map_or(0, |found| found.len());
        let mut wal = path.as_os_str().to_owned();
        wal.push("-wal");
        Some(DiskUse { database: bytes(path), wal: bytes(wal.as_ref()), free: self.free_bytes() })
    }
}

/// Counts the rows of each table of a database, which a host may be using.
pub async fn table_rows(path: &Path) -> Result<BTreeMap<String, u64>, StoreError> {
    let failed = || StoreError::while_it("counted rows");
    let options = SqliteConnectOptions::new().filename(path).read_only(true);
    let mut connection = options.connect().await.map_err(|error| StoreError::opening(path, error))?;
    let tables: Vec<String> =
        query_scalar("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_stat%'")
            .fetch_all(&mut connection)
            .await
            .map_err(failed())?;
    let mut rows = BTreeMap::new();
    for table in tables {
        let count = format!("SELECT COUNT(*) FROM \"{}\"", table.replace('"', "\"\""));
        let count: i64 =
            query_scalar(AssertSqlSafe(count)).fetch_one(&mut connection).await.map_err(failed())?;
        rows.insert(table, count.max(0) as u64);
    }
    connection.close().await.map_err(failed())?;
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Durability;

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
        assert_eq!(Store::in_memory().await.unwrap().disk_use(), None);
    }
}
