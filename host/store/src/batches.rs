//! Batches: requests that wait until there is room for them, and their results until they are fetched.
//!
//! A batch ends, with its event, in a transaction of its own after the last of its items (see [`crate::batch_items`]);
//! one that ended is forgotten after a while.

use crate::{NewEvent, Store, StoreError, events};
use sqlx::{QueryBuilder, Row, Sqlite, query, query_scalar, sqlite::SqliteRow};

/// Bounds on what is stored of all batches together.
#[derive(Clone, Copy, Debug)]
pub struct BatchRoom {
    /// Requests and results.
    pub bytes: u64,
    /// Batches, ended ones included.
    pub batches: u64,
}

/// A batch to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBatch {
    /// How clients know it; unique.
    pub id: String,
    pub principal: String,
    pub model: String,
    pub at_ms: u64,
    pub items: Vec<NewItem>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewItem {
    pub request: Vec<u8>,
    /// The client's own name for it.
    pub reference: Option<String>,
}

/// What became of a batch that was offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queued {
    New,
    /// There is no room; nothing was written.
    Full,
}

/// A batch as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRow {
    pub id: String,
    pub principal: String,
    pub model: String,
    pub created_at_ms: u64,
    pub started_at_ms: Option<u64>,
    pub ended_at_ms: Option<u64>,
    pub cancelled: bool,
    pub items: ItemCounts,
}

/// Items of a batch, or of all, by how they stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ItemCounts {
    pub waiting: u64,
    pub running: u64,
    pub done: u64,
    pub failed: u64,
    pub cancelled: u64,
}

/// What is stored of an item for its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ItemRow {
    pub position: u64,
    pub reference: Option<String>,
    pub state: ItemState,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ItemState {
    Waiting,
    Running,
    Done(Vec<u8>),
    Failed(Vec<u8>),
    Cancelled,
}

/// Everything that waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueDepth {
    pub waiting: u64,
    /// When the oldest of them was stored.
    pub oldest_ms: Option<u64>,
}

pub(crate) const WAITING: i64 = 0;
pub(crate) const RUNNING: i64 = 1;
pub(crate) const DONE: i64 = 2;
pub(crate) const FAILED: i64 = 3;
pub(crate) const CANCELLED: i64 = 4;
/// Ended batches that are forgotten at once, so that no submission waits long for it.
const MAX_FORGOTTEN: u32 = 16;

impl Store {
    /// Makes a batch durable with the event that tells of it, if there is room for it among all others.
    pub async fn queue_batch(
        &self,
        batch: &NewBatch,
        room: BatchRoom,
        event: Option<&NewEvent>,
    ) -> Result<Queued, StoreError> {
        let failed = || StoreError::while_it("stored a batch");
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        let stored = query("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM batches")
            .fetch_one(&mut *transaction)
            .await
            .map_err(failed())?;
        let bytes: u64 = batch.items.iter().map(NewItem::bytes).sum();
        let (batches, stored_bytes) = (stored.get::<i64, _>(0) as u64, stored.get::<i64, _>(1) as u64);
        if batches >= room.batches || stored_bytes + bytes > room.bytes {
            return Ok(Queued::Full);
        }
        let key: i64 = query_scalar(
            "INSERT INTO batches (id, principal, model, created_at_ms, bytes, running, cancelled)
             VALUES (?, ?, ?, ?, ?, 0, FALSE) RETURNING key",
        )
        .bind(&batch.id)
        .bind(&batch.principal)
        .bind(&batch.model)
        .bind(batch.at_ms as i64)
        .bind(bytes as i64)
        .fetch_one(&mut *transaction)
        .await
        .map_err(failed())?;
        // SQLite bounds the parameters of one statement.
        let numbered: Vec<(usize, &NewItem)> = batch.items.iter().enumerate().collect();
        for chunk in numbered.chunks(1000) {
            let mut insert = QueryBuilder::<Sqlite>::new(
                "INSERT INTO batch_items (batch, position, reference, request, state, failures, losses, wake_ms) ",
            );
            insert.push_values(chunk, |mut row, (position, item)| {
                row.push_bind(key)
                    .push_bind(*position as i64)
                    .push_bind(&item.reference)
                    .push_bind(&item.request)
                    .push_bind(WAITING)
                    .push_bind(0)
                    .push_bind(0)
                    .push_bind(0);
            });
            insert.build().execute(&mut *transaction).await.map_err(failed())?;
        }
        if let Some(event) = event {
            events::insert(&mut transaction, event, batch.at_ms).await?;
        }
        transaction.commit().await.map_err(failed())?;
        Ok(Queued::New)
    }

    /// Cancels what has not ended of a batch. Items that run count as cancelled; whoever runs them finds out.
    pub async fn cancel_batch(&self, id: &str) -> Result<(), StoreError> {
        let failed = || StoreError::while_it("cancelled a batch");
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        let key: Option<i64> = query_scalar(
            "UPDATE batches SET cancelled = TRUE, running = 0 WHERE id = ? AND ended_at_ms IS NULL RETURNING key",
        )
        .bind(id)
        .fetch_optional(&mut *transaction)
        .await
        .map_err(failed())?;
        query("UPDATE batch_items SET state = ? WHERE batch = ? AND state IN (0, 1)")
            .bind(CANCELLED)
            .bind(key)
            .execute(&mut *transaction)
            .await
            .map_err(failed())?;
        transaction.commit().await.map_err(failed())
    }

