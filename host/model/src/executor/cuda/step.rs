//! The inputs of a step's kernels, packed into one run of bytes that is copied to each device at once.
//!
//! Sequences with few rows come first, in the order of the batch; they are decoded. If attention has one order, these are
//! sequences with one row, which are tiles instead, because contexts that are split according to what else a step holds
//! are added up in a different order. Invariant: the batch has been checked. Steps with the same shape have every array
//! at the same offset, so recorded launches find it.

use std::cmp::Reverse;
use std::ops::Range;

use skep_kernels::cuda::attention_decode::{
    Blocks, MAX_ROWS, Plan, Rows, SharedRange, SharedRow, Split, shared_ranges,
};
use skep_kernels::cuda::attention_prefill::{Join, QUERY_TILE_ROWS, QueryTile, TILE_KEYS};

use crate::batch::{Batch, BatchSequence, PAGE_TOKENS};

/// The alignment of every array in bytes.
const ALIGNMENT: usize = 16;
/// Minimum length of a page table, so that not every page leads to a new shape.
const LEAST_STRIDE: usize = 64;

/// The properties that all steps of an executor share.
pub(super) struct Cuts {
    /// The distinct windows of the layers.
    pub(super) windows: Vec<Option<usize>>,
    /// The blocks that split contexts.
    pub(super) blocks: Blocks,
    /// Maximum number of rows of a step with a shape.
    pub(super) most_shape_rows: usize,
    /// A page that is never read.
    pub(super) spare_page: u32,
    pub(super) attention: Attention,
}

/// The attention of sequences with few rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attention {
    /// Contexts are divided into as many splits as the device runs at once.
    Split,
    /// Contexts are split as for rows of prompts: into splits of `split_keys` keys, joined from the first to the
    /// last.
    FixedOrder { split_keys: u32 },
}

impl Attention {
    /// Chooses a sixteenth of the model's context for a split, which gives enough blocks for a row and few joins for
    /// a prompt. The size must not depend on what a step holds.
    pub(super) fn in_fixed_order(context_length: usize) -> Self {
        let split = (context_length / 16).clamp(TILE_KEYS as usize, 1024).next_power_of_two();
        Attention::FixedOrder { split_keys: split as u32 }
    }

    /// Returns the maximum number of rows of a sequence that is decoded.
    fn most_decoded_rows(self) -> usize {
        match self {
            Attention::Split => MAX_ROWS as usize,
            Attention::FixedOrder { .. } => 1,
        }
    }

    /// Returns the number of splits of a context with this many pages.
    fn splits(self, pages: usize) -> usize {
        match self {
            Attention::Split => 1,
            Attention::FixedOrder { split_keys } => (pages * PAGE_TOKENS).div_ceil(split_keys as usize),
        }
    }

    /// Returns the maximum number of states in a step with this many rows and sequences, and this many
    /// pages per sequence, if attention has one order.
    fn max_states(self, rows: usize, sequences: usize, pages: usize) -> usize {
        match self.splits(pages) {
            0 | 1 => 0,
            splits => rows.saturating_add(sequences.saturating_mul(splits)),
        }
    }
}

/// The shape of a step that decodes few rows of each sequence and needs the logits of all of them. Every shape has
/// separate recordings. It does not matter which rows belong to which sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct DecodeShape {
    pub(super) rows: usize,
    pub(super) stride: usize,
}

/// The offsets of a step's arrays, and their lengths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) rows: usize,
    /// Number of rows, at the start, whose contexts are divided into splits.
    pub(super) decoded: usize,
    /// Number of page tables.
    pub(super) sequences: usize,
    pub(super) stride: usize,
    pub(super) logit_rows: usize,
    /// The shape, if recordings are made for such steps.
    pub(super) shape: Option<DecodeShape>,
    /// The arrays of the rows. Their elements are u32, except for `slots`, whose elements are u64.
    pub(super) tokens: Range<usize>,
    pub(super) positions: Range<usize>,
    pub(super) slots: Range<usize>,
    pub(super) page_tables: Range<usize>,
    /// One plan for each window.
    pub(super) plans: Vec<PlanOffsets>,
    pub(super) tiles: Range<usize>,
    pub(super) tile_count: usize,
    pub(super) splits: Option<SplitOffsets>,
    /// Rows whose logits are requested; `None` if those are all rows in order.
    pub(super) wanted: Option<Range<usize>>,
    pub(super) bytes: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlanOffsets {
    pub(super) splits: Range<usize>,
    pub(super) split_count: usize,
    /// The rows that read shared splits.
    pub(super) shared_rows: Range<usize>,
}

