//! Deliveries: one event in flight to one session or one webhook.
//!
//! A delivery waits, starts, and is removed when it succeeds; for a session this happens in the commit of the
//! turn, in the same transaction. A delivery that has started when the host terminates is started again
//! unchanged. A delivery whose attempts are used up is dead, and stays until it is redelivered manually or
//! removed.

use crate::{
    Store, StoreError,
    hosts::{HostNumber, is_left},
    rows,
    sql::{AssertSqlSafe, Connection, Row, query, query_scalar},
};

/// The key of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeliveryKey(pub i64);

/// The target of an event.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    Session {
        agent: String,
        session: String,
    },
    /// The id of the webhook.
    Webhook(String),
}

/// A new delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDelivery {
    pub target: Target,
    /// Why the delivery can never be made. Such a delivery is dead from the start.
    pub undeliverable: Option<String>,
}

/// A delivery with its event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    pub key: DeliveryKey,
    pub target: Target,
    pub state: DeliveryState,
    /// Number of attempts that were started.
    pub attempt: u32,
    /// Error of the last attempt.
    pub error: Option<String>,
    pub event_id: String,
    pub source: String,
    pub topic: String,
    pub data: Option<Vec<u8>>,
    pub principal: String,
    pub hops: u32,
    pub at_ms: u64,
    /// The delivery was in flight when a backup was taken that was later restored, so it may have been made
    /// before.
    pub restored: bool,
}

/// The state of a delivery. A delivery that succeeds has none, because its row is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryState {
    /// The next attempt has not started.
    Waiting,
    /// An attempt has started.
    Begun,
    /// No further attempt is made, unless somebody redelivers it.
    Dead,
}

const WAITING: i64 = 0;
const BEGUN: i64 = 1;
const DEAD: i64 = 2;
const COLUMNS: &str = "deliveries.key, deliveries.agent, deliveries.session, deliveries.webhook, deliveries.state, \
                       deliveries.attempt, deliveries.error, events.id, events.source, events.topic, events.data, \
                       events.principal, events.hops, events.at_ms, deliveries.restored";

impl Store {
    /// Returns at most `limit` deliveries that are due, each for a different target, and none for a target
    /// with a started delivery.
    pub async fn due_deliveries(&self, now_ms: u64, limit: u32) -> Result<Vec<Delivery>, StoreError> {
        let rows = query(AssertSqlSafe(due_statement()))
            .bind(now_ms as i64)
            .bind(limit)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for deliveries that are due"))?;
        Ok(rows::readable(&rows, "delivery", delivery))
    }

    /// Returns the time of the next attempt of a waiting delivery, the earliest after `now_ms`.
    pub async fn next_delivery_ms(&self, now_ms: u64) -> Result<Option<u64>, StoreError> {
        let next: Option<i64> =
            query_scalar("SELECT MIN(wake_ms) FROM deliveries WHERE state = 0 AND wake_ms > ?")
                .bind(now_ms as i64)
                .fetch_one(&self.readers)
                .await
                .map_err(StoreError::while_it("looked for the next delivery"))?;
        Ok(next.map(|next| next as u64))
    }

