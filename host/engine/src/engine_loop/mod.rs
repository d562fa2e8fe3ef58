//! The thread that owns an engine's scheduler and executor. It loops through drain → plan → execute → commit
//! until the last handle is dropped.
//!
//! Invariant: no caller waits forever. A step that fails or panics fails the sequences in it, and the loop
//! continues; when the loop terminates, every stream has received its last event.

mod failures;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use skep_model::{Batch, DrawnAhead, Executor, LogitRow, RowOutput, Tokenizer};
use tokio::sync::oneshot;

use crate::disk_pages::{COPY_TIME, DiskPages, Warming};
use crate::health::Health;
use crate::lookahead::{Expected, Lookahead};
use crate::mask_worker::{MaskWorker, Masked};
use crate::page_giving;
use crate::recovery::Recovery;
use crate::router::ReplicaView;
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, SequenceContext};
use crate::sequence_id::SequenceId;
use crate::speculation::Speculator;
use crate::step::{self, Committed, RowUse, StepRows};
use crate::submission::Submission;
use crate::timeline::{Phase, StepTimer, StepWork};
use crate::{EngineError, EraseScope, ModelInfo, PageOwner};
use failures::{guarded, is_executor_failure};

/// The interval at which an idle loop probes whether its broken executor works again.
const PROBE_INTERVAL: Duration = Duration::from_millis(250);

/// The interval at which an idle loop looks whether its executor has failed for good.
const FAULT_INTERVAL: Duration = Duration::from_secs(1);
/// The interval at which a loop without a working executor looks whether there is another one.
const RECOVERY_INTERVAL: Duration = Duration::from_millis(20);

/// The interval at which an idle loop looks whether the disk's queue has room again.
const COPY_INTERVAL: Duration = Duration::from_millis(10);
/// Time for which a loop that ends copies pages.
const LAST_COPY_TIME: Duration = Duration::from_secs(1);

/// The outputs of the rows of one [`RowUse`].
type RowOutputs = Vec<Result<RowOutput, EngineError>>;

/// The events that an idle loop waits for.
enum Awaited {
    Command(Command),
    /// The executor is being replaced, which takes commands as well.
    Fault,
    /// No handle is left.
    End,
}

/// The tokens of a step.
struct Sampled {
    /// The outputs of each use, in the order of its rows.
    outputs: Vec<RowOutputs>,
    /// The error that broke the executor, if one did.
    broken: Option<String>,
    /// The error after which the executor computes nothing more, if there was one. There are no outputs then.
    fault: Option<String>,
    /// Whether the executor has started the next step.
    has_begun: bool,
}

/// The commands that a running loop accepts.
pub(crate) enum Command {
    Submit(Box<Submission>),
    /// Notifies `done` once no request runs or waits anymore.
    Drain {
        done: oneshot::Sender<()>,
    },
    /// Ends every request now.
    Abort {
        done: oneshot::Sender<()>,
    },
    /// Returns the owners of the KV pages.
    Pages {
        done: oneshot::Sender<Vec<PageOwner>>,
    },
    /// Frees cached pages, and forgets those that wait to be copied to the disk.
    Forget {
        pages: EraseScope,
        done: oneshot::Sender<()>,
    },
    /// Reads the pages of a conversation from the disk before a request needs them.
    Warm(Box<Warming>),
    /// Ends every request and the loop, and notifies `done` once the executor is freed.
    Stop {
        done: oneshot::Sender<()>,
    },
}

pub(crate) struct EngineLoop {
    executor: Box<dyn Executor>,
    scheduler: Scheduler,
    speculator: Speculator,
    lookahead: Lookahead,
    masks: MaskWorker,
    disk: Option<DiskPages>,
    recovery: Recovery,
    timer: StepTimer,
    context: Arc<SequenceContext>,
    /// The name of the model, for errors.
    name: String,
    health: Arc<Health>,
    next_id: u64,
    drains: Vec<oneshot::Sender<()>>,
    /// Callers that want the loop to end.
    stops: Vec<oneshot::Sender<()>>,
}

impl EngineLoop {
    /// Creates a loop that does nothing before `run` is called on its thread.
    pub fn new(
        executor: Box<dyn Executor>,
        mut scheduler: Scheduler,
        speculator: Speculator,
        (masks, disk, recovery): (MaskWorker, Option<DiskPages>, Recovery),
        timer: StepTimer,
        (info, tokenizer): (&ModelInfo, &Arc<Tokenizer>),
        view: &ReplicaView,
    ) -> Self {
        let context = SequenceContext {
            tokenizer: tokenizer.clone(),
            eos: info.eos.clone(),
            vocabulary_size: info.vocabulary_size,
            telemetry: view.telemetry.clone(),
        };
        let context = Arc::new(context);
        let health = view.health.clone();
        let name = info.name.clone();
        let lookahead = Lookahead::default();
        if disk.as_ref().is_some_and(DiskPages::has_disk) {
            scheduler.record_ended();
        }
        if let Some(limits) = executor.windows() {
            scheduler.limit_windows(limits);
        }
        let (drains, stops) = (Vec::new(), Vec::new());
        let next_id = 0;
        EngineLoop {
            executor,
            scheduler,
            speculator,
            lookahead,
            masks,
            disk,
            recovery,
            timer,
            context,
            name,
            health,
            next_id,
            drains,
            stops,
        }
    }

