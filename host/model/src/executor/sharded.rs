//! The executor of a model that is divided among ranks, each of which is a thread with a separate pool, buffers and
//! KV pages.
//!
//! The rank that receives the logits runs on the caller's thread; the others follow. Invariant: a rank that panics,
//! stalls or makes a different call fails the step on all ranks and never hangs it. The ranks are reconnected before
//! the next step. Until all of them have returned from the failed step, every step fails with its reason.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use skep_kernels::Isa;
use skep_kernels::turns::TurnGroup;

use super::limits::{check, limits};
use super::model_weights::ModelWeights;
use super::page_form::{PageForm, PageParts, check_pages, unsupported};
use super::rank::{Rank, RankOptions, memory_plan};
use super::threads::{share_of, tier_and_threads};
use super::windows::window_limits;
use super::{Executor, ExecutorLimits, ExecutorOptions, StepLogits, option, pipeline};
use crate::batch::{Batch, PageId, WindowChange, WindowLimits};
use crate::communicator::{Communicator, Links, World, buffer_bytes};
use crate::config::ModelConfig;
use crate::error::{ModelError, RankFault};
use crate::expert_load::ExpertLoad;
use crate::memory_plan::{MemoryPlan, RankMemory};
use crate::models::cost::Cost;
use crate::models::transformer::Transformer;
use crate::rank_times::RankTimes;
use crate::sampling::{LogitRow, RowOutput};

/// Time that the leader waits for a rank to copy pages.
const PAGES_DEADLINE: Duration = Duration::from_secs(10);

/// The connections of all ranks, in the order of their numbers.
pub(super) type Connected<C> = (Arc<World>, Vec<Links<C>>);

pub(super) struct ShardedExecutor<C: Communicator> {
    leader: NumberedRank<C>,
    /// The other ranks, in the order of their numbers.
    followers: Vec<Follower<C>>,
    reports: Receiver<Done>,
    connect: Box<dyn Fn() -> Connected<C> + Send>,
    /// Number of followers that have not returned from a step.
    missing: usize,
    /// Cost of a whole step, if there are several stages.
    cost: Option<Cost>,
    stages: usize,
    /// The CPUs are handed over only between steps, because ranks wait for each other within one.
    turns: Option<TurnGroup>,
    isa: Isa,
    logits: StepLogits,
    limits: ExecutorLimits,
    plan: MemoryPlan,
    memory: Vec<RankMemory>,
    pages: JoinedPages,
    experts: Option<Arc<ExpertLoad>>,
    times: Arc<RankTimes>,
}

/// The pages of all ranks together.
struct JoinedPages {
    form: PageForm,
    parts: PageParts,
    windows: Option<WindowLimits>,
}

/// A rank and its position among the others.
struct NumberedRank<C> {
    number: usize,
    world: Arc<World>,
    times: Arc<RankTimes>,
    rank: Rank<C>,
}

struct Follower<C> {
    number: usize,
    commands: SyncSender<RankCommand<C>>,
    thread: JoinHandle<()>,
}

enum RankCommand<C> {
    Step(Arc<[Batch]>),
    /// Sends the rank's part of these pages.
    ReadPages(Arc<[PageId]>, Sender<Result<Vec<u8>, ModelError>>),
    /// Replaces the rank's part of these pages, and sends an empty part.
    WritePages(Arc<[PageId]>, Vec<u8>, Sender<Result<Vec<u8>, ModelError>>),
    /// Changes what pages keep for layers with a window, and sends an empty part.
    ChangeWindows(Arc<[WindowChange]>, Sender<Result<Vec<u8>, ModelError>>),
    /// Replaces the connections after a failure.
    Reconnect(Arc<World>, Box<Links<C>>),
}

/// The report that a follower has finished a step, whether it succeeded or failed. Its world holds the failure.
struct Done;

