//! The executor that runs a model on CUDA devices with this project's kernels, in the order of each device's queue.
//!
//! One thread drives all ranks, with the threads of `launching` for steps that are not recorded. It enqueues a step and
//! continues; only drawing waits, for the tokens. Steps that decode few rows of each sequence are recorded once per shape and
//! then replayed. Invariant: all memory is allocated
//! before the first step, and a model that does not fit is rejected then.

mod draw;
#[cfg(feature = "emulated")]
mod emulated;
pub(crate) mod estimate;
mod launching;
mod layout;
mod load;
mod page_copies;
mod rank;
mod recordings;
mod restart;
mod room;
mod shape;
mod staging;
mod start;
mod step;
mod sums;
mod warm_up;
mod weights;
pub(crate) mod workspace;

use std::cell::{Cell, OnceCell};
use std::collections::HashSet;
use std::sync::Arc;

use skep_kernels::Isa;
use skep_kernels::cuda::device::{HostBuffer, Recording};
use skep_kernels::cuda::sample::NONE;

use super::limits::check;
use super::page_form::{PageForm, check_pages};
use super::step_logits::no_row;
use super::{DrawnAhead, Executor, ExecutorLimits, StepAhead, pipeline};
use crate::batch::{Batch, BatchSequence, PageId};
use crate::error::{ModelError, RankFault};
use crate::memory_plan::{MemoryPlan, RankMemory};
use crate::sampling::{LogitRow, RowOutput, draw};
use draw::{DrawBuffers, DrawnRows};
#[cfg(feature = "emulated")]
pub use emulated::emulated_executor;
use launching::{Launchers, Stages};
use page_copies::PageCopies;
use rank::{Peers, Rank};
use recordings::Recordings;
pub(crate) use restart::{Restarted, SharedWeights};
pub(crate) use start::CudaModel;
use step::{Cuts, Step};
use workspace::logits_stride;

/// Minimum number of rows per micro-batch; this many are worth a pass over the weights of a stage.
const MICRO_BATCH_ROWS: usize = 256;

/// An executor on one or several CUDA devices, each with its part of one model.
pub struct CudaExecutor {
    /// Dropped before the ranks, whose resources the recordings use.
    recordings: Recordings,
    /// Started with the first step that is not recorded.
    launchers: Option<Launchers>,
    /// The ranks of each stage, in the order of the stages.
    stages: Stages,
    /// A rank that other ranks waited for until they gave up. The ranks' meeting state must be reset before the next step.
    stalled: Cell<Option<usize>>,
    cuts: Cuts,
    inputs: StepInputs,
    draws: DrawBuffers,
    logit_rows: usize,
    /// The last step.
    step: Batch,
    /// A step that was started with the tokens drawn before it. By now it contains these tokens.
    ahead: Option<Batch>,
    /// The logits of the last step with their padding, read when the host first needs them.
    logits: OnceCell<Vec<f32>>,
    isa: Isa,
    limits: ExecutorLimits,
    plan: MemoryPlan,
    /// The memory of each rank.
    memory: Vec<RankMemory>,
    copies: PageCopies,
}

/// The host memory that steps are copied from.
struct StepInputs {
    /// The buffers that steps are copied from in turn.
    buffers: [HostBuffer; 2],
    /// Index of the buffer for the next step.
    next: usize,
    packed: Vec<u8>,
}

impl CudaExecutor {
    /// Returns all ranks for changes. No thread launches for them anymore.
    fn ranks_mut(&mut self) -> impl Iterator<Item = &mut Rank> {
        self.launchers = None;
        Arc::get_mut(&mut self.stages).into_iter().flatten().flatten()
    }

    fn leader(&self) -> &Rank {
        &self.stages[self.stages.len() - 1][0]
    }

    /// Enqueues a step on all ranks and returns its number of logit rows. For a micro-batch of a step, `micro_batch` is the
    /// row at which its logits start.
    fn put(&mut self, batch: &Batch, micro_batch: Option<usize>) -> Result<usize, ModelError> {
        self.copies.unmark();
        let step = self.cuts.pack(batch, micro_batch.is_none(), &mut self.inputs.packed);
        let put = self.copy_inputs(&step).and_then(|()| self.compute(&step, micro_batch.unwrap_or(0)));
        self.all_or_none(put)
    }

