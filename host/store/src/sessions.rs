//! Sessions: their state, their conversations, and the commit of a turn.

use crate::{
    DeliveryKey, LogEntry, NewEvent, ScheduleChange, Store, StoreError, TokenUse, TurnKey, deliveries,
    events, logs, schedules, token_use, turns, writer::Write,
};
use sqlx::{Row, SqliteConnection, query, sqlite::SqliteRow};
use std::sync::Arc;

/// One session of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRow {
    pub session: String,
    /// Turns committed.
    pub turns: u64,
    pub created_at_ms: u64,
    pub updated_at_ms: u64,
}

/// Where ids of sessions are that have the same beginning, or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionFolder {
    /// All ids come after this,
    pub(crate) begin: String,
    /// and before this.
    pub(crate) end: String,
    pub(crate) has_slash: bool,
}

impl SessionFolder {
    /// Of the ids that begin with this name and a slash; without a name, of those that have no slash.
    pub fn of(name: Option<&str>) -> Self {
        match name {
            Some(name) => {
                SessionFolder { begin: format!("{name}/"), end: format!("{name}0"), has_slash: true }
            }
            // Ids are visible ASCII.
            None => SessionFolder { begin: String::new(), end: "\u{7f}".to_owned(), has_slash: false },
        }
    }
}

/// A conversation, as bytes that the runtime understands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConversationRow {
    pub name: String,
    pub body: Vec<u8>,
}

/// A session with everything in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionSnapshot {
    pub row: SessionRow,
    /// By key, in order.
    pub state: Vec<(String, Vec<u8>)>,
    pub conversations: Vec<ConversationRow>,
}

/// A change of one key; `None` removes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateChange {
    pub key: String,
    pub value: Option<Vec<u8>>,
}

/// What a turn answered, kept under the key that its caller sent if it sent one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub idempotency_key: Option<String>,
    pub body: Vec<u8>,
}

/// What began a turn, and is over when it is committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Occasion {
    /// A schedule by its id, at this time.
    Alarm {
        schedule: String,
        due_ms: u64,
    },
    Event(DeliveryKey),
}

/// Everything that a turn changed, written in one transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TurnCommit {
    pub agent: String,
    pub session: String,
    /// The open turn that ends with this.
    pub key: Option<TurnKey>,
    /// The number of this turn: one more than the session's committed turns.
    pub turn: u64,
    pub at_ms: u64,
    pub state: Vec<StateChange>,
    /// Conversations that changed.
    pub conversations: Vec<ConversationRow>,
    pub logs: Vec<LogEntry>,
    pub outcome: Option<Outcome>,
    pub occasion: Option<Occasion>,
    /// In the order in which they were made.
    pub schedules: Vec<ScheduleChange>,
    pub events: Vec<NewEvent>,
    /// What it generated.
    pub token_use: Option<TokenUse>,
}

impl Store {
    /// Writes a turn and ends it. A turn that is not the session's next one is a [`StoreError::TurnConflict`] and writes
    /// nothing.
    pub async fn commit_turn(&self, commit: impl Into<Arc<TurnCommit>>) -> Result<(), StoreError> {
        self.group.write(Write::Commit(commit.into())).await.map(drop)
    }

