//! Sessions: their state, their conversations, and the commit of a turn.

mod commit;

use crate::{
    DeliveryKey, LogEntry, NewEvent, ScheduleChange, Store, StoreError, TokenUse, TurnKey, UsageRow,
    line_counts::LineCounts,
    row_groups::bounded,
    sql::{Connection, GivenRows, Row},
    writer::JointKind,
};
use commit::{commit_turn, commit_turns};
use std::{collections::BTreeMap, sync::Arc};

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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub idempotency_key: Option<String>,
    /// The digest of the message that was sent with the key, if later messages with the key are compared with it.
    pub message_digest: Option<Vec<u8>>,
    pub body: Vec<u8>,
}

/// An outcome that is kept under its idempotency key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptOutcome {
    pub body: Vec<u8>,
    /// The digest of the message, if one was stored.
    pub message_digest: Option<Vec<u8>>,
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

impl TurnCommit {
    /// Returns the size of what may be large.
    fn bytes(&self) -> usize {
        let TurnCommit { state, conversations, logs, outcome, timeline, .. } = self;
        let state = state.iter().filter_map(|change| change.value.as_ref()).map(Vec::len);
        let conversations = conversations.iter().map(|conversation| conversation.body.len());
        let logs = logs.iter().map(|line| line.message.len());
        let outcome = outcome.iter().map(|outcome| outcome.body.len());
        state.chain(conversations).chain(logs).chain(outcome).sum::<usize>() + timeline.len()
    }
}

/// A commit, with the counts of log lines that its statements use.
struct PendingCommit {
    commit: Arc<TurnCommit>,
    line_counts: LineCounts,
}

impl Store {
    /// Writes a turn and finishes it. If the turn is not the session's next one, the error is
    /// [`StoreError::TurnConflict`] and nothing is written.
    pub async fn commit_turn(&self, commit: impl Into<Arc<TurnCommit>>) -> Result<(), StoreError> {
        let commit: Arc<TurnCommit> = commit.into();
        self.write_jointly(
            JointKind::Commits,
            commit.bytes(),
            PendingCommit { commit, line_counts: self.line_counts.clone() },
            |connection, turn| Box::pin(commit_turn(connection, turn)),
            |connection, turns| Box::pin(commit_turns(connection, turns)),
        )
        .await
    }
}

/// Writes conversations of sessions, which have these keys. The last one with a name counts.
pub(crate) async fn put_conversations(
    connection: &mut Connection,
    conversations: &[(i64, &ConversationRow)],
) -> Result<(), StoreError> {
    let dialect = connection.dialect();
    let last: BTreeMap<_, _> =
        conversations.iter().map(|(session, row)| ((*session, &row.name), *row)).collect();
    let rows: Vec<_> = last.into_iter().map(|((session, _), row)| (session, row)).collect();
    for rows in bounded(&rows, |(_, row)| row.body.len()) {
        let rows = GivenRows::new()
            .column("session", rows.iter().map(|(session, _)| *session))
            .column("name", rows.iter().map(|(_, row)| &row.name))
            .column("model", rows.iter().map(|(_, row)| &row.model))
            .column("digest", rows.iter().map(|(_, row)| &row.digest))
            .column("body", rows.iter().map(|(_, row)| &row.body));
        let put = rows.query(
            dialect,
            "INSERT INTO conversations (session, name, model, digest, body)
             SELECT session, name, model, digest, body FROM",
            "WHERE TRUE ON CONFLICT (session, name) DO UPDATE
             SET model = excluded.model, digest = excluded.digest, body = excluded.body",
        );
        put.execute(&mut *connection).await.map_err(StoreError::while_it("committed a conversation"))?;
    }
    Ok(())
}

pub(crate) fn session_row(row: &Row) -> SessionRow {
    SessionRow {
        session: row.get(0),
        turns: row.get::<i64>(1) as u64,
        created_at_ms: row.get::<i64>(2) as u64,
        updated_at_ms: row.get::<i64>(3) as u64,
    }
}