/// The splits of contexts if attention has one order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SplitOffsets {
    pub(super) keys: u32,
    pub(super) joins: Range<usize>,
    pub(super) join_count: usize,
}

/// Returns the number of rows that a decode step is rounded up to.
pub(super) fn bucket(rows: usize) -> usize {
    match rows {
        0..=8 => rows.next_power_of_two(),
        9..=64 => rows.next_multiple_of(8),
        _ => rows.next_multiple_of(32),
    }
}

impl Cuts {
    /// Returns the maximum number of splits in a step with this many decoded rows.
    fn max_splits(&self, rows: usize) -> usize {
        match self.attention {
            Attention::Split => self.blocks.max_splits(count(rows)) as usize,
            Attention::FixedOrder { .. } => 0,
        }
    }

    /// Returns the maximum number of rows that read shared splits in a step with this many decoded rows.
    fn max_shared_rows(&self, rows: usize) -> usize {
        match self.attention {
            Attention::Split => self.blocks.max_shared_rows(count(rows)) as usize,
            Attention::FixedOrder { .. } => 0,
        }
    }

    /// Returns the maximum number of words that count the arrivals of splits in a step with this many rows.
    pub(super) fn max_arrivals(&self, rows: usize) -> usize {
        self.blocks.max_arrivals(count(rows)) as usize
    }

    /// Returns the maximum number of states in a step with this many rows and sequences, and this many pages per
    /// sequence.
    pub(super) fn max_states(&self, rows: usize, sequences: usize, pages: usize) -> usize {
        match self.attention {
            Attention::Split => self.blocks.max_states(count(rows)) as usize,
            ordered @ Attention::FixedOrder { .. } => ordered.max_states(rows, sequences, stride(pages)),
        }
    }

    /// Returns the size of the largest step in bytes.
    pub(super) fn most_bytes(&self, rows: usize, sequences: usize, pages: usize, logit_rows: usize) -> usize {
        let tables = sequences.saturating_mul(stride(pages)).saturating_mul(4);
        let decoded = rows.min(sequences.saturating_mul(self.attention.most_decoded_rows()));
        let plan = self.max_splits(decoded) * size_of::<Split>()
            + self.max_shared_rows(decoded) * size_of::<SharedRow>()
            + 2 * ALIGNMENT;
        let plans = self.windows.len() * plan;
        // A decoded sequence has a tile for each split, and a join.
        let splits = sequences.saturating_mul(self.attention.splits(stride(pages)));
        let tiles = (rows / QUERY_TILE_ROWS as usize + splits.max(sequences) + 1)
            .saturating_mul(size_of::<QueryTile>())
            + sequences * size_of::<Join>()
            + ALIGNMENT;
        let arrays = rows * (4 + 4 + 8) + plans + tiles + logit_rows * 4 + 8 * ALIGNMENT;
        arrays.saturating_add(tables)
    }

