//! One replica of a model as seen from outside: a loop thread with its executor, scheduler and KV pages. The
//! router chooses the replica that a request goes to. Dropping a replica stops its loop, and requests that
//! still run end with `ShuttingDown`.

use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use skep_model::{Executor, ExpertLoad, RankTimes, Restart, Tokenizer};
use tokio::sync::oneshot;

use crate::disk_pages::{DiskPages, Warming};
use crate::engine_loop::{Command, EngineLoop};
use crate::health::Health;
use crate::keyed_hash::KeyedHash;
use crate::kv::PublishedPrefixes;
use crate::mask_worker::MaskWorker;
use crate::recovery::Recovery;
use crate::router::{ReplicaLoad, ReplicaView};
use crate::scheduler::{BACKGROUND_HEADROOM, Scheduler, StepLimits};
use crate::speculation::Speculator;
use crate::submission::Submission;
use crate::telemetry::Telemetry;
use crate::timeline::StepTimer;
use crate::{
    Affinity, EngineError, EngineOptions, EngineStats, EngineTimes, EraseScope, LayerLoad, ModelInfo,
    PageOwner, Priority, RankTime, Warmed,
};

/// The reason that a request did not reach the loop.
pub(crate) enum SendError {
    Full,
    /// The loop has terminated; another replica may serve the request.
    Gone(Box<Submission>),
}

pub(crate) struct Replica {
    view: ReplicaView,
    experts: Option<Arc<ExpertLoad>>,
    times: Option<Arc<RankTimes>>,
    /// `None` only while dropping: closing the channel stops the thread.
    commands: Option<mpsc::SyncSender<Command>>,
    thread: Option<JoinHandle<()>>,
}

impl Replica {
    /// Starts the thread of replica number `index` of a model.
    pub fn start(
        index: usize,
        (executor, restart): (Box<dyn Executor>, Option<Restart>),
        (info, tokenizer): (&ModelInfo, &Arc<Tokenizer>),
        hash: &KeyedHash,
        options: &EngineOptions,
    ) -> Result<Self, EngineError> {
        let limits = *executor.limits();
        let step = StepLimits::new(options, &limits)?;
        let view = ReplicaView {
            load: Arc::new(ReplicaLoad::default()),
            prefixes: Arc::new(PublishedPrefixes::new(hash)),
            telemetry: Telemetry::new(&info.name, index, limits.page_count),
            health: Arc::new(Health::default()),
            page_count: limits.page_count,
            max_sequences: step.sequences,
        };
        let (commands, queue) = mpsc::sync_channel(options.max_queue.saturating_add(64));
        let masks = MaskWorker::start(&format!("{index}-{}", info.name)).map_err(unstartable)?;
        let speculator = Speculator::new(options.speculation, executor.supports_lookahead());
        let scheduler = Scheduler::new(step, &options.weights, options.meter.clone(), &view);
        let timer = StepTimer::new(options.timeline.clone(), index);
        let from = (options.disk.as_ref(), options.peers.as_ref());
        let disk = DiskPages::of(from, &info.digest.weights, &*executor, &info.name);
        let around = (masks, disk, Recovery::new(restart));
        let (experts, times) = (executor.expert_load(), executor.rank_times());
        let engine_loop =
            EngineLoop::new(executor, scheduler, speculator, around, timer, (info, tokenizer), &view);
        let thread = std::thread::Builder::new()
            .name(format!("engine-{index}-{}", info.name))
            .spawn(move || engine_loop.run(queue))
            .map_err(unstartable)?;
        Ok(Replica { view, experts, times, commands: Some(commands), thread: Some(thread) })
    }

    /// Returns the state that the router sees.
    pub fn view(&self) -> &ReplicaView {
        &self.view
    }

    /// Returns the counters since the start and the current load, without waiting for the loop.
    pub fn stats(&self) -> EngineStats {
        self.view.telemetry.stats()
    }

    /// Sets the gauges of its load again.
    pub fn set_gauges(&self) {
        self.view.telemetry.set_gauges();
    }

    /// Returns the distributions of times since the start, without waiting for the loop.
    pub fn times(&self) -> EngineTimes {
        self.view.telemetry.times()
    }

