//! The outbox: events with where they are to go, written in the transaction of what made them happen.
//!
//! An event is known by its source and its id, and written once, as long as it is kept.

use crate::{NewDelivery, Store, StoreError, deliveries};
use sqlx::{Row, SqliteConnection, query, query_scalar, sqlite::SqliteRow};

/// An event whose deliveries are over is kept for this long, so that the same one is not taken again.
pub const EVENT_IDS_KEPT_MS: u64 = 24 * 3600 * 1000;
/// Deliveries that failed for good are kept for this long.
pub(crate) const DEAD_KEPT_MS: u64 = 30 * 24 * 3600 * 1000;
/// Old ones are looked for once in so many events.
const EVENTS_BETWEEN_PRUNING: i64 = 64;
/// That are looked at then, so that no commit waits long for it.
const EVENTS_LOOKED_AT: i64 = 256;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEvent {
    /// Who says so; with the id it is unique.
    pub source: String,
    pub id: String,
    pub topic: String,
    pub data: Option<Vec<u8>>,
    /// On whose behalf.
    pub principal: String,
    /// How many events led to it, one after the other.
    pub hops: u32,
    pub at_ms: u64,
    pub deliveries: Vec<NewDelivery>,
}

/// What became of an event that was published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    New,
    /// The same one was published before; nothing was written.
    Known,
}

/// An event as it is stored, and how its deliveries stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventRow {
    /// Grows.
    pub key: i64,
    pub source: String,
    pub id: String,
    pub topic: String,
    pub data: Option<Vec<u8>>,
    pub hops: u32,
    pub at_ms: u64,
    pub published_at_ms: u64,
    /// Deliveries that are still tried.
    pub pending: u32,
    /// Deliveries that failed for good.
    pub dead: u32,
}

impl Store {
    /// Makes an event durable, with its deliveries.
    pub async fn publish(&self, event: &NewEvent, now_ms: u64) -> Result<Published, StoreError> {
        self.write((event.clone(), now_ms), |connection, (event, now_ms)| {
            Box::pin(insert(connection, event, *now_ms))
        })
        .await
    }

    /// The newest events, those before the key `before` if it is given.
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
    connection: &mut SqliteConnection,
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
    if key % EVENTS_BETWEEN_PRUNING == 0 {
        prune(connection, Bounds::of(|kept_ms| now_ms.saturating_sub(kept_ms))).await?;
    }
    Ok(Published::New)
}

/// Times of day before which events are old.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    now_ms: u64,
    /// The bound for events that are only ids.
    ids_ms: u64,
    /// The bound for dead letters.
    dead_ms: u64,
}

impl Bounds {
    /// `before` gives the time of day from which on so many milliseconds went by.
    pub(crate) fn of(before: impl Fn(u64) -> u64) -> Self {
        Bounds { now_ms: before(0), ids_ms: before(EVENT_IDS_KEPT_MS), dead_ms: before(DEAD_KEPT_MS) }
    }
}

/// What one look for old events did.
pub(crate) struct Pruned {
    pub gone: u64,
    /// It came to the end, or to events that are all young; the next look begins anew.
    pub is_through: bool,
}

/// Looks at some events, from where the last look ended, and removes the old ones.
pub(crate) async fn prune(connection: &mut SqliteConnection, bounds: Bounds) -> Result<Pruned, StoreError> {
    let failed = || StoreError::while_it("removed old events");
    let after: i64 = query_scalar("SELECT after_key FROM event_pruning")
        .fetch_one(&mut *connection)
        .await
        .map_err(failed())?;
    let looked_at = query(
        // Events of a future that a clock which was set back took away lie before others that are old.
        "SELECT COUNT(*), coalesce(SUM(published_at_ms < ?1 OR published_at_ms > ?2), 0), coalesce(MAX(key), 0)
         FROM (SELECT key, published_at_ms FROM events WHERE key > ?3 ORDER BY key LIMIT ?4)",
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

fn event_row(row: &SqliteRow) -> EventRow {
    EventRow {
        key: row.get(0),
        source: row.get(1),
        id: row.get(2),
        topic: row.get(3),
        data: row.get(4),
        hops: row.get(5),
        at_ms: row.get::<i64, _>(6) as u64,
        published_at_ms: row.get::<i64, _>(7) as u64,
        pending: row.get(8),
        dead: row.get(9),
    }
}