    /// Marks the ranks for a reset if `put` failed. Ranks of which only some have a step enqueued would never meet
    /// again.
    fn all_or_none<T>(&mut self, put: Result<T, ModelError>) -> Result<T, ModelError> {
        if put.is_err() {
            self.ahead = None;
            self.logit_rows = 0;
            self.stalled.set(self.stalled.get().or(Some(0)));
        }
        put
    }

    /// Enqueues a step whose first tokens are those drawn first, which only the device knows.
    fn put_drawn(&mut self, next: &StepAhead) -> Result<(), ModelError> {
        let put = self.try_put_drawn(next);
        self.all_or_none(put)
    }

    fn try_put_drawn(&mut self, next: &StepAhead) -> Result<(), ModelError> {
        self.copies.mark()?;
        let step = self.cuts.pack(&next.batch, true, &mut self.inputs.packed);
        self.copy_inputs(&step)?;
        let leader = self.leader();
        leader.drawn.record()?;
        // Sequences of one token are decoded, so they come first in a step, in the order of the batch.
        let count = next.drawn.len();
        let tokens = leader.drawn_tokens(count)?;
        for rank in self.stages.iter().flatten() {
            // All ranks wait, because their part of the logits overwrites the logits that the draw reads.
            rank.device.wait(&leader.drawn)?;
            rank.device.copy(tokens, rank.tokens(&step, count)?)?;
        }
        self.compute(&step, 0).map(drop)
    }

    fn compute(&mut self, step: &Step, first: usize) -> Result<usize, ModelError> {
        self.record(step);
        let launchers = match self.launchers.take() {
            Some(launchers) => launchers,
            None => Launchers::start(&self.stages)?,
        };
        let launchers = self.launchers.insert(launchers);
        let recordings = step.shape.and_then(|shape| self.recordings.made.get(&shape));
        for stage in 0..self.stages.len() {
            let ranks = &self.stages[stage];
            for own in 0..ranks.len() {
                if stage > 0 {
                    Peers { ranks, own }.take_over(&self.stages[stage - 1][own], step.rows)?;
                }
                if let Some(next) = self.stages.get(stage + 1) {
                    ranks[own].device.wait(&next[own].handed_on)?;
                }
            }
            match recordings {
                Some(recordings) => recordings[stage].iter().try_for_each(Recording::replay)?,
                None => launchers.launch(stage, step, first)?,
            }
            for rank in ranks {
                rank.done.record()?;
            }
        }
        Ok(step.logit_rows)
    }

    fn copy_inputs(&mut self, step: &Step) -> Result<(), ModelError> {
        let input = self.inputs.next;
        self.inputs.next ^= 1;
        for rank in self.stages.iter().flatten() {
            rank.copied[input].synchronize()?;
        }
        self.inputs.buffers[input].bytes_mut()[..step.bytes].copy_from_slice(&self.inputs.packed);
        for rank in self.stages.iter().flatten() {
            rank.device.upload(&self.inputs.buffers[input], 0, rank.inputs(step.bytes)?)?;
            rank.copied[input].record()?;
        }
        Ok(())
    }

    /// Waits until all ranks have finished the step.
    fn finish(&self) -> Result<(), ModelError> {
        for rank in self.stages.iter().flatten() {
            rank.device.synchronize()?;
        }
        self.check_meetings()
    }

    /// Checks that the ranks of the finished step met all others. A failure of a step that was started since is an error
    /// as well.
    fn check_meetings(&self) -> Result<(), ModelError> {
        let Some(rank) = meeting(&self.stages).find_map(Rank::missing_peer) else { return Ok(()) };
        self.stalled.set(Some(rank));
        let deadline = std::time::Duration::from_micros(self.leader().shape.rank_deadline_us);
        Err(ModelError::Rank { rank, fault: RankFault::TimedOut { deadline } })
    }

