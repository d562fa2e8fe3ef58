//! Turns: a row exists from the moment a message is accepted until a while after its turn has finished.
//!
//! A turn is open while it waits or runs. A host that starts runs all open turns to completion. A turn
//! finishes once: by its commit (see `sessions`) or by a failure. A failure releases the idempotency key,
//! unless callers must be able to find the failure by it.

use crate::{
    LogEntry, NewEvent, Store, StoreError, TokenUse, TurnKey, UsageRow, events,
    hosts::is_owned,
    journal,
    line_counts::LineCounts,
    logs,
    row_groups::bounded,
    rows,
    sql::{AssertSqlSafe, Connection, GivenRows, Row, query},
    token_use, usage,
    writer::JointKind,
};
use std::collections::{HashMap, HashSet};

/// Minimum number of finished turns that a session keeps, the newest ones. A few more may still exist.
pub const TURNS_KEPT: u32 = 32;
/// Number of turns between removals of older ones, because looking for them costs as much as a small turn.
const TURNS_BETWEEN_PRUNING: u64 = 16;

/// A message that was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTurn {
    /// The unique id by which clients know the turn.
    pub id: String,
    pub agent: String,
    pub session: String,
    pub idempotency_key: Option<String>,
    /// The digest of the active component.
    pub digest: String,
    pub input: Vec<u8>,
    /// The seed of everything random in the turn.
    pub seed: Vec<u8>,
    pub accepted_at_ms: u64,
    /// The turn's number if it starts at once; `None` if it waits.
    pub number: Option<u64>,
}

impl NewTurn {
    fn first_state(&self) -> i64 {
        if self.number.is_some() { RUNNING } else { WAITING }
    }
}

/// The outcome of accepting a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acceptance {
    New(TurnKey),
    /// The session already has a turn with this idempotency key. Nothing was written.
    Known(TurnKey),
}

/// A stored turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnRow {
    pub key: TurnKey,
    pub id: String,
    pub agent: String,
    pub session: String,
    pub idempotency_key: Option<String>,
    pub digest: String,
    pub input: Vec<u8>,
    pub seed: Vec<u8>,
    pub accepted_at_ms: u64,
    pub state: TurnState,
}

impl TurnRow {
    /// Returns whether the turn waits or runs.
    pub fn is_open(&self) -> bool {
        matches!(self.state, TurnState::Waiting | TurnState::Running { .. })
    }
}

/// The state of a turn. Outcomes and errors are encoded and have no meaning here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnState {
    /// The turn was accepted and has not started.
    Waiting,
    /// The turn runs as the session's turn with this number.
    Running { number: u64 },
    /// The turn was committed.
    Done { number: u64, outcome: Vec<u8>, ended_at_ms: u64 },
    /// The turn failed; nothing of it was committed.
    Failed { error: Vec<u8>, ended_at_ms: u64 },
}

/// A turn that waits or runs, without its message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenTurn {
    pub key: TurnKey,
    pub id: String,
    pub agent: String,
    pub session: String,
    pub is_running: bool,
    /// Number of times that a process died during the turn without any progress of the turn in between.
    pub losses: u32,
    /// Size of the stored message in bytes.
    pub message_bytes: u64,
}

/// The end of a turn that changed nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnFailure {
    pub key: TurnKey,
    pub agent: String,
    pub session: String,
    /// The number of the turn; 0 if it never started.
    pub number: u64,
    pub at_ms: u64,
    pub error: Vec<u8>,
    /// Whether requests with the same idempotency key find the failure. Otherwise the key can be used for a
    /// new attempt.
    pub keeps_key: bool,
    pub logs: Vec<LogEntry>,
    /// Events that announce the failure.
    pub events: Vec<NewEvent>,
    /// Tokens that the turn generated before it failed.
    pub token_use: Option<TokenUse>,
    /// The models that the turn used before it failed.
    pub usage: Vec<UsageRow>,
    /// The timeline of the turn, in a format that only its reader knows.
    pub timeline: Vec<u8>,
}

/// The end of a turn that is committed.
pub(crate) struct EndedTurn<'a> {
    pub(crate) key: TurnKey,
    pub(crate) agent: &'a str,
    pub(crate) session: &'a str,
    pub(crate) number: u64,
    pub(crate) outcome: &'a [u8],
    pub(crate) timeline: &'a [u8],
    pub(crate) at_ms: u64,
}

