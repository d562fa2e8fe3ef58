//! The queue as clients see it: queueing, status, results and cancellation. `puller` processes it.

use super::{
    AGENT_MODEL, BatchItem, BatchPhase, BatchResults, BatchStatus, BatchTerms, LiveAnswer, NewBatch,
    announcement::{Announcement, BatchName},
    puller, stored,
};
use crate::{
    AgentName, BatchOptions, RuntimeError, batch::Context, dispatch::Dispatch, session::StoredFailure,
    tenancy::TENANT_SHARE, text::excerpt,
};
use skep_store::{BatchRoom, BatchRow, ItemCounts, ItemKey, Queued};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{Notify, oneshot},
    task::JoinSet,
};

/// An item fails permanently if this many processes ended while it ran, because it may be the
/// cause.
const MAX_LOSSES: u32 = 5;
const RETRY_AFTER_MS: u32 = 10_000;
/// Maximum number of items that wait for people in addition to those that run. It leaves an agent a part of the turns that it
/// may have at the same time.
const MAX_IDLE: usize = 500;
const MAX_REFERENCE_BYTES: usize = 256;
/// Prefix of the ids of responses.
pub(crate) const RESPONSE_PREFIX: &str = "resp_";

/// Returns whether a batch produces a response, whose id it has. No event announces such a batch.
pub(super) fn is_response(batch: &str) -> bool {
    batch.starts_with(RESPONSE_PREFIX)
}

/// The batch queue of a host.
pub(crate) struct BatchQueue {
    shared: Arc<QueueShared>,
    /// The pulling loop and everything it runs. Dropping this stops it.
    pulling: Mutex<JoinSet<()>>,
}

/// The part of the queue that the pulling loop shares.
pub(super) struct QueueShared {
    pub(super) context: Context,
    pub(super) options: BatchOptions,
    pub(super) changed: Notify,
    /// Whether the database failed, so that items may be taken that nobody runs, or batches
    /// finished that were not announced.
    pub(super) needs_repair: AtomicBool,
    /// Running items. Removing an entry cancels the item.
    running: Mutex<BTreeMap<ItemKey, Running>>,
}

pub(super) struct Running {
    pub(super) batch: String,
    pub(super) principal: String,
    /// True while the turn of the item only waits for people. When the turn continues, the item counts again, even if the
    /// queue then runs more items than its maximum for a while.
    pub(super) is_idle: bool,
    pub(super) _cancel: oneshot::Sender<()>,
}

/// Marks an item as idle while it exists.
pub(super) struct Idle<'a> {
    queue: &'a QueueShared,
    key: ItemKey,
}

impl Drop for Idle<'_> {
    fn drop(&mut self) {
        self.queue.set_idle(self.key, false);
    }
}

impl BatchQueue {
    pub(crate) fn new(options: BatchOptions, context: Context) -> Self {
        let shared = QueueShared {
            options,
            context,
            changed: Notify::new(),
            needs_repair: AtomicBool::new(false),
            running: Mutex::default(),
        };
        BatchQueue { shared: Arc::new(shared), pulling: Mutex::default() }
    }

    /// Returns items left by the last process to the queue, and starts pulling.
    pub(crate) async fn start(&self, dispatch: &Arc<Dispatch>) -> Result<(), RuntimeError> {
        self.shared.recover().await?;
        self.shared.end_finished().await?;
        let pulling = puller::run(self.shared.clone(), Arc::downgrade(dispatch));
        self.pulling.lock().unwrap_or_else(PoisonError::into_inner).spawn(pulling);
        Ok(())
    }

    /// Stops pulling and returns running items to the queue.
    pub(crate) async fn stop(&self) {
        let mut pulling = std::mem::take(&mut *self.pulling.lock().unwrap_or_else(PoisonError::into_inner));
        pulling.shutdown().await;
        self.shared.running().clear();
        if let Err(error) = self.shared.context.store.give_back_items().await {
            tracing::warn!("cannot return running batch items to the queue, so they count as lost: {error}");
        }
    }

    pub(crate) async fn queue(&self, batch: NewBatch) -> Result<BatchStatus, RuntimeError> {
        self.queue_as(uuid::Uuid::now_v7().simple().to_string(), batch).await
    }