    /// Runs until all handles are dropped, or one of them stops it.
    pub fn run(mut self, commands: Receiver<Command>) {
        while self.take_commands(&commands) && self.stops.is_empty() {
            self.timer.lap(Phase::Wait);
            self.scheduler.end_interrupted(Instant::now());
            if self.recovery.is_under_way() {
                self.recover();
                self.scheduler.record_load();
                continue;
            }
            self.promote();
            self.scheduler.admit();
            let rows = self.next_rows();
            if !rows.plan.is_empty() {
                self.step(rows);
            } else if let Some(disk) = self.disk.as_mut().filter(|disk| disk.is_reading()) {
                disk.wait();
            }
            self.copy_pages(COPY_TIME);
            if cfg!(test) {
                self.check_integrity();
            }
            self.scheduler.record_load();
        }
        self.scheduler.abort(|| EngineError::ShuttingDown);
        self.copy_pages(LAST_COPY_TIME);
        self.recovery.end();
        self.scheduler.record_load();
        self.context.telemetry.record_end();
        let stops = std::mem::take(&mut self.stops);
        // Requests that arrive from here on find the loop gone.
        drop((self, commands));
        for done in stops {
            // A receiver that no longer waits does not need the notification.
            let _ = done.send(());
        }
    }

    /// Takes the queued commands, and waits for one when there is nothing else to do. Returns false when no
    /// handle is left.
    fn take_commands(&mut self, commands: &Receiver<Command>) -> bool {
        if self.scheduler.is_idle() && !self.disk.as_ref().is_some_and(DiskPages::is_reading) {
            if cfg!(debug_assertions) {
                self.check_integrity();
            }
            for done in self.drains.drain(..) {
                // A receiver that no longer waits does not need the notification.
                let _ = done.send(());
            }
            match self.next_command(commands) {
                Awaited::Command(command) => self.apply(command),
                Awaited::Fault => {}
                Awaited::End => return false,
            }
        }
        if self.recovery.is_under_way() {
            match commands.recv_timeout(RECOVERY_INTERVAL) {
                Ok(command) => self.apply(command),
                Err(RecvTimeoutError::Disconnected) => return false,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        loop {
            match commands.try_recv() {
                Ok(command) => self.apply(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Waits for the next command, and meanwhile probes whether a broken executor works again, and looks whether it has failed
    /// for good.
    fn next_command(&mut self, commands: &Receiver<Command>) -> Awaited {
        while self.disk.as_ref().is_some_and(DiskPages::has_spills) {
            let wait = if self.copy_pages(COPY_TIME) { Duration::ZERO } else { COPY_INTERVAL };
            match commands.recv_timeout(wait) {
                Ok(command) => return Awaited::Command(command),
                Err(RecvTimeoutError::Disconnected) => return Awaited::End,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        while !self.recovery.is_under_way() {
            let is_failing = self.health.problem().is_some();
            match commands.recv_timeout(if is_failing { PROBE_INTERVAL } else { FAULT_INTERVAL }) {
                Ok(command) => return Awaited::Command(command),
                Err(RecvTimeoutError::Disconnected) => return Awaited::End,
                Err(RecvTimeoutError::Timeout) if is_failing => self.probe(),
                Err(RecvTimeoutError::Timeout) => self.look_for_fault(),
            }
        }
        Awaited::Fault
    }

    fn apply(&mut self, command: Command) {
        match command {
            Command::Submit(submission) => {
                let id = SequenceId(self.next_id);
                self.next_id += 1;
                let sequence = Sequence::new(id, *submission, &self.context);
                if let Some(disk) = &mut self.disk {
                    disk.look_up(&sequence, &mut self.scheduler);
                }
                self.scheduler.submit(sequence);
            }
            Command::Forget { pages, done } => {
                if let Some(disk) = &mut self.disk {
                    disk.take_ended(&mut self.scheduler);
                    disk.forget(&pages, &mut self.scheduler);
                }
                self.scheduler.forget_continuations(|owner| pages.includes(owner));
                self.scheduler.forget(|owner| pages.includes(owner));
                // A receiver that no longer waits does not need the notification.
                let _ = done.send(());
            }
            Command::Drain { done } => {
                self.end_warmings();
                self.drains.push(done);
            }
            Command::Warm(warming) => match &mut self.disk {
                Some(disk) => disk.warm(*warming, &mut self.scheduler),
                None => warming.answer_from_memory(&mut self.scheduler),
            },
            Command::Pages { done } => {
                // A receiver that no longer waits does not need the answer.
                let _ = done.send(self.scheduler.page_owners());
            }
            Command::Stop { done } => self.stops.push(done),
            Command::Abort { done } => {
                self.end_warmings();
                self.scheduler.abort(|| EngineError::ShuttingDown);
                self.drains.push(done);
            }
        }
    }

    /// Ends the reads that no request waits for.
    fn end_warmings(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.end_warmings(&mut self.scheduler);
        }
    }

    /// Takes pages that were read from the disk.
    fn promote(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.promote(&mut self.scheduler, &mut *self.executor);
        }
    }

    /// Copies pages of ended sequences for the disk. Returns false if its queue is full.
    fn copy_pages(&mut self, time: Duration) -> bool {
        let Some(disk) = &mut self.disk else { return true };
        disk.take_ended(&mut self.scheduler);
        disk.copy_some(&mut self.scheduler, &mut *self.executor, time)
    }

    /// Panics unless every page has exactly one owner.
    fn check_integrity(&self) {
        self.scheduler.check_integrity(self.disk.iter().flat_map(DiskPages::held_pages));
    }

    /// Returns the rows of the next step: those of the step that was started ahead, if any of them are of use, or those
    /// of a new plan.
    fn next_rows(&mut self) -> StepRows {
        self.discard_useless();
        if let Some(rows) = self.lookahead.collect(&mut self.scheduler, &self.context.telemetry) {
            return rows;
        }
        let mut plan = self.scheduler.plan();
        self.scheduler.plan_drafts(&mut plan, &mut self.speculator);
        StepRows::of_plan(&self.scheduler, plan)
    }

    /// Frees the pages that are held for a started step of which nothing is of use.
    fn discard_useless(&mut self) {
        self.lookahead.discard_useless(&mut self.scheduler, &self.context.telemetry);
    }

    /// Runs one step: compute → assign rows → predict → sample → commit → learn.
    fn step(&mut self, rows: StepRows) {
        let drafted = rows.plan.iter().map(|planned| planned.draft.tokens.len()).sum();
        self.lookahead.record_plan(&rows.plan);
        self.context.telemetry.record_step(rows.token_count(), rows.plan.len());
        self.timer.lap(Phase::Plan);
        let started = Instant::now();
        let (masked, computed) = self.compute(&rows);
        if let Err(error) = computed {
            step::return_constraints(&mut self.scheduler, masked);
            return self.fail(&rows.plan, &error);
        }
        let uses = step::row_uses(&mut self.scheduler, &rows, masked);
        if let Err(error) = self.wait_for_undrawn(&rows.batch, &uses) {
            return self.fail(&rows.plan, &error);
        }
        let next = self.predict(&uses);
        let Sampled { outputs, broken, fault, has_begun } = self.sample(&uses, next.as_ref());
        if let Some(fault) = fault {
            return self.lose_executor(&fault, &rows.plan);
        }
        self.begin(next.filter(|_| has_begun), &outputs);
        self.timer.lap(Phase::Sample);
        self.record_health(broken);
        let took = started.elapsed();
        self.scheduler.record_step_time(took);
        self.context.telemetry.record_step_time(took);
        for (used, outputs) in uses.into_iter().zip(outputs) {
            self.commit(used, outputs);
        }
        self.discard_useless();
        self.learn(&rows.batch, took);
        self.timer.lap(Phase::Commit);
        self.timer.end(StepWork {
            sequences: rows.plan.len(),
            tokens: rows.token_count(),
            logit_rows: rows.logit_rows(),
            drafted,
            read_pages: self.disk.as_mut().map_or(0, DiskPages::take_page_count),
        });
    }

    /// Runs the forward pass, and computes the token masks of its rows at the same time.
    fn compute(&mut self, rows: &StepRows) -> (Vec<Masked>, Result<(), EngineError>) {
        let changed = self.change_windows();
        let masks = self.masks.begin(step::mask_jobs(&mut self.scheduler, &rows.plan));
        let computed = changed.and_then(|()| guarded(|| self.executor.forward(&rows.batch)));
        self.timer.lap(Phase::Forward);
        let masked = masks.join();
        self.timer.lap(Phase::Masks);
        (masked, computed)
    }

    /// Waits for the end of a step with rows of which none is drawn or scored: an executor that returns from a step before
    /// the step is done reports its failure only when its rows are used.
    fn wait_for_undrawn(&self, batch: &Batch, uses: &[RowUse]) -> Result<(), EngineError> {
        let is_used = uses.iter().any(|used| used.row_count() > 0);
        if is_used || batch.logit_rows() == 0 {
            return Ok(());
        }
        guarded(|| self.executor.logits(0).map(|_| ()))
    }

    /// Reports to the executor what pages keep for layers with a window. What it did not take is reported again.
    fn change_windows(&mut self) -> Result<(), EngineError> {
        if self.scheduler.window_changes().is_empty() {
            return Ok(());
        }
        guarded(|| self.executor.change_windows(self.scheduler.window_changes()))?;
        self.scheduler.forget_window_changes();
        Ok(())
    }

    /// Returns the step that is expected after this one, if the executor can start it early and it can be
    /// predicted.
    fn predict(&mut self, uses: &[RowUse]) -> Option<Expected> {
        if !self.executor.supports_lookahead() {
            return None;
        }
        self.lookahead.expect(&mut self.scheduler, uses, self.speculator.looks_up())
    }

    /// Keeps the next step if it has begun. The rows of this one are computed, whoever asked for them.
    fn begin(&mut self, begun: Option<Expected>, outputs: &[RowOutputs]) {
        let drawn = outputs.iter().flatten();
        let tokens: Vec<u32> = drawn.map(|output| output.as_ref().map_or(0, |row| row.token)).collect();
        self.lookahead.begin(begun, &tokens, &mut self.scheduler);
    }

    /// Draws from the rows of each use. A failure of a row fails that row alone, unless it broke the executor. `next` is
    /// the step that is expected after this one.
    fn sample(&mut self, uses: &[RowUse], next: Option<&Expected>) -> Sampled {
        let rows: Vec<Vec<LogitRow<'_>>> = uses
            .iter()
            .map(|used| self.scheduler.sequence(used.id).map_or_else(Vec::new, |s| used.logit_rows(s)))
            .collect();
        let all: Vec<LogitRow<'_>> = rows.iter().flatten().cloned().collect();
        if all.is_empty() {
            let outputs = uses.iter().map(|_| Vec::new()).collect();
            return Sampled { outputs, broken: None, fault: None, has_begun: false };
        }
        // An executor that returns from a step before the step is done reports its failure only now.
        let mut broken = None;
        let mut together = |executor: &mut dyn Executor| {
            let drawn = match next {
                Some(next) => executor.sample_and_begin(&all, &next.step),
                None => executor.sample(&all).map(|outputs| DrawnAhead { outputs, has_begun: false }),
            };
            drawn.inspect_err(|error| broken = is_executor_failure(error).then(|| error.to_string()))
        };
        match guarded(|| together(&mut *self.executor)) {
            Ok(DrawnAhead { outputs, has_begun }) if outputs.len() == all.len() => {
                let mut outputs = outputs.into_iter().map(Ok);
                let outputs = rows.iter().map(|rows| outputs.by_ref().take(rows.len()).collect()).collect();
                Sampled { outputs, broken, fault: None, has_begun }
            }
            failed => {
                if let Some(fault) = failed.err().and_then(|error| self.fault_after(&error)) {
                    return Sampled { outputs: Vec::new(), broken, fault: Some(fault), has_begun: false };
                }
                let mut alone = |row| match guarded(|| self.executor.sample(std::slice::from_ref(row))) {
                    Ok(mut outputs) if outputs.len() == 1 => Ok(outputs.remove(0)),
                    Ok(_) => Err(EngineError::Failed("the executor returned no token for a row".to_string())),
                    Err(error) => Err(error),
                };
                let outputs = rows.iter().map(|rows| rows.iter().map(&mut alone).collect()).collect();
                Sampled { outputs, broken, fault: None, has_begun: false }
            }
        }
    }

    /// Hands the outputs to their sequence, and ends the sequence if they end it.
    fn commit(&mut self, used: RowUse, outputs: RowOutputs) {
        let id = used.id;
        let Some(sequence) = self.scheduler.sequence_mut(id) else { return };
        let Committed { ending, computed, draft, cut } = used.commit(sequence, outputs);
        if let Some(draft) = draft {
            sequence.record_rejected(draft.rejected);
            self.speculator.record_draft(id, &draft.tried);
        }
        if cut {
            self.speculator.forget_tokens(id);
        }
        self.scheduler.computed(id, computed);
        page_giving::give(id, &mut self.scheduler, &mut *self.executor);
        match ending {
            Some(ending) => self.scheduler.end(id, ending),
            None => self.scheduler.give_up_left(id),
        }
    }

    /// Records how long the step took, for the choice of drafts, and forgets the drafts of ended sequences.
    fn learn(&mut self, batch: &Batch, took: Duration) {
        if batch.logit_rows() == batch.token_count() {
            self.speculator.record_step(batch.token_count(), took);
        }
        if let Some(disk) = &mut self.disk {
            disk.record_step(batch.token_count(), took);
        }
        self.speculator.retain(|id| self.scheduler.sequence(id).is_some());
    }
}