    /// A session with its state and conversations, or `None` if no turn of it was committed.
    pub async fn session(&self, agent: &str, session: &str) -> Result<Option<SessionSnapshot>, StoreError> {
        let failed = || StoreError::while_it("read a session");
        // One transaction: the three reads see the same turn.
        let mut transaction = self.readers.begin().await.map_err(failed())?;
        let row = query(
            "SELECT session, turns, created_at_ms, updated_at_ms FROM sessions WHERE agent = ? AND session = ?",
        )
        .bind(agent)
        .bind(session)
        .fetch_optional(&mut *transaction)
        .await
        .map_err(failed())?;
        let Some(row) = row else { return Ok(None) };
        let state = query("SELECT key, value FROM state WHERE agent = ? AND session = ? ORDER BY key")
            .bind(agent)
            .bind(session)
            .fetch_all(&mut *transaction)
            .await
            .map_err(failed())?;
        let conversations =
            query("SELECT name, body FROM conversations WHERE agent = ? AND session = ? ORDER BY name")
                .bind(agent)
                .bind(session)
                .fetch_all(&mut *transaction)
                .await
                .map_err(failed())?;
        Ok(Some(SessionSnapshot {
            row: session_row(&row),
            state: state.into_iter().map(|row| (row.get(0), row.get(1))).collect(),
            conversations: conversations
                .into_iter()
                .map(|row| ConversationRow { name: row.get(0), body: row.get(1) })
                .collect(),
        }))
    }

    /// At most `limit` sessions of an agent in a folder in the order of their ids, those after `after` if it is given.
    pub async fn sessions(
        &self,
        agent: &str,
        folder: &SessionFolder,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<SessionRow>, StoreError> {
        let SessionFolder { begin, end, has_slash } = folder;
        let rows = query(
            "SELECT session, turns, created_at_ms, updated_at_ms FROM sessions
             WHERE agent = ? AND session > ? AND session < ? AND (? OR instr(session, '/') = 0)
             ORDER BY session LIMIT ?",
        )
        .bind(agent)
        .bind(after.map_or(begin.as_str(), |after| after.max(begin.as_str())))
        .bind(end)
        .bind(has_slash)
        .bind(limit)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed sessions"))?;
        Ok(rows.iter().map(session_row).collect())
    }

    /// One conversation of a session, or `None` if there is no such one.
    pub async fn conversation(
        &self,
        agent: &str,
        session: &str,
        name: &str,
    ) -> Result<Option<ConversationRow>, StoreError> {
        let row = query("SELECT name, body FROM conversations WHERE agent = ? AND session = ? AND name = ?")
            .bind(agent)
            .bind(session)
            .bind(name)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("read a conversation"))?;
        Ok(row.map(|row| ConversationRow { name: row.get(0), body: row.get(1) }))
    }

    /// The names of a session's conversations, in order. `None` if no turn of it was committed.
    pub async fn conversation_names(
        &self,
        agent: &str,
        session: &str,
    ) -> Result<Option<Vec<String>>, StoreError> {
        let rows = query(
            "SELECT name FROM sessions LEFT JOIN conversations USING (agent, session)
             WHERE agent = ? AND session = ? ORDER BY name",
        )
        .bind(agent)
        .bind(session)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed conversations"))?;
        let names = rows.iter().filter_map(|row| row.get(0)).collect();
        Ok((!rows.is_empty()).then_some(names))
    }

    /// What a session takes: the bytes of its keys, values and conversations. `None` if no turn of it was committed.
    pub async fn session_bytes(&self, agent: &str, session: &str) -> Result<Option<u64>, StoreError> {
        let row = query(
            "SELECT (SELECT COALESCE(SUM(LENGTH(CAST(key AS BLOB)) + LENGTH(value)), 0) FROM state
                     WHERE agent = ?1 AND session = ?2)
                  + (SELECT COALESCE(SUM(LENGTH(body)), 0) FROM conversations WHERE agent = ?1 AND session = ?2)
             FROM sessions WHERE agent = ?1 AND session = ?2",
        )
        .bind(agent)
        .bind(session)
        .fetch_optional(&self.readers)
        .await
        .map_err(StoreError::while_it("measured a session"))?;
        Ok(row.map(|row| row.get::<i64, _>(0) as u64))
    }

    /// What the turn with this key answered, if one was committed.
    pub async fn outcome(
        &self,
        agent: &str,
        session: &str,
        idempotency_key: &str,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        let row = query("SELECT body FROM outcomes WHERE agent = ? AND session = ? AND idempotency_key = ?")
            .bind(agent)
            .bind(session)
            .bind(idempotency_key)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for the outcome of a turn"))?;
        Ok(row.map(|row| row.get(0)))
    }
}