const WAITING: i64 = 0;
pub(crate) const RUNNING: i64 = 1;
const DONE: i64 = 2;
const FAILED: i64 = 3;
pub(crate) const COLUMNS: &str = "key, id, agent, session, idempotency_key, digest, input, seed, accepted_at_ms, state, number, \
                       result, ended_at_ms";

impl Store {
    /// Stores a message durably.
    pub async fn accept_turn(&self, turn: NewTurn) -> Result<Acceptance, StoreError> {
        self.write_jointly(
            JointKind::Messages,
            turn.input.len(),
            turn,
            |connection, turn| Box::pin(accept(connection, turn)),
            |connection, turns| Box::pin(accept_all(connection, turns)),
        )
        .await
    }

    /// Starts a turn that waited, with the component that is now active.
    pub async fn start_turn(&self, turn: TurnKey, number: u64, digest: String) -> Result<(), StoreError> {
        self.write((turn, number, digest), |connection, (turn, number, digest)| {
            Box::pin(start(connection, *turn, *number, digest))
        })
        .await
    }

    /// Finishes a turn of which only the error and the log lines are kept.
    pub async fn fail_turn(&self, failure: TurnFailure) -> Result<(), StoreError> {
        self.write((failure, self.line_counts.clone()), |connection, (failure, counts)| {
            Box::pin(fail(connection, failure, counts))
        })
        .await
    }

    /// Returns all turns that wait or run and are not held, in the order in which they are to be resumed:
    /// running ones first. In a cluster, these are the turns of the sessions that this host owns.
    pub async fn open_turns(&self) -> Result<Vec<OpenTurn>, StoreError> {
        let own = match (&self.membership, self.host) {
            (Some(_), Some(host)) => is_owned("turns", host),
            _ => "TRUE".to_owned(),
        };
        let sql = format!(
            "SELECT key, id, agent, session, state, losses, length(input) FROM turns
             WHERE ended_at_ms IS NULL AND NOT held AND {own}
             ORDER BY state DESC, key"
        );
        let rows = query(AssertSqlSafe(sql))
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("listed open turns"))?;
        Ok(rows::readable(&rows, "turn", open_turn))
    }

    /// Returns a turn of a session by its id, if it is still stored.
    pub async fn turn(&self, agent: &str, session: &str, id: &str) -> Result<Option<TurnRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM turns WHERE agent = ? AND session = ? AND id = ?");
        let row = query(AssertSqlSafe(sql))
            .bind(agent)
            .bind(session)
            .bind(id)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("read a turn"))?;
        row.map(|row| rows::one(&row, "turn", turn_row)).transpose()
    }

    /// Returns the turn of a session with this number, if it is still stored. A turn that failed leaves its number to the
    /// next one; the later turn is returned.
    pub async fn turn_by_number(
        &self,
        agent: &str,
        session: &str,
        number: u64,
    ) -> Result<Option<TurnRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM turns WHERE agent = ? AND session = ? AND number = ? ORDER BY key DESC LIMIT 1"
        );
        let row = query(AssertSqlSafe(sql))
            .bind(agent)
            .bind(session)
            .bind(i64::try_from(number).unwrap_or(i64::MAX))
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("read a turn"))?;
        row.map(|row| rows::one(&row, "turn", turn_row)).transpose()
    }

    /// Returns the session's turn with this idempotency key, if it is still stored.
    pub async fn turn_with_idempotency_key(
        &self,
        agent: &str,
        session: &str,
        idempotency_key: &str,
    ) -> Result<Option<TurnRow>, StoreError> {
        let sql =
            format!("SELECT {COLUMNS} FROM turns WHERE agent = ? AND session = ? AND idempotency_key = ?");
        let row = query(AssertSqlSafe(sql))
            .bind(agent)
            .bind(session)
            .bind(idempotency_key)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("read a turn"))?;
        row.map(|row| rows::one(&row, "turn", turn_row)).transpose()
    }

    /// Returns the turn, if it is still stored.
    pub async fn turn_by_key(&self, turn: TurnKey) -> Result<Option<TurnRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM turns WHERE key = ?");
        let row = query(AssertSqlSafe(sql))
            .bind(turn.0)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("read a turn"))?;
        row.map(|row| rows::one(&row, "turn", turn_row)).transpose()
    }
}

