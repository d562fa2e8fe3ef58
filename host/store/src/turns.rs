//! Turns: a row from the moment a message is accepted until a while after its turn has ended.
//!
//! A turn is open while it waits or runs; a host that starts runs all open turns to their end. It ends once: by its
//! commit (see `sessions`) or by a failure, which gives its idempotency key back, unless it is to be found by it.

use crate::{LogEntry, NewEvent, Store, StoreError, TokenUse, events, journal, logs, rows, token_use};
use sqlx::{Row, SqliteConnection, query, sqlite::SqliteRow};

/// Ended turns that a session keeps at least, the newest; a few more may still be there.
pub const TURNS_KEPT: u32 = 32;
/// Older ones are removed only every so many turns, because looking for them costs as much as a small turn.
const TURNS_BETWEEN_PRUNING: u64 = 16;
/// Ended turns are kept no longer than this, whatever their number, while there are newer ones to make room for.
const KEPT_MS: u64 = 24 * 3600 * 1000;
/// Of all sessions together, removed at once, so that no turn waits long for it.
const MAX_FORGOTTEN: u32 = 64;

/// How the store knows a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TurnKey(pub(crate) i64);

/// A message that was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTurn {
    /// How clients know the turn; unique.
    pub id: String,
    pub agent: String,
    pub session: String,
    pub idempotency_key: Option<String>,
    /// Of the component that is in force.
    pub digest: String,
    pub input: Vec<u8>,
    /// What everything random in the turn is drawn from.
    pub seed: Vec<u8>,
    pub accepted_at_ms: u64,
    /// The turn's number if it starts at once; `None` if it waits.
    pub number: Option<u64>,
}

/// What became of a new turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acceptance {
    New(TurnKey),
    /// The session has a turn with this idempotency key; nothing was written.
    Known(TurnKey),
}

/// A turn as it is stored.
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
    /// Whether it waits or runs.
    pub fn is_open(&self) -> bool {
        matches!(self.state, TurnState::Waiting | TurnState::Running { .. })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnState {
    Waiting,
    Running { number: u64 },
    Done { number: u64, outcome: Vec<u8>, ended_at_ms: u64 },
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
    /// How often the process died under it since it last got any further.
    pub losses: u32,
    /// Of its message, as it is stored.
    pub message_bytes: u64,
}

/// The end of a turn that changed nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnFailure {
    pub key: TurnKey,
    pub agent: String,
    pub session: String,
    /// 0 if it never started.
    pub number: u64,
    pub at_ms: u64,
    pub error: Vec<u8>,
    /// Whoever asks with its idempotency key finds the failure. Otherwise the key may be used for another try.
    pub keeps_key: bool,
    pub logs: Vec<LogEntry>,
    /// That tell of the failure.
    pub events: Vec<NewEvent>,
    /// What it generated all the same.
    pub token_use: Option<TokenUse>,
}

const WAITING: i64 = 0;
const RUNNING: i64 = 1;
const DONE: i64 = 2;
const FAILED: i64 = 3;
const COLUMNS: &str = "key, id, agent, session, idempotency_key, digest, input, seed, accepted_at_ms, state, number, \
                       result, ended_at_ms";

impl Store {
    /// Makes a message durable.
    pub async fn accept_turn(&self, turn: NewTurn) -> Result<Acceptance, StoreError> {
        self.write(turn, |connection, turn| Box::pin(accept(connection, turn))).await
    }

    /// A turn that waited begins, with the component that is in force now.
    pub async fn start_turn(&self, turn: TurnKey, number: u64, digest: String) -> Result<(), StoreError> {
        self.write((turn, number, digest), |connection, (turn, number, digest)| {
            Box::pin(start(connection, *turn, *number, digest))
        })
        .await
    }

    /// Ends a turn of which nothing is to remain but its error and its log lines.
    pub async fn fail_turn(&self, failure: TurnFailure) -> Result<(), StoreError> {
        self.write(failure, |connection, failure| Box::pin(fail(connection, failure))).await
    }

    /// All turns that wait or run and are not held, in the order in which they are to go on: those that run first.
    pub async fn open_turns(&self) -> Result<Vec<OpenTurn>, StoreError> {
        let rows = query(
            "SELECT key, id, agent, session, state, losses, length(input) FROM turns
             WHERE ended_at_ms IS NULL AND NOT held
             ORDER BY state DESC, key",
        )
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed open turns"))?;
        Ok(rows::readable(&rows, "turn", open_turn))
    }

    /// Counts that the last process died under the turns that ran, unless it ended in order. One that got further since it
    /// was last lost begins to count anew; one that waits for a person, or for a turn that it called, is not counted: it
    /// did nothing. The key of a call begins with `called`, the id of the turn that makes it, and a space.
    pub async fn count_losses(&self, called: &str) -> Result<(), StoreError> {
        self.write(called.to_owned(), |connection, called| Box::pin(count_losses(connection, called))).await
    }

