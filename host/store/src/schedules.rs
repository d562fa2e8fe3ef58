//! Schedules, which wake a session. They are set by a session, or by the manifest of its agent.
//!
//! A schedule waits until it is due. Then it has started until its turn is committed, which settles it in the
//! same transaction. A schedule that has started when the host terminates is started again unchanged. The due
//! times are computed outside of this crate: a timing is text here.

use crate::{
    Store, StoreError,
    hosts::{HostNumber, is_left},
    rows,
    sql::{AssertSqlSafe, Connection, Row, query, query_scalar},
};

/// A schedule to be set. It replaces a schedule with the same owner and name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSchedule {
    /// Unique id, which is never reused.
    pub id: String,
    pub name: String,
    /// The session that the schedule wakes.
    pub target: String,
    /// The principal on whose behalf the schedule runs.
    pub principal: String,
    pub timing: String,
    pub repeats: bool,
    pub data: Option<Vec<u8>>,
    /// Number of attempts for each due time.
    pub tries: u32,
    pub due_ms: u64,
}

/// A change that a turn makes to the schedules of its session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScheduleChange {
    Set(NewSchedule),
    /// Cancels the schedule with this name.
    Cancel(String),
}

/// A stored schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleRow {
    pub agent: String,
    /// The session that set the schedule; `None` means the manifest.
    pub owner: Option<String>,
    pub schedule: NewSchedule,
    pub state: ScheduleState,
    /// Number of attempts for the current due time, including one in progress.
    pub attempt: u32,
    /// Number of earlier due times that passed while the agent could not be called.
    pub missed: u32,
    /// The time at which the schedule is checked next.
    pub wake_ms: u64,
    /// Error of the last failed attempt.
    pub error: Option<String>,
}

/// The state of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScheduleState {
    /// The schedule is not due, or waits for its next attempt.
    Waiting,
    /// Its turn was requested.
    Begun,
    /// Its turn is committed. The schedule repeats, and its next due time has to be set.
    Settled,
    /// Its attempts are used up, and it does not repeat.
    Failed,
    /// The database was restored, and the operator has not yet decided about it.
    Held,
}

const WAITING: i64 = 0;
const BEGUN: i64 = 1;
const SETTLED: i64 = 2;
const FAILED: i64 = 3;
/// The states of schedules that a restored database holds (see `restored`): 4 is a schedule, and 5 one whose turn
/// was committed and which only needs its next due time.
const HELD: [i64; 2] = [4, 5];
/// The owner of a manifest's schedules. No session has an empty id.
const MANIFEST: &str = "";
pub(crate) const COLUMNS: &str = "id, agent, session, name, target, principal, timing, repeats, data, tries, state, due_ms, missed, \
                       attempt, wake_ms, error";

impl Store {
    /// Returns at most `limit` schedules that are due, each for a different session, and none for a session
    /// with a started schedule.
    pub async fn due_schedules(&self, now_ms: u64, limit: u32) -> Result<Vec<ScheduleRow>, StoreError> {
        let sql = format!(
            "SELECT * FROM
                 (SELECT {COLUMNS}, ROW_NUMBER() OVER (PARTITION BY agent, target ORDER BY wake_ms, key) AS place
                  FROM schedules AS due WHERE state = {WAITING} AND wake_ms <= ?
                  AND NOT EXISTS (SELECT 1 FROM schedules AS begun WHERE begun.agent = due.agent
                      AND begun.target = due.target AND begun.state IN ({BEGUN}, {SETTLED}))
                 ) AS first WHERE place = 1
             ORDER BY ROW_NUMBER() OVER (PARTITION BY principal ORDER BY wake_ms), wake_ms LIMIT ?"
        );
        let rows = query(AssertSqlSafe(sql))
            .bind(now_ms as i64)
            .bind(limit)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for schedules that are due"))?;
        Ok(rows::readable(&rows, "schedule", schedule_row))
    }

    /// Returns the time at which a waiting schedule is checked next, the earliest after `now_ms`.
    pub async fn next_schedule_ms(&self, now_ms: u64) -> Result<Option<u64>, StoreError> {
        let next: Option<i64> =
            query_scalar("SELECT MIN(wake_ms) FROM schedules WHERE state = 0 AND wake_ms > ?")
                .bind(now_ms as i64)
                .fetch_one(&self.readers)
                .await
                .map_err(StoreError::while_it("looked for the next schedule"))?;
        Ok(next.map(|next| next as u64))
    }