    /// Takes up the deliveries that had started when their host terminated, and returns them with those that this host has
    /// in hand.
    pub async fn begun_deliveries(&self) -> Result<Vec<Delivery>, StoreError> {
        if self.host.is_some() && self.has_left_deliveries().await? {
            self.write_common(self.host, |connection, host| Box::pin(take_up(connection, *host))).await?;
        }
        let sql = format!(
            "SELECT {COLUMNS} FROM deliveries JOIN events ON events.key = deliveries.event
             WHERE deliveries.state = {BEGUN} AND deliveries.host IS NOT DISTINCT FROM ? ORDER BY deliveries.key DESC"
        );
        let rows = query(AssertSqlSafe(sql))
            .bind(self.host)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("listed deliveries"))?;
        Ok(rows::readable(&rows, "delivery", delivery))
    }

    async fn has_left_deliveries(&self) -> Result<bool, StoreError> {
        let sql = format!("SELECT EXISTS (SELECT 1 FROM deliveries WHERE {})", is_stopped());
        let found = query_scalar(AssertSqlSafe(sql)).fetch_one(&self.readers).await;
        found.map_err(StoreError::while_it("looked for deliveries that had started"))
    }

    /// Returns deliveries that failed permanently, the newest first. If `before` is given, returns only those
    /// before that key.
    pub async fn dead_deliveries(
        &self,
        before: Option<DeliveryKey>,
        limit: u32,
    ) -> Result<Vec<Delivery>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM deliveries JOIN events ON events.key = deliveries.event
             WHERE deliveries.state = {DEAD} AND deliveries.key < ? ORDER BY deliveries.key DESC LIMIT ?"
        );
        let rows = query(AssertSqlSafe(sql))
            .bind(before.map_or(i64::MAX, |key| key.0))
            .bind(limit)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("listed deliveries"))?;
        Ok(rows::readable(&rows, "delivery", delivery))
    }

    /// Counts the waiting and started deliveries by the tenant of their event.
    pub async fn count_deliveries(&self) -> Result<Vec<(String, usize)>, StoreError> {
        let rows = query(
            "SELECT principal, COUNT(*) FROM deliveries JOIN events ON events.key = event
             WHERE deliveries.state IN (0, 1) GROUP BY principal",
        )
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("counted deliveries"))?;
        Ok(rows.iter().map(|row| (row.get(0), row.get::<i64>(1).max(0) as usize)).collect())
    }

    /// Starts this attempt of a delivery that was read before it. Returns whether the delivery is still due and no attempt was
    /// made since, by another host, and whether no other host is just starting it.
    pub async fn begin_delivery(
        &self,
        key: DeliveryKey,
        attempt: u32,
        now_ms: u64,
    ) -> Result<bool, StoreError> {
        self.write((key, attempt, now_ms, self.host), |connection, (key, attempt, now_ms, host)| {
            Box::pin(async move {
                let (key, attempt, now_ms, host) = (*key, *attempt, *now_ms, *host);
                let begin = format!(
                    "UPDATE deliveries SET state = ?, attempt = ?, host = ?
                     WHERE key = (SELECT key FROM deliveries WHERE key = ? AND state = ? AND attempt = ? AND wake_ms <= ? {})",
                    connection.dialect().skip_locked()
                );
                let begun = query(AssertSqlSafe(begin))
                    .bind(BEGUN)
                    .bind(attempt)
                    .bind(host)
                    .bind(key.0)
                    .bind(WAITING)
                    .bind(attempt.saturating_sub(1))
                    .bind(now_ms as i64)
                    .execute(connection)
                    .await
                    .map_err(StoreError::while_it("started a delivery"))?;
                Ok(begun.rows_affected() > 0)
            })
        })
        .await
    }

    /// Returns a delivery that this host has started to the queue for another attempt. `attempt` is the number of attempts that
    /// count. If this is repeated, because the first answer was lost, another host may have started the next attempt: then it changes
    /// nothing.
    pub async fn retry_delivery(
        &self,
        key: DeliveryKey,
        attempt: u32,
        wake_ms: u64,
        error: &str,
    ) -> Result<(), StoreError> {
        let data = (key, attempt, wake_ms, error.to_owned(), self.host);
        self.write(data, |connection, (key, attempt, wake_ms, error, host)| {
            Box::pin(async move {
                query(
                    "UPDATE deliveries SET state = ?, attempt = ?, wake_ms = ?, error = ?
                     WHERE key = ? AND state = ? AND host IS NOT DISTINCT FROM ?",
                )
                .bind(WAITING)
                .bind(*attempt)
                .bind(*wake_ms as i64)
                .bind(error)
                .bind(key.0)
                .bind(BEGUN)
                .bind(*host)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("postponed a delivery"))?;
                Ok(())
            })
        })
        .await
    }

    /// Removes a delivery that succeeded.
    pub async fn finish_delivery(&self, key: DeliveryKey) -> Result<(), StoreError> {
        self.write(key, |connection, key| {
            Box::pin(async move {
                let key = *key;
                query("DELETE FROM deliveries WHERE key = ?")
                    .bind(key.0)
                    .execute(connection)
                    .await
                    .map_err(StoreError::while_it("finished a delivery"))?;
                Ok(())
            })
        })
        .await
    }

    /// Marks a delivery that this host has started as dead.
    pub async fn dead_letter_delivery(&self, key: DeliveryKey, error: &str) -> Result<(), StoreError> {
        self.write((key, error.to_owned(), self.host), |connection, (key, error, host)| {
            Box::pin(async move {
                query(
                    "UPDATE deliveries SET state = ?, error = ?
                     WHERE key = ? AND state = ? AND host IS NOT DISTINCT FROM ?",
                )
                .bind(DEAD)
                .bind(error)
                .bind(key.0)
                .bind(BEGUN)
                .bind(*host)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("abandoned a delivery"))?;
                Ok(())
            })
        })
        .await
    }

    /// Queues a dead delivery again, starting with its first attempt. Returns whether a dead delivery with a
    /// usable target exists.
    pub async fn redeliver(&self, key: DeliveryKey, now_ms: u64) -> Result<bool, StoreError> {
        self.write_common((key, now_ms), |connection, (key, now_ms)| {
            Box::pin(async move {
                let (key, now_ms) = (*key, *now_ms);
                let again = query(
                    "UPDATE deliveries SET state = ?, attempt = 0, wake_ms = ? WHERE key = ? AND state = ?
             AND session IS DISTINCT FROM ''",
                )
                .bind(WAITING)
                .bind(now_ms as i64)
                .bind(key.0)
                .bind(DEAD)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("redelivered an event"))?;
                Ok(again.rows_affected() > 0)
            })
        })
        .await
    }
}