    /// Packs a step or a micro-batch of one. A micro-batch has no shape, because its logits follow those of others.
    /// `buffer` is cleared first.
    pub(super) fn pack(&self, batch: &Batch, is_whole: bool, buffer: &mut Vec<u8>) -> Step {
        let few = 1..=self.attention.most_decoded_rows();
        let (decoded, others): (Vec<_>, Vec<_>) = batch
            .sequences
            .iter()
            .enumerate()
            .partition(|(_, sequence)| few.contains(&sequence.tokens.len()));
        let all_wanted =
            batch.sequences.iter().all(|sequence| sequence.logit_rows() == sequence.tokens.len());
        let decoded_rows = decoded.iter().map(|(_, sequence)| sequence.tokens.len()).sum::<usize>();
        let pages = batch.sequences.iter().map(|sequence| sequence.pages.len()).max().unwrap_or(0);
        let stride = stride(pages);
        let has_shape = is_whole && others.is_empty() && all_wanted && decoded_rows > 0;
        let shape = has_shape
            .then(|| DecodeShape { rows: bucket(decoded_rows), stride })
            .filter(|shape| shape.rows <= self.most_shape_rows);
        let padding = shape.map_or(0, |shape| shape.rows - decoded_rows);
        // A step with a shape has as many page tables as rows, so that the arrays keep their offsets.
        let sequences = shape.map_or(batch.sequences.len(), |shape| shape.rows);
        let ordered: Vec<_> = decoded.iter().chain(&others).copied().collect();
        let rows = batch.token_count() + padding;

        let mut packing = Packing { bytes: buffer };
        packing.bytes.clear();
        let spare = std::iter::repeat_n(0u32, padding);
        let tokens = ordered.iter().flat_map(|(_, sequence)| sequence.tokens.iter().copied());
        let tokens = packing.put(tokens.chain(spare.clone()).map(u32::to_le_bytes));
        let positions = ordered.iter().flat_map(|(_, sequence)| positions_of(sequence).map(|at| at as u32));
        let positions = packing.put(positions.chain(spare).map(u32::to_le_bytes));
        let slots = ordered.iter().flat_map(|(_, sequence)| {
            positions_of(sequence).map(|at| slot(sequence.pages[at / PAGE_TOKENS].0, at % PAGE_TOKENS))
        });
        let spare = std::iter::repeat_n(slot(self.spare_page, 0), padding);
        let slots = packing.put(slots.chain(spare).map(u64::to_le_bytes));
        let tables = ordered.iter().flat_map(|(_, sequence)| {
            let pages = sequence.pages.iter().map(|page| page.0);
            pages.chain(std::iter::repeat(self.spare_page)).take(stride)
        });
        let spare = std::iter::repeat_n(self.spare_page, (sequences - ordered.len()) * stride);
        let page_tables = packing.put(tables.chain(spare).map(u32::to_le_bytes));
        let is_split = self.attention == Attention::Split;
        let plans = match decoded.is_empty() || !is_split {
            true => Vec::new(),
            false => {
                let rows = planned_rows(&decoded, padding);
                let ranges = self.shared_ranges(&decoded, &rows);
                let put = |window: &Option<usize>| {
                    self.put_plan(&mut packing, &rows, &ranges, window.unwrap_or(0) as u32, shape)
                };
                self.windows.iter().map(put).collect()
            }
        };
        let (mut tiles, joins) = self.decode_tiles(&decoded, decoded.len() + padding, stride);
        let mut row = decoded_rows as u32;
        let first_state = tiles.len() as u32;
        for (index, (_, sequence)) in others.iter().enumerate() {
            let (count, start) = (sequence.tokens.len() as u32, sequence.start as u32);
            let sequence = (decoded.len() + index) as u32;
            tiles.extend(QueryTile::cover(sequence, row, count, start, first_state + row));
            row += count;
        }
        // Tiles that see many keys take longest, so they start first, and the device has no long tile left at the end.
        tiles[first_state as usize..].sort_by_key(|tile| Reverse(tile.first_position + tile.rows));
        let tile_count = tiles.len();
        let tiles = packing.put(tiles.iter().flat_map(QueryTile::words).map(u32::to_le_bytes));
        let splits = match self.attention {
            Attention::FixedOrder { split_keys } => {
                let words = joins.iter().flat_map(|join| [join.row, join.first_state, join.parts]);
                let range = packing.put(words.map(u32::to_le_bytes));
                Some(SplitOffsets { keys: split_keys, joins: range, join_count: joins.len() })
            }
            Attention::Split => None,
        };
        let wanted = match shape {
            Some(_) => None,
            None => Some(packing.put(wanted_rows(batch, &ordered).into_iter().map(u32::to_le_bytes))),
        };
        let logit_rows = batch.logit_rows();
        let decoded = if is_split { decoded_rows + padding } else { 0 };
        let bytes = packing.bytes.len();
        Step {
            rows,
            decoded,
            sequences,
            stride,
            logit_rows,
            shape,
            tokens,
            positions,
            slots,
            page_tables,
            plans,
            tiles,
            tile_count,
            splits,
            wanted,
            bytes,
        }
    }

    /// Returns the tiles of decoded rows if attention has one order, and their joins if contexts may have several
    /// splits. Each row has as many tiles as its page table has room for, so that the arrays of a shape keep their
    /// offsets. Padding rows see the first slot of the spare page, where all of them write the same values.
    fn decode_tiles(
        &self,
        decoded: &[(usize, &BatchSequence)],
        rows: usize,
        stride: usize,
    ) -> (Vec<QueryTile>, Vec<Join>) {
        let (mut tiles, mut joins) = (Vec::new(), Vec::new());
        let Attention::FixedOrder { split_keys } = self.attention else { return (tiles, joins) };
        let splits = self.attention.splits(stride);
        for row in 0..rows {
            let position = decoded.get(row).map_or(0, |(_, sequence)| sequence.start) as u32;
            let (row, first_state) = (row as u32, tiles.len() as u32);
            if splits == 1 {
                tiles.extend(QueryTile::cover(row, row, 1, position, first_state));
                continue;
            }
            tiles.extend(QueryTile::parts(row, row, position, split_keys, first_state));
            joins.push(Join { row, first_state, parts: tiles.len() as u32 - first_state });
            tiles.resize(first_state as usize + splits, QueryTile::NONE);
        }
        (tiles, joins)
    }

