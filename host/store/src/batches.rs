//! Batches: requests that wait until there is room for them, and their results until they are fetched.
//!
//! An item is taken, and ends once: a result is written only to an item that is taken. What was taken when the process
//! ended is given back when the next one starts. A batch ends, with its event, in a transaction of its own after the
//! last of its items; one that ended is forgotten after a while.

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

/// How the store knows an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ItemKey {
    pub(crate) batch: i64,
    pub(crate) position: i64,
}

/// An item that was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakenItem {
    pub key: ItemKey,
    pub batch: String,
    /// Its place in the batch, from 0.
    pub position: u64,
    pub principal: String,
    pub model: String,
    pub request: Vec<u8>,
    /// How often it failed before.
    pub failures: u32,
    /// How long it waited since its batch was stored.
    pub queued_at_ms: u64,
}

/// What there is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Take {
    Item(Box<TakenItem>),
    /// Nothing yet; something can be tried again at this time.
    Later(u64),
    Nothing,
}

/// What became of an item that was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ItemEnd {
    Done(Vec<u8>),
    /// For good.
    Failed(Vec<u8>),
    /// It failed, and is tried again at this time.
    Again {
        wake_ms: u64,
    },
    /// It was not its fault; it waits as before.
    GivenBack {
        wake_ms: u64,
    },
}

/// What an item's end means for its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ItemEnded {
    OthersLeft,
    /// No item of its batch is left; the batch can be ended.
    Last,
    /// It is not taken any more, because its batch was cancelled; nothing was written.
    NotTaken,
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