    /// Resets the ranks' meeting state, after all ranks have returned from the failed step.
    fn reconnect(&mut self) -> Result<(), ModelError> {
        for rank in meeting(&self.stages) {
            rank.device.synchronize()?;
        }
        for rank in meeting(&self.stages) {
            rank.forget_meetings()?;
            rank.device.synchronize()?;
        }
        self.stalled.set(None);
        Ok(())
    }

    /// Returns the tokens of the rows that the device draws, each with the index of its row in `rows`. If the device
    /// draws all rows, starts `next` before it waits for the tokens.
    fn draw(
        &mut self,
        rows: &[LogitRow<'_>],
        next: Option<&StepAhead>,
    ) -> Result<Vec<(usize, u32)>, ModelError> {
        let next = next.filter(|next| can_follow(rows, next));
        let first = next.map_or(&[][..], |next| next.drawn.as_slice());
        let vocabulary = self.limits.vocabulary_size;
        let mut drawn = DrawnRows::new(rows, first, vocabulary, self.draws.most_adjustments);
        if drawn.order.is_empty() {
            return Ok(Vec::new());
        }
        self.enqueue_draws(&mut drawn)?;
        if let Some(next) = next.filter(|_| drawn.order.len() == rows.len()) {
            self.put_drawn(next)?;
            // The logits of the drawn step are overwritten.
            self.logit_rows = 0;
            self.ahead = Some(next.batch.clone());
        }
        self.leader().known.synchronize()?;
        self.check_meetings()?;
        let tokens = self.draws.output.bytes().chunks_exact(4).map(word);
        Ok(drawn.order.into_iter().zip(tokens).collect())
    }
}

/// Returns the ranks that share the weights of a stage with other ranks.
fn meeting(stages: &[Vec<Rank>]) -> impl Iterator<Item = &Rank> {
    stages.iter().filter(|ranks| ranks.len() > 1).flatten()
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Returns whether `next` continues with tokens of different rows, one for each of its first sequences.
fn can_follow(rows: &[LogitRow<'_>], next: &StepAhead) -> bool {
    let StepAhead { batch, drawn } = next;
    let decodes = |sequence: &BatchSequence| sequence.tokens.len() == 1 && sequence.logit_rows() == 1;
    let are_rows = drawn.iter().all(|row| *row < rows.len());
    let differ = drawn.iter().collect::<HashSet<_>>().len() == drawn.len();
    let first = batch.sequences.get(..drawn.len());
    are_rows && differ && first.is_some_and(|first| !first.is_empty() && first.iter().all(decodes))
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        // A running step may still use the buffers of other ranks. Errors have been reported already.
        for rank in self.stages.iter().flatten() {
            let _ = rank.device.synchronize();
        }
    }
}

impl Executor for CudaExecutor {
    fn limits(&self) -> &ExecutorLimits {
        &self.limits
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), ModelError> {
        self.logit_rows = 0;
        self.logits.take();
        check(batch, &self.limits)?;
        let ahead = self.ahead.take();
        if self.stalled.get().is_some() {
            self.reconnect()?;
        } else if let Some(ahead) = ahead.filter(|ahead| ahead == batch) {
            self.logit_rows = ahead.logit_rows();
            self.step = ahead;
            return Ok(());
        }
        self.step.clone_from(batch);
        let tokens = batch.token_count();
        if tokens == 0 {
            return Ok(());
        }
        let count = match self.stages.len() {
            1 => 1,
            stages => (tokens / MICRO_BATCH_ROWS).clamp(1, stages),
        };
        let mut rows = 0;
        if count == 1 {
            rows = self.put(batch, None)?;
        } else {
            for part in pipeline::split(batch, count) {
                rows += self.put(&part, Some(rows))?;
            }
        }
        self.logit_rows = rows;
        // No draw will wait for a step without logits.
        if rows == 0 { self.finish() } else { Ok(()) }
    }

    fn logits(&self, row: usize) -> Result<&[f32], ModelError> {
        if row >= self.logit_rows {
            return Err(no_row(row, self.logit_rows));
        }
        let width = self.limits.vocabulary_size;
        let stride = logits_stride(width);
        let all = match self.logits.get() {
            Some(all) => all,
            None => {
                self.finish()?;
                let mut bytes = vec![0; self.logit_rows * stride * 4];
                let leader = self.leader();
                if let Some(logits) = &leader.logits {
                    leader.device.read(logits.slice().part(0..bytes.len())?, &mut bytes)?;
                }
                let values = bytes
                    .chunks_exact(4)
                    .map(|value| f32::from_le_bytes([value[0], value[1], value[2], value[3]]));
                self.logits.get_or_init(|| values.collect())
            }
        };
        Ok(&all[row * stride..][..width])
    }

    fn sample(&mut self, rows: &[LogitRow<'_>]) -> Result<Vec<RowOutput>, ModelError> {
        self.sample_rows(rows, None)
    }

    fn supports_lookahead(&self) -> bool {
        true
    }

    fn sample_and_begin(
        &mut self,
        rows: &[LogitRow<'_>],
        next: &StepAhead,
    ) -> Result<DrawnAhead, ModelError> {
        // An invalid step is rejected when it is requested.
        let mut next = Some(next.clone()).filter(|next| check(&next.batch, &self.limits).is_ok());
        let outputs = match self.sample_rows(rows, next.as_ref()) {
            Ok(outputs) => outputs,
            Err(error) => {
                // The caller may request the rows again, one by one. The logits of the step are overwritten, so the
                // step is repeated.
                if self.ahead.take().is_some() {
                    let step = std::mem::take(&mut self.step);
                    self.forward(&step)?;
                }
                return Err(error);
            }
        };
        if let Some(next) = next.as_mut().filter(|_| self.ahead.is_some()) {
            let tokens: Vec<u32> = outputs.iter().map(|output| output.token).collect();
            next.fill_in(&tokens);
            self.ahead = Some(std::mem::take(&mut next.batch));
        }
        Ok(DrawnAhead { outputs, has_begun: self.ahead.is_some() })
    }

    fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    fn fault(&self) -> Option<ModelError> {
        let mut ranks = self.stages.iter().flatten();
        ranks.find_map(|rank| rank.device.fault()).map(ModelError::from)
    }

    fn ranks(&self) -> &[RankMemory] {
        if self.memory.len() > 1 { &self.memory } else { &[] }
    }

    fn page_form(&self) -> Option<&PageForm> {
        Some(self.copies.form())
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), ModelError> {
        let bytes = self.copies.form().bytes;
        check_pages(pages, self.limits.page_count, out.len(), bytes)?;
        let mut pages = pages.iter().zip(out.chunks_exact_mut(bytes));
        pages.try_for_each(|(page, out)| self.copies.read(&self.stages, *page, out))
    }

    fn write_pages(&mut self, pages: &[PageId], from: &[u8]) -> Result<(), ModelError> {
        let bytes = self.copies.form().bytes;
        check_pages(pages, self.limits.page_count, from.len(), bytes)?;
        let mut pages = pages.iter().zip(from.chunks_exact(bytes));
        pages.try_for_each(|(page, from)| self.copies.write(&self.stages, *page, from))
    }
}

impl CudaExecutor {
    fn sample_rows(
        &mut self,
        rows: &[LogitRow<'_>],
        next: Option<&StepAhead>,
    ) -> Result<Vec<RowOutput>, ModelError> {
        if let Some(row) = rows.iter().find(|row| row.row() >= self.logit_rows) {
            return Err(no_row(row.row(), self.logit_rows));
        }
        let mut outputs: Vec<Option<RowOutput>> = vec![None; rows.len()];
        for (index, token) in self.draw(rows, next)? {
            if token == NONE {
                let problem = format!(
                    "row {}: the mask, bans and logits leave no token to choose from",
                    rows[index].row()
                );
                return Err(ModelError::Batch { problem });
            }
            outputs[index] = Some(RowOutput { token, logprob: None, top: Vec::new() });
        }
        let outputs = outputs.into_iter().zip(rows).map(|(drawn, row)| match drawn {
            Some(drawn) => Ok(drawn),
            None => draw(self.isa, self.logits(row.row())?, row),
        });
        outputs.collect()
    }
}

#[cfg(test)]
mod tests;
