//! Batches: requests that wait until there is room for them, and their results until they are fetched.
//!
//! A batch finishes, with its event, in a separate transaction after the last of its items (see
//! [`crate::batch_items`]). Finished batches are removed after a while. [`crate::batch_rows`] creates and
//! removes them.

use crate::{
    NewEvent, Store, StoreError, events, responses, rows,
    sql::{Connection, QueryBuilder, Row, query, query_scalar},
    work_states::{CANCELLED, DONE, FAILED, RUNNING},
};
use std::collections::BTreeSet;

/// Limits on the storage of all batches together.
#[derive(Clone, Copy, Debug)]
pub struct BatchRoom {
    /// Maximum number of bytes of requests and results.
    pub bytes: u64,
    /// Maximum number of batches, including finished ones.
    pub batches: u64,
    /// A tenant may hold at most this many times the free amount; `None` if there is only one tenant.
    pub share: Option<u64>,
}

impl BatchRoom {
    /// Returns whether there is room for one more of this size. `all` and `own` are the number and the bytes of those that are
    /// stored, and of the tenant's among them.
    pub(crate) fn admits(&self, all: (u64, u64), own: (u64, u64), bytes: u64) -> bool {
        if all.0 >= self.batches || all.1 + bytes > self.bytes {
            return false;
        }
        self.share.is_none_or(|share| {
            let free_bytes = self.bytes - all.1 - bytes;
            own.0 < share * (self.batches - all.0) && own.1 + bytes <= share.saturating_mul(free_bytes)
        })
    }
}

/// A batch to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBatch {
    /// The unique id by which clients know the batch.
    pub id: String,
    pub principal: String,
    pub model: String,
    pub at_ms: u64,
    pub items: Vec<NewItem>,
    pub terms: BatchTerms,
}

/// The part of a batch that its client's API adds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchTerms {
    /// A JSON object, which has no meaning here.
    pub details: Option<String>,
    /// The time at which the batch is cancelled if it has not ended.
    pub expires_at_ms: Option<u64>,
    /// The time for which the batch is kept after its end; `None` for that of all batches.
    pub keep_ms: Option<u64>,
}

/// A request of a new batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewItem {
    /// The encoded request, which has no meaning here.
    pub request: Vec<u8>,
    /// The client's own name for the item.
    pub reference: Option<String>,
}

/// The outcome of submitting a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queued {
    New,
    /// There is no room. Nothing was written.
    Full,
}

/// A stored batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRow {
    pub id: String,
    pub principal: String,
    pub model: String,
    pub created_at_ms: u64,
    pub started_at_ms: Option<u64>,
    pub ended_at_ms: Option<u64>,
    pub cancelled: bool,
    /// Whether the batch was cancelled because its time was over.
    pub expired: bool,
    pub terms: BatchTerms,
    pub items: ItemCounts,
}

/// Number of items of a batch, or of all batches, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ItemCounts {
    pub waiting: u64,
    pub running: u64,
    pub done: u64,
    pub failed: u64,
    pub cancelled: u64,
}

/// The part of an item that its client sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ItemRow {
    pub position: u64,
    pub reference: Option<String>,
    pub state: ItemState,
}

/// The state of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ItemState {
    /// The item waits for room.
    Waiting,
    /// A host computes the item.
    Running,
    /// The item succeeded, with this encoded answer.
    Done(Vec<u8>),
    /// The item failed permanently, with this encoded error.
    Failed(Vec<u8>),
    /// The item was cancelled before it ended.
    Cancelled,
}

/// All waiting items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueDepth {
    pub waiting: u64,
    /// The time at which the oldest of them was stored.
    pub oldest_ms: Option<u64>,
}

