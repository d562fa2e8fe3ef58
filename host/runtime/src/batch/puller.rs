//! Takes items when their model has room, and no more at once than the operator allows.
//!
//! It pulls. Nothing is pushed into an engine that has others to serve, so a full queue is rows in the store and not
//! requests in front of anybody. Whoever waits for room looks for it again every few milliseconds, while something waits.

use super::{
    AGENT_MODEL, BatchAnswer, BatchOptions,
    queue::{QueueShared, Running},
    stored as rows,
    work::{self, Retry},
};
use crate::{
    AgentHost, RuntimeError, agent_host::Services, capability::log::now_ms, metric, session::StoredFailure,
    store_retry::stored, tenancy::Shares,
};
use metrics::{counter, gauge, histogram};
use skep_engine::Priority;
use skep_store::{BusyTenant, ItemEnd, ItemEnded, ItemKey, QueueDepth, Take, TakenItem};
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use tokio::{
    sync::oneshot,
    task::{JoinError, JoinSet},
};

/// How soon to look for room again while something waits for it.
const ROOM_INTERVAL: Duration = Duration::from_millis(20);
/// How soon to try again what was refused because others came first.
const BUSY_INTERVAL: Duration = Duration::from_millis(250);
/// How old the figures of a queue may be in which something waits.
const FIGURES_INTERVAL: Duration = Duration::from_secs(1);
/// How soon to look for what was stored without a word, because whoever stored it was cut off.
const IDLE_INTERVAL: Duration = Duration::from_secs(30);
/// How soon to try again what the store would not do.
const STORE_INTERVAL: Duration = Duration::from_secs(1);

/// When there may be something to begin.
enum Pull {
    /// When something changes.
    Wait,
    /// After this time, or when something changes.
    Within(Duration),
}

/// Until the host is gone.
pub(super) async fn run(queue: Arc<QueueShared>, services: Arc<Services>) {
    let mut tasks = JoinSet::new();
    let mut figures = Figures::default();
    loop {
        let Some(strong) = services.host() else { return };
        let pull = match queue.mend(&strong).await {
            Ok(()) => begin(&queue, &strong, &mut tasks).await,
            Err(error) => Err(error),
        };
        let depth = figures.refresh(&strong).await;
        drop(strong);
        let within = match pull {
            // Somebody may set the clock meanwhile.
            Ok(Pull::Within(time)) => time.min(IDLE_INTERVAL),
            Ok(Pull::Wait) if depth.waiting > 0 => FIGURES_INTERVAL,
            Ok(Pull::Wait) => IDLE_INTERVAL,
            Err(error) => {
                tracing::error!("the queue of batches does not go on: {error}");
                queue.has_strays.store(true, Ordering::Release);
                STORE_INTERVAL
            }
        };
        tokio::select! {
            () = queue.changed.notified() => {}
            Some(ended) = tasks.join_next() => if let Err(error) = ended {
                tracing::error!("an item of a batch ended badly: {error}");
            },
            () = tokio::time::sleep(within) => {}
        }
    }
}

/// Begins items while there is room.
async fn begin(
    queue: &Arc<QueueShared>,
    host: &AgentHost,
    tasks: &mut JoinSet<()>,
) -> Result<Pull, RuntimeError> {
    while tasks.len() < queue.options.max_running {
        let (roomy, all_have_room) = models_with_room(host);
        let tenants = busy_tenants(queue, host);
        let item = match host.services().store.take_item(&roomy, &tenants, now_ms()).await? {
            Take::Item(item) => Arc::new(*item),
            _ if !all_have_room => return Ok(Pull::Within(ROOM_INTERVAL)),
            Take::Later(at_ms) => {
                return Ok(Pull::Within(Duration::from_millis(at_ms.saturating_sub(now_ms()).max(1))));
            }
            Take::Nothing => return Ok(Pull::Wait),
        };
        let (cancel, cancelled) = oneshot::channel();
        let (begun, has_begun) = oneshot::channel();
        let (batch, principal) = (item.batch.clone(), item.principal.clone());
        let runs = Runs::begin(queue, item.key, Running { batch, principal, _cancel: cancel });
        tasks.spawn(run_item(runs, host.clone(), item, cancelled, begun));
        // The next one sees the room that this one leaves. One that ends without beginning drops its sender.
        let _ = has_begun.await;
    }
    Ok(Pull::Wait)
}

/// How many items of which tenants run, and which tenants have as many as they may have beside others.
fn busy_tenants(queue: &QueueShared, host: &AgentHost) -> Vec<BusyTenant> {
    let running = queue.running();
    let shares: Shares = running.values().map(|running| (running.principal.clone(), 1)).collect();
    let has_several = host.services().tenancy.has_several();
    let tenants = shares.by_tenant().map(|(principal, running)| BusyTenant {
        principal: principal.to_owned(),
        running,
        has_its_share: !shares.may_take(principal, 1, queue.options.max_running, has_several),
    });
    tenants.collect()
}