    /// Returns the tokens of each expert since the start, without waiting for the loop. A model without experts has none.
    pub fn expert_load(&self) -> Vec<LayerLoad> {
        self.experts.as_ref().map(|experts| experts.layers()).unwrap_or_default()
    }

    /// Returns the time of each rank since the start, without waiting for the loop. A model that is not divided has none.
    pub fn rank_times(&self) -> Vec<RankTime> {
        self.times.as_ref().map(|times| times.of_ranks()).unwrap_or_default()
    }

    /// Returns the owners of the KV pages, between two steps. A loop that is gone has none.
    pub async fn page_owners(&self) -> Vec<PageOwner> {
        let (done, owners) = oneshot::channel();
        if self.commands().try_send(Command::Pages { done }).is_err() {
            return Vec::new();
        }
        owners.await.unwrap_or_default()
    }

    /// Frees the cached pages that only these clients have, and forgets those that wait to be copied to the disk. Requests
    /// of these clients that run leave no pages behind.
    pub async fn forget(&self, pages: &EraseScope) {
        let (done, forgotten) = oneshot::channel();
        self.send(Command::Forget { pages: pages.clone(), done }).await;
        let _ = forgotten.await;
    }

    /// Reads the pages of a conversation from the disk before a request needs them. Returns `None` if the loop ends first.
    pub async fn warm(&self, affinity: Affinity, tokens: Vec<u32>) -> Option<Warmed> {
        let (done, warmed) = oneshot::channel();
        self.send(Command::Warm(Box::new(Warming { affinity, tokens, done }))).await;
        warmed.await.ok()
    }

    /// Returns the number of sequences of this class that could start now without waiting for another one.
    pub fn free_slots(&self, priority: Priority) -> usize {
        let ReplicaView { load, max_sequences, .. } = &self.view;
        if self.view.health.problem().is_some() {
            return 0;
        }
        let all = load.sequences();
        match priority {
            // Background work gives up its slot.
            Priority::Interactive => max_sequences.saturating_sub(all - load.background_sequences().min(all)),
            Priority::Background => {
                let kept_pages = self.view.page_count / BACKGROUND_HEADROOM;
                let has_pages = self.view.telemetry.stats().pages_free > kept_pages;
                // While others run, the last slot is kept for interactive work.
                if has_pages { max_sequences.saturating_sub(all + usize::from(all > 0)) } else { 0 }
            }
        }
    }

    /// Hands a request, which already has its slot in the queue, to the loop.
    pub fn submit(&self, submission: Box<Submission>) -> Result<(), SendError> {
        match self.commands().try_send(Command::Submit(submission)) {
            Err(mpsc::TrySendError::Disconnected(Command::Submit(submission))) => {
                Err(SendError::Gone(submission))
            }
            Err(_) => Err(SendError::Full),
            Ok(()) => Ok(()),
        }
    }

    /// Waits until all running requests have finished; past the deadline they end with `ShuttingDown`.
    pub async fn drain(&self, deadline: Duration) {
        let (done, drained) = oneshot::channel();
        let finished = async {
            self.send(Command::Drain { done }).await;
            // The sender is dropped if the loop is gone, and with it everything that ran.
            let _ = drained.await;
        };
        if tokio::time::timeout(deadline, finished).await.is_ok() {
            return;
        }
        let (done, aborted) = oneshot::channel();
        self.send(Command::Abort { done }).await;
        let _ = aborted.await;
    }

    /// Ends the loop, and waits until its executor is freed.
    pub async fn stop(&self) {
        let (done, stopped) = oneshot::channel();
        self.send(Command::Stop { done }).await;
        // The sender is dropped if the loop was gone already.
        let _ = stopped.await;
    }

    /// Hands a command to the loop. If the loop is gone, the command is dropped.
    async fn send(&self, mut command: Command) {
        // The channel is full only for moments, because a loop empties it before each step.
        while let Err(mpsc::TrySendError::Full(returned)) = self.commands().try_send(command) {
            command = returned;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn commands(&self) -> &mpsc::SyncSender<Command> {
        self.commands.as_ref().expect("the channel is closed only while dropping")
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // The loop itself catches panics of a step; a panic outside of a step has already ended all
            // streams.
            let _ = thread.join();
        }
    }
}

fn unstartable(error: std::io::Error) -> EngineError {
    EngineError::Failed(format!("the engine's threads cannot be started: {error}"))
}
