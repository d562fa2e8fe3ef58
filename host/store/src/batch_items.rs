//! The items of batches while they are processed.
//!
//! An item is taken and finishes once: a result is written only to an item that this host has taken. Items that were
//! taken when a host terminated are given back when the next one starts. Hosts that take items at the same time get
//! different ones, and one of them finds that an item was the last of its batch.

use crate::work_states::{DONE, FAILED, RUNNING, WAITING};
use crate::{
    Store, StoreError,
    hosts::{HostNumber, is_left},
    sql::{AssertSqlSafe, Connection, QueryBuilder, Row, Target, query, query_as, query_scalar},
};
use std::collections::BTreeMap;

/// The key of an item.
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
    /// Position of the item in its batch, from 0.
    pub position: u64,
    pub principal: String,
    pub model: String,
    pub request: Vec<u8>,
    /// Number of earlier failures.
    pub failures: u32,
    /// The time at which its batch was stored, from which its waiting time counts.
    pub queued_at_ms: u64,
}

/// A tenant with running items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BusyTenant {
    pub principal: String,
    pub running: usize,
    /// Whether the tenant has used up its share, so that it gets no more items now.
    pub has_its_share: bool,
}

/// The next item to process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Take {
    Item(Box<TakenItem>),
    /// No item is ready yet; the next one can be retried at this time.
    Later(u64),
    Nothing,
}

/// The outcome of an item that was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ItemEnd {
    Done(Vec<u8>),
    /// The item failed permanently.
    Failed(Vec<u8>),
    /// The item failed, and is retried at this time.
    Again {
        wake_ms: u64,
    },
    /// The item is not to blame; it waits as before.
    GivenBack {
        wake_ms: u64,
    },
}

/// The consequence of an item's end for its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ItemEnded {
    OthersLeft,
    /// No item of its batch is left, so the batch can be finished.
    Last,
    /// The item is no longer taken, because its batch was cancelled. Nothing was written.
    NotTaken,
}

impl Store {
    /// Takes the next item for one of these models. It is an item of the tenant, and then of the batch, that
    /// has the fewest items in flight, so that a large batch does not hold up a small one; among equals, the
    /// oldest batch comes first. `tenants` lists the items in flight of each tenant.
    pub async fn take_item(
        &self,
        models: &[String],
        tenants: &[BusyTenant],
        now_ms: u64,
    ) -> Result<Take, StoreError> {
        if models.is_empty() {
            return Ok(Take::Nothing);
        }
        // The hosts of a cluster look often, and take one after the other.
        if self.is_clustered() && next_batch((&self.readers).into(), models, tenants, now_ms).await?.is_none()
        {
            return next_time((&self.readers).into(), models, tenants).await;
        }
        let data = (models.to_vec(), tenants.to_vec(), now_ms, self.host);
        self.write_common(data, |connection, (models, tenants, now_ms, host)| {
            Box::pin(take(connection, models, tenants, *now_ms, *host))
        })
        .await
    }

    /// Finishes an item that was taken, or gives it back.
    pub async fn end_item(&self, key: ItemKey, end: &ItemEnd) -> Result<ItemEnded, StoreError> {
        self.write_common((key, end.clone(), self.host), |connection, (key, end, host)| {
            Box::pin(end_taken(connection, *key, end, *host))
        })
        .await
    }

    /// Gives back the items whose host is gone, so that they wait again: in a file, all that its last process has left. An
    /// item that was lost `max_losses` times fails with `error`, because it may be what terminates processes.
    /// Returns the number of lost items.
    pub async fn recover_items(&self, max_losses: u32, error: &[u8]) -> Result<u64, StoreError> {
        self.write_common((max_losses, error.to_vec()), |connection, (max_losses, error)| {
            Box::pin(recover(connection, *max_losses, error))
        })
        .await
    }

    /// Gives back the items that this host has taken and that are not in `running`, without counting a failure. Nothing
    /// runs them, because the database failed when they were taken. Returns their number.
    pub async fn requeue_orphaned_items(&self, running: &[ItemKey]) -> Result<u64, StoreError> {
        self.write_common((running.to_vec(), self.host), |connection, (running, host)| {
            Box::pin(give_back_others(connection, running, *host))
        })
        .await
    }

    /// Gives back all items that this host has taken, without counting a failure, because it shuts down in an orderly way.
    pub async fn give_back_items(&self) -> Result<(), StoreError> {
        self.write_common(self.host, |connection, host| Box::pin(give_back_others(connection, &[], *host)))
            .await
            .map(drop)
    }
}