    /// This process takes up a turn that another one left: if it dies under it, that counts.
    pub async fn take_up_turn(&self, turn: TurnKey) -> Result<(), StoreError> {
        self.write(turn, |connection, turn| {
            Box::pin(async move {
                query("UPDATE turns SET runs = TRUE WHERE key = ?")
                    .bind(turn.0)
                    .execute(connection)
                    .await
                    .map(drop)
                    .map_err(StoreError::while_it("took up a turn"))
            })
        })
        .await
    }

    /// What runs now is not lost: the process ends in order.
    pub async fn end_in_order(&self, at_ms: u64) -> Result<(), StoreError> {
        self.write(at_ms, |connection, at_ms| {
            Box::pin(async move {
                query("INSERT INTO ended_in_order (at_ms) VALUES (?)")
                    .bind(*at_ms as i64)
                    .execute(connection)
                    .await
                    .map(drop)
                    .map_err(StoreError::while_it("noted that the host ends"))
            })
        })
        .await
    }

    /// A turn of a session by its id, if it is still kept.
    pub async fn turn(&self, agent: &str, session: &str, id: &str) -> Result<Option<TurnRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM turns WHERE agent = ? AND session = ? AND id = ?");
        let row = query(sqlx::AssertSqlSafe(sql))
            .bind(agent)
            .bind(session)
            .bind(id)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("read a turn"))?;
        row.map(|row| rows::one(&row, "turn", turn_row)).transpose()
    }

    /// The session's turn with this idempotency key, if it is still kept.
    pub async fn turn_with_idempotency_key(
        &self,
        agent: &str,
        session: &str,
        idempotency_key: &str,
    ) -> Result<Option<TurnRow>, StoreError> {
        let sql =
            format!("SELECT {COLUMNS} FROM turns WHERE agent = ? AND session = ? AND idempotency_key = ?");
        let row = query(sqlx::AssertSqlSafe(sql))
            .bind(agent)
            .bind(session)
            .bind(idempotency_key)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("read a turn"))?;
        row.map(|row| rows::one(&row, "turn", turn_row)).transpose()
    }

    pub async fn turn_by_key(&self, turn: TurnKey) -> Result<Option<TurnRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM turns WHERE key = ?");
        let row = query(sqlx::AssertSqlSafe(sql))
            .bind(turn.0)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("read a turn"))?;
        row.map(|row| rows::one(&row, "turn", turn_row)).transpose()
    }
}

async fn accept(connection: &mut SqliteConnection, turn: &NewTurn) -> Result<Acceptance, StoreError> {
    let failed = || StoreError::while_it("accepted a turn");
    let inserted = query(
        "INSERT INTO turns (id, agent, session, idempotency_key, digest, input, seed, accepted_at_ms, state, number)
         SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10 WHERE EXISTS (SELECT 1 FROM agents WHERE name = ?2 AND NOT deleted)
         ON CONFLICT DO NOTHING RETURNING key",
    )
    .bind(&turn.id)
    .bind(&turn.agent)
    .bind(&turn.session)
    .bind(&turn.idempotency_key)
    .bind(&turn.digest)
    .bind(&turn.input)
    .bind(&turn.seed)
    .bind(turn.accepted_at_ms as i64)
    .bind(if turn.number.is_some() { RUNNING } else { WAITING })
    .bind(turn.number.map(|number| number as i64))
    .fetch_optional(&mut *connection)
    .await
    .map_err(failed())?;
    if let Some(row) = inserted {
        return Ok(Acceptance::New(TurnKey(row.get(0))));
    }
    let known = query("SELECT key FROM turns WHERE agent = ? AND session = ? AND idempotency_key = ?")
        .bind(&turn.agent)
        .bind(&turn.session)
        .bind(&turn.idempotency_key)
        .fetch_optional(connection)
        .await
        .map_err(failed())?;
    let known = known.ok_or_else(|| StoreError::AgentMissing { name: turn.agent.clone() })?;
    Ok(Acceptance::Known(TurnKey(known.get(0))))
}

async fn start(
    connection: &mut SqliteConnection,
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
    must_be_open(started.rows_affected(), turn)
}

async fn fail(connection: &mut SqliteConnection, failure: &TurnFailure) -> Result<(), StoreError> {
    let TurnFailure { key, agent, session, number, at_ms, error, keeps_key, logs, events, token_use } =
        failure;
    let ended = query(
        "UPDATE turns SET state = ?, result = ?, ended_at_ms = ?,
             idempotency_key = CASE WHEN ? THEN idempotency_key END
         WHERE key = ? AND ended_at_ms IS NULL",
    )
    .bind(FAILED)
    .bind(error)
    .bind(*at_ms as i64)
    .bind(keeps_key)
    .bind(key.0)
    .execute(&mut *connection)
    .await
    .map_err(StoreError::while_it("ended a turn"))?;
    must_be_open(ended.rows_affected(), *key)?;
    journal::close(connection, *key).await?;
    logs::insert(connection, agent, session, *number, logs).await?;
    for event in events {
        events::insert(connection, event, *at_ms).await?;
    }
    if let Some(used) = token_use {
        token_use::add(connection, used).await?;
    }
    prune(connection, agent, session, *at_ms).await
}