impl<C: Communicator> ShardedExecutor<C> {
    /// Starts the ranks of `weights` with the connections that `connect` makes.
    pub(super) fn new(
        weights: &ModelWeights,
        options: ExecutorOptions,
        connect: impl Fn() -> Connected<C> + Send + 'static,
    ) -> Result<Self, ModelError> {
        weights.check_ranks(&options)?;
        let config = &weights.config;
        let limits = limits(config, &options)?;
        let windows = window_limits(config, &options, &limits)?;
        let (isa, threads) = tier_and_threads(&options)?;
        let memory = memory_of_ranks(weights, threads, &limits, &options)?;
        let plan = sum_of_ranks(weights, &memory, &limits);
        let (world, links) = connect();
        let ranks = weights.parts.len();
        let leader_number = ranks - weights.tensor_parallel;
        let (done, reports) = channel();
        let mut leader = None;
        let mut followers = Vec::with_capacity(ranks - 1);
        let mut affinity = options.affinity;
        let layers = weights.parts.iter().map(|model| layer_page_bytes(model, &options));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let parts = PageParts::new(&layers, weights.tensor_parallel);
        let form = PageForm::new(config, &options, isa, parts.bytes);
        let first_ranks = weights.parts.iter().step_by(weights.tensor_parallel);
        let experts = ExpertLoad::new(first_ranks.flat_map(|model| model.experts()));
        let times = RankTimes::new(ranks);
        let mut first_layer = 0;
        for (number, (model, links)) in weights.parts.iter().zip(links).enumerate() {
            let own_threads = share_of(threads, number, ranks);
            let options = RankOptions {
                isa,
                threads: own_threads,
                affinity,
                kv: options.kv,
                page_count: limits.page_count,
                windows,
            };
            affinity = affinity.after(own_threads);
            let mut rank = Rank::new(model.clone(), options, links)?;
            if number.is_multiple_of(weights.tensor_parallel) {
                rank.workspace.load = experts.as_ref().map(|experts| experts.of_stage(first_layer));
                first_layer += layers[number].len();
            }
            let numbered = NumberedRank { number, world: world.clone(), times: times.clone(), rank };
            if number == leader_number {
                leader = Some(numbered);
            } else {
                followers.push(Follower::start(numbered, done.clone())?);
            }
        }
        let leader = leader.ok_or_else(|| {
            option(
                "tensor_parallel",
                format!("the connections do not include rank {leader_number} of {ranks}"),
            )
        })?;
        Ok(ShardedExecutor {
            leader,
            followers,
            reports,
            connect: Box::new(connect),
            missing: 0,
            cost: weights.cost,
            stages: weights.stages,
            turns: weights.turns.clone(),
            isa,
            logits: StepLogits::new(config.vocabulary_size),
            limits,
            plan,
            memory,
            pages: JoinedPages { form, parts, windows },
            experts,
            times,
        })
    }

    /// Runs the micro-batches on all ranks.
    fn step(&mut self, micro_batches: Arc<[Batch]>, rows: usize) -> Result<(), ModelError> {
        for follower in &self.followers {
            match follower.commands.send(RankCommand::Step(micro_batches.clone())) {
                Ok(()) => self.missing += 1,
                Err(_) => {
                    self.leader.world.fail(follower.number, RankFault::Terminated);
                }
            }
        }
        let led = self.leader.take_part(&micro_batches, Some(self.logits.buffer(rows)));
        self.await_followers()?;
        led?;
        self.leader.world.check()
    }

    /// Sends a command about pages to all followers, and returns the reply of each. Nothing is sent while a follower has
    /// not returned from a failed step.
    fn of_followers(
        &mut self,
        mut command: impl FnMut(usize, Sender<Result<Vec<u8>, ModelError>>) -> RankCommand<C>,
    ) -> Result<Vec<(usize, Vec<u8>)>, ModelError> {
        self.leader.world.check()?;
        let mut replies = Vec::with_capacity(self.followers.len());
        for follower in &self.followers {
            let (reply, received) = channel();
            let sent = follower.commands.send(command(follower.number, reply));
            sent.map_err(|_| self.leader.world.fail(follower.number, RankFault::Terminated))?;
            replies.push((follower.number, received));
        }
        let wait = |(number, received): (usize, Receiver<Result<Vec<u8>, ModelError>>)| {
            let reply = received.recv_timeout(PAGES_DEADLINE);
            let terminated = |_| self.leader.world.fail(number, RankFault::Terminated);
            Ok((number, reply.map_err(terminated)??))
        };
        replies.into_iter().map(wait).collect()
    }

    /// Waits for the followers that are still running the step.
    fn await_followers(&mut self) -> Result<(), ModelError> {
        let world = self.leader.world.clone();
        let mut patience = world.patience();
        while self.missing > 0 {
            let before = Instant::now();
            match self.reports.recv_timeout(patience.slice()) {
                Ok(Done) => self.missing -= 1,
                Err(RecvTimeoutError::Timeout) => {
                    world.endure(&mut patience, before.elapsed(), self.leader.number)?;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(world.fail(self.leader.number, RankFault::Terminated));
                }
            }
        }
        Ok(())
    }

    /// Reconnects the ranks after a failed step, if all of them have returned from it.
    fn reconnect(&mut self) -> Result<(), ModelError> {
        let Err(failed) = self.leader.world.check() else { return Ok(()) };
        self.missing -= self.reports.try_iter().count().min(self.missing);
        if self.missing > 0 || self.followers.iter().any(|follower| follower.thread.is_finished()) {
            return Err(failed);
        }
        let (world, links) = (self.connect)();
        let mut followers = self.followers.iter();
        for (number, links) in links.into_iter().enumerate() {
            if number == self.leader.number {
                (self.leader.world, self.leader.rank.links) = (world.clone(), links);
            } else if let Some(follower) = followers.next() {
                // A thread that has terminated in the meantime fails the next step.
                let _ = follower.commands.send(RankCommand::Reconnect(world.clone(), Box::new(links)));
            }
        }
        Ok(())
    }
}

