//! The one thread that owns an engine's scheduler and executor: drain → plan → execute → commit, until the last handle
//! is dropped.
//!
//! Invariant: no caller waits for ever. A step that fails or panics fails the sequences in it and the loop goes on;
//! when the loop ends, every stream has been told.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use skep_model::{
    Batch, BatchSequence, Executor, LogitRow, LogitsWanted, ModelError, RowOutput, SampleRow, ScoreRow,
    Tokenizer,
};
use tokio::sync::oneshot;

use crate::constraint::{OutputConstraint, TokenMask};
use crate::router::{LoadShare, ReplicaView};
use crate::scheduler::{Ending, PlannedSequence, Scheduler, StepLimits};
use crate::sequence::{Sequence, SequenceContext, SequenceId};
use crate::stream::EventSender;
use crate::telemetry::QueuePlace;
use crate::{EngineError, FinishReason, GenerateRequest, ModelInfo};

/// All that can be said to a running loop.
pub(crate) enum Command {
    Submit(Box<Submission>),
    /// Say when nothing runs or waits any more.
    Drain {
        done: oneshot::Sender<()>,
    },
    /// End everything now.
    Abort {
        done: oneshot::Sender<()>,
    },
}

/// A checked request with its constraint compiled.
pub(crate) struct Submission {
    pub request: GenerateRequest,
    pub max_tokens: usize,
    pub matcher: Option<OutputConstraint>,
    pub events: EventSender,
    pub submitted: Instant,
    pub deadline: Instant,
    pub place: QueuePlace,
    pub load: LoadShare,
}

pub(crate) struct EngineLoop {
    executor: Box<dyn Executor>,
    scheduler: Scheduler,
    context: Arc<SequenceContext>,
    next_id: u64,
    drains: Vec<oneshot::Sender<()>>,
}

/// What the logit rows of one planned sequence are for.
struct RowUse {
    id: SequenceId,
    tokens: usize,
    /// Row in the step and the prompt token that it predicts.
    scores: Vec<ScoreRow>,
    sample: Sample,
}

enum Sample {
    /// More of the prompt is to come, or nothing is wanted.
    No,
    Row {
        row: usize,
        mask: Option<TokenMask>,
    },
    /// The sequence ends here without another token.
    End(Ending),
}

impl EngineLoop {
    pub fn new(
        executor: Box<dyn Executor>,
        limits: StepLimits,
        info: &ModelInfo,
        tokenizer: &Arc<Tokenizer>,
        view: &ReplicaView,
    ) -> Self {
        let context = SequenceContext {
            tokenizer: tokenizer.clone(),
            eos: info.eos.clone(),
            telemetry: view.telemetry.clone(),
        };
        let scheduler = Scheduler::new(limits, view);
        EngineLoop { executor, scheduler, context: Arc::new(context), next_id: 0, drains: Vec::new() }
    }

    /// Runs until all handles are gone.
    pub fn run(mut self, commands: Receiver<Command>) {
        while self.take_commands(&commands) {
            self.scheduler.end_interrupted(Instant::now());
            self.scheduler.admit();
            let plan = self.scheduler.plan();
            if !plan.is_empty() {
                self.step(&plan);
            }
            if cfg!(test) {
                self.scheduler.check_integrity();
            }
            self.scheduler.record_load();
        }
        self.scheduler.abort(|| EngineError::ShuttingDown);
        self.scheduler.record_load();
    }

