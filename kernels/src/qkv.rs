//! Processes queries, keys and values between their projection and attention, in one pass over the rows: norms, rotation
//! and the write into the KV pages.
//!
//! Invariant: each page is written by one task; two sequences of a call that write the same page are an error.

use crate::attention::AttentionSequence;
use crate::cpu::dispatch;
use crate::cpu::elementwise::{RmsNorm, Rotate};
use crate::error::{expect_len, product};
use crate::kv::{KvLayer, MAX_HEAD_SIZE, PAGE_TOKENS};
use crate::pool::{SharedSlice, by_rows};
use crate::residual::Norm;
use crate::rope::Pairing;
use crate::{Isa, KernelError, WorkerPool};

const OP: &str = "rotate and store";

/// Settings for the processing of heads.
#[derive(Clone, Copy, Debug)]
pub struct HeadParams<'a> {
    /// Number of query heads per row. The number of key and value heads is that of the KV layer.
    pub heads: usize,
    /// Number of values of each head that rotate, from the first on.
    pub rotated: usize,
    pub pairing: Pairing,
    /// The norm of query heads and the norm of key heads, if the model has them.
    pub norms: Option<(Norm<'a>, Norm<'a>)>,
}

/// Normalizes and rotates the query and key heads of each row in place, then stores keys and values in their pages.
///
/// A row of `rows` holds the query, key and value heads side by side; `rotary_table` is the table from [`crate::rope::rotary_table`].
pub fn rotate_and_store(
    pool: &WorkerPool,
    isa: Isa,
    params: HeadParams<'_>,
    rows: &mut [f32],
    rotary_table: &[f32],
    sequences: &[AttentionSequence],
    kv: &mut KvLayer,
) -> Result<(), KernelError> {
    kv.check_tier(OP, isa)?;
    let row = Row::new(&params, kv)?;
    let count = rows.len() / row.stride;
    expect_len(OP, "the length", product(OP, "the rows", &[count, row.stride])?, rows.len())?;
    expect_len(
        OP,
        "the length of the rotary table",
        product(OP, "the rotary table", &[count, row.rotated])?,
        rotary_table.len(),
    )?;
    let runs = runs(sequences, count, kv.page_count())?;
    let rows = SharedSlice::new(rows);
    let kv = &*kv;
    let width = (count * row.stride).div_ceil(runs.len().max(1));
    by_rows(pool, runs.len(), width, |index| {
        let run = &runs[index];
        for token in 0..run.tokens {
            let at = run.row + token;
            // SAFETY: `runs` ensured that each row and each page is in only one run, and each run belongs to one task.
            let values = unsafe { rows.part(at * row.stride, row.stride) };
            row.turn(isa, &params, values, &rotary_table[at * row.rotated..][..row.rotated]);
            let (keys, values) = values[row.keys..].split_at(row.values - row.keys);
            // SAFETY: as above; the page exists and the slot is below the size of a page.
            unsafe { kv.store(isa, run.page, run.slot + token, keys, values) };
        }
    });
    Ok(())
}

/// The layout of a row.
struct Row {
    size: usize,
    rotated: usize,
    /// The first column of the keys. `values` is the first column of the values.
    keys: usize,
    values: usize,
    stride: usize,
}

impl Row {
    fn new(params: &HeadParams<'_>, kv: &KvLayer) -> Result<Self, KernelError> {
        let size = kv.head_size();
        let kv_width = product(OP, "the KV heads", &[kv.kv_heads(), size])?;
        let keys = product(OP, "the query heads", &[params.heads, size])?;
        let stride = keys.checked_add(kv_width * 2).ok_or(KernelError::TooLarge { op: OP, what: "a row" })?;
        let rotated = params.rotated;
        expect_len(OP, "the remainder of the rotated values divided by 2", 0, rotated % 2)?;
        if rotated > size {
            return Err(KernelError::OutOfRange {
                op: OP,
                what: "rotated value",
                index: rotated,
                count: size,
            });
        }
        for norm in params.norms.iter().flat_map(|(query, key)| [query, key]) {
            expect_len(OP, "the length of a head norm", size, norm.weight.len())?;
        }
        Ok(Row { size, rotated, keys, values: keys + kv_width, stride: stride.max(1) })
    }

    /// Normalizes and rotates the query and key heads of one row.
    fn turn(&self, isa: Isa, params: &HeadParams<'_>, row: &mut [f32], rotary_table: &[f32]) {
        let interleaved = params.pairing == Pairing::Interleaved;
        let mut copy = [0f32; MAX_HEAD_SIZE];
        for (index, head) in row[..self.values].chunks_exact_mut(self.size).enumerate() {
            if let Some((query, key)) = params.norms {
                let Norm { weight, epsilon } = if index < params.heads { query } else { key };
                let input = &mut copy[..self.size];
                input.copy_from_slice(head);
                // SAFETY: safe slices of the head's length.
                unsafe { dispatch(isa, RmsNorm { input, weight, epsilon, out: head }) };
            }
            let head = &mut head[..self.rotated];
            // SAFETY: a safe slice, as long as the table.
            unsafe { dispatch(isa, Rotate { head, table: rotary_table, interleaved }) };
        }
    }
}

/// Consecutive rows that are stored in consecutive slots of one page.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) row: usize,
    pub(crate) tokens: usize,
    pub(crate) page: u32,
    pub(crate) slot: usize,
}

/// Cuts sequences into runs at page boundaries. Each row and each page is in at most one run.
pub(crate) fn runs(
    sequences: &[AttentionSequence],
    rows: usize,
    page_count: usize,
) -> Result<Vec<Run>, KernelError> {
    let mut runs = Vec::new();
    let mut free_row = 0;
    for sequence in sequences {
        if sequence.row < free_row {
            return Err(KernelError::Conflict { op: OP, what: "row", index: sequence.row });
        }
        sequence.check(OP, rows, page_count)?;
        free_row = sequence.row + sequence.tokens;
        let mut done = 0;
        while done < sequence.tokens {
            let position = sequence.start + done;
            let slot = position % PAGE_TOKENS;
            let tokens = (PAGE_TOKENS - slot).min(sequence.tokens - done);
            let page = sequence.pages[position / PAGE_TOKENS];
            runs.push(Run { row: sequence.row + done, tokens, page, slot });
            done += tokens;
        }
    }
    let mut pages: Vec<u32> = runs.iter().map(|run| run.page).collect();
    pages.sort_unstable();
    match pages.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(KernelError::Conflict { op: OP, what: "page", index: pair[0] as usize }),
        None => Ok(runs),
    }
}

#[cfg(test)]
#[path = "qkv_tests.rs"]
mod tests;
