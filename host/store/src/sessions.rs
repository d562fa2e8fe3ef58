//! Sessions: their state, their conversations, and the commit of a turn.

use crate::{
    DeliveryKey, LogEntry, NewEvent, ScheduleChange, Store, StoreError, TokenUse, TurnKey, deliveries,
    events, logs, schedules, token_use, turns,
};
use sqlx::{QueryBuilder, Row, Sqlite, SqliteConnection, query, query_scalar, sqlite::SqliteRow};
use std::sync::Arc;

/// Rows of one statement: few enough that it takes a millisecond or two, and has fewer parameters than SQLite takes.
pub(crate) const ROWS_AT_ONCE: usize = 500;
/// And their bytes, if they are large.
pub(crate) const BYTES_AT_ONCE: usize = 1 << 20;

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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConversationRow {
    pub name: String,
    /// The model that it is with, and the digest of that. Early versions stored neither.
    pub model: Option<String>,
    pub digest: Option<String>,
    pub body: Vec<u8>,
}

/// A conversation without what was said in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConversationOutline {
    pub name: String,
    pub model: Option<String>,
    /// The length of its body.
    pub bytes: usize,
}

/// A session with its state, and with its conversations by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionOutline {
    pub row: SessionRow,
    /// By key, in order.
    pub state: Vec<(String, Vec<u8>)>,
    pub conversations: Vec<ConversationOutline>,
}

/// How many sessions have conversations with one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelUse {
    pub model: String,
    pub digest: Option<String>,
    pub sessions: u64,
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
        self.write(commit.into(), |connection, turn: &Arc<TurnCommit>| {
            Box::pin(commit_turn(connection, turn))
        })
        .await
    }

    /// A session with its state and conversations, or `None` if no turn of it was committed.
    pub async fn session(&self, agent: &str, session: &str) -> Result<Option<SessionSnapshot>, StoreError> {
        // One transaction: all reads see the same turn.
        let mut reading = self.readers.begin().await.map_err(reading_failed())?;
        let Some((key, row)) = find(&mut reading, agent, session).await? else { return Ok(None) };
        let state = state_of(&mut reading, key).await?;
        let conversations = query(
            "SELECT name, model, digest, body FROM conversations WHERE session = ? ORDER BY name",
        )
        .bind(key)
        .fetch_all(&mut *reading)
        .await
        .map_err(reading_failed())?;
        let conversations = conversations.iter().map(conversation_row).collect();
        Ok(Some(SessionSnapshot { row, state, conversations }))
    }

    /// A session with its state, and the names and sizes of its conversations. `None` if no turn of it was committed.
    pub async fn session_outline(
        &self,
        agent: &str,
        session: &str,
    ) -> Result<Option<SessionOutline>, StoreError> {
        let mut reading = self.readers.begin().await.map_err(reading_failed())?;
        let Some((key, row)) = find(&mut reading, agent, session).await? else { return Ok(None) };
        let state = state_of(&mut reading, key).await?;
        let conversations = query(
            "SELECT name, model, LENGTH(body) FROM conversations WHERE session = ? ORDER BY name",
        )
        .bind(key)
        .fetch_all(&mut *reading)
        .await
        .map_err(reading_failed())?;
        let conversations = conversations.iter().map(|row| ConversationOutline {
            name: row.get(0),
            model: row.get(1),
            bytes: row.get::<i64, _>(2) as usize,
        });
        Ok(Some(SessionOutline { row, state, conversations: conversations.collect() }))
    }

    /// The models that the conversations of all sessions are with.
    pub async fn models_in_use(&self) -> Result<Vec<ModelUse>, StoreError> {
        let rows = query(
            "SELECT model, digest, COUNT(DISTINCT conversations.session) FROM conversations
             JOIN sessions ON sessions.key = conversations.session AND sessions.session IS NOT NULL
             WHERE model IS NOT NULL GROUP BY model, digest ORDER BY model, digest",
        )
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("counted the sessions of each model"))?;
        let model_use = |row: &SqliteRow| ModelUse {
            model: row.get(0),
            digest: row.get(1),
            sessions: row.get::<i64, _>(2) as u64,
        };
        Ok(rows.iter().map(model_use).collect())
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
        let row = query(
            "SELECT name, model, digest, body FROM conversations
             WHERE session = (SELECT key FROM sessions WHERE agent = ? AND session = ?) AND name = ?",
        )
        .bind(agent)
        .bind(session)
        .bind(name)
        .fetch_optional(&self.readers)
        .await
        .map_err(StoreError::while_it("read a conversation"))?;
        Ok(row.as_ref().map(conversation_row))
    }

    /// The names of a session's conversations, in order. `None` if no turn of it was committed.
    pub async fn conversation_names(
        &self,
        agent: &str,
        session: &str,
    ) -> Result<Option<Vec<String>>, StoreError> {
        let rows = query(
            "SELECT name FROM sessions LEFT JOIN conversations ON conversations.session = sessions.key
             WHERE agent = ? AND sessions.session = ? ORDER BY name",
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
            "SELECT (SELECT COALESCE(SUM(LENGTH(CAST(state.key AS BLOB)) + LENGTH(value)), 0) FROM state
                     WHERE state.session = sessions.key)
                  + (SELECT COALESCE(SUM(LENGTH(body)), 0) FROM conversations
                     WHERE conversations.session = sessions.key)
             FROM sessions WHERE agent = ? AND session = ?",
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
        let row = query(
            "SELECT body FROM outcomes
             WHERE session = (SELECT key FROM sessions WHERE agent = ? AND session = ?) AND idempotency_key = ?",
        )
            .bind(agent)
            .bind(session)
            .bind(idempotency_key)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for the outcome of a turn"))?;
        Ok(row.map(|row| row.get(0)))
    }
}

