//! The sequences of a step, the ranges of positions that they share, and the plans that its layers reuse.
//!
//! Invariant: blocks of shared ranges are those of [`crate::cpu::attention`], so that sharing changes no bits.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::plan::{Plan, PlanShape};
use super::{AttentionSequence, BLOCK_PAGES, PAGE_TOKENS};
use crate::cpu::attention::MAX_ROWS;
use crate::shared_prefix::{Reader, Rules, SharedRange, shared_ranges};

/// Number of blocks from which on a common range is worth a task of its own.
const MIN_BLOCKS: usize = 2;
/// Maximum number of plans that are kept, which is enough for layers with a window and layers without.
pub(super) const KEPT_PLANS: usize = 2;

/// The sequences of a step, and the ranges that they share.
pub struct AttentionBatch {
    sequences: Vec<AttentionSequence>,
    /// The number of queries that each token has for a KV head.
    queries_per_token: usize,
    /// Those of a sequence in the order of their positions.
    ranges: Vec<SharedRange>,
    /// Plans that no call uses, the one that was used last at the end.
    plans: Mutex<Vec<(PlanShape, Plan)>>,
}

impl AttentionBatch {
    /// Finds the shared ranges of sequences whose tokens each have `queries_per_token` queries for a KV head.
    pub fn new(sequences: Vec<AttentionSequence>, queries_per_token: usize) -> Self {
        let readers: Vec<Reader<'_>> = sequences
            .iter()
            .map(|sequence| Reader {
                pages: past_pages(sequence),
                queries: sequence.tokens.saturating_mul(queries_per_token),
            })
            .collect();
        let rules = Rules { block_pages: BLOCK_PAGES, min_blocks: MIN_BLOCKS, max_queries: MAX_ROWS };
        let ranges = shared_ranges(&readers, rules);
        AttentionBatch { sequences, queries_per_token, ranges, plans: Mutex::default() }
    }

    /// Returns the sequences in the order in which they were given.
    pub fn sequences(&self) -> &[AttentionSequence] {
        &self.sequences
    }

    /// Returns the shared ranges if tokens have this many queries for a KV head.
    pub(super) fn ranges(&self, queries_per_token: usize) -> &[SharedRange] {
        if queries_per_token == self.queries_per_token { &self.ranges } else { &[] }
    }
}

/// The layers of a model have few shapes, and dividing the work again in each of them would take longer than some of their
/// matrix products.
impl AttentionBatch {
    /// Returns a plan of this shape for one call, which no other call uses.
    pub(super) fn take_plan(&self, shape: &PlanShape) -> Plan {
        let mut plans = self.plans();
        let kept = plans.iter().position(|(kept, _)| kept == shape).map(|index| plans.remove(index).1);
        if kept.is_none() && plans.len() == KEPT_PLANS {
            plans.remove(0);
        }
        drop(plans);
        let mut plan = kept.unwrap_or_else(|| Plan::new(shape, self));
        plan.begin();
        plan
    }

    /// Keeps the plan of a call that is over.
    pub(super) fn keep_plan(&self, shape: PlanShape, plan: Plan) {
        let mut plans = self.plans();
        if plans.len() < KEPT_PLANS {
            plans.push((shape, plan));
        }
    }

    fn plans(&self) -> MutexGuard<'_, Vec<(PlanShape, Plan)>> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the pages before a sequence's first query.
fn past_pages(sequence: &AttentionSequence) -> &[u32] {
    &sequence.pages[..sequence.start / PAGE_TOKENS]
}

#[cfg(test)]
mod tests {
    use super::super::Strides;
    use super::*;
    use crate::cpu::attention::BLOCK;

    /// Returns sequences of one token each, from the letters of their blocks. The last block is not a whole one.
    fn find(blocks: &[&str], queries_per_token: usize) -> Vec<(Vec<usize>, usize, usize)> {
        let sequence = |(row, blocks): (usize, &&str)| {
            let pages: Vec<u32> =
                blocks.bytes().flat_map(|b| (0..8).map(move |page| u32::from(b) * 8 + page)).collect();
            AttentionSequence { row, tokens: 1, start: pages.len() * 16 - 1, pages }
        };
        let sequences = blocks.iter().enumerate().map(sequence).collect();
        let ranges = AttentionBatch::new(sequences, queries_per_token).ranges;
        ranges.into_iter().map(|range| (range.members, range.from / BLOCK, range.to / BLOCK)).collect()
    }

    #[test]
    fn a_common_prefix_is_read_together_and_branches_after_it() {
        assert_eq!(find(&["abcx", "abcy", "abcz"], 3), [(vec![0, 1, 2], 0, 3)]);
        assert_eq!(
            find(&["abcdeX", "abZ", "abcdfgX", "abcdfgY", "Q"], 1),
            [(vec![1, 0, 2, 3], 0, 2), (vec![0, 2, 3], 2, 4), (vec![2, 3], 4, 6)]
        );
        // The block of a query is never shared, even if its pages are.
        assert_eq!(find(&["abc", "abc"], 1), [(vec![0, 1], 0, 2)]);
        assert_eq!(find(&["ax", "ay"], 1), [], "one block is not worth a task");
        assert_eq!(find(&["abx", "cdy"], 1), []);
    }

    #[test]
    fn queries_of_a_range_are_limited() {
        let eight = ["abx"; 8];
        assert_eq!(find(&eight, 3), [(vec![0, 1, 2, 3], 0, 2), (vec![4, 5, 6, 7], 0, 2)]);
        assert_eq!(find(&["abx"; 5], 3), [(vec![0, 1, 2], 0, 2), (vec![3, 4], 0, 2)]);
        assert_eq!(find(&eight, 7), [], "each has enough queries for itself");
    }

    #[test]
    fn plans_are_kept_for_calls_of_the_same_shape_and_used_by_one_at_a_time() {
        let sequence = AttentionSequence { row: 0, tokens: 1, start: 40, pages: vec![0, 1, 2] };
        let batch = AttentionBatch::new(vec![sequence], 1);
        let shape = |threads| {
            let (query, output) = ([16, 16], [16, 16]);
            let strides = Strides { heads: 1, kv_heads: 1, query, output, value_stride: 16, value_size: 16 };
            PlanShape { threads, strides, window: None }
        };
        let start = |plan: &Plan| plan.groups.as_ptr();
        let (one, other) = (batch.take_plan(&shape(1)), batch.take_plan(&shape(1)));
        let (first, second) = (start(&one), start(&other));
        assert_ne!(first, second, "two calls at once have a plan each");
        batch.keep_plan(shape(1), one);
        assert_eq!(start(&batch.take_plan(&shape(1))), first);
        batch.keep_plan(shape(1), other);
        let of_two = batch.take_plan(&shape(2));
        batch.keep_plan(shape(2), of_two);
        assert_eq!(batch.plans().len(), KEPT_PLANS);
        // A third shape takes the place of the oldest plan.
        let of_three = batch.take_plan(&shape(3));
        batch.keep_plan(shape(3), of_three);
        let shapes: Vec<usize> = batch.plans().iter().map(|(shape, _)| shape.threads).collect();
        assert_eq!(shapes, [2, 3]);
    }
}
