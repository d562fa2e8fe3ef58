//! Copies of sessions: forks of another session, and imports of exported ones.
//!
//! Invariant: a session exists completely or not at all, and an existing session is replaced only if the
//! caller says so. A copy is written in chunks to a session without a name; the last chunk sets the name. A
//! copy contains what was committed when it started.

use crate::{
    ConversationRow, SessionRow, SessionSnapshot, Store, StoreError,
    chunks::Chunk,
    erasure::{self, PendingDeliveries, StartedErasure},
    error::is_foreign_key,
    hosts::HostNumber,
    row_groups::{BYTES_AT_ONCE, ROWS_AT_ONCE},
    session_reads::conversation_row,
    sessions::put_conversations,
    sql::{Connection, QueryBuilder, query, query_scalar},
};
use std::{collections::VecDeque, time::Duration};
use tokio::sync::SemaphorePermit;

/// The way to handle a session that already exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    Refuse,
    Replace,
}

/// The outcome of a fork.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fork {
    Done(SessionRow),
    /// The session to copy does not exist.
    SourceMissing,
    /// The target already exists. Nothing was written.
    TargetExists,
}

/// The source of a copy.
enum Source {
    /// A session as it was when this transaction started to read.
    Stored {
        reading: Connection,
        session: i64,
        state_after: Option<String>,
        name_after: Option<String>,
    },
    Given {
        state: VecDeque<(String, Vec<u8>)>,
        conversations: VecDeque<ConversationRow>,
    },
}

/// The rows of a copy that are written at once.
#[derive(Default)]
struct Rows {
    state: Vec<(String, Vec<u8>)>,
    conversations: Vec<ConversationRow>,
    bytes: usize,
}

/// A chunk of a copy.
struct CopyChunk {
    agent: String,
    row: SessionRow,
    existing: Existing,
    /// The key of the session without a name; `None` before the first chunk.
    key: Option<i64>,
    rows: Rows,
    is_last: bool,
    time: Duration,
    maker: HostNumber,
}

/// The outcome of writing a chunk.
enum CopyState {
    InProgress(i64),
    /// The copy is complete. The session that it replaced may still have to be removed.
    Complete(Option<StartedErasure>),
    /// Another session has the name. Nothing was written.
    Exists,
}

impl Store {
    /// Copies the committed part of a session to a session that does not exist yet: state, conversations and
    /// the number of turns. The turns, outcomes and log of the original are not copied.
    pub async fn fork_session(
        &self,
        agent: &str,
        from: &str,
        to: &str,
        at_ms: u64,
    ) -> Result<Fork, StoreError> {
        let (store, agent, from, to) = (self.clone(), agent.to_owned(), from.to_owned(), to.to_owned());
        // The fork continues even if the caller stops waiting.
        let forking = tokio::spawn(async move { store.fork(agent, &from, to, at_ms).await });
        forking.await.map_err(|_ended| StoreError::Closed)?
    }

    /// Writes a whole session. An existing session is kept, or replaced with everything that belongs to it.
    /// Returns whether the session was written.
    pub async fn import_session(
        &self,
        agent: &str,
        snapshot: SessionSnapshot,
        existing: Existing,
    ) -> Result<bool, StoreError> {
        let (store, agent) = (self.clone(), agent.to_owned());
        let SessionSnapshot { row, state, conversations } = snapshot;
        let source = Source::Given { state: state.into(), conversations: conversations.into() };
        let importing = tokio::spawn(async move {
            let permit = store.chunked_write_permit().await?;
            store.copy(agent, source, row, existing, permit).await
        });
        importing.await.map_err(|_ended| StoreError::Closed)?
    }

    async fn fork(&self, agent: String, from: &str, to: String, at_ms: u64) -> Result<Fork, StoreError> {
        if exists(&mut self.reader().await?, &agent, &to).await? {
            return Ok(Fork::TargetExists);
        }
        // Acquire the permit before reading anything, so that a waiting fork holds no connection.
        let permit = self.chunked_write_permit().await?;
        let Some((turns, source)) = self.source(&agent, from).await? else {
            return Ok(Fork::SourceMissing);
        };
        let row = SessionRow { session: to, turns, created_at_ms: at_ms, updated_at_ms: at_ms };
        Ok(match self.copy(agent, source, row.clone(), Existing::Refuse, permit).await? {
            true => Fork::Done(row),
            false => Fork::TargetExists,
        })
    }