    /// Queues a batch with an id that no other batch has.
    pub(crate) async fn queue_as(&self, id: String, batch: NewBatch) -> Result<BatchStatus, RuntimeError> {
        let context = &self.shared.context;
        context.shutdown.admit()?;
        self.check(&batch).await?;
        let NewBatch { principal, key, model, items, terms } = batch;
        let BatchTerms { details, window, keep } = terms;
        let keep = keep.map(|keep| keep.min(self.shared.options.file_retention));
        let now_ms = context.clock.now_ms();
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX >> 1);
        let expires_at_ms = window.map(|window| now_ms.saturating_add(ms(window)));
        let terms = skep_store::BatchTerms { details, expires_at_ms, keep_ms: keep.map(ms) };
        let row = skep_store::NewBatch {
            terms: terms.clone(),
            id,
            principal,
            model,
            at_ms: now_ms,
            items: items.into_iter().map(|item| stored::new_item(item, key.as_deref())).collect(),
        };
        self.shared.forget().await?;
        let BatchOptions { max_stored_bytes, max_batches, .. } = self.shared.options;
        let share = context.tenancy.has_several().then_some(TENANT_SHARE as u64);
        let room = BatchRoom { bytes: max_stored_bytes, batches: max_batches, share };
        let name = BatchName { id: &row.id, model: &row.model, principal: &row.principal };
        let event = Announcement::Queued.event(&context.outbox, &name, row.at_ms);
        let deliveries = event.as_ref().map_or(0, |event| event.deliveries.len());
        context.outbox.reserve(&row.principal, deliveries).await?;
        let (id, model, at_ms, waiting) =
            (row.id.clone(), row.model.clone(), row.at_ms, row.items.len() as u64);
        match context.store.queue_batch(row, room, event).await? {
            Queued::New => context.outbox.ring(),
            Queued::Full => {
                let message = format!(
                    "the queue has no room for this batch (it keeps {max_batches} batches and \
                     {max_stored_bytes} bytes, and results for {} h, or {} h as files; a part is reserved for other \
                     tenants); delete result files that are no longer needed",
                    self.shared.options.retention.as_secs() / 3600,
                    self.shared.options.file_retention.as_secs() / 3600
                );
                return Err(RuntimeError::QueueFull { message, retry_after_ms: RETRY_AFTER_MS });
            }
        }
        if waiting == 0 {
            // There is nothing to process.
            self.shared.end_finished().await?;
        }
        self.shared.changed.notify_one();
        // The status at the time of storing; some items may already be running.
        let items = ItemCounts { waiting, ..ItemCounts::default() };
        let phase = BatchPhase::Queued;
        Ok(BatchStatus {
            id,
            model,
            created_at_ms: at_ms,
            started_at_ms: None,
            expires_at_ms,
            kept_until_ms: None,
            phase,
            cancelled: false,
            expired: false,
            details: terms.details,
            items,
        })
    }

    pub(crate) fn context(&self) -> &Context {
        &self.shared.context
    }

    pub(crate) fn options(&self) -> &BatchOptions {
        &self.shared.options
    }

    pub(crate) async fn status(&self, principal: &str, id: &str) -> Result<BatchStatus, RuntimeError> {
        Ok(self.shared.status(&self.row(principal, id).await?))
    }

    /// Returns the results of a batch that has ended, or `None` if it has not.
    pub(crate) async fn results(
        &self,
        principal: &str,
        id: &str,
    ) -> Result<(BatchStatus, Option<BatchResults>), RuntimeError> {
        let status = self.status(principal, id).await?;
        let BatchPhase::Ended { .. } = status.phase else { return Ok((status, None)) };
        let rows = self.shared.context.store.batch_items(id).await?;
        let items = rows.into_iter().map(stored::result).collect::<Result<_, _>>()?;
        Ok((status.clone(), Some(BatchResults { status, items })))
    }

    /// Returns the answer that a batch is producing.
    pub(crate) fn live(&self, id: &str) -> Arc<LiveAnswer> {
        self.shared.context.live.of(id)
    }

    /// Returns batches of this principal that have details, the newest first, before the batch with the id `before`.
    pub(crate) async fn detailed(
        &self,
        principal: &str,
        before: Option<&str>,
        limit: u32,
    ) -> Result<Vec<BatchStatus>, RuntimeError> {
        let rows = self.shared.context.store.detailed_batches(principal, before, limit).await?;
        let kept = rows.iter().filter(|row| self.shared.is_kept(row));
        Ok(kept.map(|row| self.shared.status(row)).collect())
    }

    /// Changes members of the details of a batch, as an RFC 7396 merge patch.
    pub(crate) async fn patch_details(
        &self,
        principal: &str,
        id: &str,
        patch: &str,
    ) -> Result<(), RuntimeError> {
        let row = self.row(principal, id).await?;
        Ok(self.shared.context.store.patch_batch_details(&row.id, patch).await?)
    }

    /// Removes the requests and results of a batch that has ended.
    pub(crate) async fn empty(&self, principal: &str, id: &str) -> Result<(), RuntimeError> {
        let row = self.row(principal, id).await?;
        Ok(self.shared.context.store.empty_batch(&row.id).await?)
    }

    /// Makes the puller look for work that nobody announced.
    pub(crate) fn look(&self) {
        self.shared.request_repair();
    }

    /// Makes the puller look for items that another host has queued.
    pub(crate) fn wake(&self) {
        self.shared.changed.notify_one();
    }

    /// Cancels the items that wait or run. Existing results are kept.
    pub(crate) async fn cancel(&self, principal: &str, id: &str) -> Result<(), RuntimeError> {
        let row = self.row(principal, id).await?;
        self.stop_items(&row.id).await?;
        self.shared.end_finished().await
    }

    /// Cancels all batches of a principal.
    pub(crate) async fn cancel_all(&self, principal: &str) -> Result<(), RuntimeError> {
        for id in self.shared.context.store.batches_of(principal).await? {
            self.stop_items(&id).await?;
        }
        self.shared.end_finished().await
    }

    async fn stop_items(&self, id: &str) -> Result<(), RuntimeError> {
        let cancelled = self.shared.context.store.cancel_batch(id).await;
        // The batch may be marked, and a part of its items be cancelled.
        cancelled.inspect_err(|_| self.shared.request_repair())?;
        self.shared.running().retain(|_, running| running.batch != id);
        Ok(())
    }

    async fn check(&self, batch: &NewBatch) -> Result<(), RuntimeError> {
        let invalid = |message: String| Err(RuntimeError::InvalidBatch { message });
        match batch.items.len() {
            // The details of an empty batch say why it has no requests.
            0 if batch.terms.details.is_some() => return Ok(()),
            0 => return invalid("a batch must have at least one request".to_owned()),
            items if items > self.shared.options.max_items => {
                let most = self.shared.options.max_items;
                return invalid(format!("the batch has {items} requests; at most {most} are allowed"));
            }
            _ => {}
        }
        let long = |item: &BatchItem| {
            item.reference.as_ref().is_some_and(|reference| reference.len() > MAX_REFERENCE_BYTES)
        };
        if let Some(index) = batch.items.iter().position(long) {
            return invalid(format!(
                "requests[{index}].external_reference is longer than {MAX_REFERENCE_BYTES} bytes"
            ));
        }
        match batch.model.strip_prefix(AGENT_MODEL) {
            Some(agent) => {
                AgentName::new(agent)?;
                self.shared.context.deployments.find(agent).await.map(drop)
            }
            None => Ok(self.shared.context.models.find(Some(&batch.model)).map(drop)?),
        }
    }

    /// Returns a batch of this principal that is still kept.
    async fn row(&self, principal: &str, id: &str) -> Result<BatchRow, RuntimeError> {
        let row = self.shared.context.store.batch(id).await?;
        row.filter(|row| row.principal == principal && self.shared.is_kept(row)).ok_or_else(|| {
            RuntimeError::BatchNotFound {
                id: excerpt(id),
                hours: self.shared.options.retention.as_secs() / 3600,
            }
        })
    }
}

