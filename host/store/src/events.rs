//! The outbox: events with their deliveries, written in the same transaction as the change that caused them.
//!
//! An event is identified by its source and its id, and is written only once while it is stored.

use crate::{
    NewDelivery, Store, StoreError, deliveries,
    sql::{AssertSqlSafe, Connection, Row, query, query_scalar},
};

/// Time for which an event is kept after its deliveries are finished, so that the same event is not accepted
/// again.
pub const EVENT_IDS_KEPT_MS: u64 = 24 * 3600 * 1000;
/// Time for which permanently failed deliveries are kept.
pub(crate) const DEAD_KEPT_MS: u64 = 30 * 24 * 3600 * 1000;
/// Number of events checked at a time, so that no commit waits long for it.
const EVENTS_LOOKED_AT: i64 = 256;

/// An event to be published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEvent {
    /// The source of the event, which is unique together with the id.
    pub source: String,
    pub id: String,
    pub topic: String,
    pub data: Option<Vec<u8>>,
    /// The principal on whose behalf the event is published.
    pub principal: String,
    /// Length of the chain of events that led to this one.
    pub hops: u32,
    pub at_ms: u64,
    pub deliveries: Vec<NewDelivery>,
}

/// The outcome of publishing an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    New,
    /// The same event was published before. Nothing was written.
    Known,
}

/// A stored event, with the state of its deliveries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventRow {
    /// The key, which grows with each event.
    pub key: i64,
    pub source: String,
    pub id: String,
    pub topic: String,
    pub data: Option<Vec<u8>>,
    pub hops: u32,
    pub at_ms: u64,
    pub published_at_ms: u64,
    /// Number of deliveries that are still attempted.
    pub pending: u32,
    /// Number of deliveries that failed permanently.
    pub dead: u32,
}

impl Store {
    /// Stores an event durably, with its deliveries.
    pub async fn publish(&self, event: &NewEvent, now_ms: u64) -> Result<Published, StoreError> {
        self.write((event.clone(), now_ms), |connection, (event, now_ms)| {
            Box::pin(insert(connection, event, *now_ms))
        })
        .await
    }

    /// Returns the newest events. If `before` is given, returns only those before that key.
    pub async fn events(&self, before: Option<i64>, limit: u32) -> Result<Vec<EventRow>, StoreError> {
        let rows = query(
            "SELECT key, source, id, topic, data, hops, at_ms, published_at_ms,
                 (SELECT COUNT(*) FROM deliveries WHERE event = events.key AND state IN (0, 1, 3)),
                 (SELECT COUNT(*) FROM deliveries WHERE event = events.key AND state = 2)
             FROM events WHERE ?1 IS NULL OR key < ?1 ORDER BY key DESC LIMIT ?2",
        )
        .bind(before)
        .bind(limit)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed events"))?;
        Ok(rows.iter().map(event_row).collect())
    }
}

pub(crate) async fn insert(
    connection: &mut Connection,
    event: &NewEvent,
    now_ms: u64,
) -> Result<Published, StoreError> {
    let NewEvent { source, id, topic, data, principal, hops, at_ms, deliveries } = event;
    let key: Option<i64> = query_scalar(
        "INSERT INTO events (source, id, topic, data, principal, hops, at_ms, published_at_ms)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING key",
    )
    .bind(source)
    .bind(id)
    .bind(topic)
    .bind(data)
    .bind(principal)
    .bind(hops)
    .bind(*at_ms as i64)
    .bind(now_ms as i64)
    .fetch_optional(&mut *connection)
    .await
    .map_err(StoreError::while_it("wrote an event"))?;
    let Some(key) = key else { return Ok(Published::Known) };
    for delivery in deliveries {
        deliveries::insert(connection, key, delivery, now_ms).await?;
    }
    Ok(Published::New)
}

/// Times of day before which events are old.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    now_ms: u64,
    /// The limit for events without open or dead deliveries, of which only the id is still needed.
    ids_ms: u64,
    /// The limit for dead letters.
    dead_ms: u64,
}

impl Bounds {
    /// Computes the limits. `before` returns the time of day that lies this many milliseconds in the past.
    pub(crate) fn of(before: impl Fn(u64) -> u64) -> Self {
        Bounds { now_ms: before(0), ids_ms: before(EVENT_IDS_KEPT_MS), dead_ms: before(DEAD_KEPT_MS) }
    }
}

/// The result of one search for old events.
pub(crate) struct Pruned {
    pub gone: u64,
    /// Whether the search reached the end, or only events that are all young. The next search then starts
    /// over.
    pub is_through: bool,
}

/// Checks some events, starting where the last search stopped, and removes the old ones.
pub(crate) async fn prune(connection: &mut Connection, bounds: Bounds) -> Result<Pruned, StoreError> {
    let failed = || StoreError::while_it("removed old events");
    let after = format!("SELECT after_key FROM event_pruning {}", connection.dialect().skip_locked());
    let after: Option<i64> =
        query_scalar(AssertSqlSafe(after)).fetch_optional(&mut *connection).await.map_err(failed())?;
    // Another host is looking for old events.
    let Some(after) = after else { return Ok(Pruned { gone: 0, is_through: true }) };
    let looked_at = query(
        // After the clock was set back, events with a time in the future lie before older ones.
        "SELECT COUNT(*), COUNT(*) FILTER (WHERE published_at_ms < ?1 OR published_at_ms > ?2), coalesce(MAX(key), 0)
         FROM (SELECT key, published_at_ms FROM events WHERE key > ?3 ORDER BY key LIMIT ?4) AS next",
    )
    .bind(bounds.ids_ms as i64)
    .bind(bounds.now_ms as i64)
    .bind(after)
    .bind(EVENTS_LOOKED_AT)
    .fetch_one(&mut *connection)
    .await
    .map_err(failed())?;
    let (events, not_young, last): (i64, i64, i64) = (looked_at.get(0), looked_at.get(1), looked_at.get(2));
    let gone = query(
        "DELETE FROM events WHERE key > ?1 AND key <= ?2 AND published_at_ms < ?3
         AND NOT EXISTS (SELECT 1 FROM deliveries WHERE event = events.key AND (state != 2 OR published_at_ms >= ?4))",
    )
    .bind(after)
    .bind(last)
    .bind(bounds.ids_ms as i64)
    .bind(bounds.dead_ms as i64)
    .execute(&mut *connection)
    .await
    .map_err(failed())?;
    let is_through = events < EVENTS_LOOKED_AT || not_young == 0;
    let next = if is_through { 0 } else { last };
    if next != after {
        let moved = query("UPDATE event_pruning SET after_key = ?").bind(next).execute(connection).await;
        moved.map_err(failed())?;
    }
    Ok(Pruned { gone: gone.rows_affected(), is_through })
}

fn event_row(row: &Row) -> EventRow {
    EventRow {
        key: row.get(0),
        source: row.get(1),
        id: row.get(2),
        topic: row.get(3),
        data: row.get(4),
        hops: row.get(5),
        at_ms: row.get::<i64>(6) as u64,
        published_at_ms: row.get::<i64>(7) as u64,
        pending: row.get(8),
        dead: row.get(9),
    }
}
