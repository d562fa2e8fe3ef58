//! Deletion of sessions: the session disappears at once, and then all its rows in all tables are removed in
//! chunks.
//!
//! Invariant: every table that has a session is named here; a test compares this file with the schema. Rows
//! that refer to these rows are removed with them. Turns that wait or run stay: they were accepted later, and
//! start the session again. Everything else that was written after the deletion started stays too.

use crate::{
    Store, StoreError,
    chunks::{Bind, Chunk, ChunkProgress, remove_content, remove_turns},
    hosts::{HostNumber, is_left},
    page_erasures::{self, PageErasure},
    sql::{AssertSqlSafe, Connection, Row, query, query_scalar},
    usage,
};
use std::time::Duration;

/// A deletion that was started. Rows with larger keys than these were written after it started.
#[derive(Clone, Debug)]
pub(crate) struct Erasure {
    key: i64,
    agent: String,
    session: String,
    /// The key of the session's row, if there was one.
    content: Option<i64>,
    schedule: i64,
    delivery: i64,
    turn: i64,
    log: i64,
    request: i64,
    response: i64,
}

/// The outcome of the first chunk of a deletion.
#[derive(Debug)]
pub(crate) struct StartedErasure {
    /// Whether anything was stored of the session.
    was_there: bool,
    pub(crate) left: Option<Erasure>,
}

impl Store {
    /// Removes everything that is stored of a session except open turns. Returns whether there was anything.
    /// If an error occurs after the session has disappeared, the rest is left to [`Store::tidy`].
    pub async fn delete_session(&self, agent: &str, session: &str) -> Result<bool, StoreError> {
        let data = (agent.to_owned(), session.to_owned(), self.chunk_time, self.host);
        let store = self.clone();
        // The deletion continues even if the caller stops waiting.
        let deleting = tokio::spawn(async move {
            let started = store
                .write_common(data, |connection, (agent, session, time, maker)| {
                    Box::pin(async move {
                        let (deliveries, chunk) = (PendingDeliveries::Remove, Chunk::new(*time));
                        let started = begin(connection, agent, session, deliveries, chunk, *maker).await?;
                        announce(connection, agent, session, *maker).await?;
                        Ok(started)
                    })
                })
                .await?;
            store.erase_what_is_left(started).await
        });
        deleting.await.map_err(|_ended| StoreError::Closed)?
    }

    /// Does the same as [`Store::delete_session`], but only if the session's last turn was committed before
    /// `before_ms`, no turn is open, and nothing is in flight to it. Events that could not be delivered to it
    /// stay. Returns whether it was removed.
    pub async fn expire_session(
        &self,
        agent: &str,
        session: &str,
        before_ms: u64,
    ) -> Result<bool, StoreError> {
        let data = (agent.to_owned(), session.to_owned(), before_ms, self.chunk_time, self.host);
        let store = self.clone();
        let expiring = tokio::spawn(async move {
            let started = store
                .write_common(data, |connection, (agent, session, before_ms, time, maker)| {
                    Box::pin(async move {
                        let expired = query(AssertSqlSafe(format!("{EXPIRED} AND session = ?3")))
                            .bind(agent)
                            .bind(*before_ms as i64)
                            .bind(session)
                            .fetch_optional(&mut *connection)
                            .await
                            .map_err(failed())?;
                        match expired {
                            Some(_) => {
                                let (deliveries, chunk) = (PendingDeliveries::Keep, Chunk::new(*time));
                                let started =
                                    begin(connection, agent, session, deliveries, chunk, *maker).await?;
                                announce(connection, agent, session, *maker).await?;
                                Ok(started)
                            }
                            None => Ok(StartedErasure { was_there: false, left: None }),
                        }
                    })
                })
                .await?;
            store.erase_what_is_left(started).await
        });
        expiring.await.map_err(|_ended| StoreError::Closed)?
    }

    async fn erase_what_is_left(&self, started: StartedErasure) -> Result<bool, StoreError> {
        let StartedErasure { was_there, left } = started;
        let Some(left) = left else { return Ok(was_there) };
        Ok(self.erase_in_the_end(left).await? > 0 || was_there)
    }