pub(crate) async fn commit(connection: &mut SqliteConnection, commit: &TurnCommit) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("committed a turn");
    let TurnCommit { agent, session, turn, at_ms, .. } = commit;
    let written = query(
        "INSERT INTO sessions (agent, session, turns, created_at_ms, updated_at_ms)
         SELECT ?1, ?2, ?3, ?4, ?4 WHERE ?3 = 1 OR EXISTS
             (SELECT 1 FROM sessions WHERE agent = ?1 AND session = ?2)
         ON CONFLICT (agent, session) DO UPDATE SET turns = ?3, updated_at_ms = ?4 WHERE turns = ?3 - 1",
    )
    .bind(agent)
    .bind(session)
    .bind(*turn as i64)
    .bind(*at_ms as i64)
    .execute(&mut *connection)
    .await;
    let written = match written {
        Ok(done) => done.rows_affected(),
        Err(error) if is_foreign_key(&error) => {
            return Err(StoreError::AgentMissing { name: agent.clone() });
        }
        Err(error) => return Err(failed()(error)),
    };
    if written == 0 {
        return Err(StoreError::TurnConflict { agent: agent.clone(), session: session.clone(), turn: *turn });
    }
    for change in &commit.state {
        let statement = match &change.value {
            Some(value) => query(
                "INSERT INTO state (agent, session, key, value) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT (agent, session, key) DO UPDATE SET value = ?4",
            )
            .bind(agent)
            .bind(session)
            .bind(&change.key)
            .bind(value),
            None => query("DELETE FROM state WHERE agent = ? AND session = ? AND key = ?")
                .bind(agent)
                .bind(session)
                .bind(&change.key),
        };
        statement.execute(&mut *connection).await.map_err(failed())?;
    }
    for conversation in &commit.conversations {
        query(
            "INSERT INTO conversations (agent, session, name, body) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT (agent, session, name) DO UPDATE SET body = ?4",
        )
        .bind(agent)
        .bind(session)
        .bind(&conversation.name)
        .bind(&conversation.body)
        .execute(&mut *connection)
        .await
        .map_err(failed())?;
    }
    let outcome = commit.outcome.as_ref();
    if let Some(Outcome { idempotency_key: Some(key), body }) = outcome {
        query("INSERT INTO outcomes (agent, session, idempotency_key, turn, body) VALUES (?, ?, ?, ?, ?)")
            .bind(agent)
            .bind(session)
            .bind(key)
            .bind(*turn as i64)
            .bind(body)
            .execute(&mut *connection)
            .await
            .map_err(failed())?;
    }
    if let Some(key) = commit.key {
        let body = outcome.map_or(&[][..], |outcome| &outcome.body);
        turns::finish(connection, key, agent, session, *turn, body, *at_ms).await?;
    }
    match &commit.occasion {
        Some(Occasion::Alarm { schedule, due_ms }) => {
            schedules::settle(connection, schedule, *due_ms).await?
        }
        Some(Occasion::Event(delivery)) => deliveries::settle(connection, *delivery).await?,
        None => {}
    }
    schedules::change(connection, agent, session, &commit.schedules).await?;
    for event in &commit.events {
        events::insert(connection, event, *at_ms).await?;
    }
    if let Some(used) = &commit.token_use {
        token_use::add(connection, used).await?;
    }
    logs::insert(connection, agent, session, *turn, &commit.logs).await
}

pub(crate) fn session_row(row: &SqliteRow) -> SessionRow {
    SessionRow {
        session: row.get(0),
        turns: row.get::<i64, _>(1) as u64,
        created_at_ms: row.get::<i64, _>(2) as u64,
        updated_at_ms: row.get::<i64, _>(3) as u64,
    }
}

pub(crate) fn is_foreign_key(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.is_foreign_key_violation())
}
