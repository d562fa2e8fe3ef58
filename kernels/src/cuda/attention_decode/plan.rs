//! The division of what rows see into splits, which blocks of a device attend to at once.

use std::ops::Range;

use super::shared::{MAX_SHARED_ROWS, SharedRow, Shares};
use super::{MAX_WARPS, SharedRange};
use crate::cuda::PAGE_POSITIONS;

/// Number of keys that the warps of a block process at once. Splits are multiples of it.
const PASS: u32 = MAX_WARPS * PAGE_POSITIONS;
/// Minimum length of a split. Shorter splits cost more to join than they save.
pub(super) const MIN_SPLIT: u32 = 2 * PASS;

/// A split of what some rows of one sequence see, or rows of several sequences.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Index of the sequence's page table.
    pub sequence: u32,
    /// Index of the first row in the batch, or among the shared rows.
    pub first_row: u32,
    pub rows: u32,
    /// Position of the first row. Rows of a shared split are at this position or after it.
    pub first_position: u32,
    pub first_key: u32,
    /// Exclusive. Keys that a row does not see are skipped.
    pub last_key: u32,
    /// Index of the state of the first row and the first split. The states of a row follow each other.
    pub first_state: u32,
    /// Index of the split among those of its rows.
    pub part: u32,
    /// Number of these splits. 0 means that there is nothing to do.
    pub parts: u32,
    /// Index of the arrivals of these splits.
    pub arrival: u32,
    /// 1 if rows of several sequences read the split together. Their states and arrivals are in [`SharedRow`].
    pub is_shared: u32,
}

impl Split {
    /// A split that computes nothing. Recorded launches have as many splits as any step of their shape needs.
    pub const SPARE: Split = Split {
        sequence: 0,
        first_row: 0,
        rows: 0,
        first_position: 0,
        first_key: 0,
        last_key: 0,
        first_state: 0,
        part: 0,
        parts: 0,
        arrival: 0,
        is_shared: 0,
    };

    /// Returns the split in its memory layout.
    pub fn words(&self) -> [u32; 11] {
        let Split {
            sequence,
            first_row,
            rows,
            first_position,
            first_key,
            last_key,
            first_state,
            part,
            parts,
            arrival,
            is_shared,
        } = *self;
        [
            sequence,
            first_row,
            rows,
            first_position,
            first_key,
            last_key,
            first_state,
            part,
            parts,
            arrival,
            is_shared,
        ]
    }
}

/// Consecutive rows of a sequence, which attend to the positions before them and to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Index of the sequence's page table.
    pub sequence: u32,
    /// Index of the first row in the batch.
    pub first_row: u32,
    pub count: u32,
    /// Position of the first row.
    pub first_position: u32,
}

/// The properties of a device and of the heads of a layer that decide about plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Number of blocks that the device runs at once.
    pub at_once: u32,
    /// See [`blocks_per_split`](super::blocks_per_split).
    pub per_split: u32,
    /// See [`rows_per_split`](super::rows_per_split).
    pub rows: u32,
    /// See [`rows_per_shared_split`](super::rows_per_shared_split). 0 if no split is shared.
    pub shared_rows: u32,
}

impl Blocks {
    /// Returns the maximum number of splits for this number of rows.
    pub fn max_splits(&self, rows: u32) -> u32 {
        let more = if rows > 1 && self.shared_rows > 0 { self.most_more_splits() } else { 0 };
        self.splits_at_once().max(rows.saturating_add(more))
    }

    /// Returns the maximum number of states for this number of rows. Rows that alone fill the device have no splits, and thus
    /// no states, unless they also read shared splits.
    pub fn max_states(&self, rows: u32) -> u32 {
        let of_splits = self.rows.saturating_add(self.shared_rows);
        self.splits_at_once().saturating_mul(of_splits).saturating_add(self.max_shared_rows(rows))
    }

    /// Returns the maximum number of words that count arrivals. Only rows with at least two splits, of which some may be
    /// shared, have arrivals.
    pub fn max_arrivals(&self, rows: u32) -> u32 {
        (self.at_once / 2).saturating_add(self.max_shared_rows(rows).saturating_mul(self.per_split))
    }

    /// Returns the maximum number of shared rows for this number of rows. A row counts in each range that it shares, which
    /// are two if its prefix continues one that more rows share.
    pub fn max_shared_rows(&self, rows: u32) -> u32 {
        if self.shared_rows > 0 { rows.saturating_mul(2).min(MAX_SHARED_ROWS) } else { 0 }
    }

    fn splits_at_once(&self) -> u32 {
        self.at_once / self.per_split.max(1)
    }

    /// Returns the number of splits by which those of a step with shared ones may exceed its tiles, even if the tiles alone
    /// fill the device. Tiles that have read their prefix with others are short, so a device that takes their blocks in
    /// several rounds reads shared splits at the same time.
    pub(super) fn most_more_splits(&self) -> u32 {
        self.splits_at_once() / 2
    }
}