impl<C: Communicator> Executor for ShardedExecutor<C> {
    fn limits(&self) -> &ExecutorLimits {
        &self.limits
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), ModelError> {
        self.logits.clear();
        check(batch, &self.limits)?;
        let rows = batch.logit_rows();
        let tokens = batch.token_count();
        if tokens > 0 {
            self.reconnect()?;
            let count =
                self.cost.as_ref().map_or(1, |cost| pipeline::micro_batches(cost, self.stages, tokens));
            let _turn = self.turns.as_ref().map(TurnGroup::take);
            self.step(pipeline::split(batch, count).into(), rows)?;
        }
        self.logits.keep(rows);
        Ok(())
    }

    fn logits(&self, row: usize) -> Result<&[f32], ModelError> {
        self.logits.row(row)
    }

    fn sample(&mut self, rows: &[LogitRow<'_>]) -> Result<Vec<RowOutput>, ModelError> {
        self.logits.sample(self.isa, rows)
    }

    fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    fn ranks(&self) -> &[RankMemory] {
        &self.memory
    }

    fn expert_load(&self) -> Option<Arc<ExpertLoad>> {
        self.experts.clone()
    }

    fn rank_times(&self) -> Option<Arc<RankTimes>> {
        Some(self.times.clone())
    }

    fn windows(&self) -> Option<WindowLimits> {
        self.pages.windows
    }

    fn change_windows(&mut self, changes: &[WindowChange]) -> Result<(), ModelError> {
        if changes.is_empty() || self.windows().is_none() {
            return Ok(());
        }
        // Changes that a rank missed would let it read other tokens, so ranks are reconnected before they get them.
        self.reconnect()?;
        let shared: Arc<[WindowChange]> = changes.into();
        self.of_followers(|_, reply| RankCommand::ChangeWindows(shared.clone(), reply))?;
        self.leader.rank.change_windows(changes);
        Ok(())
    }

    fn page_form(&self) -> Option<&PageForm> {
        self.pages.windows.is_none().then_some(&self.pages.form)
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), ModelError> {
        self.page_form().ok_or_else(unsupported)?;
        check_pages(pages, self.limits.page_count, out.len(), self.pages.form.bytes)?;
        let wanted: Arc<[PageId]> = pages.into();
        let received = self.of_followers(|_, reply| RankCommand::ReadPages(wanted.clone(), reply))?;
        let parts = &self.pages.parts;
        let leader = self.leader.number;
        let mut own = vec![0; pages.len() * parts.rank_bytes(leader)];
        self.leader.rank.read_pages(pages, &mut own)?;
        parts.join(leader, &own, out);
        received.iter().for_each(|(rank, part)| parts.join(*rank, part, out));
        Ok(())
    }

    fn write_pages(&mut self, pages: &[PageId], bytes: &[u8]) -> Result<(), ModelError> {
        self.page_form().ok_or_else(unsupported)?;
        check_pages(pages, self.limits.page_count, bytes.len(), self.pages.form.bytes)?;
        let wanted: Arc<[PageId]> = pages.into();
        let mut split: Vec<Option<Vec<u8>>> =
            (0..=self.followers.len()).map(|rank| Some(self.pages.parts.part(rank, bytes))).collect();
        let own = split[self.leader.number].take().unwrap_or_default();
        self.of_followers(|rank, reply| {
            let part = split[rank].take().unwrap_or_default();
            RankCommand::WritePages(wanted.clone(), part, reply)
        })?;
        self.leader.rank.write_pages(pages, &own)
    }
}

impl<C: Communicator> Drop for ShardedExecutor<C> {
    fn drop(&mut self) {
        let stuck = self.missing > 0;
        for Follower { commands, thread, .. } in self.followers.drain(..) {
            drop(commands);
            // A rank that never returned is not joined. It terminates when it finds that no other rank waits for it.
            if !stuck && thread.join().is_err() {
                tracing::error!("a rank's thread panicked");
            }
        }
    }
}

impl<C: Communicator> NumberedRank<C> {
    /// Runs the rank's part of a step. Any error or panic fails all ranks.
    fn take_part(&mut self, micro_batches: &[Batch], logits: Option<&mut [f32]>) -> Result<(), ModelError> {
        self.world.check()?;
        self.world.set_idle(self.number, false);
        let (began, before) = (Instant::now(), self.world.waited(self.number));
        let rank = &mut self.rank;
        let outcome = catch_unwind(AssertUnwindSafe(|| rank.steps(micro_batches, logits)));
        self.world.set_idle(self.number, true);
        let waited = self.world.waited(self.number).saturating_sub(before);
        self.times.record(self.number, began.elapsed(), waited);
        match outcome {
            Ok(Ok(())) => Ok(()),
            Ok(Err(ModelError::Rank { rank, fault })) => Err(self.world.fail(rank, fault)),
            Ok(Err(error)) => {
                Err(self.world.fail(self.number, RankFault::Failed { reason: error.to_string() }))
            }
            Err(panic) => {
                Err(self.world.fail(self.number, RankFault::Failed { reason: panic_text(&*panic) }))
            }
        }
    }
}

impl<C: Communicator> Follower<C> {
    fn start(mut numbered: NumberedRank<C>, done: Sender<Done>) -> Result<Self, ModelError> {
        let number = numbered.number;
        let (commands, queue) = sync_channel(2);
        let follow = move || {
            for command in queue {
                match command {
                    RankCommand::Step(micro_batches) => {
                        // The world holds the failure, and the leader reads it there.
                        let _ = numbered.take_part(&micro_batches, None);
                        if done.send(Done).is_err() {
                            return;
                        }
                    }
                    // A leader that stopped waiting does not need the reply.
                    RankCommand::ReadPages(pages, reply) => {
                        let _ = reply.send(numbered.rank.pages(&pages));
                    }
                    RankCommand::WritePages(pages, part, reply) => {
                        let written = numbered.rank.write_pages(&pages, &part);
                        let _ = reply.send(written.map(|()| Vec::new()));
                    }
                    RankCommand::ChangeWindows(changes, reply) => {
                        numbered.rank.change_windows(&changes);
                        let _ = reply.send(Ok(Vec::new()));
                    }
                    RankCommand::Reconnect(world, links) => {
                        (numbered.world, numbered.rank.links) = (world, *links)
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name(format!("skep-rank-{number}")).spawn(follow).map_err(
            |error| option("tensor_parallel", format!("cannot start the thread of rank {number}: {error}")),
        )?;
        Ok(Follower { number, commands, thread })
    }
}

/// Returns the number of bytes of a page in each layer of a rank.
fn layer_page_bytes(model: &Transformer, options: &ExecutorOptions) -> Result<Vec<usize>, ModelError> {
    let format = options.kv.format()?;
    // The sizes were checked for all pages of the pool.
    Ok(model.caches().map(|cache| cache.byte_len(format, 1).unwrap_or(0)).collect())
}

/// Returns the memory that each rank takes, without what they share. `threads` are those of all ranks together.
fn memory_of_ranks(
    weights: &ModelWeights,
    threads: usize,
    limits: &ExecutorLimits,
    options: &ExecutorOptions,
) -> Result<Vec<RankMemory>, ModelError> {
    let rank = |(number, model): (usize, &Arc<Transformer>)| {
        let own_threads = share_of(threads, number, weights.parts.len());
        let own = memory_plan(model, own_threads, limits, options)?;
        let memory = MemoryPlan { weight_bytes: model.weight_bytes(), ..own };
        let (stage, shard) = (number / weights.tensor_parallel, number % weights.tensor_parallel);
        Ok(RankMemory { stage, shard, device: "cpu".to_owned(), memory })
    };
    weights.parts.iter().enumerate().map(rank).collect()
}

/// Returns the memory that all ranks take together.
fn sum_of_ranks(weights: &ModelWeights, ranks: &[RankMemory], limits: &ExecutorLimits) -> MemoryPlan {
    let shared = MemoryPlan {
        activation_bytes: shared_bytes(&weights.config, limits, weights.tensor_parallel, weights.stages),
        ..MemoryPlan::default()
    };
    let sum = ranks.iter().fold(shared, |sum, rank| sum.plus(&rank.memory));
    MemoryPlan { weight_bytes: weights.bytes, ..sum }
}

/// Returns the size of what the ranks of a model share: the logits of a step and the buffers in which they meet.
pub(super) fn shared_bytes(
    config: &ModelConfig,
    limits: &ExecutorLimits,
    tensor_parallel: usize,
    stages: usize,
) -> u64 {
    let hidden = limits.max_batch_tokens.saturating_mul(config.hidden_size);
    let logits = limits.max_logit_rows.saturating_mul(config.vocabulary_size);
    let buffers = buffer_bytes(tensor_parallel, stages, hidden, logits);
    buffers.saturating_add(StepLogits::byte_len(limits))
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("it panicked: {}", text.unwrap_or("without a message"))
}

#[cfg(test)]
#[path = "sharded_tests.rs"]
mod tests;
