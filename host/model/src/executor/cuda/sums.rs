//! How the ranks of a stage add up their parts, and the norms that follow.
//!
//! Invariant: all ranks choose the same kernels for a step. A sum of few rows ends before all ranks have read its parts, so the
//! parts of sums that follow each other are in different buffers, unless the first of them waits for the reads.

use std::ops::Range;

use skep_kernels::KernelError;
use skep_kernels::cuda::all_reduce::MAX_RANKS;
use skep_kernels::cuda::all_reduce_norm;
use skep_kernels::cuda::device::Slice;
use skep_kernels::cuda::operation::{ACTIVATION_BYTES, AllReduce, Meeting, ProductRows, RmsNorm};

use super::rank::{Peers, Rank};
use super::step::Step;
use crate::error::ModelError;
use crate::models::parts::{Completion, Output, Part};

/// Number of times that a rank polls for the others before it fails, per microsecond that it may wait. A poll goes
/// through the memory of another device.
const POLLS_PER_US: u64 = 1;

/// The reader of the hidden rows, which are normed for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    /// The attention of a layer.
    Attention(usize),
    /// The feed-forward part of a layer.
    FeedForward(usize),
    Head,
}

impl<'a> Peers<'a> {
    /// Returns the destination of this rank's share in the output of a part.
    pub(super) fn share(self, part: Part, rows: usize) -> Result<Slice<'a>, ModelError> {
        match self.ranks {
            [rank] => rank.output(part, rows),
            _ => self.rank().summand(part, rows, self.norms_sums(rows)),
        }
    }

    /// Adds up the results of all ranks for a part, and completes the sum. Where the norm that follows is computed as well, the sum
    /// is added to the hidden rows.
    pub(super) fn add_up(self, part: Part, step: &Step) -> Result<(), ModelError> {
        match self.reader_of(part).filter(|reader| self.norms_with_sum(*reader, step)) {
            Some(reader) => {
                let norm = self.norm(reader, step.rows)?;
                let Rank { device, shape, .. } = self.rank();
                self.meet(part, step.rows, |meeting| {
                    device.all_reduce_norm(meeting, &norm, shape.activation)
                })?;
            }
            None if self.ranks.len() > 1 => self.sum(part, step.rows)?,
            None => {}
        }
        match part.completion(self.rank().weights.layout.completions) {
            Completion::Nothing => Ok(()),
            // `LayerStyle::lack_on_cuda` refuses such a model before its weights are read.
            completion @ (Completion::Scale | Completion::Norm) => {
                let operation = format!("{completion:?} after {part:?}");
                Err(ModelError::unsupported("model_type", operation, "models without it on CUDA devices"))
            }
        }
    }

    /// Returns the rows that `reader` reads, with their norm unless a sum over the ranks has computed it. `adds` says whether the
    /// projected rows are added first.
    pub(super) fn normed(
        self,
        reader: Reader,
        adds: bool,
        step: &Step,
    ) -> Result<ProductRows<'a>, ModelError> {
        let norm = self.norm(reader, step.rows)?;
        if adds && self.norms_with_sum(reader, step) {
            return Ok(ProductRows::Normed { x: norm.out, rows: norm.rows });
        }
        let x = if adds { Some(self.rank().projected(step.rows)?) } else { None };
        Ok(ProductRows::Norm(RmsNorm { x, ..norm }))
    }

    /// Returns the norm through which `reader` reads the hidden rows, without what is added to them first.
    fn norm(self, reader: Reader, rows: usize) -> Result<RmsNorm<'a>, ModelError> {
        let rank = self.rank();
        let layout = &rank.weights.layout;
        let [hidden, between] = [rank.hidden(rows)?, rank.hidden_between(rows)?];
        let (residual_and_sum, weight) = match reader {
            Reader::Attention(layer) => ([hidden, between], &layout.layers[layer].attention_norm),
            Reader::FeedForward(layer) => ([between, hidden], &layout.layers[layer].mlp_norm),
            Reader::Head => match &layout.exit {
                Some(exit) => ([hidden; 2], &exit.norm),
                None => return Err(ModelError::Batch { problem: "this rank has no head".to_owned() }),
            },
        };
        rank.norm(None, residual_and_sum, weight, rows)
    }

    /// Returns what reads the hidden rows next after this part's output is added to them, if this stage does.
    fn reader_of(self, part: Part) -> Option<Reader> {
        let layout = &self.rank().weights.layout;
        match part.adder(layout.layers.len()) {
            Some(Part::Attention { layer, .. }) => Some(Reader::Attention(layer)),
            Some(Part::FeedForward { layer }) => Some(Reader::FeedForward(layer)),
            Some(Part::Embedding) => None,
            None => (part.output() == Output::Projected && layout.exit.is_some()).then_some(Reader::Head),
        }
    }

    /// Returns whether the sum before this norm computes it.
    fn norms_with_sum(self, reader: Reader, step: &Step) -> bool {
        let follows_sum = match reader {
            // The rows of the first layer come from the embedding or from another stage.
            Reader::Attention(layer) => layer > 0,
            Reader::FeedForward(_) => true,
            // Otherwise the head reads only some of the rows.
            Reader::Head => step.wanted.is_none(),
        };
        follows_sum && self.norms_sums(step.rows)
    }

    /// Returns whether one kernel adds up a part of so many rows and computes the norm that follows.
    fn norms_sums(self, rows: usize) -> bool {
        let Rank { shape, weights, .. } = self.rank();
        #[cfg(test)]
        if shape.sums_are_apart {
            return false;
        }
        let part = Part::FeedForward { layer: 0 };
        let [rows, width, ranks] = [rows, shape.hidden, self.ranks.len()].map(|size| size as u32);
        ranks > 1
            && part.completion(weights.layout.completions) == Completion::Nothing
            && all_reduce_norm::fits(rows, width, ranks)
    }

    /// Adds up the parts of all ranks.
    fn sum(self, part: Part, rows: usize) -> Result<(), ModelError> {
        let rank = self.rank();
        let out = rank.output(part, rows)?;
        let values = rows * rank.shape.hidden;
        let shares = self.of_all(&|rank| rank.whole(&rank.offsets.meeting.shares))?;
        let shares = &shares[..self.ranks.len()];
        self.meet(part, rows, |meeting| {
            let reduce = AllReduce { meeting: *meeting, shares, out, values };
            rank.device.all_reduce(&reduce, rank.shape.activation)
        })
    }

    /// Calls `launch` with the parts of all ranks.
    fn meet(
        self,
        part: Part,
        rows: usize,
        launch: impl FnOnce(&Meeting<'_>) -> Result<(), KernelError>,
    ) -> Result<(), ModelError> {
        let rank = self.rank();
        let shape = rank.shape;
        let norms = self.norms_sums(rows);
        let input = self.of_all(&|rank| rank.summand(part, rows, norms))?;
        let signals = self.of_all(&|rank| rank.whole(&rank.offsets.meeting.signals))?;
        let count = self.ranks.len();
        let meeting = Meeting {
            input: &input[..count],
            signals: &signals[..count],
            failure: rank.failure()?,
            report: &rank.report,
            max_polls: shape.rank_deadline_us.saturating_mul(POLLS_PER_US),
            most_blocks: shape.meeting_blocks,
            rank: self.own,
        };
        Ok(launch(&meeting)?)
    }

    /// Returns a slice of each rank.
    fn of_all(
        self,
        slice: &dyn Fn(&'a Rank) -> Result<Slice<'a>, ModelError>,
    ) -> Result<[Slice<'a>; MAX_RANKS], ModelError> {
        let count = self.ranks.len();
        if count > MAX_RANKS {
            let (op, what) = ("all_reduce", "rank");
            return Err(KernelError::OutOfRange { op, what, index: count - 1, count: MAX_RANKS }.into());
        }
        let mut all = [slice(self.rank())?; MAX_RANKS];
        for (to, of) in all.iter_mut().zip(self.ranks) {
            *to = slice(of)?;
        }
        Ok(all)
    }
}

impl Rank {
    /// Returns the rows that the output of a part goes to.
    fn output(&self, part: Part, rows: usize) -> Result<Slice<'_>, ModelError> {
        match part.output() {
            Output::Hidden => self.hidden(rows),
            Output::Projected => self.projected(rows),
        }
    }

    /// Returns the buffer for this rank's share in the output of a part. `norms_sums` says whether sums of so many rows may end
    /// before all ranks have read it; the one before or after then has another buffer.
    fn summand(&self, part: Part, rows: usize, norms_sums: bool) -> Result<Slice<'_>, ModelError> {
        let has_second = norms_sums && matches!(part, Part::FeedForward { .. });
        let buffer = &self.offsets.meeting.parts[usize::from(has_second)];
        self.workspace_slice(buffer, rows * self.shape.hidden * ACTIVATION_BYTES)
    }

    fn whole(&self, range: &Range<usize>) -> Result<Slice<'_>, ModelError> {
        self.workspace_slice(range, range.len())
    }
}