impl QueueShared {
    /// Returns the time at which a batch that has ended is deleted.
    fn kept_until_ms(&self, row: &BatchRow) -> Option<u64> {
        let retention = || u64::try_from(self.options.retention.as_millis()).unwrap_or(u64::MAX);
        let ended_at_ms = row.ended_at_ms?;
        Some(match row.terms.keep_ms {
            Some(keep_ms) => ended_at_ms.saturating_add(keep_ms),
            None => self.context.clock.elapsed_after(ended_at_ms, retention()),
        })
    }

    fn is_kept(&self, row: &BatchRow) -> bool {
        match (row.ended_at_ms, row.terms.keep_ms) {
            (None, _) => true,
            (Some(at_ms), None) => at_ms >= self.oldest_ms(),
            (Some(at_ms), Some(keep_ms)) => at_ms.saturating_add(keep_ms) >= self.context.clock.now_ms(),
        }
    }

    fn status(&self, row: &BatchRow) -> BatchStatus {
        stored::status(row, self.kept_until_ms(row))
    }

    /// Returns the time before which ended batches are deleted.
    fn oldest_ms(&self) -> u64 {
        let retention_ms = u64::try_from(self.options.retention.as_millis()).unwrap_or(u64::MAX);
        self.context.clock.elapsed_before(self.context.clock.now_ms(), retention_ms)
    }