/// The division of what the rows of a step see into splits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The shared splits come first.
    pub splits: Vec<Split>,
    pub shared_rows: Vec<SharedRow>,
    /// Number of states that the splits write.
    pub states: u32,
}

/// Some rows of a sequence that share the blocks of their splits, and the keys that any of them sees and does not read with
/// other sequences.
pub(super) struct Tile {
    /// Index of the rows that the tile is a part of.
    pub(super) owner: usize,
    pub(super) rows: Rows,
    seen: Range<u32>,
    /// Number of shared splits that the rows see before their own.
    pub(super) shared_parts: u32,
    pub(super) parts: u32,
    pub(super) first_state: u32,
    /// Index of the first split of its own.
    pub(super) first_split: u32,
}

impl Plan {
    /// Divides what these rows see into splits. `window` is the number of positions that a row sees, or 0 for all. The
    /// longest split is as short as possible while all splits together take no more blocks than the device runs at once, so
    /// that none waits long for another. All rows have at least one split.
    ///
    /// Ranges that rows share are read together if that saves bytes (see `Shares`). `ranges` come from
    /// [`shared_ranges`](super::shared_ranges) for the same rows, and are ignored if there is a window, which may begin
    /// inside of them.
    pub fn new(rows: &[Rows], ranges: &[SharedRange], window: u32, blocks: &Blocks) -> Self {
        let ranges = if window == 0 { ranges } else { &[] };
        let shares = Shares::choose(rows, ranges, blocks);
        let mut tiles: Vec<Tile> = rows
            .iter()
            .enumerate()
            .flat_map(|(owner, rows)| tiles(owner, *rows, window, blocks.rows.max(1)))
            .collect();
        for tile in &mut tiles {
            tile.seen.start = tile.seen.start.max(shares.covered(tile.owner));
        }
        let more = if shares.ranges.is_empty() { 0 } else { blocks.most_more_splits() };
        let wanted = u64::from(blocks.splits_at_once()).max(tiles.len() as u64 + u64::from(more));
        let count = |length: u32| {
            let own = tiles.iter().map(|tile| u64::from(tile.splits(length))).sum::<u64>();
            own + shares.ranges.iter().map(|range| u64::from(range.splits(length))).sum::<u64>()
        };
        let shared = shares.ranges.iter().map(|range| range.keys.end - range.keys.start);
        let longest = tiles.iter().map(Tile::keys).chain(shared).max().unwrap_or(0);
        // Binary search for the shortest length that gives no more splits than wanted. A greater length never gives more
        // splits.
        let (mut low, mut high) = (MIN_SPLIT / PASS, longest.max(MIN_SPLIT).div_ceil(PASS));
        while low < high {
            let middle = low + (high - low) / 2;
            if count(middle * PASS) <= wanted { high = middle } else { low = middle + 1 }
        }
        let length = low * PASS;
        let lengths: Vec<u32> = shares
            .ranges
            .iter()
            .map(|range| even_length(range.keys.end - range.keys.start, length))
            .collect();
        let mut plan = Plan { splits: Vec::new(), shared_rows: Vec::new(), states: 0 };
        let first_own = shares.ranges.iter().zip(&lengths).map(|(range, length)| range.splits(*length)).sum();
        let shared_parts = shares.count_parts(rows.len(), &lengths);
        let own = plan.divide_tiles(&mut tiles, &shared_parts, length, first_own);
        shares.read_together(&mut plan, rows, &tiles, &lengths);
        plan.splits.extend(own);
        plan
    }

    /// Divides what tiles see alone into splits, of which the first has this index.
    fn divide_tiles(
        &mut self,
        tiles: &mut [Tile],
        shared_parts: &[u32],
        length: u32,
        first: u32,
    ) -> Vec<Split> {
        let mut splits = Vec::new();
        let mut arrival = 0;
        for tile in tiles {
            // The splits of a tile have equal lengths.
            let even = even_length(tile.keys(), length);
            let begin = tile.seen.start / PAGE_POSITIONS * PAGE_POSITIONS;
            let Rows { sequence, first_row, count: rows, first_position } = tile.rows;
            tile.shared_parts = shared_parts[tile.owner];
            let own = tile.splits(even);
            tile.parts = tile.shared_parts + own;
            tile.first_state = self.states;
            tile.first_split = first + splits.len() as u32;
            splits.extend((0..own).map(|part| Split {
                sequence,
                first_row,
                rows,
                first_position,
                first_key: (begin + part * even).max(tile.seen.start),
                last_key: (begin + (part + 1) * even).min(tile.seen.end),
                first_state: tile.first_state,
                part: tile.shared_parts + part,
                parts: tile.parts,
                arrival,
                is_shared: 0,
            }));
            if tile.parts > 1 {
                self.states += rows * tile.parts;
                arrival += 1;
            }
        }
        splits
    }
}

/// Returns the length of equal splits of at most `length` keys, which is a multiple of [`PASS`].
fn even_length(keys: u32, length: u32) -> u32 {
    keys.div_ceil(keys.div_ceil(length).max(1)).next_multiple_of(PASS)
}