/// Accepts the messages that are new, and leaves the others.
async fn accept_all(
    connection: &mut Connection,
    turns: &[&NewTurn],
) -> Result<Vec<Option<Acceptance>>, StoreError> {
    let mut keys = HashMap::new();
    for turns in bounded(turns, |turn| turn.input.len()) {
        let rows = GivenRows::new()
            .column("id", turns.iter().map(|turn| &turn.id))
            .column("agent", turns.iter().map(|turn| &turn.agent))
            .column("session", turns.iter().map(|turn| &turn.session))
            .column("idempotency_key", turns.iter().map(|turn| &turn.idempotency_key))
            .column("digest", turns.iter().map(|turn| &turn.digest))
            .column("input", turns.iter().map(|turn| &turn.input))
            .column("seed", turns.iter().map(|turn| &turn.seed))
            .column("accepted_at_ms", turns.iter().map(|turn| turn.accepted_at_ms as i64))
            .column("state", turns.iter().map(|turn| turn.first_state()))
            .column("number", turns.iter().map(|turn| turn.number.map(|number| number as i64)));
        let columns =
            "id, agent, session, idempotency_key, digest, input, seed, accepted_at_ms, state, number";
        let insert = rows.query(
            connection.dialect(),
            &format!("INSERT INTO turns ({columns}) SELECT {columns} FROM"),
            "WHERE EXISTS (SELECT 1 FROM agents WHERE name = new.agent AND NOT deleted) ORDER BY place
             ON CONFLICT DO NOTHING RETURNING id, key",
        );
        let inserted = insert.fetch_all(&mut *connection).await;
        let inserted = inserted.map_err(StoreError::while_it("accepted turns"))?;
        keys.extend(inserted.iter().map(|row| (row.get::<String>(0), TurnKey(row.get(1)))));
    }
    Ok(turns.iter().map(|turn| keys.remove(&turn.id).map(Acceptance::New)).collect())
}

async fn accept(connection: &mut Connection, turn: &NewTurn) -> Result<Acceptance, StoreError> {
    if let Some(accepted) = accept_all(connection, &[turn]).await?.pop().flatten() {
        return Ok(accepted);
    }
    let known = query("SELECT key FROM turns WHERE agent = ? AND session = ? AND idempotency_key = ?")
        .bind(&turn.agent)
        .bind(&turn.session)
        .bind(&turn.idempotency_key)
        .fetch_optional(connection)
        .await
        .map_err(StoreError::while_it("accepted a turn"))?;
    let known = known.ok_or_else(|| StoreError::AgentMissing { name: turn.agent.clone() })?;
    Ok(Acceptance::Known(TurnKey(known.get(0))))
}

async fn start(
    connection: &mut Connection,
    turn: TurnKey,
    number: u64,
    digest: &str,
) -> Result<(), StoreError> {
    let started =
        query("UPDATE turns SET state = ?, number = ?, digest = ?, runs = TRUE WHERE key = ? AND ended_at_ms IS NULL")
            .bind(RUNNING)
            .bind(number as i64)
            .bind(digest)
            .bind(turn.0)
            .execute(connection)
            .await
            .map_err(StoreError::while_it("started a turn"))?;
    check_turn_is_open(started.rows_affected(), turn)
}

async fn fail(
    connection: &mut Connection,
    failure: &TurnFailure,
    line_counts: &LineCounts,
) -> Result<(), StoreError> {
    let TurnFailure { key, agent, session, number, at_ms, error, keeps_key, logs, .. } = failure;
    let TurnFailure { events, token_use, usage, timeline, .. } = failure;
    let ended = query(
        "UPDATE turns SET state = ?, result = ?, timeline = ?, ended_at_ms = ?,
             idempotency_key = CASE WHEN ? THEN idempotency_key END
         WHERE key = ? AND ended_at_ms IS NULL",
    )
    .bind(FAILED)
    .bind(error)
    .bind(timeline)
    .bind(*at_ms as i64)
    .bind(keeps_key)
    .bind(key.0)
    .execute(&mut *connection)
    .await
    .map_err(StoreError::while_it("finished a turn"))?;
    check_turn_is_open(ended.rows_affected(), *key)?;
    journal::close(connection, [*key]).await?;
    let lines = logs::TurnLines { agent, session, turn: *number, lines: logs };
    logs::insert(connection, line_counts, &[lines]).await?;
    for event in events {
        events::insert(connection, event, *at_ms).await?;
    }
    token_use::add(connection, &Vec::from_iter(token_use));
    usage::add(connection, &Vec::from_iter(usage)).await?;
    remove_surplus(connection, agent, session).await
}

