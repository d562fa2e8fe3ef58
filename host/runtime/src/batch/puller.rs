//! Starts items when their model has room, up to the operator's limit.
//!
//! The puller never pushes items into a busy engine, so a full queue consists of rows in the store
//! rather than of requests ahead of other clients. While items wait for room, the puller checks for
//! it every few milliseconds.

use super::{
    AGENT_MODEL, BatchAnswer,
    queue::{QueueShared, Running},
    stored as rows,
    work::{self, Retry},
};
use crate::{
    BatchOptions, RuntimeError, batch::Context, dispatch::Dispatch, metric, session::StoredFailure,
    tenancy::Shares,
};
use metrics::{counter, gauge, histogram};
use skep_engine::{ModelState, Priority};
use skep_store::{BusyTenant, ItemEnd, ItemEnded, ItemKey, QueueDepth, Take, TakenItem};
use std::{
    sync::{Arc, Weak, atomic::Ordering},
    time::{Duration, Instant},
};
use tokio::{
    sync::oneshot,
    task::{JoinError, JoinSet},
};

/// Interval between checks for room while items wait for it.
const ROOM_INTERVAL: Duration = Duration::from_millis(20);
/// Delay before retrying an item that was refused because others came first.
const BUSY_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum age of the queue metrics while items wait.
const FIGURES_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between searches for batches whose time is over.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between searches for rows whose writer was interrupted before it could notify the
/// puller.
const IDLE_INTERVAL: Duration = Duration::from_secs(30);
/// Delay before retrying after a store error.
const STORE_INTERVAL: Duration = Duration::from_secs(1);

/// When there may be something to start.
enum Pull {
    /// When something changes.
    Wait,
    /// After this time, or when something changes.
    Within(Duration),
}

/// Runs until the host is gone.
pub(super) async fn run(queue: Arc<QueueShared>, dispatch: Weak<Dispatch>) {
    let mut tasks = JoinSet::new();
    let mut figures = Figures::default();
    let mut looked: Option<Instant> = None;
    loop {
        let Some(strong) = dispatch.upgrade() else { return };
        let is_due = looked.is_none_or(|at| at.elapsed() >= EXPIRY_INTERVAL);
        let prepared = async {
            queue.repair().await?;
            if !is_due {
                return Ok(());
            }
            queue.drop_stopped().await?;
            queue.expire().await
        };
        let prepared = prepared.await;
        if is_due {
            looked = Some(Instant::now());
        }
        let pull = match prepared {
            Ok(()) => begin(&queue, &strong, &mut tasks).await,
            Err(error) => Err(error),
        };
        let depth = figures.refresh(&queue.context).await;
        drop(strong);
        let within = match pull {
            // The clock may be changed meanwhile, so the wait is bounded.
            Ok(Pull::Within(time)) => time.min(IDLE_INTERVAL),
            Ok(Pull::Wait) if depth.waiting > 0 => FIGURES_INTERVAL,
            // Items that run may belong to a batch whose time ends.
            Ok(Pull::Wait) if !tasks.is_empty() => EXPIRY_INTERVAL,
            Ok(Pull::Wait) => IDLE_INTERVAL,
            Err(error) => {
                tracing::error!("the batch queue is stalled: {error}");
                queue.needs_repair.store(true, Ordering::Release);
                STORE_INTERVAL
            }
        };
        // Another host of the cluster may cancel what runs here.
        let is_watched = queue.context.store.is_clustered() && !tasks.is_empty();
        let within = if is_watched { within.min(EXPIRY_INTERVAL) } else { within };
        tokio::select! {
            () = queue.changed.notified() => {}
            Some(ended) = tasks.join_next() => if let Err(error) = ended {
                tracing::error!("the task of a batch item ended abnormally: {error}");
            },
            () = tokio::time::sleep(within) => {}
        }
    }
}