/// The key of a session, with its row.
async fn find(
    reading: &mut SqliteConnection,
    agent: &str,
    session: &str,
) -> Result<Option<(i64, SessionRow)>, StoreError> {
    let row = query(
        "SELECT session, turns, created_at_ms, updated_at_ms, key FROM sessions WHERE agent = ? AND session = ?",
    )
    .bind(agent)
    .bind(session)
    .fetch_optional(reading)
    .await
    .map_err(reading_failed())?;
    Ok(row.map(|row| (row.get(4), session_row(&row))))
}

async fn state_of(
    reading: &mut SqliteConnection,
    session: i64,
) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
    let rows = query("SELECT key, value FROM state WHERE session = ? ORDER BY key")
        .bind(session)
        .fetch_all(reading)
        .await
        .map_err(reading_failed())?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

fn reading_failed() -> impl FnOnce(sqlx::Error) -> StoreError {
    StoreError::while_it("read a session")
}

/// From the columns name, model, digest and body.
pub(crate) fn conversation_row(row: &SqliteRow) -> ConversationRow {
    ConversationRow { name: row.get(0), model: row.get(1), digest: row.get(2), body: row.get(3) }
}

async fn commit_turn(connection: &mut SqliteConnection, commit: &TurnCommit) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("committed a turn");
    let TurnCommit { agent, session, turn, at_ms, .. } = commit;
    let Some(key) = advance(connection, commit).await? else {
        return Err(StoreError::TurnConflict { agent: agent.clone(), session: session.clone(), turn: *turn });
    };
    change_state(connection, key, &commit.state).await?;
    put_conversations(connection, key, &commit.conversations).await?;
    let outcome = commit.outcome.as_ref();
    if let Some(Outcome { idempotency_key: Some(idempotency_key), body }) = outcome {
        query("INSERT INTO outcomes (session, idempotency_key, turn, body, at_ms) VALUES (?, ?, ?, ?, ?)")
            .bind(key)
            .bind(idempotency_key)
            .bind(*turn as i64)
            .bind(body)
            .bind(*at_ms as i64)
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

/// Makes this the session's last turn, if it is the next one, and gives the session's key.
async fn advance(connection: &mut SqliteConnection, commit: &TurnCommit) -> Result<Option<i64>, StoreError> {
    let failed = || StoreError::while_it("committed a turn");
    let TurnCommit { agent, session, turn, at_ms, .. } = commit;
    let advanced = query_scalar(
        "UPDATE sessions SET turns = ?3, updated_at_ms = ?4
         WHERE agent = ?1 AND session = ?2 AND turns = ?3 - 1 RETURNING key",
    )
    .bind(agent)
    .bind(session)
    .bind(*turn as i64)
    .bind(*at_ms as i64)
    .fetch_optional(&mut *connection)
    .await
    .map_err(failed())?;
    if advanced.is_some() || *turn != 1 {
        return Ok(advanced);
    }
    query_scalar(
        "INSERT INTO sessions (agent, session, turns, created_at_ms, updated_at_ms) VALUES (?1, ?2, 1, ?3, ?3)
         ON CONFLICT DO NOTHING RETURNING key",
    )
    .bind(agent)
    .bind(session)
    .bind(*at_ms as i64)
    .fetch_optional(connection)
    .await
    .map_err(|error| match is_foreign_key(&error) {
        true => StoreError::AgentMissing { name: agent.clone() },
        false => failed()(error),
    })
}

/// In their order: of one key, the last change holds.
async fn change_state(
    connection: &mut SqliteConnection,
    session: i64,
    changes: &[StateChange],
) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("committed the state of a session");
    for alike in changes.chunk_by(|a, b| a.value.is_some() == b.value.is_some()) {
        for rows in bounded(alike, |change| change.value.as_ref().map_or(0, Vec::len)) {
            let is_set = rows[0].value.is_some();
            let mut statement = QueryBuilder::<Sqlite>::new(match is_set {
                true => "INSERT INTO state (session, key, value) ",
                false => "DELETE FROM state WHERE session = ",
            });
            if is_set {
                statement.push_values(rows, |mut row, change| {
                    row.push_bind(session).push_bind(&change.key).push_bind(&change.value);
                });
                statement.push(" ON CONFLICT (session, key) DO UPDATE SET value = excluded.value");
            } else {
                statement.push_bind(session).push(" AND key IN (");
                let mut keys = statement.separated(", ");
                rows.iter().for_each(|change| _ = keys.push_bind(&change.key));
                statement.push(")");
            }
            statement.build().execute(&mut *connection).await.map_err(failed())?;
        }
    }
    Ok(())
}