/// Returns the statement that finds the deliveries that are due at a time, up to a number of them. It reads the first waiting
/// delivery of each target and none of those behind it, however many wait: a recursion steps from one session to the next in
/// the index `deliveries_by_target`, and each webhook has a row of its own. `CROSS JOIN` makes SQLite join in the order that is
/// written.
pub(crate) fn due_statement() -> String {
    let first = |of: &str| {
        format!(
            "SELECT key FROM deliveries WHERE state = {WAITING} AND {of}
             ORDER BY agent, session, webhook, wake_ms, key LIMIT 1"
        )
    };
    let first_session = first("agent IS NOT NULL");
    let next_in_agent = first("agent = walked.agent AND session > walked.session");
    let in_next_agent = first("agent > walked.agent");
    let of_webhook = first("agent IS NULL AND session IS NULL AND webhook = webhooks.id");
    format!(
        "WITH RECURSIVE walked (key, agent, session) AS (
             SELECT key, agent, session FROM deliveries WHERE key = ({first_session})
             UNION ALL
             SELECT next.key, next.agent, next.session FROM walked JOIN deliveries AS next
                 ON next.key = COALESCE(({next_in_agent}), ({in_next_agent})))
         SELECT {COLUMNS} FROM
             (SELECT deliveries.key, ROW_NUMBER() OVER (PARTITION BY events.principal, deliveries.webhook IS NULL
                  ORDER BY deliveries.wake_ms, deliveries.key) AS place
              FROM (SELECT key FROM walked WHERE NOT EXISTS (SELECT 1 FROM deliveries AS begun
                        WHERE begun.state = {BEGUN} AND begun.agent = walked.agent AND begun.session = walked.session)
                    UNION ALL
                    SELECT ({of_webhook}) FROM webhooks WHERE NOT EXISTS (SELECT 1 FROM deliveries AS begun
                        WHERE begun.state = {BEGUN} AND begun.agent IS NULL AND begun.session IS NULL
                        AND begun.webhook = webhooks.id)) AS first_of_target
                  CROSS JOIN deliveries CROSS JOIN events
              WHERE deliveries.key = first_of_target.key AND events.key = deliveries.event AND deliveries.wake_ms <= ?
              ORDER BY place, deliveries.wake_ms, deliveries.key LIMIT ?) AS due
             CROSS JOIN deliveries CROSS JOIN events
         WHERE deliveries.key = due.key AND events.key = deliveries.event
         ORDER BY due.place, deliveries.wake_ms, deliveries.key"
    )
}