    /// Returns the number of turns of a session, and its content.
    async fn source(&self, agent: &str, session: &str) -> Result<Option<(u64, Source)>, StoreError> {
        if self.is_in_memory() {
            // A transaction on the only connection of an in-memory database would block all writes.
            let found = self.session(agent, session).await?;
            return Ok(found.map(|SessionSnapshot { row, state, conversations }| {
                (row.turns, Source::Given { state: state.into(), conversations: conversations.into() })
            }));
        }
        let failed = || StoreError::while_it("read a session to copy it");
        let mut reading = self.readers.begin().await.map_err(failed())?;
        let row = query("SELECT turns, key FROM sessions WHERE agent = ? AND session = ?")
            .bind(agent)
            .bind(session)
            .fetch_optional(&mut reading)
            .await
            .map_err(failed())?;
        Ok(row.map(|row| {
            let (turns, session) = (row.get::<i64>(0) as u64, row.get(1));
            (turns, Source::Stored { reading, session, state_after: None, name_after: None })
        }))
    }

    /// Returns whether the copy was written.
    async fn copy(
        &self,
        agent: String,
        mut source: Source,
        row: SessionRow,
        existing: Existing,
        permit: SemaphorePermit<'_>,
    ) -> Result<bool, StoreError> {
        let mut key = None;
        let written = self.put_all(&agent, &mut source, row, existing, &mut key).await;
        drop((source, permit));
        let left = match written {
            Ok(CopyState::Complete(left)) => left,
            Ok(CopyState::Exists | CopyState::InProgress(_)) => {
                self.give_up(key).await;
                return Ok(false);
            }
            Err(error) => {
                self.give_up(key).await;
                return Err(error);
            }
        };
        // The copy exists, even if removing the session that it replaced fails.
        if let Some(erasure) = left.and_then(|started| started.left)
            && let Err(error) = self.erase_in_the_end(erasure).await
        {
            tracing::error!("the rest of a replaced session will be removed later: {error}");
        }
        Ok(true)
    }

    async fn put_all(
        &self,
        agent: &str,
        source: &mut Source,
        row: SessionRow,
        existing: Existing,
        key: &mut Option<i64>,
    ) -> Result<CopyState, StoreError> {
        loop {
            let (rows, is_last) = source.rows().await?;
            let (agent, row, time) = (agent.to_owned(), row.clone(), self.chunk_time);
            let put = CopyChunk { agent, row, existing, key: *key, rows, is_last, time, maker: self.host };
            let state = match put.is_last && existing == Existing::Replace {
                // It removes what other hosts count, too.
                true => {
                    self.write_common(put, |connection, put| Box::pin(put_chunk(connection, put))).await?
                }
                false => self.write(put, |connection, put| Box::pin(put_chunk(connection, put))).await?,
            };
            match state {
                CopyState::InProgress(unnamed) => *key = Some(unnamed),
                state => return Ok(state),
            }
        }
    }

    /// Removes an incomplete copy. If that fails, [`Store::tidy`] removes it.
    async fn give_up(&self, key: Option<i64>) {
        if let Some(key) = key {
            let _ = self.remove_unnamed(key).await;
        }
    }

    async fn reader(&self) -> Result<Connection, StoreError> {
        self.readers.acquire().await.map_err(StoreError::while_it("waited for a connection"))
    }
}

impl Rows {
    fn is_full(&self) -> bool {
        self.state.len() + self.conversations.len() >= ROWS_AT_ONCE || self.bytes >= BYTES_AT_ONCE
    }
}