    /// Returns the ranges of pages that decoded sequences have in common. Padding rows have none.
    fn shared_ranges(&self, decoded: &[(usize, &BatchSequence)], rows: &[Rows]) -> Vec<SharedRange> {
        if self.blocks.shared_rows == 0 || decoded.len() < 2 {
            return Vec::new();
        }
        let tables = decoded.iter().map(|(_, sequence)| sequence.pages.iter().map(|page| page.0).collect());
        let tables: Vec<Vec<u32>> = tables.collect();
        let tables: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();
        shared_ranges(&rows[..decoded.len()], &tables, &self.blocks)
    }

    /// Packs the plan of one window. A step with a shape always has the maximum number of splits and of shared rows; the
    /// excess splits are spare ones, and nothing refers to the excess rows.
    fn put_plan(
        &self,
        packing: &mut Packing<'_>,
        rows: &[Rows],
        ranges: &[SharedRange],
        window: u32,
        shape: Option<DecodeShape>,
    ) -> PlanOffsets {
        let Plan { mut splits, mut shared_rows, .. } = Plan::new(rows, ranges, window, &self.blocks);
        if let Some(DecodeShape { rows, .. }) = shape {
            splits.resize(self.max_splits(rows).max(splits.len()), Split::SPARE);
            shared_rows.resize(self.max_shared_rows(rows).max(shared_rows.len()), SharedRow::default());
        }
        let range = packing.put(splits.iter().flat_map(Split::words).map(u32::to_le_bytes));
        let rows = packing.put(shared_rows.iter().flat_map(SharedRow::words).map(u32::to_le_bytes));
        PlanOffsets { splits: range, split_count: splits.len(), shared_rows: rows }
    }
}

struct Packing<'a> {
    bytes: &'a mut Vec<u8>,
}

impl Packing<'_> {
    fn put<const N: usize>(&mut self, values: impl Iterator<Item = [u8; N]>) -> Range<usize> {
        let start = self.bytes.len().next_multiple_of(ALIGNMENT);
        self.bytes.resize(start, 0);
        values.for_each(|value| self.bytes.extend(value));
        start..self.bytes.len()
    }
}

/// Returns the number of pages in a row of the page tables.
pub(super) fn stride(pages: usize) -> usize {
    pages.max(LEAST_STRIDE).next_power_of_two()
}

/// Returns the rows of decoded sequences, and the padding rows. Each of these is the first row of its own page table, which
/// has only the spare page.
fn planned_rows(decoded: &[(usize, &BatchSequence)], padding: usize) -> Vec<Rows> {
    let sequences = decoded.iter().map(|(_, sequence)| (sequence.tokens.len(), sequence.start));
    let padding = std::iter::repeat_n((1, 0), padding);
    let (mut rows, mut first_row) = (Vec::new(), 0);
    for (sequence, (count, start)) in sequences.chain(padding).enumerate() {
        let (count, first_position) = (count as u32, start as u32);
        rows.push(Rows { sequence: sequence as u32, first_row, count, first_position });
        first_row += count;
    }
    rows
}

/// Returns a number of rows for a plan.
fn count(rows: usize) -> u32 {
    u32::try_from(rows).unwrap_or(u32::MAX)
}

fn positions_of(sequence: &BatchSequence) -> Range<usize> {
    sequence.start..sequence.start + sequence.tokens.len()
}

fn slot(page: u32, offset: usize) -> u64 {
    u64::from(page) * PAGE_TOKENS as u64 + offset as u64
}

/// Returns the rows of the step whose logits are requested, in the order of the batch.
fn wanted_rows(batch: &Batch, ordered: &[(usize, &BatchSequence)]) -> Vec<u32> {
    let mut ends = vec![0; batch.sequences.len()];
    let mut row = 0;
    for (index, sequence) in ordered {
        row += sequence.tokens.len();
        ends[*index] = row;
    }
    let rows = batch.sequences.iter().zip(ends).flat_map(|(sequence, end)| end - sequence.logit_rows()..end);
    rows.map(|row| row as u32).collect()
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
