//! Lines that agents logged. Each agent keeps its newest ones, up to [`LINES_PER_AGENT`].

use crate::{Store, StoreError};
use sqlx::{QueryBuilder, Row, Sqlite, SqliteConnection, query};

/// Lines kept for each agent; older ones go when newer ones come.
pub(crate) const LINES_PER_AGENT: i64 = 10_000;

/// A line to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    pub at_ms: u64,
    pub level: String,
    pub message: String,
}

/// A stored line. Ids grow, so that a reader asks for what came after the last one it saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRow {
    pub id: i64,
    pub session: String,
    pub turn: u64,
    pub entry: LogEntry,
}

impl Store {
    /// Stores lines outside a commit: those of a turn that failed, or of no turn (0).
    pub async fn append_logs(
        &self,
        agent: &str,
        session: &str,
        turn: u64,
        entries: &[LogEntry],
    ) -> Result<(), StoreError> {
        let failed = || StoreError::while_it("stored log lines");
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        insert(&mut transaction, agent, session, turn, entries).await?;
        transaction.commit().await.map_err(failed())
    }

    /// At most `limit` lines with an id over `after_id`, oldest first. Without `after_id`: the newest ones.
    pub async fn logs(
        &self,
        agent: &str,
        after_id: Option<i64>,
        limit: u32,
    ) -> Result<Vec<LogRow>, StoreError> {
        let sql = match after_id {
            Some(_) => {
                "SELECT id, session, turn, at_ms, level, message FROM logs
                 WHERE agent = ?1 AND id > ?2 ORDER BY id LIMIT ?3"
            }
            None => {
                "SELECT * FROM (SELECT id, session, turn, at_ms, level, message FROM logs
                 WHERE agent = ?1 AND id > ?2 ORDER BY id DESC LIMIT ?3) ORDER BY id"
            }
        };
        let rows = query(sql)
            .bind(agent)
            .bind(after_id.unwrap_or(0))
            .bind(limit)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("read log lines"))?;
        Ok(rows
            .into_iter()
            .map(|row| LogRow {
                id: row.get(0),
                session: row.get(1),
                turn: row.get::<i64, _>(2) as u64,
                entry: LogEntry {
                    at_ms: row.get::<i64, _>(3) as u64,
                    level: row.get(4),
                    message: row.get(5),
                },
            })
            .collect())
    }
}

pub(crate) async fn insert(
    connection: &mut SqliteConnection,
    agent: &str,
    session: &str,
    turn: u64,
    entries: &[LogEntry],
) -> Result<(), StoreError> {
    // SQLite bounds the parameters of one statement.
    for chunk in entries.chunks(1000) {
        let mut insert =
            QueryBuilder::<Sqlite>::new("INSERT INTO logs (agent, session, turn, at_ms, level, message) ");
        insert.push_values(chunk, |mut row, entry| {
            row.push_bind(agent)
                .push_bind(session)
                .push_bind(turn as i64)
                .push_bind(entry.at_ms as i64)
                .push_bind(&entry.level)
                .push_bind(&entry.message);
        });
        insert.build().execute(&mut *connection).await.map_err(StoreError::while_it("stored log lines"))?;
    }
    if !entries.is_empty() {
        query(
            "DELETE FROM logs WHERE agent = ?1 AND id <=
             (SELECT id FROM logs WHERE agent = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
        )
        .bind(agent)
        .bind(LINES_PER_AGENT)
        .execute(connection)
        .await
        .map_err(StoreError::while_it("trimmed log lines"))?;
    }
    Ok(())
}