    /// Removes the rest and returns the number of rows. After an error it logs the error and retries later,
    /// because leftover turns, events and schedules could be mistaken for those of the next session with this
    /// name.
    pub(crate) async fn erase_in_the_end(&self, erasure: Erasure) -> Result<u64, StoreError> {
        let first = self.erase_rest(erasure.clone()).await;
        if first.is_err() {
            let store = self.clone();
            tokio::spawn(async move {
                for wait_s in LATER_S {
                    tokio::time::sleep(Duration::from_secs(wait_s)).await;
                    match store.erase_rest(erasure.clone()).await {
                        Ok(_) | Err(StoreError::Closed) => return,
                        Err(error) => {
                            tracing::error!("the rows of a deleted session could not be removed yet: {error}")
                        }
                    }
                }
            });
        }
        first
    }

    /// Removes the rest and returns the number of rows.
    pub(crate) async fn erase_rest(&self, erasure: Erasure) -> Result<u64, StoreError> {
        let _permit = self.chunked_write_permit().await?;
        let mut all = 0;
        loop {
            let progress = self
                .write_common((erasure.clone(), self.chunk_time), |connection, (erasure, time)| {
                    Box::pin(async move { erase(connection, erasure, Chunk::new(*time)).await })
                })
                .await?;
            match progress {
                ChunkProgress::More { removed } => all += removed,
                ChunkProgress::Done { removed } => return Ok(all + removed),
            }
        }
    }

    /// Returns the deletions that a crash interrupted.
    pub(crate) async fn erasures(&self) -> Result<Vec<Erasure>, StoreError> {
        let sql = format!(
            "SELECT key, agent, session, schedule, delivery, turn, log, request, response FROM erasures WHERE {}",
            is_left("maker")
        );
        let rows = query(AssertSqlSafe(sql))
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for interrupted deletions"))?;
        Ok(rows.iter().map(erasure).collect())
    }

    /// Returns at most `limit` sessions of an agent whose last turn was committed before `before_ms` and that
    /// have no open turn. If `after` is given, returns only those after it.
    pub async fn expired_sessions(
        &self,
        agent: &str,
        before_ms: u64,
        pattern: Option<&str>,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<String>, StoreError> {
        let rows = query(AssertSqlSafe(format!(
            "{EXPIRED} AND session > ?3 AND (?5 IS NULL OR glob(?5, substr(session, instr(session, '/') + 1)))
             ORDER BY session LIMIT ?4"
        )))
        .bind(agent)
        .bind(before_ms as i64)
        .bind(after.unwrap_or(""))
        .bind(limit)
        .bind(pattern)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("looked for expired sessions"))?;
        Ok(rows.into_iter().map(|row| row.get(0)).collect())
    }
}

/// Delays between the retries of a failed deletion. After the last one, the rest is left to [`Store::tidy`].
const LATER_S: [u64; 8] = [1, 2, 5, 10, 30, 60, 300, 1_800];

const EXPIRED: &str = "SELECT session FROM sessions WHERE agent = ?1 AND updated_at_ms < ?2 AND session IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM turns WHERE turns.agent = sessions.agent AND turns.session = sessions.session
        AND ended_at_ms IS NULL)
    AND NOT EXISTS (SELECT 1 FROM deliveries WHERE deliveries.agent = sessions.agent
        AND deliveries.session = sessions.session AND deliveries.state IN (0, 1, 3))
    AND NOT EXISTS (SELECT 1 FROM schedules WHERE schedules.agent = sessions.agent
        AND schedules.session = sessions.session AND schedules.state != 3)";

/// The handling of deliveries to a deleted session.
#[derive(Clone, Copy)]
pub(crate) enum PendingDeliveries {
    Remove,
    Keep,
}

/// Makes the other hosts of a cluster erase the session's KV pages, also if nothing else is stored of it: a turn that failed
/// may have left some.
async fn announce(
    connection: &mut Connection,
    agent: &str,
    session: &str,
    maker: HostNumber,
) -> Result<(), StoreError> {
    let erased = PageErasure::Session { agent: agent.to_owned(), session: session.to_owned() };
    page_erasures::record(connection, &erased, maker).await
}

