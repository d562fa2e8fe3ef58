//! The end of a session: everything that any table holds of it goes, in one transaction.
//!
//! Invariant: [`TABLES`] names every table that has a session; a test holds it against the schema. What refers to those
//! rows goes with them by its foreign key. Turns that wait or run stay: they came after, and begin the session anew.

use crate::{Store, StoreError};
use sqlx::{AssertSqlSafe, Row, SqliteConnection, query};

/// Tables with the columns `agent` and `session`, and which of the session's rows go.
const TABLES: &[(&str, &str)] = &[
    ("state", "TRUE"),
    ("conversations", "TRUE"),
    ("outcomes", "TRUE"),
    ("logs", "TRUE"),
    // Those of the manifest have no session of their own.
    ("schedules", "TRUE"),
    ("deliveries", "TRUE"),
    ("turns", "ended_at_ms IS NOT NULL"),
    ("sessions", "TRUE"),
];

impl Store {
    /// Removes all that is stored of a session, but turns that are still open. Whether there was anything.
    pub async fn delete_session(&self, agent: &str, session: &str) -> Result<bool, StoreError> {
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        let deleted = erase(&mut transaction, agent, session).await?;
        transaction.commit().await.map_err(failed())?;
        Ok(deleted)
    }

    /// As [`Store::delete_session`], if the session's last turn was committed before `before_ms` and none is open. Whether
    /// it was removed.
    pub async fn expire_session(
        &self,
        agent: &str,
        session: &str,
        before_ms: u64,
    ) -> Result<bool, StoreError> {
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        let expired = query(AssertSqlSafe(format!("{EXPIRED} AND session = ?3")))
            .bind(agent)
            .bind(before_ms as i64)
            .bind(session)
            .fetch_optional(&mut *transaction)
            .await
            .map_err(failed())?;
        if expired.is_some() {
            erase(&mut transaction, agent, session).await?;
        }
        transaction.commit().await.map_err(failed())?;
        Ok(expired.is_some())
    }

    /// At most `limit` sessions of an agent whose last turn was committed before `before_ms` and that have no open one, those
    /// after `after` if it is given.
    pub async fn expired_sessions(
        &self,
        agent: &str,
        before_ms: u64,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<String>, StoreError> {
        let rows = query(AssertSqlSafe(format!("{EXPIRED} AND session > ?3 ORDER BY session LIMIT ?4")))
            .bind(agent)
            .bind(before_ms as i64)
            .bind(after.unwrap_or(""))
            .bind(limit)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for expired sessions"))?;
        Ok(rows.into_iter().map(|row| row.get(0)).collect())
    }
}

const EXPIRED: &str = "SELECT session FROM sessions WHERE agent = ?1 AND updated_at_ms < ?2 AND NOT EXISTS
    (SELECT 1 FROM turns WHERE turns.agent = sessions.agent AND turns.session = sessions.session
        AND ended_at_ms IS NULL)
    AND NOT EXISTS (SELECT 1 FROM schedules WHERE schedules.agent = sessions.agent
        AND schedules.session = sessions.session AND schedules.state != 3)";

/// Whether there was anything.
pub(crate) async fn erase(
    connection: &mut SqliteConnection,
    agent: &str,
    session: &str,
) -> Result<bool, StoreError> {
    let mut rows = 0;
    for (table, which) in TABLES {
        let sql = format!("DELETE FROM {table} WHERE agent = ? AND session = ? AND {which}");
        let done = query(AssertSqlSafe(sql)).bind(agent).bind(session).execute(&mut *connection).await;
        rows += done.map_err(failed())?.rows_affected();
    }
    Ok(rows > 0)
}

fn failed() -> impl FnOnce(sqlx::Error) -> StoreError {
    StoreError::while_it("deleted a session")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AgentRow, NewTurn, SessionFolder, TurnCommit};
    use sqlx::query_scalar;

