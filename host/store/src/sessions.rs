//! Sessions: their state, their conversations, and the commit of a turn.

use crate::{
    DeliveryKey, LogEntry, NewEvent, ScheduleChange, Store, StoreError, TokenUse, TurnKey, UsageRow,
    deliveries,
    error::is_foreign_key,
    events, logs, schedules,
    sql::{Connection, QueryBuilder, Row, query, query_scalar},
    token_use, turns, usage,
};
use std::sync::Arc;

/// Maximum number of rows per statement: few enough that it takes a millisecond or two and stays below
/// SQLite's limit on parameters.
pub(crate) const ROWS_AT_ONCE: usize = 500;
/// Maximum number of bytes per statement, if the rows are large.
pub(crate) const BYTES_AT_ONCE: usize = 1 << 20;

/// One session of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRow {
    pub session: String,
    /// Number of committed turns.
    pub turns: u64,
    pub created_at_ms: u64,
    pub updated_at_ms: u64,
}

/// A conversation, as bytes that only the runtime interprets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConversationRow {
    pub name: String,
    /// The model of the conversation, and the digest of that model. Early versions stored neither.
    pub model: Option<String>,
    pub digest: Option<String>,
    pub body: Vec<u8>,
}

/// A conversation without its messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConversationOutline {
    pub name: String,
    pub model: Option<String>,
    /// Length of the body in bytes.
    pub bytes: usize,
}

/// The place of a conversation, and its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConversationPlace {
    /// The key of its session.
    pub session: i64,
    pub name: String,
    /// Length of the body in bytes.
    pub bytes: usize,
}

/// A session with its state, and with an outline of its conversations by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionOutline {
    pub row: SessionRow,
    /// The state, ordered by key.
    pub state: Vec<(String, Vec<u8>)>,
    pub conversations: Vec<ConversationOutline>,
}

/// The number of sessions that have conversations with one model.
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
    /// The state, ordered by key.
    pub state: Vec<(String, Vec<u8>)>,
    pub conversations: Vec<ConversationRow>,
}

/// A change of one key; `None` removes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateChange {
    pub key: String,
    pub value: Option<Vec<u8>>,
}

/// The outcome of a turn, stored under the idempotency key that its caller sent, if any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub idempotency_key: Option<String>,
    pub body: Vec<u8>,
}

/// The trigger of a turn, which is settled when the turn is committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnTrigger {
    /// The due time `due_ms` of the schedule with this id.
    Alarm {
        schedule: String,
        due_ms: u64,
    },
    Event(DeliveryKey),
}

/// All changes of a turn, written in one transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TurnCommit {
    pub agent: String,
    pub session: String,
    /// The open turn that this commit finishes.
    pub key: Option<TurnKey>,
    /// The number of this turn: one more than the number of committed turns of the session.
    pub turn: u64,
    pub at_ms: u64,
    pub state: Vec<StateChange>,
    /// The conversations that changed.
    pub conversations: Vec<ConversationRow>,
    pub logs: Vec<LogEntry>,
    pub outcome: Option<Outcome>,
    pub trigger: Option<TurnTrigger>,
    /// Changes to schedules, in the order in which they were made.
    pub schedules: Vec<ScheduleChange>,
    pub events: Vec<NewEvent>,
    /// The tokens that the turn generated.
    pub token_use: Option<TokenUse>,
    /// The models that the turn used.
    pub usage: Vec<UsageRow>,
    /// The timeline of the turn, in a format that only its reader knows.
    pub timeline: Vec<u8>,
}

impl Store {
    /// Writes a turn and finishes it. If the turn is not the session's next one, the error is
    /// [`StoreError::TurnConflict`] and nothing is written.
    pub async fn commit_turn(&self, commit: impl Into<Arc<TurnCommit>>) -> Result<(), StoreError> {
        self.write(commit.into(), |connection, turn: &Arc<TurnCommit>| {
            Box::pin(commit_turn(connection, turn))
        })
        .await
    }
}

async fn commit_turn(connection: &mut Connection, commit: &TurnCommit) -> Result<(), StoreError> {
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
        let ended = turns::EndedTurn {
            agent,
            session,
            number: *turn,
            outcome: outcome.map_or(&[][..], |outcome| &outcome.body),
            timeline: &commit.timeline,
            at_ms: *at_ms,
        };
        turns::finish(connection, key, ended).await?;
    }
    match &commit.trigger {
        Some(TurnTrigger::Alarm { schedule, due_ms }) => {
            schedules::settle(connection, schedule, *due_ms).await?
        }
        Some(TurnTrigger::Event(delivery)) => deliveries::settle(connection, *delivery).await?,
        None => {}
    }
    schedules::change(connection, agent, session, &commit.schedules).await?;
    for event in &commit.events {
        events::insert(connection, event, *at_ms).await?;
    }
    if let Some(used) = &commit.token_use {
        token_use::add(connection, used).await?;
    }
    usage::add(connection, &commit.usage).await?;
    logs::insert(connection, agent, session, *turn, &commit.logs).await
}

/// Makes this the session's last turn, if it is the next one, and returns the session's key.
async fn advance(connection: &mut Connection, commit: &TurnCommit) -> Result<Option<i64>, StoreError> {
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

/// Applies changes in order, so that the last change of a key wins.
async fn change_state(
    connection: &mut Connection,
    session: i64,
    changes: &[StateChange],
) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("committed the state of a session");
    for alike in changes.chunk_by(|a, b| a.value.is_some() == b.value.is_some()) {
        for rows in bounded(alike, |change| change.value.as_ref().map_or(0, Vec::len)) {
            let is_set = rows[0].value.is_some();
            let mut statement = QueryBuilder::new(match is_set {
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
    connection: &mut Connection,
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

/// Splits rows into groups of which each fits into one statement.
pub(crate) fn bounded<T>(rows: &[T], bytes: impl Fn(&T) -> usize) -> impl Iterator<Item = &[T]> {
    let mut left = rows;
    std::iter::from_fn(move || {
        let mut sum = 0;
        let fits = |row: &&T| {
            sum += bytes(row);
            sum <= BYTES_AT_ONCE
        };
        let count = left.iter().take(ROWS_AT_ONCE).take_while(fits).count();
        // A row that is larger than the limit forms its own group.
        let (rows, rest) = left.split_at(count.max(1).min(left.len()));
        left = rest;
        (!rows.is_empty()).then_some(rows)
    })
}

pub(crate) fn session_row(row: &Row) -> SessionRow {
    SessionRow {
        session: row.get(0),
        turns: row.get::<i64>(1) as u64,
        created_at_ms: row.get::<i64>(2) as u64,
        updated_at_ms: row.get::<i64>(3) as u64,
    }
}