/// Makes the session disappear, and removes as many of its rows as a chunk may. `maker` is the host that removes the rest.
/// An owner of the session remains its owner (see `owners`).
pub(crate) async fn begin(
    connection: &mut Connection,
    agent: &str,
    session: &str,
    deliveries: PendingDeliveries,
    chunk: Chunk,
    maker: HostNumber,
) -> Result<StartedErasure, StoreError> {
    let hide =
        "UPDATE sessions SET session = NULL, maker = ?3 WHERE agent = ?1 AND session = ?2 RETURNING key";
    let content = query_scalar(hide)
        .bind(agent)
        .bind(session)
        .bind(maker)
        .fetch_optional(&mut *connection)
        .await
        .map_err(failed())?;
    let row = query(
        "INSERT INTO erasures (agent, session, schedule, delivery, turn, log, request, response, maker)
         SELECT ?1, ?2, (SELECT COALESCE(MAX(key), 0) FROM schedules),
             CASE WHEN ?3 THEN (SELECT COALESCE(MAX(key), 0) FROM deliveries) ELSE 0 END,
             COALESCE((SELECT MIN(key) - 1 FROM turns WHERE agent = ?1 AND session = ?2 AND ended_at_ms IS NULL),
                 (SELECT COALESCE(MAX(key), 0) FROM turns)),
             (SELECT COALESCE(MAX(id), 0) FROM logs), (SELECT COALESCE(MAX(key), 0) FROM requests),
             (SELECT COALESCE(MAX(key), 0) FROM responses), ?4
         RETURNING key, agent, session, schedule, delivery, turn, log, request, response",
    )
    .bind(agent)
    .bind(session)
    .bind(matches!(deliveries, PendingDeliveries::Remove))
    .bind(maker)
    .fetch_one(&mut *connection)
    .await
    .map_err(failed())?;
    let erasure = Erasure { content, ..erasure(&row) };
    Ok(match erase(connection, &erasure, chunk).await? {
        ChunkProgress::Done { removed } => {
            StartedErasure { was_there: content.is_some() || removed > 0, left: None }
        }
        ChunkProgress::More { removed } => {
            StartedErasure { was_there: content.is_some() || removed > 0, left: Some(erasure) }
        }
    })
}

async fn erase(
    connection: &mut Connection,
    erasure: &Erasure,
    mut chunk: Chunk,
) -> Result<ChunkProgress, StoreError> {
    let Erasure { key, agent, session, content, schedule, delivery, turn, log, request, response } = erasure;
    // Remove first everything that would wake the session.
    let entries = [
        (
            "DELETE FROM schedules WHERE key IN
                 (SELECT key FROM schedules WHERE agent = ?1 AND session = ?2 AND key <= ?3 LIMIT 50)",
            schedule,
        ),
        (
            "DELETE FROM deliveries WHERE key IN
                 (SELECT key FROM deliveries WHERE agent = ?1 AND session = ?2 AND key <= ?3 LIMIT 500)",
            delivery,
        ),
    ];
    if !remove_entries(connection, &mut chunk, erasure, entries).await? {
        return Ok(chunk.more());
    }
    let bind = [Bind::Text(agent), Bind::Text(session), Bind::Key(*turn)];
    let turns =
        "SELECT key FROM turns WHERE agent = ?1 AND session = ?2 AND key <= ?3 AND ended_at_ms IS NOT NULL
         LIMIT 1";
    if !remove_turns(connection, &mut chunk, turns, &bind).await? {
        return Ok(chunk.more());
    }
    if let Some(content) = content
        && !remove_content(connection, &mut chunk, *content).await?
    {
        return Ok(chunk.more());
    }
    let entries = [
        (
            "DELETE FROM logs WHERE id IN
                 (SELECT id FROM logs WHERE agent = ?1 AND session = ?2 AND id <= ?3 LIMIT 1000)",
            log,
        ),
        (
            "DELETE FROM requests WHERE key IN
                 (SELECT key FROM requests WHERE agent = ?1 AND session = ?2 AND key <= ?3 LIMIT 50)",
            request,
        ),
        (
            "DELETE FROM responses WHERE key IN
                 (SELECT key FROM responses WHERE agent = ?1 AND session = ?2 AND key <= ?3 LIMIT 50)",
            response,
        ),
    ];
    if !remove_entries(connection, &mut chunk, erasure, entries).await? {
        return Ok(chunk.more());
    }
    if !usage::forget_session(connection, &chunk, agent, Some(session)).await? {
        return Ok(chunk.more());
    }
    query("DELETE FROM erasures WHERE key = ?").bind(key).execute(connection).await.map_err(failed())?;
    Ok(chunk.done())
}

