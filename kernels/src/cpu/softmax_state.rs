//! The softmax states of query rows, and how those of blocks of positions are merged.
//!
//! Invariant: merging computes in the order that [`super::attention`] describes; each row is merged alone.

use super::Kernel;
use super::attention::{BLOCK, MAX_ROWS, QueryRow};
use super::kv::MAX_LATENT;
use super::simd::{Simd, exp};
use crate::pool::SharedSlice;

/// Lanes of a register that holds one value per row. A state has one such register of largest scores and one of totals.
pub(super) const LANES: usize = 16;
/// The score of a position that a row does not see.
pub(super) const MASKED: f32 = -1e30;

/// The softmax state of several rows in plain memory: a register of largest scores, a register of totals, then the
/// weighted values of each row.
#[derive(Clone, Copy)]
pub(crate) struct State {
    start: *mut f32,
    pub(super) value_stride: usize,
}

impl State {
    /// Maximum number of floats in a state.
    pub const MAX_LEN: usize = Self::len(MAX_ROWS, MAX_LATENT);

    /// Returns the number of floats in the state of `rows` rows.
    pub const fn len(rows: usize, value_stride: usize) -> usize {
        2 * LANES + rows * value_stride
    }

    /// Creates a state at `start`, which must have room for it.
    pub fn new(start: *mut f32, value_stride: usize) -> Self {
        State { start, value_stride }
    }

    /// Returns the weighted values of a row, the total by which to divide them, and the largest score.
    ///
    /// # Safety
    /// The state is valid, was computed for the row, and no thread writes it.
    pub unsafe fn row(&self, row: usize) -> (&[f32], f32, f32) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let values = std::slice::from_raw_parts(self.values(row), self.value_stride);
            (values, *self.start.add(LANES + row), *self.start.add(row))
        }
    }

    /// Returns the state that begins this many floats later.
    ///
    /// # Safety
    /// The states lie in one allocation, or the result is not used.
    #[inline(always)]
    pub(super) unsafe fn after(self, floats: usize) -> Self {
        State { start: self.start.wrapping_add(floats), ..self }
    }

    /// Returns a pointer to the weighted values of a row.
    ///
    /// # Safety
    /// The state has the row.
    #[inline(always)]
    pub(super) unsafe fn values(&self, row: usize) -> *mut f32 {
        // SAFETY: guaranteed by the caller.
        unsafe { self.start.add(2 * LANES + row * self.value_stride) }
    }

    /// Resets the state to that of rows that have seen no position.
    ///
    /// # Safety
    /// The state is valid for `rows` rows, and only the caller has access to it.
    #[inline(always)]
    pub(super) unsafe fn clear<S: Simd>(&self, rows: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            S::store(self.start, S::splat(MASKED));
            for at in (LANES..Self::len(rows, self.value_stride)).step_by(LANES) {
                S::store(self.start.add(at), S::zero());
            }
        }
    }

    /// Merges a block's largest scores and totals. Returns the factors for the previous values and for the block's values.
    ///
    /// # Safety
    /// The state is valid, only the caller has access to it, and each pointer is valid for one register.
    #[inline(always)]
    pub(super) unsafe fn merge_totals<S: Simd>(&self, largest: *const f32, totals: *const f32) -> Factors {
        let mut factors = Factors { before: [0.0; LANES], block: [0.0; LANES] };
        // SAFETY: guaranteed by the caller.
        unsafe {
            let (before, block) = (S::load(self.start), S::load(largest));
            let new = S::max(before, block);
            let (before, block) = (exp::<S>(S::sub(before, new)), exp::<S>(S::sub(block, new)));
            let total = S::mul(S::load(self.start.add(LANES)), before);
            S::store(self.start, new);
            S::store(self.start.add(LANES), S::fma(S::load(totals), block, total));
            S::store(factors.before.as_mut_ptr(), before);
            S::store(factors.block.as_mut_ptr(), block);
        }
        factors
    }
}

