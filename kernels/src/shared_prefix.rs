//! The ranges of positions that sequences of a step have in common, because they share pages.
//!
//! Sequences that begin with the same pages form a tree. Each of its edges is a range that some of the sequences share;
//! their queries read the keys and values of the range together. Invariant: ranges are whole blocks before the first
//! query of each member, and together with the rest of each sequence they cover every position once, in order. A range
//! follows those that its members share before it. With windows, ranges are parts that the windows of all members cover.

use std::cmp::Ordering;

use crate::kv::PAGE_TOKENS;

/// Number of pages that are compared at once.
const COMPARED_AT_ONCE: usize = 64;

/// A sequence that may share what it reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a> {
    /// The pages before its first query.
    pub(crate) pages: &'a [u32],
    pub(crate) queries: usize,
}

/// The ranges that are worth reading together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Number of pages in a block. Ranges are whole blocks.
    pub(crate) block_pages: usize,
    pub(crate) min_blocks: usize,
    /// Maximum number of queries that read a range together. Sequences with more than half of it read alone, because
    /// they make good use of each read already.
    pub(crate) max_queries: usize,
}

/// A range of positions that some sequences share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedRange {
    /// Indices of the sequences, at least two.
    pub members: Vec<usize>,
    pub from: usize,
    pub to: usize,
}

/// Finds the shared ranges of sequences. Those of a sequence are in the order of their positions.
pub(crate) fn shared_ranges(readers: &[Reader<'_>], rules: Rules) -> Vec<SharedRange> {
    let few = |index: &usize| (1..=rules.max_queries / 2).contains(&readers[*index].queries);
    let mut order: Vec<usize> = (0..readers.len()).filter(few).collect();
    let mut search = Search { readers, rules, found: Vec::new() };
    if order.len() > 1 {
        order.sort_by(|a, b| compare(search.whole_blocks(*a), search.whole_blocks(*b)));
        search.search(&order, 0);
    }
    search.found
}

/// Returns the parts of ranges that members read together if the queries of each sequence all see only the positions from
/// `seen_from` on. The positions of a range may be divided among several parts, each with more members than the one before.
///
/// The first part of a sequence follows positions that it reads alone, and so may a part that no other sequence sees before.
pub(crate) fn seen_ranges(ranges: &[SharedRange], seen_from: &[usize], rules: Rules) -> Vec<SharedRange> {
    let block = rules.block_pages * PAGE_TOKENS;
    let mut found = Vec::new();
    for range in ranges {
        let start = |member: usize| seen_from[member].next_multiple_of(block).max(range.from);
        let mut members = range.members.clone();
        members.sort_by_key(|member| start(*member));
        let (mut to, before) = (range.to, found.len());
        while let [_, .., last] = members[..] {
            let from = start(last);
            // A part that continues with another one is worth a task even if it is short: each member has one block less to
            // read alone.
            let least = if to == range.to { rules.min_blocks * block } else { block };
            if from + least <= to {
                found.push(SharedRange { members: members.clone(), from, to });
                to = from;
            }
            members.pop();
        }
        found[before..].reverse();
    }
    found
}

struct Search<'a> {
    readers: &'a [Reader<'a>],
    rules: Rules,
    found: Vec<SharedRange>,
}

impl<'a> Search<'a> {
    /// Finds the ranges of sequences in the order of their pages, which have the first `depth` blocks in common.
    fn search(&mut self, order: &[usize], depth: usize) {
        let [first, .., last] = order else { return };
        let Rules { block_pages, min_blocks, max_queries } = self.rules;
        let common = self.common_blocks(*first, *last);
        let queries: usize = order.iter().map(|index| self.readers[*index].queries).sum();
        if common >= depth + min_blocks {
            if queries > max_queries {
                return self.search_chunks(order, depth, queries);
            }
            let (members, block) = (order.to_vec(), block_pages * PAGE_TOKENS);
            self.found.push(SharedRange { members, from: depth * block, to: common * block });
        }
        let depth = if common >= depth + min_blocks { common } else { depth };
        // Sequences that continue with the same blocks are adjacent.
        let continues_with = |index: &usize| {
            let next = depth * block_pages..(depth + min_blocks) * block_pages;
            self.whole_blocks(*index).get(next)
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
        let max_queries = self.rules.max_queries;
        let share = queries.div_ceil(queries.div_ceil(max_queries));
        let (mut start, mut taken) = (0, 0);
        for (at, index) in order.iter().enumerate() {
            let own = self.readers[*index].queries;
            if taken > 0 && (taken + own > max_queries || taken >= share) {
                self.search(&order[start..at], depth);
                (start, taken) = (at, 0);
            }
            taken += own;
        }
        self.search(&order[start..], depth);
    }

    /// Returns the pages of the whole blocks before a sequence's first query.
    fn whole_blocks(&self, index: usize) -> &'a [u32] {
        let pages = self.readers[index].pages;
        &pages[..pages.len() / self.rules.block_pages * self.rules.block_pages]
    }

    fn common_blocks(&self, a: usize, b: usize) -> usize {
        let pairs = self.whole_blocks(a).iter().zip(self.whole_blocks(b));
        pairs.take_while(|(a, b)| a == b).count() / self.rules.block_pages
    }
}

/// Returns the order of two lists of pages, of which long parts are equal.
fn compare(a: &[u32], b: &[u32]) -> Ordering {
    let parts = a.chunks(COMPARED_AT_ONCE).zip(b.chunks(COMPARED_AT_ONCE));
    let first = parts.into_iter().find(|(a, b)| a != b);
    first.map_or(a.len().cmp(&b.len()), |(a, b)| a.cmp(b))
}