    async fn forget(&self) -> Result<(), RuntimeError> {
        let now_ms = self.context.clock.now_ms();
        self.context.store.forget_batches(self.oldest_ms(), now_ms).await?;
        Ok(())
    }

    /// Returns items to the queue whose host is gone.
    async fn recover(&self) -> Result<(), RuntimeError> {
        let message = format!("{MAX_LOSSES} processes terminated while the item ran, so it may be the cause");
        let error = StoredFailure::encode(&RuntimeError::Internal { message });
        let lost = self.context.store.recover_items(MAX_LOSSES, &error).await?;
        if lost > 0 {
            tracing::info!(items = lost, "batch items were returned to the queue");
        }
        Ok(())
    }

    /// Cancels the items that run here although their batch was cancelled, as another host of the cluster does it.
    pub(super) async fn drop_stopped(&self) -> Result<(), RuntimeError> {
        let running: BTreeSet<String> =
            self.running().values().map(|running| running.batch.clone()).collect();
        if !self.context.store.is_clustered() || running.is_empty() {
            return Ok(());
        }
        let stopped = self.context.store.stopped_batches(running).await?;
        self.running().retain(|_, running| !stopped.contains(&running.batch));
        Ok(())
    }

    /// Cancels the batches whose time is over.
    pub(super) async fn expire(&self) -> Result<(), RuntimeError> {
        let overdue = self.context.store.overdue_batches(self.context.clock.now_ms()).await?;
        for id in &overdue {
            self.context.store.expire_batch(id).await?;
            self.running().retain(|_, running| running.batch != *id);
            tracing::info!(
                batch = id,
                "a batch has reached the end of its completion window; its unfinished requests are cancelled"
            );
        }
        if overdue.is_empty() { Ok(()) } else { self.end_finished().await }
    }

    /// Makes the puller look for items that nobody runs and batches that nobody announced.
    pub(super) fn request_repair(&self) {
        self.needs_repair.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    /// Returns taken items that nobody runs to the queue, finishes cancellations, and ends finished batches.
    pub(super) async fn repair(&self) -> Result<(), RuntimeError> {
        if !self.needs_repair.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let repaired = async {
            if self.context.store.is_clustered() {
                // The host that ran them may have ended while others continue.
                self.recover().await?;
            }
            let running: Vec<ItemKey> = self.running().keys().copied().collect();
            self.context.store.requeue_orphaned_items(&running).await?;
            self.context.store.finish_cancellations().await?;
            self.end_finished().await
        };
        let repaired = repaired.await;
        if repaired.is_err() {
            self.needs_repair.store(true, Ordering::Release);
        }
        repaired
    }

    /// Ends the batches that have no unfinished items left.
    pub(super) async fn end_finished(&self) -> Result<(), RuntimeError> {
        let context = &self.context;
        for row in context.store.finished_batches().await? {
            let announcement = match row.items.done {
                1.. if !row.cancelled => Announcement::Succeeded,
                _ => Announcement::Failed { cancelled: row.cancelled },
            };
            let name = BatchName { id: &row.id, model: &row.model, principal: &row.principal };
            let at_ms = self.context.clock.now_ms();
            let event = announcement.event(&context.outbox, &name, at_ms);
            if context.store.end_batch(&row.id, at_ms, event.as_ref()).await? {
                context.outbox.ring();
                context.live.ended(&row.id);
                tracing::info!(
                    batch = row.id,
                    items = row.items.total(),
                    failed = row.items.failed,
                    "a batch ended"
                );
            }
        }
        self.forget().await
    }

    /// Marks an item as idle, so that others may start.
    pub(super) fn idle(&self, key: ItemKey) -> Idle<'_> {
        self.set_idle(key, true);
        self.changed.notify_one();
        Idle { queue: self, key }
    }

    fn set_idle(&self, key: ItemKey, is_idle: bool) {
        if let Some(running) = self.running().get_mut(&key) {
            running.is_idle = is_idle;
        }
    }

    /// Returns the number of running items that do not count, because they only wait for people.
    pub(super) fn idle_count(&self) -> usize {
        self.running().values().filter(|running| running.is_idle).count().min(MAX_IDLE)
    }

    /// Returns the tenants of the running items that count, once for each item.
    pub(super) fn busy_tenants(&self) -> Vec<String> {
        let running = self.running();
        let (idle, busy): (Vec<&Running>, Vec<&Running>) =
            running.values().partition(|running| running.is_idle);
        busy.into_iter().chain(idle.into_iter().skip(MAX_IDLE)).map(|one| one.principal.clone()).collect()
    }

    pub(super) fn running(&self) -> MutexGuard<'_, BTreeMap<ItemKey, Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