/// The factors by which values are multiplied when a block is merged, for each row.
pub(super) struct Factors {
    before: [f32; LANES],
    block: [f32; LANES],
}

/// Adds a register of a block's weighted values to the 16 at `to`.
///
/// # Safety
/// `to` is valid for one register to which only the caller has access; call inside a dispatched kernel.
#[inline(always)]
pub(super) unsafe fn merge_values<S: Simd>(to: *mut f32, block: S::F, factors: &Factors, row: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let before = S::mul(S::load(to), S::splat(factors.before[row]));
        S::store(to, S::fma(block, S::splat(factors.block[row]), before));
    }
}

/// The state of one block for consecutive rows of those that it was computed for.
#[derive(Clone, Copy)]
pub(crate) struct BlockState {
    pub state: State,
    pub first_row: usize,
}

/// Merges the states of single blocks, in order, into one state.
pub(crate) struct MergeStates<Blocks> {
    pub blocks: Blocks,
    pub rows: usize,
    /// Receives the result.
    pub into: State,
}

impl<Blocks: Iterator<Item = BlockState>> Kernel for MergeStates<Blocks> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let MergeStates { blocks, rows, into } = self;
        // SAFETY: the caller guarantees that the states are valid and that no other thread uses them. A register that
        // begins at a later row ends inside the state.
        unsafe {
            into.clear::<S>(rows);
            for BlockState { state, first_row } in blocks {
                let largest = state.start.add(first_row);
                let factors = into.merge_totals::<S>(largest, largest.add(LANES));
                for row in 0..rows {
                    let (to, from) = (into.values(row), state.values(first_row + row));
                    for column in (0..into.value_stride).step_by(LANES) {
                        merge_values::<S>(to.add(column), S::load(from.add(column)), &factors, row);
                    }
                }
            }
        }
    }
}

/// Divides the values of rows by the sums of the weights and writes them to `out`.
pub(crate) struct FinishRows<'a> {
    pub rows: &'a [QueryRow],
    pub state: State,
    /// Either empty or, for each head, the score of a position without a value.
    pub sinks: &'a [f32],
    /// Number of values that a row has in `out`.
    pub value_size: usize,
    pub out: &'a SharedSlice<f32>,
}

impl Kernel for FinishRows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for (r, row) in self.rows.iter().enumerate() {
            // SAFETY: the caller guarantees that the state was computed for the rows, and that no other thread writes their part
            // of `out`.
            let ((values, total, largest), out) =
                unsafe { (self.state.row(r), self.out.part(row.output, self.value_size)) };
            let sink = self.sinks.get(row.head).map_or(0.0, |sink| (sink - largest).exp());
            let factor = 1.0 / (total + sink);
            for (out, value) in out.iter_mut().zip(values) {
                // Positions with weight zero may flip the sign of a zero; adding 0.0 gives +0.0 for either sign.
                *out = value * factor + 0.0;
            }
        }
    }
}

/// The weights of a block of positions, and the state that its values are merged into.
pub(super) struct ValueBlock<'a> {
    pub weights: &'a [[f32; BLOCK]],
    pub first_page: usize,
    pub pages: usize,
    pub state: State,
    pub factors: Factors,
}

impl ValueBlock<'_> {
    /// Merges `C` registers of weighted values of `R` rows from `first` on, from `column` on.
    ///
    /// # Safety
    /// The state has the rows and columns, and only the caller has access to it; call inside a dispatched kernel.
    #[inline(always)]
    pub unsafe fn merge<S: Simd, const R: usize, const C: usize>(
        &self,
        sums: &[[S::F; C]; R],
        first: usize,
        column: usize,
    ) {
        for (r, sums) in sums.iter().enumerate() {
            for (c, sum) in sums.iter().enumerate() {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    let to = self.state.values(first + r).add(column + 16 * c);
                    merge_values::<S>(to, *sum, &self.factors, first + r);
                }
            }
        }
    }
}