impl Store {
    /// Returns batches without unfinished items that have not been finished themselves.
    pub async fn finished_batches(&self) -> Result<Vec<BatchRow>, StoreError> {
        let rows = query(
            "SELECT key FROM batches WHERE ended_at_ms IS NULL AND complete AND (cancelled OR NOT held)
             AND NOT EXISTS (SELECT 1 FROM batch_items WHERE batch = key AND state = 0)
             AND NOT EXISTS (SELECT 1 FROM batch_items WHERE batch = key AND state = 1) ORDER BY key",
        )
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("looked for batches that can be finished"))?;
        let mut found = Vec::with_capacity(rows.len());
        for row in rows {
            match self.batch_by_key(row.get(0)).await {
                Err(error @ StoreError::Unreadable { .. }) => tracing::error!("{error}; it is skipped"),
                batch => found.extend(batch?),
            }
        }
        Ok(found)
    }

    /// Finishes a batch without unfinished items, ends the response that it produced, if any, and writes the event
    /// that announces it. Returns `false` if the batch had finished before; then nothing is written.
    pub async fn end_batch(
        &self,
        id: &str,
        now_ms: u64,
        event: Option<&NewEvent>,
    ) -> Result<bool, StoreError> {
        self.write_common((id.to_owned(), now_ms, event.cloned()), |connection, (id, now_ms, event)| {
            Box::pin(end(connection, id, *now_ms, event.as_ref()))
        })
        .await
    }

    /// Returns a batch, unless it was removed or its items are still being written.
    pub async fn batch(&self, id: &str) -> Result<Option<BatchRow>, StoreError> {
        let key = query_scalar("SELECT key FROM batches WHERE id = ? AND complete")
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
                 COUNT(*) FILTER (WHERE state = 0), COUNT(*) FILTER (WHERE state = 1), COUNT(*) FILTER (WHERE state = 2),
                 COUNT(*) FILTER (WHERE state = 3), COUNT(*) FILTER (WHERE state = 4), expired, details, expires_at_ms,
                 keep_ms
             FROM batches LEFT JOIN batch_items ON batch = key WHERE key = ? GROUP BY key",
        )
        .bind(key)
        .fetch_optional(&self.readers)
        .await
        .map_err(StoreError::while_it("read a batch"))?;
        row.map(|row| rows::one(&row, "batch", batch_row)).transpose()
    }

    /// Returns batches of this principal that have details, the newest first, before the batch with the id `before`.
    pub async fn detailed_batches(
        &self,
        principal: &str,
        before: Option<&str>,
        limit: u32,
    ) -> Result<Vec<BatchRow>, StoreError> {
        let keys: Vec<i64> = query_scalar(
            "SELECT key FROM batches WHERE principal = ?1 AND details IS NOT NULL AND complete
             AND (?2 IS NULL OR key < (SELECT key FROM batches WHERE id = ?2)) ORDER BY key DESC LIMIT ?3",
        )
        .bind(principal)
        .bind(before)
        .bind(limit)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed batches"))?;
        let mut found = Vec::with_capacity(keys.len());
        for key in keys {
            found.extend(self.batch_by_key(key).await?);
        }
        Ok(found)
    }

    /// Returns the ids of batches whose time is over and that have not ended.
    pub async fn overdue_batches(&self, now_ms: u64) -> Result<Vec<String>, StoreError> {
        query_scalar(
            "SELECT id FROM batches WHERE expires_at_ms <= ? AND ended_at_ms IS NULL AND complete AND NOT cancelled",
        )
        .bind(now_ms as i64)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("looked for batches whose time is over"))
    }

    /// Returns those of these batches that no longer run: they were cancelled, have ended, or were removed.
    pub async fn stopped_batches(&self, ids: BTreeSet<String>) -> Result<BTreeSet<String>, StoreError> {
        if ids.is_empty() {
            return Ok(ids);
        }
        let mut select = QueryBuilder::new(
            "SELECT id FROM batches WHERE ended_at_ms IS NULL AND NOT cancelled AND id IN (",
        );
        let mut list = select.separated(", ");
        ids.iter().for_each(|id| _ = list.push_bind(id));
        select.push(")");
        let open = select.build().fetch_all(&self.readers).await;
        let open = open.map_err(StoreError::while_it("looked for batches that were cancelled"))?;
        let open: BTreeSet<String> = open.iter().map(|row| row.get(0)).collect();
        Ok(ids.difference(&open).cloned().collect())
    }

    /// Changes members of the details of a batch, as an RFC 7396 merge patch.
    pub async fn patch_batch_details(&self, id: &str, patch: &str) -> Result<(), StoreError> {
        self.write_common((id.to_owned(), patch.to_owned()), |connection, (id, patch)| {
            Box::pin(async move {
                query("UPDATE batches SET details = json_patch(details, ?) WHERE id = ? AND details IS NOT NULL")
                    .bind(patch.as_str())
                    .bind(id.as_str())
                    .execute(connection)
                    .await
                    .map_err(StoreError::while_it("changed the details of a batch"))?;
                Ok(())
            })
        })
        .await
    }

    /// Returns the items of a batch, in order.
    pub async fn batch_items(&self, id: &str) -> Result<Vec<ItemRow>, StoreError> {
        let rows = query(
            "SELECT position, reference, state, result FROM batch_items
             WHERE batch = (SELECT key FROM batches WHERE id = ?) ORDER BY position",
        )
        .bind(id)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("read the items of a batch"))?;
        rows.iter().map(|row| rows::one(row, "batch item", item_row)).collect()
    }

    /// Returns the number of waiting items of all batches, and their age.
    pub async fn queue_depth(&self) -> Result<QueueDepth, StoreError> {
        let row = query(
            "SELECT (SELECT COUNT(*) FROM batch_items WHERE state = 0),
                 (SELECT MIN(created_at_ms) FROM batches WHERE ended_at_ms IS NULL
                  AND EXISTS (SELECT 1 FROM batch_items WHERE batch = key AND state = 0))",
        )
        .fetch_one(&self.readers)
        .await
        .map_err(StoreError::while_it("counted waiting batch items"))?;
        let oldest: Option<i64> = row.get(1);
        Ok(QueueDepth { waiting: row.get::<i64>(0) as u64, oldest_ms: oldest.map(|at| at as u64) })
    }
}

