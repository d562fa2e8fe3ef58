//! The sequences of a step, the ranges of positions that they share, and the plans that its layers reuse.
//!
//! Invariant: blocks of shared ranges are those of [`crate::cpu::attention`], so that sharing changes no bits.

use std::borrow::Cow;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::plan::{Plan, PlanShape};
use super::{AttentionSequence, BLOCK_PAGES, PAGE_TOKENS};
use crate::cpu::attention::MAX_ROWS;
use crate::shared_prefix::{Reader, Rules, SharedRange, seen_ranges, shared_ranges};

/// The ranges that are worth a task of their own.
const RULES: Rules = Rules { block_pages: BLOCK_PAGES, min_blocks: 2, max_queries: MAX_ROWS };
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
        let ranges = shared_ranges(&readers, RULES);
        AttentionBatch { sequences, queries_per_token, ranges, plans: Mutex::default() }
    }

    /// Returns a batch of the same sequences for layers with a window whose keys and values are in other pages, given for each
    /// sequence. Pages before a window may have any number, so what sequences share is taken from the pages of this batch.
    pub fn with_pages(&self, pages: Vec<Vec<u32>>) -> Self {
        let mut pages = pages.into_iter();
        let mut moved = |sequence: &AttentionSequence| {
            let AttentionSequence { row, tokens, start, .. } = *sequence;
            AttentionSequence { row, tokens, start, pages: pages.next().unwrap_or_default() }
        };
        let sequences: Vec<AttentionSequence> = self.sequences.iter().map(&mut moved).collect();
        let (queries_per_token, ranges) = (self.queries_per_token, self.ranges.clone());
        AttentionBatch { sequences, queries_per_token, ranges, plans: Mutex::default() }
    }

    /// Returns the sequences in the order in which they were given.
    pub fn sequences(&self) -> &[AttentionSequence] {
        &self.sequences
    }

    /// Returns what is shared if tokens have this many queries for a KV head: the shared ranges, or the parts of them that windows
    /// cover.
    pub(super) fn ranges(&self, queries_per_token: usize, window: Option<usize>) -> Cow<'_, [SharedRange]> {
        if queries_per_token != self.queries_per_token {
            return Cow::Borrowed(&[]);
        }
        let Some(window) = window else { return Cow::Borrowed(&self.ranges) };
        // The last token of a sequence sees the fewest of the earlier positions.
        let seen_from =
            |sequence: &AttentionSequence| (sequence.start + sequence.tokens).saturating_sub(window);
        let seen_from: Vec<usize> = self.sequences.iter().map(seen_from).collect();
        let mut seen = seen_ranges(&self.ranges, &seen_from, RULES);
        seen.retain(|range| self.has_same_pages(range));
        Cow::Owned(seen)
    }

    /// Returns whether the members of a range have the same pages there, as those of another batch do if they are shared.
    fn has_same_pages(&self, range: &SharedRange) -> bool {
        let pages = |member: &usize| {
            self.sequences[*member].pages.get(range.from / PAGE_TOKENS..range.to / PAGE_TOKENS)
        };
        let first = range.members.first().and_then(pages);
        first.is_some() && range.members.iter().all(|member| pages(member) == first)
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

    /// The members of a range, its first block and its end.
    type Range = (Vec<usize>, usize, usize);

    /// Returns sequences of one token each, from the letters of their blocks. The last block is not a whole one.
    fn batch(blocks: &[&str], queries_per_token: usize) -> AttentionBatch {
        let sequence = |(row, blocks): (usize, &&str)| {
            let pages: Vec<u32> =
                blocks.bytes().flat_map(|b| (0..8).map(move |page| u32::from(b) * 8 + page)).collect();
            AttentionSequence { row, tokens: 1, start: pages.len() * 16 - 1, pages }
        };
        let sequences = blocks.iter().enumerate().map(sequence).collect();
        AttentionBatch::new(sequences, queries_per_token)
    }

    fn in_blocks(ranges: &[SharedRange]) -> Vec<Range> {
        ranges.iter().map(|range| (range.members.clone(), range.from / BLOCK, range.to / BLOCK)).collect()
    }

    fn find(blocks: &[&str], queries_per_token: usize) -> Vec<Range> {
        in_blocks(&batch(blocks, queries_per_token).ranges)
    }

    /// Finds what sequences share whose windows are this number of blocks.
    fn find_seen(blocks: &[&str], window: usize) -> Vec<Range> {
        in_blocks(&batch(blocks, 1).ranges(1, Some(window * BLOCK)))
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
    fn windows_share_the_blocks_that_all_of_them_cover() {
        let tails = ["abcdefghx", "abcdefghyz", "abcdefghuvwx"];
        // The windows begin with blocks 1, 2 and 4.
        assert_eq!(find_seen(&tails, 8), [(vec![0, 1], 2, 4), (vec![0, 1, 2], 4, 8)]);
        assert_eq!(find_seen(&tails, 6), [(vec![0, 1], 4, 6), (vec![0, 1, 2], 6, 8)]);
        assert_eq!(find_seen(&tails, 5), [(vec![0, 1], 5, 8)], "the third sees one of these blocks");
        assert_eq!(find_seen(&tails, 3), [], "the first two have one block in common");
        assert_eq!(find_seen(&tails, 100), [(vec![0, 2, 1], 0, 8)]);
        // A branch is cut where the window of one of its members begins, and the others read what is before it.
        let branches = ["abcdefghX", "abcdefghijkY", "abcdX"];
        assert_eq!(find_seen(&branches, 7), [(vec![2, 0], 2, 4), (vec![0, 1], 5, 8)]);
    }

    #[test]
    fn sequences_whose_pages_were_moved_share_what_they_see() {
        let batch = batch(&["abcdx", "abcdyz"], 1);
        let moved = |batch: &AttentionBatch, first_page: [usize; 2]| -> Vec<Vec<u32>> {
            let places = |(sequence, first): (&AttentionSequence, usize)| {
                let place = |(at, page): (usize, &u32)| if at < first { 0 } else { page + 7 };
                sequence.pages.iter().enumerate().map(place).collect()
            };
            batch.sequences().iter().zip(first_page).map(places).collect()
        };
        // The windows begin with blocks 1 and 2.
        let window = Some(4 * BLOCK);
        let places = batch.with_pages(moved(&batch, [8, 16]));
        assert_eq!(in_blocks(&places.ranges(1, window)), [(vec![0, 1], 2, 4)]);
        assert_eq!(
            places.sequences()[1].pages[..17],
            [[0; 16].as_slice(), &[batch.sequences[1].pages[16] + 7]].concat()
        );
        let other = batch.with_pages(moved(&batch, [8, 17]));
        assert_eq!(in_blocks(&other.ranges(1, window)), [], "a page of the range is another one");
        assert!(batch.with_pages(Vec::new()).sequences().iter().all(|sequence| sequence.pages.is_empty()));
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