/// The part of a commit that ends the turn's own row.
pub(crate) async fn finish(
    connection: &mut SqliteConnection,
    turn: TurnKey,
    agent: &str,
    session: &str,
    number: u64,
    outcome: &[u8],
    at_ms: u64,
) -> Result<(), StoreError> {
    let ended = query(
        "UPDATE turns SET state = ?, number = ?, result = ?, ended_at_ms = ? WHERE key = ? AND ended_at_ms IS NULL",
    )
    .bind(DONE)
    .bind(number as i64)
    .bind(outcome)
    .bind(at_ms as i64)
    .bind(turn.0)
    .execute(&mut *connection)
    .await
    .map_err(StoreError::while_it("ended a turn"))?;
    must_be_open(ended.rows_affected(), turn)?;
    journal::close(connection, turn).await?;
    if number.is_multiple_of(TURNS_BETWEEN_PRUNING) {
        prune(connection, agent, session, at_ms).await?;
    }
    Ok(())
}

async fn prune(
    connection: &mut SqliteConnection,
    agent: &str,
    session: &str,
    now_ms: u64,
) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("removed old turns");
    query(
        "DELETE FROM turns WHERE agent = ?1 AND session = ?2 AND ended_at_ms IS NOT NULL AND key <=
         (SELECT key FROM turns WHERE agent = ?1 AND session = ?2 AND ended_at_ms IS NOT NULL
          ORDER BY key DESC LIMIT 1 OFFSET ?3)",
    )
    .bind(agent)
    .bind(session)
    .bind(TURNS_KEPT)
    .execute(&mut *connection)
    .await
    .map_err(failed())?;
    query("DELETE FROM turns WHERE key IN (SELECT key FROM turns WHERE ended_at_ms < ? LIMIT ?)")
        .bind(now_ms.saturating_sub(KEPT_MS) as i64)
        .bind(MAX_FORGOTTEN)
        .execute(connection)
        .await
        .map_err(failed())?;
    Ok(())
}

async fn count_losses(connection: &mut SqliteConnection, called: &str) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("counted the turns that were lost");
    let ended = query("DELETE FROM ended_in_order").execute(&mut *connection).await.map_err(failed())?;
    let lost = query(
        "UPDATE turns SET losses = CASE WHEN lost_at = reached.position THEN losses + 1 ELSE 1 END,
             lost_at = reached.position
         FROM (SELECT key AS turn, COALESCE((SELECT MAX(position) FROM turn_records
                   WHERE turn_records.turn = turns.key), 0) AS position FROM turns
               WHERE ended_at_ms IS NULL) AS reached
         WHERE turns.key = reached.turn AND state = ?1 AND runs AND NOT ?3
             AND NOT EXISTS (SELECT 1 FROM approvals WHERE approvals.turn = turns.key AND verdict IS NULL)
             AND NOT EXISTS (SELECT 1 FROM turns AS called WHERE called.ended_at_ms IS NULL
                 AND substr(called.idempotency_key, 1, length(?2 || turns.id) + 1) = ?2 || turns.id || ' ')",
    )
    .bind(RUNNING)
    .bind(called)
    .bind(ended.rows_affected() > 0)
    .execute(&mut *connection)
    .await;
    lost.map_err(failed())?;
    let left = query("UPDATE turns SET runs = FALSE WHERE ended_at_ms IS NULL").execute(connection).await;
    left.map(drop).map_err(failed())
}

fn must_be_open(rows: u64, turn: TurnKey) -> Result<(), StoreError> {
    if rows == 1 { Ok(()) } else { Err(StoreError::TurnNotOpen { key: turn.0 }) }
}

fn turn_row(row: &SqliteRow) -> Result<TurnRow, sqlx::Error> {
    let number = row.try_get::<Option<i64>, _>(10)?.unwrap_or_default() as u64;
    let result = row.try_get::<Option<Vec<u8>>, _>(11)?.unwrap_or_default();
    let ended_at_ms = row.try_get::<Option<i64>, _>(12)?.unwrap_or_default() as u64;
    Ok(TurnRow {
        key: TurnKey(row.try_get(0)?),
        id: row.try_get(1)?,
        agent: row.try_get(2)?,
        session: row.try_get(3)?,
        idempotency_key: row.try_get(4)?,
        digest: row.try_get(5)?,
        input: row.try_get(6)?,
        seed: row.try_get(7)?,
        accepted_at_ms: row.try_get::<i64, _>(8)? as u64,
        state: match row.try_get::<i64, _>(9)? {
            WAITING => TurnState::Waiting,
            RUNNING => TurnState::Running { number },
            DONE => TurnState::Done { number, outcome: result, ended_at_ms },
            _ => TurnState::Failed { error: result, ended_at_ms },
        },
    })
}

pub(crate) fn open_turn(row: &SqliteRow) -> Result<OpenTurn, sqlx::Error> {
    Ok(OpenTurn {
        key: TurnKey(row.try_get(0)?),
        id: row.try_get(1)?,
        agent: row.try_get(2)?,
        session: row.try_get(3)?,
        is_running: row.try_get::<i64, _>(4)? == RUNNING,
        losses: row.try_get(5)?,
        message_bytes: row.try_get::<i64, _>(6)? as u64,
    })
}