/// Models in which a background sequence could begin now, agents by the room in theirs; and whether these are all.
fn models_with_room(host: &AgentHost) -> (Vec<String>, bool) {
    let models = host.models().iter().map(|engine| (engine.info().name.clone(), engine.clone()));
    let agents = host.agents().into_iter().filter_map(|agent| {
        let engine = host.models().get(Some(&agent.model)).ok()?;
        Some((format!("{AGENT_MODEL}{}", agent.name), engine))
    });
    let (mut roomy, mut all_have_room) = (Vec::new(), true);
    for (name, engine) in models.chain(agents) {
        match engine.room(Priority::Background) {
            0 => all_have_room = false,
            _ => roomy.push(name),
        }
    }
    (roomy, all_have_room)
}

/// While it is there, somebody runs the item. One whose task ends badly is looked for as a stray.
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
            self.queue.look_for_strays();
        }
    }
}

async fn run_item(
    runs: Runs,
    host: AgentHost,
    item: Arc<TakenItem>,
    cancelled: oneshot::Receiver<()>,
    begun: oneshot::Sender<()>,
) {
    let waited_ms = now_ms().saturating_sub(item.queued_at_ms);
    histogram!(metric::BATCH_WAIT).record(waited_ms as f64 / 1000.0);
    let queue = &runs.queue;
    let (of_item, taken) = (host.clone(), item.clone());
    // Dropped with this, it is aborted.
    let mut working = JoinSet::new();
    working.spawn(async move { work::run(&of_item, &taken, begun).await });
    let result = tokio::select! {
        worked = working.join_next() => answer_of(worked, &item),
        // Its sender is dropped when the batch is cancelled, and when the queue stops.
        _ = cancelled => {
            working.shutdown().await;
            work::abandon(&host, &item).await;
            Err(RuntimeError::Cancelled)
        }
    };
    let (end, outcome) = end_of(result, &item, &queue.options);
    let services = host.services();
    let write = || services.store.end_item(item.key, &end);
    match stored(services, "the result of an item of a batch", write).await {
        Some(ItemEnded::NotTaken) => {
            counter!(metric::BATCH_ITEMS, "outcome" => "cancelled").increment(1);
            // Or it was the last one, and was written by a try of which that was not known.
            queue.look_for_strays();
        }
        Some(ended) => {
            counter!(metric::BATCH_ITEMS, "outcome" => outcome).increment(1);
            if ended == ItemEnded::Last
                && let Err(error) = queue.end_finished(&host).await
            {
                tracing::error!(batch = item.batch, "the batch is not ended yet: {error}");
                queue.look_for_strays();
            }
        }
        // The next process finds that it was taken, and runs it again.
        None => {}
    }
}

/// A panic in an item's work is a failure of this item, which is tried again and given up as any other.
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

/// What is written of an item, and what it counts as.
fn end_of(
    result: Result<BatchAnswer, RuntimeError>,
    item: &TakenItem,
    options: &BatchOptions,
) -> (ItemEnd, &'static str) {
    let error = match result {
        Ok(answer) => return (ItemEnd::Done(rows::encode_answer(&answer)), "done"),
        Err(error) => error,
    };
    let after = |time: Duration| now_ms() + u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    match work::retry(&error) {
        Retry::Soon => (ItemEnd::GivenBack { wake_ms: after(BUSY_INTERVAL) }, "given_back"),
        Retry::After(time) => (ItemEnd::GivenBack { wake_ms: after(time) }, "given_back"),
        Retry::Later if item.failures + 1 < options.max_attempts => {
            tracing::warn!(
                batch = item.batch,
                position = item.position,
                "an item of a batch failed: {error}"
            );
            let wake_ms = after(options.backoff.saturating_mul(1 << item.failures.min(10)));
            (ItemEnd::Again { wake_ms }, "retried")
        }
        Retry::Later | Retry::Never => (ItemEnd::Failed(StoredFailure::encode(&error)), "failed"),
    }
}

/// What the metrics say of the queue.
#[derive(Default)]
struct Figures {
    depth: QueueDepth,
    at: Option<Instant>,
}

impl Figures {
    async fn refresh(&mut self, host: &AgentHost) -> QueueDepth {
        if self.at.is_none_or(|at| at.elapsed() >= FIGURES_INTERVAL || self.depth.waiting == 0) {
            match host.services().store.queue_depth().await {
                Ok(depth) => self.depth = depth,
                Err(error) => tracing::warn!("the depth of the queue of batches is not known: {error}"),
            }
            self.at = Some(Instant::now());
            let age_ms = self.depth.oldest_ms.map_or(0, |oldest_ms| now_ms().saturating_sub(oldest_ms));
            gauge!(metric::BATCH_WAITING).set(self.depth.waiting as f64);
            gauge!(metric::BATCH_OLDEST).set(age_ms as f64 / 1000.0);
        }
        self.depth
    }
}