impl Source {
    /// Returns the next rows, and whether they are the last ones.
    async fn rows(&mut self) -> Result<(Rows, bool), StoreError> {
        let mut rows = Rows::default();
        match self {
            Source::Given { state, conversations } => {
                while !rows.is_full() {
                    if let Some((key, value)) = state.pop_front() {
                        rows.bytes += value.len();
                        rows.state.push((key, value));
                    } else if let Some(conversation) = conversations.pop_front() {
                        rows.bytes += conversation.body.len();
                        rows.conversations.push(conversation);
                    } else {
                        break;
                    }
                }
                let is_last = state.is_empty() && conversations.is_empty();
                Ok((rows, is_last))
            }
            Source::Stored { reading, session, state_after, name_after } => {
                let failed = || StoreError::while_it("read a session to copy it");
                // Read the sizes first: they cost nothing, and the values may be large.
                let sizes = query(
                    "SELECT key, LENGTH(value) FROM state WHERE session = ? AND key > ? ORDER BY key LIMIT ?",
                )
                .bind(*session)
                .bind(state_after.as_deref().unwrap_or_default())
                .bind(ROWS_AT_ONCE as i64)
                .fetch_all(&mut *reading)
                .await
                .map_err(failed())?;
                let mut last: Option<String> = None;
                for size in &sizes {
                    if rows.bytes >= BYTES_AT_ONCE {
                        break;
                    }
                    rows.bytes += size.get::<i64>(1) as usize;
                    last = Some(size.get(0));
                }
                if let Some(last) = last {
                    let values = query(
                        "SELECT key, value FROM state WHERE session = ? AND key > ? AND key <= ? ORDER BY key",
                    )
                    .bind(*session)
                    .bind(state_after.as_deref().unwrap_or_default())
                    .bind(&last)
                    .fetch_all(&mut *reading)
                    .await
                    .map_err(failed())?;
                    rows.state = values.iter().map(|row| (row.get(0), row.get(1))).collect();
                    *state_after = Some(last);
                }
                while !rows.is_full() {
                    let next = query(
                        "SELECT name, model, digest, body FROM conversations WHERE session = ?1 AND (?2 IS NULL OR name > ?2)
                         ORDER BY name LIMIT 1",
                    )
                    .bind(*session)
                    .bind(name_after.as_deref())
                    .fetch_optional(&mut *reading)
                    .await
                    .map_err(failed())?;
                    let Some(row) = next else { return Ok((rows, true)) };
                    let conversation = conversation_row(&row);
                    *name_after = Some(conversation.name.clone());
                    rows.bytes += conversation.body.len();
                    rows.conversations.push(conversation);
                }
                Ok((rows, false))
            }
        }
    }
}

async fn put_chunk(connection: &mut Connection, put: &CopyChunk) -> Result<CopyState, StoreError> {
    let failed = || StoreError::while_it("wrote a session");
    let CopyChunk { agent, row, existing, key, rows, is_last, time, maker } = put;
    let session = &row.session;
    if *is_last && *existing == Existing::Refuse && exists(connection, agent, session).await? {
        return Ok(CopyState::Exists);
    }
    let key = match key {
        Some(key) => *key,
        None => begin(connection, agent, row, *maker).await?,
    };
    if !rows.state.is_empty() {
        let mut insert = QueryBuilder::new("INSERT INTO state (session, key, value) ");
        insert.push_values(&rows.state, |mut to, (name, value)| {
            to.push_bind(key).push_bind(name).push_bind(value);
        });
        insert.build().execute(&mut *connection).await.map_err(failed())?;
    }
    let conversations: Vec<_> = rows.conversations.iter().map(|row| (key, row)).collect();
    put_conversations(connection, &conversations).await?;
    if !is_last {
        return Ok(CopyState::InProgress(key));
    }
    let left = match existing {
        Existing::Refuse => None,
        Existing::Replace => {
            let chunk = Chunk::new(*time);
            let deliveries = PendingDeliveries::Remove;
            Some(erasure::begin(connection, agent, session, deliveries, chunk, *maker).await?)
        }
    };
    query("UPDATE sessions SET session = ? WHERE key = ?")
        .bind(session)
        .bind(key)
        .execute(connection)
        .await
        .map_err(failed())?;
    Ok(CopyState::Complete(left))
}

/// Creates a session without a name.
async fn begin(
    connection: &mut Connection,
    agent: &str,
    row: &SessionRow,
    maker: HostNumber,
) -> Result<i64, StoreError> {
    let SessionRow { session: _, turns, created_at_ms, updated_at_ms } = row;
    let missing = || StoreError::AgentMissing { name: agent.to_owned() };
    let begun = query_scalar(
        "INSERT INTO sessions (agent, session, turns, created_at_ms, updated_at_ms, maker)
         SELECT ?1, NULL, ?2, ?3, ?4, ?5 WHERE EXISTS (SELECT 1 FROM agents WHERE name = ?1) RETURNING key",
    )
    .bind(agent)
    .bind(*turns as i64)
    .bind(*created_at_ms as i64)
    .bind(*updated_at_ms as i64)
    .bind(maker)
    .fetch_optional(connection)
    .await
    .map_err(|error| match is_foreign_key(&error) {
        true => missing(),
        false => StoreError::while_it("wrote a session")(error),
    })?;
    begun.ok_or_else(missing)
}