    /// Returns the waiting schedules that are checked next after `now_ms`, the earliest first.
    pub async fn upcoming_schedules(&self, now_ms: u64, limit: u32) -> Result<Vec<ScheduleRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM schedules WHERE state = {WAITING} AND wake_ms > ? ORDER BY wake_ms LIMIT ?"
        );
        let rows = query(AssertSqlSafe(sql))
            .bind(now_ms as i64)
            .bind(limit)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for schedules that are due soon"))?;
        Ok(rows::readable(&rows, "schedule", schedule_row))
    }

    /// Takes up the schedules that had started, or were settled without a next due time, when their host terminated, and
    /// returns them with those that this host has in hand.
    pub async fn begun_schedules(&self) -> Result<Vec<ScheduleRow>, StoreError> {
        if self.host.is_some() && self.has_left_schedules().await? {
            self.write_common(self.host, |connection, host| Box::pin(take_up(connection, *host))).await?;
        }
        let sql = format!(
            "SELECT {COLUMNS} FROM schedules WHERE state IN ({BEGUN}, {SETTLED}) AND host IS NOT DISTINCT FROM ?
             ORDER BY wake_ms"
        );
        let rows = query(AssertSqlSafe(sql))
            .bind(self.host)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for schedules that had started"))?;
        Ok(rows::readable(&rows, "schedule", schedule_row))
    }

    async fn has_left_schedules(&self) -> Result<bool, StoreError> {
        let sql = format!("SELECT EXISTS (SELECT 1 FROM schedules WHERE {})", is_stopped());
        let found = query_scalar(AssertSqlSafe(sql)).fetch_one(&self.readers).await;
        found.map_err(StoreError::while_it("looked for schedules that had started"))
    }

    /// Starts an attempt of a waiting schedule that was read before it, with this `wake_ms`. Returns whether it still waits as it
    /// was read: no other host has started it meanwhile, or is just starting it.
    pub async fn begin_schedule(
        &self,
        id: &str,
        due_ms: u64,
        missed: u32,
        attempt: u32,
        wake_ms: u64,
    ) -> Result<bool, StoreError> {
        let data = (id.to_owned(), due_ms, missed, (attempt, wake_ms), self.host);
        self.write(data, |connection, (id, due_ms, missed, (attempt, wake_ms), host)| {
            Box::pin(async move {
                let (due_ms, missed, attempt, wake_ms) = (*due_ms, *missed, *attempt, *wake_ms);
                let begin = format!(
                    "UPDATE schedules SET state = ?, due_ms = ?, missed = ?, attempt = ?, host = ?
                     WHERE key = (SELECT key FROM schedules WHERE id = ? AND state = ? AND attempt = ? AND wake_ms = ? {})",
                    connection.dialect().skip_locked()
                );
                let begun = query(AssertSqlSafe(begin))
                    .bind(BEGUN)
                    .bind(due_ms as i64)
                    .bind(missed)
                    .bind(attempt)
                    .bind(*host)
                    .bind(id)
                    .bind(WAITING)
                    .bind(attempt.saturating_sub(1))
                    .bind(wake_ms as i64)
                    .execute(connection)
                    .await
                    .map_err(StoreError::while_it("started a schedule"))?;
                Ok(begun.rows_affected() > 0)
            })
        })
        .await
    }

    /// Returns a schedule that this host has started to the queue for another attempt of the same due time. `attempt` is the number of
    /// attempts that count. If this is repeated, because the first answer was lost, another host may have started the next attempt: then
    /// it changes nothing.
    pub async fn retry_schedule(
        &self,
        id: &str,
        attempt: u32,
        wake_ms: u64,
        error: &str,
    ) -> Result<(), StoreError> {
        let data = (id.to_owned(), attempt, wake_ms, error.to_owned(), self.host);
        self.write(data, |connection, (id, attempt, wake_ms, error, host)| {
            Box::pin(async move {
                query(
                    "UPDATE schedules SET state = ?, attempt = ?, wake_ms = ?, error = ?
                     WHERE id = ? AND state = ? AND host IS NOT DISTINCT FROM ?",
                )
                .bind(WAITING)
                .bind(*attempt)
                .bind(*wake_ms as i64)
                .bind(error)
                .bind(id)
                .bind(BEGUN)
                .bind(*host)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("postponed a schedule"))?;
                Ok(())
            })
        })
        .await
    }

    /// Sets the next due time of a repeating schedule that this host has started. `error` says why the previous due time failed.
    pub async fn advance_schedule(
        &self,
        id: &str,
        due_ms: u64,
        missed: u32,
        error: Option<&str>,
    ) -> Result<(), StoreError> {
        let data = (id.to_owned(), due_ms, missed, error.map(str::to_owned), self.host);
        self.write(data, |connection, (id, due_ms, missed, error, host)| {
            Box::pin(async move {
                let due_ms = *due_ms as i64;
                query(
                    "UPDATE schedules SET state = ?, due_ms = ?, wake_ms = ?, missed = ?, attempt = 0, error = ?
                     WHERE id = ? AND state IN (?, ?) AND host IS NOT DISTINCT FROM ?",
                )
                .bind(WAITING)
                .bind(due_ms)
                .bind(due_ms)
                .bind(*missed)
                .bind(error)
                .bind(id)
                .bind(BEGUN)
                .bind(SETTLED)
                .bind(*host)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("set the next due time of a schedule"))?;
                Ok(())
            })
        })
        .await
    }

    /// Marks a schedule that this host has started as failed. It stays listed.
    pub async fn fail_schedule(&self, id: &str, error: &str) -> Result<(), StoreError> {
        self.write((id.to_owned(), error.to_owned(), self.host), |connection, (id, error, host)| {
            Box::pin(async move {
                query(
                    "UPDATE schedules SET state = ?, error = ?
                     WHERE id = ? AND state IN (?, ?) AND host IS NOT DISTINCT FROM ?",
                )
                .bind(FAILED)
                .bind(error)
                .bind(id)
                .bind(BEGUN)
                .bind(SETTLED)
                .bind(*host)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("abandoned a schedule"))?;
                Ok(())
            })
        })
        .await
    }

    /// Makes a schedule due now, with all its attempts. Returns whether there is a waiting or failed schedule
    /// with this id.
    pub async fn run_schedule(&self, agent: &str, id: &str, now_ms: u64) -> Result<bool, StoreError> {
        self.write_common((agent.to_owned(), id.to_owned(), now_ms), |connection, (agent, id, now_ms)| {
            Box::pin(async move {
                let now_ms = *now_ms;
                let run = query(
                    "UPDATE schedules SET state = ?1, due_ms = ?2, wake_ms = ?2, missed = 0, attempt = 0
                     WHERE agent = ?3 AND id = ?4 AND state IN (?1, ?5)",
                )
                .bind(WAITING)
                .bind(now_ms as i64)
                .bind(agent)
                .bind(id)
                .bind(FAILED)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("made a schedule due"))?;
                Ok(run.rows_affected() > 0)
            })
        })
        .await
    }

    /// Removes a schedule. Returns whether it existed.
    pub async fn cancel_schedule(&self, agent: &str, id: &str) -> Result<bool, StoreError> {
        self.write_common((agent.to_owned(), id.to_owned()), |connection, (agent, id)| {
            Box::pin(async move {
                let cancelled = query("DELETE FROM schedules WHERE agent = ? AND id = ?")
                    .bind(agent)
                    .bind(id)
                    .execute(connection)
                    .await
                    .map_err(StoreError::while_it("cancelled a schedule"))?;
                Ok(cancelled.rows_affected() > 0)
            })
        })
        .await
    }

    /// Returns the schedules that a session set, by name.
    pub async fn schedules_of(&self, agent: &str, session: &str) -> Result<Vec<ScheduleRow>, StoreError> {
        let sql =
            format!("SELECT {COLUMNS} FROM schedules WHERE agent = ? AND session = ? ORDER BY session, name");
        let rows = query(AssertSqlSafe(sql))
            .bind(agent)
            .bind(session)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("read the schedules of a session"))?;
        Ok(rows::readable(&rows, "schedule", schedule_row))
    }

    /// Returns the schedules of all agents or of one, the next due first and the failed ones last.
    pub async fn schedules(&self, agent: Option<&str>, limit: u32) -> Result<Vec<ScheduleRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM schedules WHERE ?1 IS NULL OR agent = ?1
             ORDER BY state = {FAILED}, wake_ms, key LIMIT ?2"
        );
        let rows = query(AssertSqlSafe(sql))
            .bind(agent)
            .bind(limit)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("listed schedules"))?;
        Ok(rows::readable(&rows, "schedule", schedule_row))
    }
}