    /// Takes what is in the queue; waits for a command when there is nothing else to do. False: no handle is left.
    fn take_commands(&mut self, commands: &Receiver<Command>) -> bool {
        if self.scheduler.is_idle() {
            if cfg!(debug_assertions) {
                self.scheduler.check_integrity();
            }
            for done in self.drains.drain(..) {
                // A caller that no longer waits need not be told.
                let _ = done.send(());
            }
            let Ok(command) = commands.recv() else { return false };
            self.apply(command);
        }
        loop {
            match commands.try_recv() {
                Ok(command) => self.apply(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn apply(&mut self, command: Command) {
        match command {
            Command::Submit(submission) => {
                let id = SequenceId(self.next_id);
                self.next_id += 1;
                self.scheduler.submit(Sequence::new(id, *submission, &self.context));
            }
            Command::Drain { done } => self.drains.push(done),
            Command::Abort { done } => {
                self.scheduler.abort(|| EngineError::ShuttingDown);
                self.drains.push(done);
            }
        }
    }

    fn step(&mut self, plan: &[PlannedSequence]) {
        let batch = self.batch(plan);
        self.context.telemetry.record_step(batch.token_count());
        let computed = guarded(|| self.executor.forward(&batch));
        if let Err(error) = computed {
            tracing::error!(%error, sequences = plan.len(), "a step failed");
            let text = error.to_string();
            plan.iter()
                .for_each(|planned| self.scheduler.end(planned.id, Err(EngineError::Failed(text.clone()))));
            return;
        }
        let uses = self.row_uses(plan, &batch);
        let outputs = self.sample(&uses);
        for (used, outputs) in uses.into_iter().zip(outputs) {
            self.scheduler.computed(used.id, used.tokens);
            if let Some(ending) = self.commit(used, outputs) {
                self.scheduler.end(ending.0, ending.1);
            }
        }
    }

    fn batch(&self, plan: &[PlannedSequence]) -> Batch {
        let sequences = plan.iter().filter_map(|planned| {
            let sequence = self.scheduler.sequence(planned.id)?;
            let end = sequence.computed + planned.tokens;
            let logits = match sequence.next_scored_row() {
                Some(_) => LogitsWanted::All,
                None if end == sequence.tokens.len() && !sequence.is_prefill_only() => LogitsWanted::Last,
                None => LogitsWanted::None,
            };
            Some(BatchSequence {
                tokens: sequence.tokens[sequence.computed..end].to_vec(),
                start: sequence.computed,
                pages: sequence.pages.pages()[..crate::kv::pages_for(end)].to_vec(),
                logits,
            })
        });
        Batch { sequences: sequences.collect() }
    }

    /// Says what each sequence's rows are for and computes the masks.
    fn row_uses(&mut self, plan: &[PlannedSequence], batch: &Batch) -> Vec<RowUse> {
        let mut first_row = 0;
        let mut uses = Vec::with_capacity(plan.len());
        for (planned, rows) in plan.iter().zip(&batch.sequences) {
            let Some(sequence) = self.scheduler.sequence_mut(planned.id) else { continue };
            let end = rows.start + rows.tokens.len();
            let scores = match sequence.next_scored_row() {
                None => Vec::new(),
                Some(next) => (next..end.min(sequence.prompt().len() - 1))
                    .map(|position| ScoreRow {
                        row: first_row + position - rows.start,
                        target: sequence.tokens[position + 1],
                        top: sequence.request.prompt_logprobs.unwrap_or(0),
                    })
                    .collect(),
            };
            let last_row = (first_row + rows.logit_rows()).saturating_sub(1);
            first_row += rows.logit_rows();
            let sample = if end < sequence.tokens.len() { Sample::No } else { sample_of(sequence, last_row) };
            uses.push(RowUse { id: planned.id, tokens: planned.tokens, scores, sample });
        }
        uses
    }

    /// The outputs of each use: its scores, then its sample. A row that fails fails only its own sequence.
    fn sample(&mut self, uses: &[RowUse]) -> Vec<Result<Vec<RowOutput>, EngineError>> {
        let rows: Vec<Vec<LogitRow<'_>>> = uses
            .iter()
            .map(|used| {
                let sequence = self.scheduler.sequence(used.id);
                let sample = sequence.and_then(|sequence| sample_row(sequence, &used.sample));
                used.scores.iter().copied().map(LogitRow::Score).chain(sample.map(LogitRow::Sample)).collect()
            })
            .collect();
        let all: Vec<LogitRow<'_>> = rows.iter().flatten().cloned().collect();
        if all.is_empty() {
            return uses.iter().map(|_| Ok(Vec::new())).collect();
        }
        match guarded(|| self.executor.sample(&all)) {
            Ok(outputs) if outputs.len() == all.len() => {
                let mut outputs = outputs.into_iter();
                rows.iter().map(|rows| Ok(outputs.by_ref().take(rows.len()).collect())).collect()
            }
            _ => rows.iter().map(|rows| guarded(|| self.executor.sample(rows))).collect(),
        }
    }

    /// Hands the outputs to their sequence; gives its ending if it ends.
    fn commit(
        &mut self,
        used: RowUse,
        outputs: Result<Vec<RowOutput>, EngineError>,
    ) -> Option<(SequenceId, Ending)> {
        let sequence = self.scheduler.sequence_mut(used.id)?;
        let mut outputs = match outputs {
            Ok(outputs) => outputs.into_iter(),
            Err(error) => return Some((used.id, Err(error))),
        };
        outputs.by_ref().take(used.scores.len()).for_each(|score| sequence.record_score(score));
        let ending = match used.sample {
            Sample::No => None,
            Sample::End(ending) => Some(ending),
            Sample::Row { .. } => match outputs.next() {
                Some(sampled) => sequence.append_sampled(sampled).transpose(),
                None => Some(Err(EngineError::Failed("the executor gave no token for a row".to_string()))),
            },
        };
        ending.map(|ending| (used.id, ending))
    }
}

/// What comes after the last known token.
fn sample_of(sequence: &mut Sequence, row: usize) -> Sample {
    if sequence.is_prefill_only() {
        return Sample::End(Ok(FinishReason::Length));
    }
    match sequence.mask() {
        Err(error) => Sample::End(Err(error)),
        Ok(Some(mask)) if !mask.allows_other_than(sequence.banned()) => {
            Sample::End(Ok(FinishReason::ConstraintDone))
        }
        Ok(mask) => Sample::Row { row, mask },
    }
}

fn sample_row<'a>(sequence: &'a Sequence, sample: &'a Sample) -> Option<SampleRow<'a>> {
    let Sample::Row { row, mask } = sample else { return None };
    Some(SampleRow {
        row: *row,
        sampling: &sequence.request.sampling,
        seed: sequence.seed,
        step: sequence.output().len() as u64,
        mask: mask.as_ref().map(TokenMask::words),
        banned: sequence.banned(),
        prompt: sequence.prompt(),
        output: sequence.output(),
        top_logprobs: sequence.request.top_logprobs,
    })
}

/// Calls the executor; a panic in it is an error like any other.
fn guarded<T>(call: impl FnOnce() -> Result<T, ModelError>) -> Result<T, EngineError> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(EngineError::from),
        Err(_) => Err(EngineError::Failed("the executor panicked".to_string())),
    }
}