const WAITING: i64 = 0;
const RUNNING: i64 = 1;
const DONE: i64 = 2;
const FAILED: i64 = 3;
const CANCELLED: i64 = 4;
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

    /// Takes the next item for one of these models: of the batch that has the fewest under way, so that a large batch
    /// does not hold up a small one; of several, the oldest.
    pub async fn take_item(&self, models: &[String], now_ms: u64) -> Result<Take, StoreError> {
        let failed = || StoreError::while_it("took an item of a batch");
        if models.is_empty() {
            return Ok(Take::Nothing);
        }
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        let among = |sql: &str, rest: &str| {
            let mut query = QueryBuilder::<Sqlite>::new(sql);
            let mut list = query.separated(", ");
            models.iter().for_each(|model| _ = list.push_bind(model.clone()));
            query.push(rest);
            query
        };
        let next = among(
            "SELECT key, id, principal, model, created_at_ms FROM batches WHERE ended_at_ms IS NULL AND model IN (",
            ") AND EXISTS (SELECT 1 FROM batch_items WHERE batch = key AND state = 0 AND wake_ms <= ",
        )
        .push_bind(now_ms as i64)
        .push(") ORDER BY running, key LIMIT 1")
        .build()
        .fetch_optional(&mut *transaction)
        .await
        .map_err(failed())?;
        let Some(batch) = next else {
            let wake: Option<i64> = among(
                "SELECT MIN(wake_ms) FROM batch_items JOIN batches ON batch = key WHERE state = 0 AND model IN (",
                ")",
            )
            .build_query_scalar()
            .fetch_one(&mut *transaction)
            .await
            .map_err(failed())?;
            return Ok(wake.map_or(Take::Nothing, |wake| Take::Later(wake as u64)));
        };
        let key: i64 = batch.get(0);
        let item = query(
            "UPDATE batch_items SET state = ?1 WHERE batch = ?2 AND position =
                 (SELECT position FROM batch_items WHERE batch = ?2 AND state = 0 AND wake_ms <= ?3
                  ORDER BY position LIMIT 1)
             RETURNING position, request, failures",
        )
        .bind(RUNNING)
        .bind(key)
        .bind(now_ms as i64)
        .fetch_one(&mut *transaction)
        .await
        .map_err(failed())?;
        query("UPDATE batches SET running = running + 1, started_at_ms = COALESCE(started_at_ms, ?) WHERE key = ?")
            .bind(now_ms as i64)
            .bind(key)
            .execute(&mut *transaction)
            .await
            .map_err(failed())?;
        transaction.commit().await.map_err(failed())?;
        let position: i64 = item.get(0);
        Ok(Take::Item(Box::new(TakenItem {
            key: ItemKey { batch: key, position },
            batch: batch.get(1),
            position: position as u64,
            principal: batch.get(2),
            model: batch.get(3),
            request: item.get(1),
            failures: item.get(2),
            queued_at_ms: batch.get::<i64, _>(4) as u64,
        })))
    }

    /// Ends an item that was taken, or gives it back.
    pub async fn end_item(&self, key: ItemKey, end: &ItemEnd) -> Result<ItemEnded, StoreError> {
        let failed = || StoreError::while_it("ended an item of a batch");
        let (state, result, failures, wake_ms) = match end {
            ItemEnd::Done(result) => (DONE, Some(result), 0, 0),
            ItemEnd::Failed(error) => (FAILED, Some(error), 1, 0),
            ItemEnd::Again { wake_ms } => (WAITING, None, 1, *wake_ms),
            ItemEnd::GivenBack { wake_ms } => (WAITING, None, 0, *wake_ms),
        };
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        let ended = query(
            "UPDATE batch_items SET state = ?, result = ?, failures = failures + ?, wake_ms = ?
             WHERE batch = ? AND position = ? AND state = ?",
        )
        .bind(state)
        .bind(result)
        .bind(failures)
        .bind(wake_ms as i64)
        .bind(key.batch)
        .bind(key.position)
        .bind(RUNNING)
        .execute(&mut *transaction)
        .await
        .map_err(failed())?;
        if ended.rows_affected() == 0 {
            return Ok(ItemEnded::NotTaken);
        }
        let has_more: bool = query_scalar(
            "UPDATE batches SET running = running - 1, bytes = bytes + ?2 WHERE key = ?1
             RETURNING EXISTS (SELECT 1 FROM batch_items WHERE batch = ?1 AND state = 0)
                 OR EXISTS (SELECT 1 FROM batch_items WHERE batch = ?1 AND state = 1)",
        )
        .bind(key.batch)
        .bind(result.map_or(0, |result| result.len() as i64))
        .fetch_one(&mut *transaction)
        .await
        .map_err(failed())?;
        transaction.commit().await.map_err(failed())?;
        Ok(if has_more { ItemEnded::OthersLeft } else { ItemEnded::Last })
    }

    /// Gives back what was taken when the last process ended: it waits again. What has been lost so often that it may be
    /// what ends processes fails with `error`.
    pub async fn recover_items(&self, max_losses: u32, error: &[u8]) -> Result<u64, StoreError> {
        let failed = || StoreError::while_it("gave back the items of batches");
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        let lost = query(
            "UPDATE batch_items SET losses = losses + 1, wake_ms = 0,
                 state = CASE WHEN losses + 1 >= ?1 THEN ?2 ELSE ?3 END,
                 result = CASE WHEN losses + 1 >= ?1 THEN ?4 END
             WHERE state = ?5",
        )
        .bind(max_losses)
        .bind(FAILED)
        .bind(WAITING)
        .bind(error)
        .bind(RUNNING)
        .execute(&mut *transaction)
        .await
        .map_err(failed())?;
        query("UPDATE batches SET running = 0 WHERE running != 0")
            .execute(&mut *transaction)
            .await
            .map_err(failed())?;
        transaction.commit().await.map_err(failed())?;
        Ok(lost.rows_affected())
    }

    /// Gives back, blameless, everything that is taken: this process ends in order.
    pub async fn give_back_items(&self) -> Result<(), StoreError> {
        let failed = || StoreError::while_it("gave back the items of batches");
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        for sql in [
            "UPDATE batch_items SET state = 0 WHERE state = 1",
            "UPDATE batches SET running = 0 WHERE running != 0",
        ] {
            query(sql).execute(&mut *transaction).await.map_err(failed())?;
        }
        transaction.commit().await.map_err(failed())
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
