//! The ranges of keys that rows of several sequences read together.
//!
//! Invariant: all rows of a range see all of its keys, and read what follows it alone or in ranges that continue it.

use std::ops::Range;

use super::PACKED_ROWS;
use super::plan::{Blocks, MIN_SPLIT, Plan, Rows, Split, Tile};
use crate::cuda::PAGE_POSITIONS;
use crate::shared_prefix::{Reader, Rules, SharedRange};

/// Maximum number of rows of all ranges of a step, for which buffers have room. Further ranges are read alone.
pub(super) const MAX_SHARED_ROWS: u32 = 256;

/// A row that reads a shared split. The rows of a tile follow each other.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedRow {
    /// Index in the batch.
    pub row: u32,
    /// Index of the state of the first split that the row sees.
    pub first_state: u32,
    /// Index of a split that only the rows of its tile see.
    pub tile: u32,
}

impl SharedRow {
    /// Returns the row in its memory layout.
    pub fn words(&self) -> [u32; 3] {
        [self.row, self.first_state, self.tile]
    }
}

/// Finds the ranges that rows of several sequences may read together. `tables` are the page tables of the rows' sequences,
/// in the order of the rows.
pub fn shared_ranges(rows: &[Rows], tables: &[&[u32]], blocks: &Blocks) -> Vec<SharedRange> {
    let past_pages = |rows: &Rows| (rows.first_position / PAGE_POSITIONS) as usize;
    let readers: Vec<Reader<'_>> = rows
        .iter()
        .zip(tables)
        .map(|(rows, table)| Reader {
            pages: &table[..past_pages(rows).min(table.len())],
            queries: rows.count as usize,
        })
        .collect();
    // A shorter range is one split at most, and saves less than its join costs.
    let min_blocks = (MIN_SPLIT / PAGE_POSITIONS) as usize;
    let rules = Rules { block_pages: 1, min_blocks, max_queries: blocks.shared_rows as usize };
    crate::shared_prefix::shared_ranges(&readers, rules)
}

/// A range of keys, and the rows that read it together.
pub(super) struct Share<'a> {
    members: &'a [usize],
    pub(super) keys: Range<u32>,
}

impl Share<'_> {
    /// Returns how many splits of at most this length cover the keys.
    pub(super) fn splits(&self, length: u32) -> u32 {
        (self.keys.end - self.keys.start).div_ceil(length)
    }
}

/// The ranges that are read together.
pub(super) struct Shares<'a> {
    pub(super) ranges: Vec<Share<'a>>,
    /// The end of the keys that each of the rows reads with others.
    covered: Vec<u32>,
}

impl<'a> Shares<'a> {
    /// Chooses the ranges that save bytes and fit into the buffers.
    pub(super) fn choose(rows: &[Rows], ranges: &'a [SharedRange], blocks: &Blocks) -> Self {
        let mut shares = Shares { ranges: Vec::new(), covered: vec![0; rows.len()] };
        let mut rows_left = blocks.max_shared_rows(rows.iter().map(|rows| rows.count).sum());
        for range in ranges {
            let keys = range.from as u32..range.to as u32;
            let count: u32 = range.members.iter().map(|member| rows[*member].count).sum();
            // A range that continues one that is read alone is read alone as well.
            let continues = range.members.iter().all(|member| shares.covered[*member] == keys.start);
            let fits = count <= rows_left.min(blocks.shared_rows)
                && (shares.ranges.len() as u32) < blocks.most_more_splits();
            if continues && fits && saves_bytes(rows, range, blocks) {
                range.members.iter().for_each(|member| shares.covered[*member] = keys.end);
                shares.ranges.push(Share { members: &range.members, keys });
                rows_left -= count;
            }
        }
        shares
    }

    /// Returns the end of the keys that the rows with this index read with others.
    pub(super) fn covered(&self, owner: usize) -> u32 {
        self.covered[owner]
    }

    /// Returns the number of shared splits that each of the rows sees if ranges have splits of these lengths.
    pub(super) fn count_parts(&self, rows: usize, lengths: &[u32]) -> Vec<u32> {
        let mut parts = vec![0; rows];
        for (range, length) in self.ranges.iter().zip(lengths) {
            range.members.iter().for_each(|member| parts[*member] += range.splits(*length));
        }
        parts
    }

    /// Adds the splits of all ranges to a plan, and the rows that read them.
    pub(super) fn read_together(&self, plan: &mut Plan, rows: &[Rows], tiles: &[Tile], lengths: &[u32]) {
        let mut parts_before = vec![0; rows.len()];
        for (range, length) in self.ranges.iter().zip(lengths) {
            let (parts, first) = (range.splits(*length), range.members[0]);
            let first_row = plan.shared_rows.len() as u32;
            for member in range.members {
                let begin = tiles.partition_point(|tile| tile.owner < *member);
                for tile in tiles[begin..].iter().take_while(|tile| tile.owner == *member) {
                    plan.shared_rows.extend((0..tile.rows.count).map(|row| SharedRow {
                        row: tile.rows.first_row + row,
                        first_state: tile.first_state + row * tile.parts,
                        tile: tile.first_split,
                    }));
                }
            }
            let count = plan.shared_rows.len() as u32 - first_row;
            let part_before: u32 = parts_before[first];
            plan.splits.extend((0..parts).map(|part| Split {
                sequence: rows[first].sequence,
                first_row,
                rows: count,
                first_position: range.keys.end,
                first_key: range.keys.start + part * length,
                last_key: (range.keys.start + (part + 1) * length).min(range.keys.end),
                first_state: 0,
                part: part_before + part,
                parts,
                arrival: 0,
                is_shared: 1,
            }));
            range.members.iter().for_each(|member| parts_before[*member] += parts);
        }
    }
}

/// Returns whether reading a range together moves fewer bytes than reading it alone. For each key-value head, each tile but one
/// no longer reads `keys` keys and values of `head_size` 16-bit values. Each pair of a row and a query head writes and reads a
/// state of `head_size` 32-bit values for each split of the range, and at worst one for a split of its own that would have been
/// its only one. Both sides are divided by 4 · `head_size`. Ranges that the device's cache holds cost less to read alone, so
/// this is an upper bound on what is saved.
fn saves_bytes(rows: &[Rows], range: &SharedRange, blocks: &Blocks) -> bool {
    let keys = (range.to - range.from) as u64;
    let of_rows = |count: fn(u32, u32) -> u32| {
        let counts = range.members.iter().map(|member| count(rows[*member].count, blocks.rows.max(1)));
        counts.map(u64::from).sum::<u64>()
    };
    let (tiles, count) = (of_rows(u32::div_ceil), of_rows(|count, _| count));
    let pairs = count * u64::from(PACKED_ROWS.div_ceil(blocks.rows.max(1)));
    let states = keys.div_ceil(MIN_SPLIT.into()) + 1;
    tiles.saturating_sub(1) * keys > 2 * pairs * states
}