    /// Batches of which no item is left, and which have not been ended yet.
    pub async fn finished_batches(&self) -> Result<Vec<BatchRow>, StoreError> {
        let rows = query(
            "SELECT key FROM batches WHERE ended_at_ms IS NULL
             AND NOT EXISTS (SELECT 1 FROM batch_items WHERE batch = key AND state = 0)
             AND NOT EXISTS (SELECT 1 FROM batch_items WHERE batch = key AND state = 1) ORDER BY key",
        )
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("looked for batches that are done"))?;
        let mut found = Vec::with_capacity(rows.len());
        for row in rows {
            found.extend(self.batch_by_key(row.get(0)).await?);
        }
        Ok(found)
    }

    /// Ends a batch of which no item is left, and writes the event that tells of it. False: it had ended before, and
    /// nothing was written.
    pub async fn end_batch(
        &self,
        id: &str,
        now_ms: u64,
        event: Option<&NewEvent>,
    ) -> Result<bool, StoreError> {
        let failed = || StoreError::while_it("ended a batch");
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        let ended = query("UPDATE batches SET ended_at_ms = ? WHERE id = ? AND ended_at_ms IS NULL")
            .bind(now_ms as i64)
            .bind(id)
            .execute(&mut *transaction)
            .await
            .map_err(failed())?;
        if ended.rows_affected() == 0 {
            return Ok(false);
        }
        if let Some(event) = event {
            events::insert(&mut transaction, event, now_ms).await?;
        }
        transaction.commit().await.map_err(failed())?;
        Ok(true)
    }

    /// Removes batches that ended before `before_ms`, a few at once. How many it were.
    pub async fn forget_batches(&self, before_ms: u64) -> Result<u64, StoreError> {
        let forgotten = query(
            "DELETE FROM batches WHERE key IN
             (SELECT key FROM batches WHERE ended_at_ms < ? ORDER BY ended_at_ms LIMIT ?)",
        )
        .bind(before_ms as i64)
        .bind(MAX_FORGOTTEN)
        .execute(&self.writer)
        .await
        .map_err(StoreError::while_it("removed old batches"))?;
        Ok(forgotten.rows_affected())
    }

    pub async fn batch(&self, id: &str) -> Result<Option<BatchRow>, StoreError> {
        let key = query_scalar("SELECT key FROM batches WHERE id = ?")
            .bind(id)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for a batch"))?;
        match key {
            Some(key) => self.batch_by_key(key).await,
            None => Ok(None),
        }
    }

    async fn batch_by_key(&self, key: i64) -> Result<Option<BatchRow>, StoreError> {
        let row = query(
            "SELECT id, principal, model, created_at_ms, started_at_ms, ended_at_ms, cancelled,
                 SUM(state = 0), SUM(state = 1), SUM(state = 2), SUM(state = 3), SUM(state = 4)
             FROM batches JOIN batch_items ON batch = key WHERE key = ? GROUP BY key",
        )
        .bind(key)
        .fetch_optional(&self.readers)
        .await
        .map_err(StoreError::while_it("read a batch"))?;
        Ok(row.as_ref().map(batch_row))
    }

    /// The items of a batch, in its order.
    pub async fn batch_items(&self, id: &str) -> Result<Vec<ItemRow>, StoreError> {
        let rows = query(
            "SELECT position, reference, state, result FROM batch_items
             WHERE batch = (SELECT key FROM batches WHERE id = ?) ORDER BY position",
        )
        .bind(id)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("read the items of a batch"))?;
        Ok(rows.iter().map(item_row).collect())
    }

    /// What waits, of all batches.
    pub async fn queue_depth(&self) -> Result<QueueDepth, StoreError> {
        let row = query(
            "SELECT (SELECT COUNT(*) FROM batch_items WHERE state = 0),
                 (SELECT MIN(created_at_ms) FROM batches WHERE ended_at_ms IS NULL
                  AND EXISTS (SELECT 1 FROM batch_items WHERE batch = key AND state = 0))",
        )
        .fetch_one(&self.readers)
        .await
        .map_err(StoreError::while_it("counted what waits in batches"))?;
        let oldest: Option<i64> = row.get(1);
        Ok(QueueDepth { waiting: row.get::<i64, _>(0) as u64, oldest_ms: oldest.map(|at| at as u64) })
    }
}

impl NewItem {
    fn bytes(&self) -> u64 {
        (self.request.len() + self.reference.as_ref().map_or(0, String::len)) as u64
    }
}

impl ItemCounts {
    pub fn total(&self) -> u64 {
        self.waiting + self.running + self.done + self.failed + self.cancelled
    }
}

fn batch_row(row: &SqliteRow) -> BatchRow {
    let time = |column: usize| row.get::<Option<i64>, _>(column).map(|at| at as u64);
    let count = |column: usize| row.get::<i64, _>(column) as u64;
    BatchRow {
        id: row.get(0),
        principal: row.get(1),
        model: row.get(2),
        created_at_ms: count(3),
        started_at_ms: time(4),
        ended_at_ms: time(5),
        cancelled: row.get(6),
        items: ItemCounts {
            waiting: count(7),
            running: count(8),
            done: count(9),
            failed: count(10),
            cancelled: count(11),
        },
    }
}

fn item_row(row: &SqliteRow) -> ItemRow {
    let result = || row.get::<Option<Vec<u8>>, _>(3).unwrap_or_default();
    ItemRow {
        position: row.get::<i64, _>(0) as u64,
        reference: row.get(1),
        state: match row.get(2) {
            RUNNING => ItemState::Running,
            DONE => ItemState::Done(result()),
            FAILED => ItemState::Failed(result()),
            CANCELLED => ItemState::Cancelled,
            _ => ItemState::Waiting,
        },
    }
}