/// Removes the session's entries of each table, up to the last one that there was when the erasure began. Returns false if
/// the chunk is full.
async fn remove_entries(
    connection: &mut Connection,
    chunk: &mut Chunk,
    Erasure { agent, session, .. }: &Erasure,
    tables: impl IntoIterator<Item = (&'static str, &i64)>,
) -> Result<bool, StoreError> {
    for (sql, last) in tables {
        let bind = [Bind::Text(agent), Bind::Text(session), Bind::Key(*last)];
        if !chunk.remove(connection, sql, &bind).await? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn erasure(row: &Row) -> Erasure {
    Erasure {
        key: row.get(0),
        agent: row.get(1),
        session: row.get(2),
        content: None,
        schedule: row.get(3),
        delivery: row.get(4),
        turn: row.get(5),
        log: row.get(6),
        request: row.get(7),
        response: row.get(8),
    }
}

fn failed() -> impl FnOnce(sqlx::Error) -> StoreError {
    StoreError::while_it("deleted a session")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::query_scalar;
    use crate::table_rows::{insert_one, tables_with};
    use crate::{AgentRow, NewDelivery, NewEvent, NewTurn, SessionFolder, Target, TurnCommit};

    async fn count(store: &Store, table: &str) -> i64 {
        let sql = format!("SELECT COUNT(*) FROM {table} WHERE CAST(session AS TEXT) IN ('s', '1')");
        query_scalar(AssertSqlSafe(sql)).fetch_one(&store.readers).await.unwrap()
    }

    #[tokio::test]
    async fn a_deleted_session_leaves_no_row_in_any_table_that_has_sessions() {
        let store = Store::for_tests().await.unwrap();
        let mut tables = tables_with(&store, "session").await;
        // An ownership ends when its host releases it.
        tables.retain(|(table, _)| !["erasures", "session_owners"].contains(&table.as_str()));
        assert!(tables.len() >= 8, "{tables:?}");
        for table in &tables {
            let is_name = table.1.iter().any(|(column, kind)| column == "session" && kind == "TEXT");
            let session = if is_name { "'s'" } else { "1" };
            insert_one(&store, table, &[("agent", "'a'"), ("session", session)]).await;
        }
        for (table, _) in &tables {
            assert_eq!(count(&store, table).await, 1, "{table}");
        }
        assert!(store.delete_session("a", "s").await.unwrap());
        for (table, _) in &tables {
            assert_eq!(count(&store, table).await, 0, "{table} keeps rows; remove them in erasure.rs");
        }
        assert!(!store.delete_session("a", "s").await.unwrap());
    }

    async fn with_sessions(ages: &[(&str, u64)]) -> Store {
        let store = Store::for_tests().await.unwrap();
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
    async fn sessions_expire_when_they_are_old_enough_and_have_no_open_turn() {
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
        let expired = async |after, limit| store.expired_sessions("a", 30, None, after, limit).await.unwrap();
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

    #[tokio::test]
    async fn a_session_does_not_expire_while_an_event_is_in_flight_to_it() {
        let store = with_sessions(&[("s", 10)]).await;
        let event = |id: &str, undeliverable: Option<&str>| NewEvent {
            source: "shop".into(),
            id: id.into(),
            topic: "t".into(),
            data: None,
            principal: "p".into(),
            hops: 0,
            at_ms: 1,
            deliveries: vec![NewDelivery {
                target: Target::Session { agent: "a".into(), session: "s".into() },
                undeliverable: undeliverable.map(str::to_owned),
            }],
        };
        store.publish(&event("dead", Some("no target accepts it")), 1).await.unwrap();
        store.publish(&event("pending", None), 1).await.unwrap();
        let expires = async || {
            let listed = !store.expired_sessions("a", 30, None, None, 10).await.unwrap().is_empty();
            (listed, store.expire_session("a", "s", 30).await.unwrap())
        };
        assert_eq!(expires().await, (false, false), "the event waits");
        let [pending] = &store.due_deliveries(5, 10).await.unwrap()[..] else { panic!("one is due") };
        assert!(store.begin_delivery(pending.key, 1, 5).await.unwrap());
        assert_eq!(expires().await, (false, false), "the delivery has started");
        store.finish_delivery(pending.key).await.unwrap();
        assert_eq!(expires().await, (true, true));
        assert_eq!(store.session("a", "s").await.unwrap(), None);
        let dead = store.dead_deliveries(None, 10).await.unwrap();
        assert_eq!(dead.len(), 1, "failed deliveries can still be redelivered manually");
        assert!(store.redeliver(dead[0].key, 40).await.unwrap());
    }
}
