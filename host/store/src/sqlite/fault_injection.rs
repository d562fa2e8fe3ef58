//! Faults for tests: failing statements, damaged rows, a limited disk, and chunks of a chosen size.

use super::Store;
use crate::sql::{AssertSqlSafe, query, query_scalar};
use crate::{Faults, StoreError};
use std::time::Duration;

impl Store {
    /// Returns the fault injection of this store.
    pub fn faults(&self) -> &Faults {
        self.writer.faults()
    }

    /// Makes a write that the store itself would not make.
    pub async fn spoil(&self, sql: &'static str) -> Result<(), StoreError> {
        self.write(sql, |connection, sql| {
            Box::pin(async move {
                let done = query(AssertSqlSafe(*sql)).execute(connection).await;
                done.map(drop).map_err(StoreError::while_it("damaged a row"))
            })
        })
        .await
    }

    /// Makes copies and deletions run in the smallest possible chunks.
    pub fn in_small_chunks(self) -> Store {
        Store { chunk_time: Duration::ZERO, ..self }
    }

    /// Returns the result of a query that counts.
    pub async fn count(&self, sql: &'static str) -> Result<i64, StoreError> {
        let counted = query_scalar(AssertSqlSafe(sql)).fetch_one(&self.readers).await;
        counted.map_err(StoreError::while_it("counted rows"))
    }

    /// Limits the database to this many pages more than it has now, so that the disk appears full. `None`
    /// removes the limit.
    pub async fn leave_room(&self, pages: Option<i64>) -> Result<(), StoreError> {
        self.write(pages, |connection, pages| {
            Box::pin(async move {
                let failed = || StoreError::while_it("limited the size of the file");
                let now: i64 =
                    query_scalar("PRAGMA page_count").fetch_one(&mut *connection).await.map_err(failed())?;
                let most = pages.map_or(1 << 30, |pages| now + pages);
                let sql = AssertSqlSafe(format!("PRAGMA max_page_count = {most}"));
                query(sql).execute(connection).await.map(drop).map_err(failed())
            })
        })
        .await
    }
}