impl Tile {
    /// Returns the number of keys, from the start of the first page.
    fn keys(&self) -> u32 {
        self.seen.end - self.seen.start / PAGE_POSITIONS * PAGE_POSITIONS
    }

    /// Returns how many splits of at most this length cover the keys.
    fn splits(&self, length: u32) -> u32 {
        self.keys().div_ceil(length).max(1)
    }
}

/// Divides rows into tiles of at most `most` rows.
fn tiles(owner: usize, rows: Rows, window: u32, most: u32) -> impl Iterator<Item = Tile> {
    (0..rows.count).step_by(most as usize).map(move |begun| {
        let count = (rows.count - begun).min(most);
        let first_position = rows.first_position + begun;
        let start = if window == 0 { 0 } else { (first_position + 1).saturating_sub(window) };
        let rows = Rows { first_row: rows.first_row + begun, count, first_position, ..rows };
        let seen = start..first_position + count;
        Tile { owner, rows, seen, shared_parts: 0, parts: 0, first_state: 0, first_split: 0 }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn row(sequence: u32, context: u32) -> Rows {
        Rows { sequence, first_row: sequence, count: 1, first_position: context - 1 }
    }

    fn longest(plan: &Plan) -> u32 {
        plan.splits.iter().map(|split| split.last_key - split.first_key).max().unwrap_or(0)
    }

    #[test]
    fn a_plan_covers_what_each_row_sees_once_in_even_splits() {
        let rows =
            [row(0, 1), row(1, 4096), Rows { sequence: 2, first_row: 2, count: 7, first_position: 693 }];
        let blocks = Blocks { at_once: 64, per_split: 2, rows: 4, shared_rows: 0 };
        let plan = Plan::new(&rows, &[], 0, &blocks);
        let of = |first_row: u32| plan.splits.iter().filter(move |split| split.first_row == first_row);
        // Seven rows are two tiles.
        for (first_row, count, seen) in [(0, 1, 1), (1, 1, 4096), (2, 4, 697), (6, 3, 700)] {
            let splits: Vec<_> = of(first_row).collect();
            assert_eq!((splits[0].first_key, splits[splits.len() - 1].last_key), (0, seen));
            assert!(splits.windows(2).all(|pair| pair[0].last_key == pair[1].first_key));
            assert!(splits.iter().all(|split| split.rows == count && split.parts == splits.len() as u32));
            assert!(splits.iter().enumerate().all(|(part, split)| split.part == part as u32));
        }
        assert_eq!([0, 1, 2, 6].map(|row| of(row).count()), [1, 22, 4, 4], "192 keys each");
        assert_eq!(longest(&plan), 192);
        assert_eq!(plan.states, 22 + 4 * 4 + 3 * 4);
        assert_eq!(of(2).next().unwrap().first_state, 22);
        assert_eq!([1, 2, 6].map(|row| of(row).next().unwrap().arrival), [0, 1, 2]);
        let windowed = Plan::new(&rows[1..2], &[], 100, &blocks);
        let [split] = windowed.splits[..] else { panic!("{windowed:?}") };
        assert_eq!((split.first_key, split.last_key, split.parts), (3996, 4096, 1));
    }

    #[test]
    fn a_plan_minimizes_its_longest_split_and_stays_within_its_bounds() {
        let mut random = Random::fresh();
        for _ in 0..200 {
            let count = 1 + random.next_u64() % 20;
            let rows: Vec<Rows> =
                (0..count).map(|index| row(index as u32, 1 + (random.next_u64() % 5000) as u32)).collect();
            let at_once = (random.next_u64() % 200) as u32;
            let blocks = Blocks { at_once, per_split: 1, rows: 1, shared_rows: 0 };
            let plan = Plan::new(&rows, &[], 0, &blocks);
            let most = u64::from(at_once).max(count);
            assert!(plan.splits.len() as u64 <= most, "{rows:?} in {at_once}");
            assert!(plan.splits.len() as u32 <= blocks.max_splits(count as u32));
            assert!(plan.states <= blocks.max_states(count as u32), "{rows:?} in {at_once}");
            let arrivals =
                plan.splits.iter().filter(|split| split.parts > 1).map(|split| split.arrival + 1).max();
            assert!(arrivals.unwrap_or(0) <= blocks.max_arrivals(count as u32));
            let longest = longest(&plan).next_multiple_of(PASS);
            let shorter: u64 = rows
                .iter()
                .map(|row| u64::from((row.first_position + 1).div_ceil((longest - PASS).max(1))))
                .sum();
            assert!(longest <= MIN_SPLIT || shorter > most, "{longest} of {rows:?} in {at_once}");
        }
        let none = Blocks { at_once: 132, per_split: 8, rows: 4, shared_rows: 0 };
        assert_eq!(Plan::new(&[], &[], 0, &none), Plan { splits: vec![], shared_rows: vec![], states: 0 });
    }
}