/// Returns the condition that nobody works on a schedule that has started.
fn is_stopped() -> String {
    format!("state IN ({BEGUN}, {SETTLED}) AND {}", is_left("host"))
}

async fn take_up(connection: &mut Connection, host: HostNumber) -> Result<(), StoreError> {
    let sql = format!("UPDATE schedules SET host = ? WHERE {}", is_stopped());
    let taken = query(AssertSqlSafe(sql)).bind(host).execute(connection).await;
    taken.map(drop).map_err(StoreError::while_it("took up schedules that had started"))
}

/// Settles a schedule whose turn is committed.
pub(crate) async fn settle(connection: &mut Connection, id: &str, due_ms: u64) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("settled a schedule");
    // It may have returned to the queue in the meantime, if its turn continued without the task that had
    // started it.
    query("DELETE FROM schedules WHERE id = ? AND due_ms = ? AND state IN (?, ?) AND NOT repeats")
        .bind(id)
        .bind(due_ms as i64)
        .bind(WAITING)
        .bind(BEGUN)
        .execute(&mut *connection)
        .await
        .map_err(failed())?;
    query("UPDATE schedules SET state = ?, error = NULL WHERE id = ? AND due_ms = ? AND state IN (?, ?)")
        .bind(SETTLED)
        .bind(id)
        .bind(due_ms as i64)
        .bind(WAITING)
        .bind(BEGUN)
        .execute(connection)
        .await
        .map_err(failed())?;
    Ok(())
}