async fn take(
    connection: &mut Connection,
    models: &[String],
    tenants: &[BusyTenant],
    now_ms: u64,
    host: HostNumber,
) -> Result<Take, StoreError> {
    let failed = || StoreError::while_it("took a batch item");
    let next = next_batch((&mut *connection).into(), models, tenants, now_ms).await?;
    let Some(batch) = next else {
        return next_time((&mut *connection).into(), models, tenants).await;
    };
    let key: i64 = batch.try_get(0).map_err(failed())?;
    let skip = connection.dialect().pick("", "FOR UPDATE SKIP LOCKED");
    let item = format!(
        "UPDATE batch_items SET state = ?1, host = ?4 WHERE batch = ?2 AND position =
             (SELECT position FROM batch_items WHERE batch = ?2 AND state = 0 AND wake_ms <= ?3
              ORDER BY position LIMIT 1 {skip})
         RETURNING position, request, failures"
    );
    let item = query(AssertSqlSafe(item))
        .bind(RUNNING)
        .bind(key)
        .bind(now_ms as i64)
        .bind(host)
        .fetch_optional(&mut *connection)
        .await
        .map_err(failed())?;
    // Another host is taking the last ones.
    let Some(item) = item else { return Ok(Take::Later(now_ms)) };
    query(
        "UPDATE batches SET running = running + 1, started_at_ms = COALESCE(started_at_ms, ?) WHERE key = ?",
    )
    .bind(now_ms as i64)
    .bind(key)
    .execute(&mut *connection)
    .await
    .map_err(failed())?;
    let position: i64 = item.try_get(0).map_err(failed())?;
    Ok(Take::Item(Box::new(TakenItem {
        key: ItemKey { batch: key, position },
        batch: batch.try_get(1).map_err(failed())?,
        position: position as u64,
        principal: batch.try_get(2).map_err(failed())?,
        model: batch.try_get(3).map_err(failed())?,
        request: item.try_get(1).map_err(failed())?,
        failures: item.try_get(2).map_err(failed())?,
        queued_at_ms: batch.try_get::<i64>(4).map_err(failed())? as u64,
    })))
}