/// Starts items while there is room.
async fn begin(
    queue: &Arc<QueueShared>,
    dispatch: &Arc<Dispatch>,
    tasks: &mut JoinSet<()>,
) -> Result<Pull, RuntimeError> {
    while tasks.len().saturating_sub(queue.idle_count()) < queue.options.max_running {
        let (roomy, all_have_room) = models_with_room(&queue.context);
        let tenants = busy_tenants(queue);
        let item = match queue.context.store.take_item(&roomy, &tenants, queue.context.clock.now_ms()).await?
        {
            Take::Item(item) => Arc::new(*item),
            _ if !all_have_room => return Ok(Pull::Within(ROOM_INTERVAL)),
            Take::Later(at_ms) => {
                return Ok(Pull::Within(Duration::from_millis(
                    at_ms.saturating_sub(queue.context.clock.now_ms()).max(1),
                )));
            }
            Take::Nothing => return Ok(Pull::Wait),
        };
        let (cancel, cancelled) = oneshot::channel();
        let (begun, has_begun) = oneshot::channel();
        let (batch, principal) = (item.batch.clone(), item.principal.clone());
        let runs =
            Runs::begin(queue, item.key, Running { batch, principal, is_idle: false, _cancel: cancel });
        tasks.spawn(run_item(runs, dispatch.clone(), item, cancelled, begun));
        // Waits so that the next item sees the remaining room. An item that fails before it starts
        // drops its sender.
        let _ = has_begun.await;
    }
    Ok(Pull::Wait)
}

/// Returns how many items each tenant is running without those that wait for people, and whether the tenant has used up its
/// share.
fn busy_tenants(queue: &QueueShared) -> Vec<BusyTenant> {
    let shares: Shares = queue.busy_tenants().into_iter().map(|principal| (principal, 1)).collect();
    let has_several = queue.context.tenancy.has_several();
    let tenants = shares.by_tenant().map(|(principal, running)| BusyTenant {
        principal: principal.to_owned(),
        running,
        has_its_share: !shares.may_take(principal, 1, queue.options.max_running, has_several),
    });
    tenants.collect()
}

/// Returns the models in which a background sequence could start now (an agent counts by its
/// model), and whether these are all models.
fn models_with_room(context: &Context) -> (Vec<String>, bool) {
    // A host of the cluster that has a model takes the items for it itself.
    let models = context.models.own().into_iter().map(|model| (model.name().to_owned(), model));
    let agents = context.deployments.ready().into_iter().filter_map(|agent| {
        let model = context.models.find(Some(&agent.model)).ok()?;
        Some((format!("{AGENT_MODEL}{}", agent.manifest.name), model))
    });
    let (mut roomy, mut all_have_room) = (Vec::new(), true);
    for (name, model) in models.chain(agents) {
        let has_room = match model.loaded() {
            Some(model) => model.free_slots(Priority::Background) > 0,
            // The first item loads its model.
            None => matches!(model.state(), ModelState::Unloaded | ModelState::Failed(_)),
        };
        match has_room {
            false => all_have_room = false,
            true => roomy.push(name),
        }
    }
    (roomy, all_have_room)
}

/// Marks an item as running while it exists. If the item's task panics, the puller looks for
/// strays.
struct Runs {
    queue: Arc<QueueShared>,
    key: ItemKey,
}

impl Runs {
    fn begin(queue: &Arc<QueueShared>, key: ItemKey, running: Running) -> Self {
        queue.running().insert(key, running);
        Runs { queue: queue.clone(), key }
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        self.queue.running().remove(&self.key);
        if std::thread::panicking() {
            self.queue.request_repair();
        }
    }
}