pub(crate) async fn change(
    connection: &mut Connection,
    agent: &str,
    session: &str,
    changes: &[ScheduleChange],
) -> Result<(), StoreError> {
    for change in changes {
        match change {
            ScheduleChange::Set(schedule) => set(connection, agent, session, schedule).await?,
            ScheduleChange::Cancel(name) => remove(connection, agent, session, name).await?,
        }
    }
    Ok(())
}

/// Replaces the schedules of a manifest. Unchanged schedules keep their due times.
pub(crate) async fn replace_of_manifest(
    connection: &mut Connection,
    agent: &str,
    schedules: &[NewSchedule],
) -> Result<(), StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM schedules WHERE agent = ? AND session = ?");
    let before = query(AssertSqlSafe(sql))
        .bind(agent)
        .bind(MANIFEST)
        .fetch_all(&mut *connection)
        .await
        .map_err(StoreError::while_it("read the schedules of a manifest"))?;
    let before: Vec<NewSchedule> =
        rows::readable(&before, "schedule", schedule_row).into_iter().map(|row| row.schedule).collect();
    let is_same = |old: &NewSchedule, new: &NewSchedule| {
        *old == NewSchedule { id: old.id.clone(), due_ms: old.due_ms, ..new.clone() }
    };
    for old in &before {
        if !schedules.iter().any(|new| is_same(old, new)) {
            remove(connection, agent, MANIFEST, &old.name).await?;
        }
    }
    for new in schedules {
        if !before.iter().any(|old| is_same(old, new)) {
            set(connection, agent, MANIFEST, new).await?;
        }
    }
    Ok(())
}

async fn set(
    connection: &mut Connection,
    agent: &str,
    session: &str,
    schedule: &NewSchedule,
) -> Result<(), StoreError> {
    let NewSchedule { id, name, target, principal, timing, repeats, data, tries, due_ms } = schedule;
    remove(connection, agent, session, name).await?;
    query(
        "INSERT INTO schedules (id, agent, session, name, target, principal, timing, repeats, data, tries, state, due_ms,
             missed, attempt, wake_ms)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, 0, 0, ?12)",
    )
    .bind(id)
    .bind(agent)
    .bind(session)
    .bind(name)
    .bind(target)
    .bind(principal)
    .bind(timing)
    .bind(repeats)
    .bind(data)
    .bind(tries)
    .bind(WAITING)
    .bind(*due_ms as i64)
    .execute(connection)
    .await
    .map_err(StoreError::while_it("set a schedule"))?;
    Ok(())
}

async fn remove(
    connection: &mut Connection,
    agent: &str,
    session: &str,
    name: &str,
) -> Result<(), StoreError> {
    query("DELETE FROM schedules WHERE agent = ? AND session = ? AND name = ?")
        .bind(agent)
        .bind(session)
        .bind(name)
        .execute(connection)
        .await
        .map_err(StoreError::while_it("removed a schedule"))?;
    Ok(())
}

pub(crate) fn schedule_row(row: &Row) -> Result<ScheduleRow, sqlx::Error> {
    let owner: String = row.try_get(2)?;
    Ok(ScheduleRow {
        agent: row.try_get(1)?,
        owner: (owner != MANIFEST).then_some(owner),
        schedule: NewSchedule {
            id: row.try_get(0)?,
            name: row.try_get(3)?,
            target: row.try_get(4)?,
            principal: row.try_get(5)?,
            timing: row.try_get(6)?,
            repeats: row.try_get(7)?,
            data: row.try_get(8)?,
            tries: row.try_get(9)?,
            due_ms: row.try_get::<i64>(11)? as u64,
        },
        state: match row.try_get::<i64>(10)? {
            WAITING => ScheduleState::Waiting,
            BEGUN => ScheduleState::Begun,
            SETTLED => ScheduleState::Settled,
            held if HELD.contains(&held) => ScheduleState::Held,
            _ => ScheduleState::Failed,
        },
        missed: row.try_get(12)?,
        attempt: row.try_get(13)?,
        wake_ms: row.try_get::<i64>(14)? as u64,
        error: row.try_get(15)?,
    })
}