async fn end(
    connection: &mut Connection,
    id: &str,
    now_ms: u64,
    event: Option<&NewEvent>,
) -> Result<bool, StoreError> {
    let failed = || StoreError::while_it("finished a batch");
    let ended = query("UPDATE batches SET ended_at_ms = ? WHERE id = ? AND ended_at_ms IS NULL")
        .bind(now_ms as i64)
        .bind(id)
        .execute(&mut *connection)
        .await
        .map_err(failed())?;
    if ended.rows_affected() == 0 {
        return Ok(false);
    }
    responses::end(connection, id, now_ms).await?;
    if let Some(event) = event {
        events::insert(connection, event, now_ms).await?;
    }
    Ok(true)
}

impl NewItem {
    pub(crate) fn bytes(&self) -> u64 {
        (self.request.len() + self.reference.as_ref().map_or(0, String::len)) as u64
    }
}

impl ItemCounts {
    /// Returns the number of items in all states.
    pub fn total(&self) -> u64 {
        self.waiting + self.running + self.done + self.failed + self.cancelled
    }
}

fn batch_row(row: &Row) -> Result<BatchRow, sqlx::Error> {
    let time = |column: usize| Ok::<_, sqlx::Error>(row.try_get::<Option<i64>>(column)?.map(|at| at as u64));
    let count = |column: usize| Ok::<_, sqlx::Error>(row.try_get::<i64>(column)? as u64);
    Ok(BatchRow {
        id: row.try_get(0)?,
        principal: row.try_get(1)?,
        model: row.try_get(2)?,
        created_at_ms: count(3)?,
        started_at_ms: time(4)?,
        ended_at_ms: time(5)?,
        cancelled: row.try_get(6)?,
        expired: row.try_get(12)?,
        terms: BatchTerms { details: row.try_get(13)?, expires_at_ms: time(14)?, keep_ms: time(15)? },
        items: ItemCounts {
            waiting: count(7)?,
            running: count(8)?,
            done: count(9)?,
            failed: count(10)?,
            cancelled: count(11)?,
        },
    })
}

fn item_row(row: &Row) -> Result<ItemRow, sqlx::Error> {
    let result = || Ok::<_, sqlx::Error>(row.try_get::<Option<Vec<u8>>>(3)?.unwrap_or_default());
    Ok(ItemRow {
        position: row.try_get::<i64>(0)? as u64,
        reference: row.try_get(1)?,
        state: match row.try_get(2)? {
            RUNNING => ItemState::Running,
            DONE => ItemState::Done(result()?),
            FAILED => ItemState::Failed(result()?),
            CANCELLED => ItemState::Cancelled,
            _ => ItemState::Waiting,
        },
    })
}
