//! Chunks of work that is too much for one transaction. Copies and deletions run in chunks, with the writes
//! of others between them.
//!
//! Invariant: the first or the last chunk is a small change that makes all of the work visible or invisible.
//! Whatever a crash leaves of the other chunks is invisible, and [`Store::tidy`] removes it.

use crate::{
    Store, StoreError,
    hosts::is_left,
    sql::{AssertSqlSafe, Connection, query, query_scalar},
    writer::Work,
};
use std::time::{Duration, Instant};
use tokio::sync::SemaphorePermit;

/// The time limit of one chunk, and its progress.
pub(crate) struct Chunk {
    until: Instant,
    /// Number of rows that the chunk removed.
    pub(crate) removed: u64,
}

/// ChunkProgress of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkProgress {
    Done { removed: u64 },
    More { removed: u64 },
}

impl Chunk {
    pub(crate) fn new(time: Duration) -> Self {
        Chunk { until: Instant::now() + time, removed: 0 }
    }

    /// Repeats a statement that removes a limited number of rows until it removes none. Returns `false` if
    /// the time is over before that.
    pub(crate) async fn remove(
        &mut self,
        connection: &mut Connection,
        sql: &'static str,
        bind: &[Bind<'_>],
    ) -> Result<bool, StoreError> {
        loop {
            let mut statement = query(AssertSqlSafe(sql));
            for value in bind {
                statement = match value {
                    Bind::Key(key) => statement.bind(*key),
                    Bind::Text(text) => statement.bind(*text),
                };
            }
            let done = statement.execute(&mut *connection).await;
            let rows = done.map_err(StoreError::while_it("removed rows in chunks"))?.rows_affected();
            self.removed += rows;
            if rows == 0 {
                return Ok(true);
            }
            if self.is_over() {
                return Ok(false);
            }
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    pub(crate) fn done(&self) -> ChunkProgress {
        ChunkProgress::Done { removed: self.removed }
    }

    pub(crate) fn more(&self) -> ChunkProgress {
        ChunkProgress::More { removed: self.removed }
    }
}

/// A parameter of a statement.
#[derive(Clone, Copy)]
pub(crate) enum Bind<'a> {
    Key(i64),
    Text(&'a str),
}

impl Store {
    /// Cleans up after a crash: removes incomplete copies, files and batches that no host is writing, and finishes
    /// deletions. The host of a file calls this only when it starts, and other processes that open the file must not. A host of
    /// a server leaves alone what hosts that live are writing, itself included, so it may call this again when another one is
    /// gone.
    pub async fn tidy(&self) -> Result<(), StoreError> {
        let failed = || StoreError::while_it("looked for unfinished work");
        let agents: Vec<String> = query_scalar("SELECT name FROM agents WHERE deleted")
            .fetch_all(&self.readers)
            .await
            .map_err(failed())?;
        for agent in agents {
            self.finish_deleting(&agent).await?;
        }
        for erasure in self.erasures().await? {
            self.erase_rest(erasure).await?;
        }
        let unnamed = format!("SELECT key FROM sessions WHERE session IS NULL AND {}", is_left("maker"));
        let unnamed: Vec<i64> =
            query_scalar(AssertSqlSafe(unnamed)).fetch_all(&self.readers).await.map_err(failed())?;
        for session in unnamed {
            self.remove_unnamed(session).await?;
        }
        self.tidy_files().await?;
        self.tidy_batches().await?;
        self.tidy_owners().await
    }

    /// Waits for a permit to write in chunks.
    pub(crate) async fn chunked_write_permit(&self) -> Result<SemaphorePermit<'_>, StoreError> {
        self.chunked_writes.acquire().await.map_err(|_closed| StoreError::Closed)
    }

    /// Removes a session without a name, with its content. A session that has a name after all is kept,
    /// because it may be unknown whether the last chunk of a copy was written.
    pub(crate) async fn remove_unnamed(&self, session: i64) -> Result<(), StoreError> {
        let _permit = self.chunked_write_permit().await?;
        loop {
            let progress = self
                .write_common((session, self.chunk_time), |connection, (session, time)| {
                    Box::pin(async move {
                        let mut chunk = Chunk::new(*time);
                        let unnamed = "SELECT 1 FROM sessions WHERE key = ? AND session IS NULL";
                        if !is_there(connection, unnamed, *session).await? {
                            return Ok(chunk.done());
                        }
                        let done = remove_content(connection, &mut chunk, *session).await?;
                        Ok(if done { chunk.done() } else { chunk.more() })
                    })
                })
                .await?;
            if let ChunkProgress::Done { .. } = progress {
                return Ok(());
            }
        }
    }
}

impl Store {
    /// Repeats a statement that changes a limited number of rows until it changes none, with the writes of
    /// others in between. Returns the number of changed rows.
    pub(crate) async fn in_chunks<D>(&self, data: D, work: Work<D, u64>) -> Result<u64, StoreError>
    where
        D: Clone + Send + Sync + 'static,
    {
        let _permit = self.chunked_write_permit().await?;
        let mut changed = 0;
        loop {
            match self.write_common(data.clone(), work).await? {
                0 => return Ok(changed),
                rows => changed += rows,
            }
        }
    }
}

/// Returns whether a query for the row with this key finds it.
pub(crate) async fn is_there(
    connection: &mut Connection,
    sql: &'static str,
    key: i64,
) -> Result<bool, StoreError> {
    let found = query(sql).bind(key).fetch_optional(connection).await;
    Ok(found.map_err(StoreError::while_it("looked for rows to remove"))?.is_some())
}

/// Removes the content of a session, and then the session. Returns `false` if the time is over before that.
pub(crate) async fn remove_content(
    connection: &mut Connection,
    chunk: &mut Chunk,
    session: i64,
) -> Result<bool, StoreError> {
    for sql in [
        "DELETE FROM state WHERE session = ?1 AND key IN (SELECT key FROM state WHERE session = ?1 LIMIT 200)",
        "DELETE FROM conversations WHERE (session, name) IN (SELECT session, name FROM conversations WHERE session = ?1 LIMIT 1)",
        "DELETE FROM outcomes WHERE (session, idempotency_key) IN
             (SELECT session, idempotency_key FROM outcomes WHERE session = ?1 LIMIT 50)",
    ] {
        if !chunk.remove(connection, sql, &[Bind::Key(session)]).await? {
            return Ok(false);
        }
    }
    let row = query("DELETE FROM sessions WHERE key = ?").bind(session).execute(connection).await;
    row.map_err(StoreError::while_it("removed a session"))?;
    Ok(true)
}

/// Removes turns of an agent, or of one of its sessions, with their journals. `which` selects the keys of
/// some of them. Returns `false` if the time is over before that.
pub(crate) async fn remove_turns(
    connection: &mut Connection,
    chunk: &mut Chunk,
    which: &'static str,
    bind: &[Bind<'_>],
) -> Result<bool, StoreError> {
    loop {
        let mut statement = query(AssertSqlSafe(which));
        for value in bind {
            statement = match value {
                Bind::Key(key) => statement.bind(*key),
                Bind::Text(text) => statement.bind(*text),
            };
        }
        let turn = statement.fetch_optional(&mut *connection).await;
        let turn = turn.map_err(StoreError::while_it("looked for a turn to remove"))?;
        let Some(turn) = turn.map(|row| row.get::<i64>(0)) else { return Ok(true) };
        let records = "DELETE FROM turn_records WHERE turn = ?1 AND position IN
             (SELECT position FROM turn_records WHERE turn = ?1 LIMIT 50)";
        if !chunk.remove(connection, records, &[Bind::Key(turn)]).await? {
            return Ok(false);
        }
        let row = query("DELETE FROM turns WHERE key = ?").bind(turn).execute(&mut *connection).await;
        chunk.removed += row.map_err(StoreError::while_it("removed a turn"))?.rows_affected();
        if chunk.is_over() {
            return Ok(false);
        }
    }
}