/// Returns the condition that nobody makes a delivery that has started.
fn is_stopped() -> String {
    format!("state = {BEGUN} AND {}", is_left("host"))
}

async fn take_up(connection: &mut Connection, host: HostNumber) -> Result<(), StoreError> {
    let sql = format!("UPDATE deliveries SET host = ? WHERE {}", is_stopped());
    let taken = query(AssertSqlSafe(sql)).bind(host).execute(connection).await;
    taken.map(drop).map_err(StoreError::while_it("took up deliveries that had started"))
}

/// Writes a delivery, unless its target no longer exists.
pub(crate) async fn insert(
    connection: &mut Connection,
    event: i64,
    delivery: &NewDelivery,
    now_ms: u64,
) -> Result<(), StoreError> {
    let (agent, session, webhook) = match &delivery.target {
        Target::Session { agent, session } => (Some(agent), Some(session), None),
        Target::Webhook(id) => (None, None, Some(id)),
    };
    query(
        "INSERT INTO deliveries (event, agent, session, webhook, state, attempt, wake_ms, error)
         SELECT ?1, ?2, ?3, ?4, ?5, 0, ?6, ?7
         WHERE EXISTS (SELECT 1 FROM agents WHERE name = ?2 AND NOT deleted)
             OR EXISTS (SELECT 1 FROM webhooks WHERE id = ?4)",
    )
    .bind(event)
    .bind(agent)
    .bind(session)
    .bind(webhook)
    .bind(if delivery.undeliverable.is_some() { DEAD } else { WAITING })
    .bind(now_ms as i64)
    .bind(&delivery.undeliverable)
    .execute(connection)
    .await
    .map_err(StoreError::while_it("wrote a delivery"))?;
    Ok(())
}

/// Removes a delivery whose turn is committed.
pub(crate) async fn settle(connection: &mut Connection, key: DeliveryKey) -> Result<(), StoreError> {
    // It may have returned to the queue in the meantime, if its turn continued without the task that had
    // started it.
    query("DELETE FROM deliveries WHERE key = ? AND state IN (?, ?)")
        .bind(key.0)
        .bind(WAITING)
        .bind(BEGUN)
        .execute(connection)
        .await
        .map_err(StoreError::while_it("settled a delivery"))?;
    Ok(())
}

fn delivery(row: &Row) -> Result<Delivery, sqlx::Error> {
    let target = match row.try_get::<Option<String>>(3)? {
        Some(webhook) => Target::Webhook(webhook),
        None => Target::Session { agent: row.try_get(1)?, session: row.try_get(2)? },
    };
    Ok(Delivery {
        key: DeliveryKey(row.try_get(0)?),
        target,
        state: match row.try_get::<i64>(4)? {
            WAITING => DeliveryState::Waiting,
            BEGUN => DeliveryState::Begun,
            _ => DeliveryState::Dead,
        },
        attempt: row.try_get(5)?,
        error: row.try_get(6)?,
        event_id: row.try_get(7)?,
        source: row.try_get(8)?,
        topic: row.try_get(9)?,
        data: row.try_get(10)?,
        principal: row.try_get(11)?,
        hops: row.try_get(12)?,
        at_ms: row.try_get::<i64>(13)? as u64,
        restored: row.try_get(14)?,
    })
}