/// Returns the columns `key`, `id`, `principal`, `model` and `created_at_ms` of the batch whose item is taken next; `None` if
/// no item is ready.
async fn next_batch(
    on: Target<'_>,
    models: &[String],
    tenants: &[BusyTenant],
    now_ms: u64,
) -> Result<Option<Row>, StoreError> {
    let mut next = among(
        models,
        tenants,
        "SELECT key, id, principal, model, created_at_ms FROM batches WHERE ended_at_ms IS NULL AND complete
             AND NOT cancelled AND NOT held AND model IN (",
    );
    next.push(" AND EXISTS (SELECT 1 FROM batch_items WHERE batch = key AND state = 0 AND wake_ms <= ");
    next.push_bind(now_ms as i64).push(") ORDER BY CASE principal WHEN NULL THEN 0");
    for tenant in tenants {
        next.push(" WHEN ")
            .push_bind(tenant.principal.clone())
            .push(" THEN ")
            .push_bind(tenant.running as i64);
    }
    next.push(" ELSE 0 END, running, key LIMIT 1");
    next.build().fetch_optional(on).await.map_err(StoreError::while_it("took a batch item"))
}

/// Returns when an item is ready, if none is now.
async fn next_time(on: Target<'_>, models: &[String], tenants: &[BusyTenant]) -> Result<Take, StoreError> {
    let next = among(
        models,
        tenants,
        "SELECT MIN(wake_ms) FROM batch_items JOIN batches ON batch = key WHERE state = 0 AND complete
             AND NOT cancelled AND NOT held AND model IN (",
    );
    let wake: Result<Option<i64>, _> = next.build_query_scalar().fetch_one(on).await;
    let wake = wake.map_err(StoreError::while_it("took a batch item"))?;
    Ok(wake.map_or(Take::Nothing, |wake| Take::Later(wake as u64)))
}

/// Returns a query, of which `sql` is the beginning, for the batches of these models, without those of tenants that have their
/// share.
fn among(models: &[String], tenants: &[BusyTenant], sql: &str) -> QueryBuilder<'static> {
    let mut query = QueryBuilder::new(sql);
    let mut list = query.separated(", ");
    models.iter().for_each(|model| _ = list.push_bind(model.clone()));
    query.push(")");
    let mut full = tenants.iter().filter(|tenant| tenant.has_its_share).peekable();
    if full.peek().is_some() {
        query.push(" AND principal NOT IN (");
        let mut list = query.separated(", ");
        full.for_each(|tenant| _ = list.push_bind(tenant.principal.clone()));
        query.push(")");
    }
    query
}

async fn end_taken(
    connection: &mut Connection,
    key: ItemKey,
    end: &ItemEnd,
    host: HostNumber,
) -> Result<ItemEnded, StoreError> {
    let failed = || StoreError::while_it("finished a batch item");
    let (state, result, failures, wake_ms) = match end {
        ItemEnd::Done(result) => (DONE, Some(result), 0, 0),
        ItemEnd::Failed(error) => (FAILED, Some(error), 1, 0),
        ItemEnd::Again { wake_ms } => (WAITING, None, 1, *wake_ms),
        ItemEnd::GivenBack { wake_ms } => (WAITING, None, 0, *wake_ms),
    };
    let ended = query(
        "UPDATE batch_items SET state = ?, result = ?, failures = failures + ?, wake_ms = ?
         WHERE batch = ? AND position = ? AND state = ? AND host IS NOT DISTINCT FROM ?
         AND NOT EXISTS (SELECT 1 FROM batches WHERE key = batch AND cancelled)",
    )
    .bind(state)
    .bind(result)
    .bind(failures)
    .bind(wake_ms as i64)
    .bind(key.batch)
    .bind(key.position)
    .bind(RUNNING)
    .bind(host)
    .execute(&mut *connection)
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
    .fetch_one(&mut *connection)
    .await
    .map_err(failed())?;
    Ok(if has_more { ItemEnded::OthersLeft } else { ItemEnded::Last })
}

async fn recover(connection: &mut Connection, max_losses: u32, error: &[u8]) -> Result<u64, StoreError> {
    let failed = || StoreError::while_it("gave back batch items");
    let lost = format!(
        "UPDATE batch_items SET losses = losses + 1, wake_ms = 0, host = NULL,
             state = CASE WHEN losses + 1 >= ?1 THEN ?2 ELSE ?3 END,
             result = CASE WHEN losses + 1 >= ?1 THEN ?4 END
         WHERE state = ?5 AND {} RETURNING batch",
        is_left("host")
    );
    let lost: Vec<i64> = query_scalar(AssertSqlSafe(lost))
        .bind(max_losses)
        .bind(FAILED)
        .bind(WAITING)
        .bind(error)
        .bind(RUNNING)
        .fetch_all(&mut *connection)
        .await
        .map_err(failed())?;
    stop_running(connection, &lost).await?;
    Ok(lost.len() as u64)
}

async fn give_back_others(
    connection: &mut Connection,
    running: &[ItemKey],
    host: HostNumber,
) -> Result<u64, StoreError> {
    let failed = || StoreError::while_it("gave back batch items");
    let taken = "SELECT batch, position FROM batch_items WHERE state = 1 AND host IS NOT DISTINCT FROM ?";
    let taken: Vec<(i64, i64)> =
        query_as(taken).bind(host).fetch_all(&mut *connection).await.map_err(failed())?;
    let mut strays = Vec::new();
    for (batch, position) in taken {
        if running.contains(&ItemKey { batch, position }) {
            continue;
        }
        strays.push(batch);
        query("UPDATE batch_items SET state = 0, host = NULL WHERE batch = ? AND position = ?")
            .bind(batch)
            .bind(position)
            .execute(&mut *connection)
            .await
            .map_err(failed())?;
    }
    stop_running(connection, &strays).await?;
    Ok(strays.len() as u64)
}

/// Records that items of these batches, one for each time that a batch is listed, do not run anymore. The counter of a
/// batch that was cancelled is zero already.
async fn stop_running(connection: &mut Connection, batches: &[i64]) -> Result<(), StoreError> {
    let mut stopped: BTreeMap<i64, i64> = BTreeMap::new();
    batches.iter().for_each(|batch| *stopped.entry(*batch).or_default() += 1);
    for (batch, items) in stopped {
        query("UPDATE batches SET running = running - ? WHERE key = ? AND NOT cancelled")
            .bind(items)
            .bind(batch)
            .execute(&mut *connection)
            .await
            .map_err(StoreError::while_it("gave back batch items"))?;
    }
    Ok(())
}