async fn run_item(
    runs: Runs,
    dispatch: Arc<Dispatch>,
    item: Arc<TakenItem>,
    cancelled: oneshot::Receiver<()>,
    begun: oneshot::Sender<()>,
) {
    let queue = &runs.queue;
    let waited_ms = queue.context.clock.now_ms().saturating_sub(item.queued_at_ms);
    histogram!(metric::BATCH_WAIT).record(waited_ms as f64 / 1000.0);
    let (of_item, taken, shared) = (dispatch.clone(), item.clone(), queue.clone());
    // The task is aborted when this set is dropped.
    let mut working = JoinSet::new();
    working.spawn(async move { work::run(&shared, &of_item, &taken, begun).await });
    let result = tokio::select! {
        worked = working.join_next() => answer_of(worked, &item),
        // The sender is dropped when the batch is cancelled and when the queue stops.
        _ = cancelled => {
            working.shutdown().await;
            work::abandon(&queue.context, &dispatch, &item).await;
            Err(RuntimeError::Cancelled)
        }
    };
    let (end, outcome) = end_of(result, &item, &queue.options, queue.context.clock.now_ms());
    let context = &queue.context;
    let write = || context.store.end_item(item.key, &end);
    match context.shutdown.stored("the result of a batch item", write).await {
        Some(ItemEnded::NotTaken) => {
            counter!(metric::BATCH_ITEMS, "outcome" => "cancelled").increment(1);
            // The item was cancelled, or an earlier write of the last item's result succeeded
            // without being confirmed.
            queue.request_repair();
        }
        Some(ended) => {
            counter!(metric::BATCH_ITEMS, "outcome" => outcome).increment(1);
            if ended == ItemEnded::Last
                && let Err(error) = queue.end_finished().await
            {
                tracing::error!(batch = item.batch, "cannot end the batch yet: {error}");
                queue.request_repair();
            }
        }
        // The next process finds the item still taken and runs it again.
        None => {}
    }
}

/// Treats a panic in an item's work as a failure of this item, which is retried like any other.
fn answer_of(
    worked: Option<Result<Result<BatchAnswer, RuntimeError>, JoinError>>,
    item: &TakenItem,
) -> Result<BatchAnswer, RuntimeError> {
    match worked {
        Some(Ok(result)) => result,
        Some(Err(_)) | None => {
            let message =
                format!("item {} of batch {} panicked; see the host's log", item.position, item.batch);
            Err(RuntimeError::Internal { message })
        }
    }
}

/// Returns the end of an item to store, and its label in the metrics.
fn end_of(
    result: Result<BatchAnswer, RuntimeError>,
    item: &TakenItem,
    options: &BatchOptions,
    now_ms: u64,
) -> (ItemEnd, &'static str) {
    let error = match result {
        Ok(answer) => return (ItemEnd::Done(rows::encode_answer(&answer)), "done"),
        Err(error) => error,
    };
    let after = |time: Duration| now_ms + u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    match work::retry(&error) {
        Retry::Soon => (ItemEnd::GivenBack { wake_ms: after(BUSY_INTERVAL) }, "given_back"),
        Retry::After(time) => (ItemEnd::GivenBack { wake_ms: after(time) }, "given_back"),
        Retry::Later if item.failures + 1 < options.max_attempts => {
            tracing::warn!(batch = item.batch, position = item.position, "a batch item failed: {error}");
            let wake_ms = after(options.backoff.saturating_mul(1 << item.failures.min(10)));
            (ItemEnd::Again { wake_ms }, "retried")
        }
        Retry::Later | Retry::Never => (ItemEnd::Failed(StoredFailure::encode(&error)), "failed"),
    }
}

/// The queue's metrics.
#[derive(Default)]
struct Figures {
    depth: QueueDepth,
    at: Option<Instant>,
}

impl Figures {
    async fn refresh(&mut self, context: &Context) -> QueueDepth {
        if self.at.is_none_or(|at| at.elapsed() >= FIGURES_INTERVAL || self.depth.waiting == 0) {
            match context.store.queue_depth().await {
                Ok(depth) => self.depth = depth,
                Err(error) => tracing::warn!("cannot read the depth of the batch queue: {error}"),
            }
            self.at = Some(Instant::now());
            let age_ms =
                self.depth.oldest_ms.map_or(0, |oldest_ms| context.clock.now_ms().saturating_sub(oldest_ms));
            gauge!(metric::BATCH_WAITING).set(self.depth.waiting as f64);
            gauge!(metric::BATCH_OLDEST).set(age_ms as f64 / 1000.0);
        }
        self.depth
    }
}