    /// Of every table that has a session: its name and its columns with their types.
    async fn tables_with_a_session(store: &Store) -> Vec<(String, Vec<(String, String)>)> {
        let names: Vec<String> = query_scalar(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND EXISTS
                 (SELECT 1 FROM pragma_table_info(sqlite_master.name) AS c WHERE c.name = 'session') ORDER BY name",
        )
        .fetch_all(&store.writer)
        .await
        .unwrap();
        let mut tables = Vec::new();
        for name in names {
            let columns = query("SELECT name, type FROM pragma_table_info(?)").bind(&name);
            let columns = columns.fetch_all(&store.writer).await.unwrap();
            tables.push((name, columns.iter().map(|row| (row.get(0), row.get(1))).collect()));
        }
        tables
    }

    async fn count(store: &Store, table: &str) -> i64 {
        let sql = format!("SELECT COUNT(*) FROM {table} WHERE agent = 'a' AND session = 's'");
        query_scalar(AssertSqlSafe(sql)).fetch_one(&store.writer).await.unwrap()
    }

    #[tokio::test]
    async fn a_deleted_session_leaves_no_row_in_any_table_that_has_sessions() {
        let store = Store::in_memory().await.unwrap();
        let tables = tables_with_a_session(&store).await;
        assert!(tables.len() >= TABLES.len(), "{tables:?}");
        sqlx::raw_sql("PRAGMA foreign_keys = OFF").execute(&store.writer).await.unwrap();
        for (table, columns) in &tables {
            let values = columns.iter().map(|(column, kind)| match (column.as_str(), kind.as_str()) {
                ("agent", _) => "'a'",
                ("session", _) => "'s'",
                (_, "INTEGER") => "1",
                (_, "BLOB") => "x'01'",
                _ => "'x'",
            });
            let values = values.collect::<Vec<_>>().join(", ");
            let insert = AssertSqlSafe(format!("INSERT INTO {table} VALUES ({values})"));
            query(insert).execute(&store.writer).await.unwrap_or_else(|error| panic!("{table}: {error}"));
            assert_eq!(count(&store, table).await, 1, "{table}");
        }
        sqlx::raw_sql("PRAGMA foreign_keys = ON").execute(&store.writer).await.unwrap();
        assert!(store.delete_session("a", "s").await.unwrap());
        for (table, _) in &tables {
            assert_eq!(
                count(&store, table).await,
                0,
                "{table} keeps rows; name it in `TABLES` of erasure.rs"
            );
        }
        assert!(!store.delete_session("a", "s").await.unwrap());
    }

    async fn with_sessions(ages: &[(&str, u64)]) -> Store {
        let store = Store::in_memory().await.unwrap();
        let agent = AgentRow {
            name: "a".into(),
            manifest: String::new(),
            digest: "d".into(),
            deployed_at_ms: 1,
            deployed_by: "ann".into(),
        };
        store.put_agent(&agent, b"component", &[]).await.unwrap();
        for (session, at_ms) in ages {
            let (agent, session) = ("a".to_owned(), (*session).to_owned());
            let commit = TurnCommit { agent, session, turn: 1, at_ms: *at_ms, ..Default::default() };
            store.commit_turn(commit).await.unwrap();
        }
        store
    }

    #[tokio::test]
    async fn expired_are_sessions_that_are_old_enough_and_have_no_open_turn() {
        let store = with_sessions(&[("s1", 10), ("s2", 20), ("s3", 30), ("s4", 10)]).await;
        let waits = NewTurn {
            id: "t".into(),
            agent: "a".into(),
            session: "s4".into(),
            idempotency_key: None,
            digest: "d".into(),
            input: Vec::new(),
            seed: Vec::new(),
            accepted_at_ms: 40,
            number: None,
        };
        store.accept_turn(waits).await.unwrap();
        let expired = async |after, limit| store.expired_sessions("a", 30, after, limit).await.unwrap();
        assert_eq!(expired(None, 10).await, ["s1", "s2"]);
        assert_eq!(expired(None, 1).await, ["s1"]);
        assert_eq!(expired(Some("s1"), 10).await, ["s2"]);
        for (session, gone) in [("s1", true), ("s1", false), ("s3", false), ("s4", false), ("nobody", false)]
        {
            assert_eq!(store.expire_session("a", session, 30).await.unwrap(), gone, "{session}");
        }
        let left = store.sessions("a", &SessionFolder::of(None), None, 10).await.unwrap();
        assert_eq!(left.iter().map(|row| row.session.as_str()).collect::<Vec<_>>(), ["s2", "s3", "s4"]);
    }
}
