//! The ranges of positions that sequences of a step have in common, because they share pages.
//!
//! Sequences that begin with the same pages form a tree. Each of its edges is a range that some of the sequences share;
//! their queries read the keys and values of the range together. Invariant: ranges are whole blocks before the first
//! query of each member, and together with the rest of each sequence they cover every position once, in order.

use super::{AttentionSequence, BLOCK_PAGES};
use crate::cpu::attention::{BLOCK, MAX_ROWS};

/// Number of blocks from which on a common range is worth a task of its own.
const MIN_BLOCKS: usize = 2;

/// The sequences of a step, and the ranges that they share.
pub struct AttentionBatch {
    sequences: Vec<AttentionSequence>,
    /// The number of queries that each token has for a KV head.
    queries_per_token: usize,
    /// Those of a sequence in the order of their positions.
    ranges: Vec<SharedRange>,
}

/// A range of positions that some sequences share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SharedRange {
    /// Indices of the sequences, at least two.
    pub(crate) members: Vec<usize>,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

impl AttentionBatch {
    /// Finds the shared ranges of sequences whose tokens each have `queries_per_token` queries for a KV head.
    pub fn new(sequences: Vec<AttentionSequence>, queries_per_token: usize) -> Self {
        let ranges = shared_ranges(&sequences, queries_per_token);
        AttentionBatch { sequences, queries_per_token, ranges }
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

fn shared_ranges(sequences: &[AttentionSequence], queries_per_token: usize) -> Vec<SharedRange> {
    let queries = |index: usize| sequences[index].tokens.saturating_mul(queries_per_token);
    // Sequences with many queries make good use of each read already.
    let few = |index: &usize| (1..=MAX_ROWS / 2).contains(&queries(*index));
    let mut order: Vec<usize> = (0..sequences.len()).filter(few).collect();
    let mut found = Vec::new();
    if order.len() > 1 {
        order.sort_by(|a, b| past_pages(&sequences[*a]).cmp(past_pages(&sequences[*b])));
        Search { sequences, queries: &queries, found: &mut found }.search(&order, 0);
    }
    found
}

struct Search<'a> {
    sequences: &'a [AttentionSequence],
    queries: &'a dyn Fn(usize) -> usize,
    found: &'a mut Vec<SharedRange>,
}

impl Search<'_> {
    /// Finds the ranges of sequences in the order of their pages, which have the first `depth` blocks in common.
    fn search(&mut self, order: &[usize], depth: usize) {
        let [first, .., last] = order else { return };
        let common = common_blocks(&self.sequences[*first], &self.sequences[*last]);
        let queries: usize = order.iter().map(|index| (self.queries)(*index)).sum();
        if common >= depth + MIN_BLOCKS {
            if queries > MAX_ROWS {
                return self.search_chunks(order, depth, queries);
            }
            let members = order.to_vec();
            self.found.push(SharedRange { members, from: depth * BLOCK, to: common * BLOCK });
        }
        let depth = if common >= depth + MIN_BLOCKS { common } else { depth };
        // Sequences that continue with the same blocks are adjacent.
        let continues_with = |index: &usize| {
            let pages = past_pages(&self.sequences[*index]);
            let next = depth * BLOCK_PAGES..(depth + MIN_BLOCKS) * BLOCK_PAGES;
            pages.get(next)
        };
        let runs: Vec<&[usize]> = order
            .chunk_by(|a, b| continues_with(a).is_some() && continues_with(a) == continues_with(b))
            .filter(|run| run.len() > 1)
            .collect();
        for run in runs {
            self.search(run, depth);
        }
    }

    /// Divides sequences that share a range but have too many queries for it, as evenly as possible.
    fn search_chunks(&mut self, order: &[usize], depth: usize, queries: usize) {
        let share = queries.div_ceil(queries.div_ceil(MAX_ROWS));
        let (mut start, mut taken) = (0, 0);
        for (at, index) in order.iter().enumerate() {
            let own = (self.queries)(*index);
            if taken > 0 && (taken + own > MAX_ROWS || taken >= share) {
                self.search(&order[start..at], depth);
                (start, taken) = (at, 0);
            }
            taken += own;
        }
        self.search(&order[start..], depth);
    }
}

/// Returns the pages of the whole blocks before a sequence's first query.
fn past_pages(sequence: &AttentionSequence) -> &[u32] {
    &sequence.pages[..sequence.start / BLOCK * BLOCK_PAGES]
}

fn common_blocks(a: &AttentionSequence, b: &AttentionSequence) -> usize {
    let pairs = past_pages(a).iter().zip(past_pages(b));
    pairs.take_while(|(a, b)| a == b).count() / BLOCK_PAGES
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