pub(crate) async fn put_conversations(
    connection: &mut SqliteConnection,
    session: i64,
    conversations: &[ConversationRow],
) -> Result<(), StoreError> {
    for conversation in conversations {
        query(
            "INSERT INTO conversations (session, name, model, digest, body) VALUES (?1, ?2, ?3, ?4, ?5)
             ON CONFLICT (session, name) DO UPDATE SET model = ?3, digest = ?4, body = ?5",
        )
        .bind(session)
        .bind(&conversation.name)
        .bind(&conversation.model)
        .bind(&conversation.digest)
        .bind(&conversation.body)
        .execute(&mut *connection)
        .await
        .map_err(StoreError::while_it("committed a conversation"))?;
    }
    Ok(())
}

/// Rows, as many at once as one statement takes.
pub(crate) fn bounded<T>(rows: &[T], bytes: impl Fn(&T) -> usize) -> impl Iterator<Item = &[T]> {
    let mut left = rows;
    std::iter::from_fn(move || {
        let mut sum = 0;
        let fits = |row: &&T| {
            sum += bytes(row);
            sum <= BYTES_AT_ONCE
        };
        let count = left.iter().take(ROWS_AT_ONCE).take_while(fits).count();
        // One that is larger than all may go alone.
        let (rows, rest) = left.split_at(count.max(1).min(left.len()));
        left = rest;
        (!rows.is_empty()).then_some(rows)
    })
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