/// Finishes the rows of turns, as part of a commit.
pub(crate) async fn finish(connection: &mut Connection, turns: &[EndedTurn<'_>]) -> Result<(), StoreError> {
    for turns in bounded(turns, |turn| turn.outcome.len() + turn.timeline.len()) {
        let rows = GivenRows::new()
            .column("turn", turns.iter().map(|turn| turn.key.0))
            .column("state", turns.iter().map(|_| DONE))
            .column("number", turns.iter().map(|turn| turn.number as i64))
            .column("result", turns.iter().map(|turn| turn.outcome))
            .column("timeline", turns.iter().map(|turn| turn.timeline))
            .column("at_ms", turns.iter().map(|turn| turn.at_ms as i64));
        let update = rows.query(
            connection.dialect(),
            "UPDATE turns SET state = new.state, number = new.number, result = new.result,
                 timeline = new.timeline, ended_at_ms = new.at_ms FROM",
            "WHERE turns.key = new.turn AND turns.ended_at_ms IS NULL RETURNING turns.key",
        );
        let ended =
            update.fetch_all(&mut *connection).await.map_err(StoreError::while_it("finished a turn"))?;
        let ended: HashSet<i64> = ended.iter().map(|row| row.get(0)).collect();
        if let Some(turn) = turns.iter().find(|turn| !ended.contains(&turn.key.0)) {
            // Its session has already advanced, and all of it is taken back.
            return Err(StoreError::TurnEndedMeanwhile { key: turn.key.0 });
        }
        journal::close(connection, turns.iter().map(|turn| turn.key)).await?;
    }
    for turn in turns.iter().filter(|turn| turn.number.is_multiple_of(TURNS_BETWEEN_PRUNING)) {
        remove_surplus(connection, turn.agent, turn.session).await?;
    }
    Ok(())
}

/// Removes the turns of a session that are more than it keeps. Those that are old are removed by `retention`.
async fn remove_surplus(connection: &mut Connection, agent: &str, session: &str) -> Result<(), StoreError> {
    let surplus = format!(
        "DELETE FROM turns WHERE key IN (SELECT key FROM turns WHERE agent = ?1 AND session = ?2
             AND ended_at_ms IS NOT NULL AND key <=
             (SELECT key FROM turns WHERE agent = ?1 AND session = ?2 AND ended_at_ms IS NOT NULL
              ORDER BY key DESC LIMIT 1 OFFSET ?3) {})",
        connection.dialect().skip_locked()
    );
    let removed =
        query(AssertSqlSafe(surplus)).bind(agent).bind(session).bind(TURNS_KEPT).execute(connection);
    removed.await.map(drop).map_err(StoreError::while_it("removed old turns"))
}

fn check_turn_is_open(rows: u64, turn: TurnKey) -> Result<(), StoreError> {
    if rows == 1 { Ok(()) } else { Err(StoreError::TurnNotOpen { key: turn.0 }) }
}

pub(crate) fn turn_row(row: &Row) -> Result<TurnRow, sqlx::Error> {
    let number = row.try_get::<Option<i64>>(10)?.unwrap_or_default() as u64;
    let result = row.try_get::<Option<Vec<u8>>>(11)?.unwrap_or_default();
    let ended_at_ms = row.try_get::<Option<i64>>(12)?.unwrap_or_default() as u64;
    Ok(TurnRow {
        key: TurnKey(row.try_get(0)?),
        id: row.try_get(1)?,
        agent: row.try_get(2)?,
        session: row.try_get(3)?,
        idempotency_key: row.try_get(4)?,
        digest: row.try_get(5)?,
        input: row.try_get(6)?,
        seed: row.try_get(7)?,
        accepted_at_ms: row.try_get::<i64>(8)? as u64,
        state: match row.try_get::<i64>(9)? {
            WAITING => TurnState::Waiting,
            RUNNING => TurnState::Running { number },
            DONE => TurnState::Done { number, outcome: result, ended_at_ms },
            _ => TurnState::Failed { error: result, ended_at_ms },
        },
    })
}

pub(crate) fn open_turn(row: &Row) -> Result<OpenTurn, sqlx::Error> {
    Ok(OpenTurn {
        key: TurnKey(row.try_get(0)?),
        id: row.try_get(1)?,
        agent: row.try_get(2)?,
        session: row.try_get(3)?,
        is_running: row.try_get::<i64>(4)? == RUNNING,
        losses: row.try_get(5)?,
        message_bytes: row.try_get::<i64>(6)? as u64,
    })
}