async fn exists(connection: &mut Connection, agent: &str, session: &str) -> Result<bool, StoreError> {
    let row = query("SELECT EXISTS (SELECT 1 FROM sessions WHERE agent = ? AND session = ?)")
        .bind(agent)
        .bind(session)
        .fetch_one(connection)
        .await
        .map_err(StoreError::while_it("looked for a session"))?;
    Ok(row.get(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AgentRow, ConversationRow, LogEntry, LogFilter, Outcome, StateChange, TurnCommit};

    async fn with_a_session() -> Store {
        let store = Store::for_tests().await.unwrap();
        let agent = AgentRow {
            name: "a".into(),
            manifest: String::new(),
            digest: "d".into(),
            deployed_at_ms: 1,
            deployed_by: "ann".into(),
        };
        store.put_agent(&agent, b"component", &[]).await.unwrap();
        let commit = TurnCommit {
            agent: "a".into(),
            session: "s".into(),
            turn: 1,
            at_ms: 7,
            state: vec![StateChange { key: "k".into(), value: Some(b"v".to_vec()) }],
            conversations: vec![ConversationRow {
                name: "main".into(),
                body: b"said".to_vec(),
                ..ConversationRow::default()
            }],
            logs: vec![LogEntry { at_ms: 7, level: "info".into(), message: "hello".into() }],
            outcome: Some(Outcome {
                idempotency_key: Some("key".into()),
                body: b"answer".to_vec(),
                ..Default::default()
            }),
            ..Default::default()
        };
        store.commit_turn(commit).await.unwrap();
        store
    }

    #[tokio::test]
    async fn a_fork_copies_state_and_conversations_and_then_diverges() {
        let store = with_a_session().await;
        let done = store.fork_session("a", "s", "copy", 99).await.unwrap();
        let row = SessionRow { session: "copy".into(), turns: 1, created_at_ms: 99, updated_at_ms: 99 };
        assert_eq!(done, Fork::Done(row.clone()));
        let source = store.session("a", "s").await.unwrap().unwrap();
        let copy = store.session("a", "copy").await.unwrap().unwrap();
        assert_eq!(copy, SessionSnapshot { row, ..source });
        assert_eq!(store.outcome("a", "copy", "key").await.unwrap(), None, "a key belongs to its session");
        let next = TurnCommit { agent: "a".into(), session: "copy".into(), turn: 2, ..Default::default() };
        store.commit_turn(next).await.unwrap();
        assert_eq!(store.session("a", "s").await.unwrap().unwrap().row.turns, 1);
        assert_eq!(store.fork_session("a", "s", "copy", 1).await.unwrap(), Fork::TargetExists);
        assert_eq!(store.fork_session("a", "s", "s", 1).await.unwrap(), Fork::TargetExists);
        assert_eq!(store.fork_session("a", "nobody", "new", 1).await.unwrap(), Fork::SourceMissing);
        assert_eq!(store.session_bytes("a", "s").await.unwrap(), Some(6));
        assert_eq!(store.session_bytes("a", "nobody").await.unwrap(), None);
    }

    #[tokio::test]
    async fn an_import_is_refused_or_replaces_everything() {
        let store = with_a_session().await;
        let exported = store.session("a", "s").await.unwrap().unwrap();
        assert!(!store.import_session("a", exported.clone(), Existing::Refuse).await.unwrap());
        let mut other = exported.clone();
        other.state = vec![("other".into(), b"w".to_vec())];
        other.row.turns = 5;
        assert!(store.import_session("a", other.clone(), Existing::Replace).await.unwrap());
        assert_eq!(store.session("a", "s").await.unwrap(), Some(other));
        assert!(
            store.logs(&LogFilter::of_agent("a"), None, 10).await.unwrap().is_empty(),
            "the replaced session is gone"
        );
        assert!(store.delete_session("a", "s").await.unwrap());
        assert!(store.import_session("a", exported.clone(), Existing::Refuse).await.unwrap());
        assert_eq!(store.session("a", "s").await.unwrap(), Some(exported.clone()));
        let lost = store.import_session("nobody", exported, Existing::Refuse).await;
        assert!(matches!(lost, Err(StoreError::AgentMissing { .. })), "{lost:?}");
    }

    #[tokio::test]
    async fn a_failed_import_leaves_the_existing_session_unchanged() {
        let store = with_a_session().await;
        let before = store.session("a", "s").await.unwrap();
        let mut twice = before.clone().unwrap();
        twice.state.push(twice.state[0].clone());
        store.import_session("a", twice, Existing::Replace).await.expect_err("one key has two values");
        assert_eq!(store.session("a", "s").await.unwrap(), before);
    }
}
