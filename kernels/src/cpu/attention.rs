//! Attention of a few query rows over a range of KV pages, with a softmax that is merged block by block.
//!
//! Invariant: a row's result has the same bits whatever rows share its call and whichever thread computes which block.
//! Its positions are cut into blocks of [`BLOCK`] at absolute multiples of [`BLOCK`]. For each block the kernel computes
//! the largest score `m`, the sum `d` of the weights `exp(score - m)` (in each lane over pages in order, then over lanes)
//! and the values `o`, which are weighted sums over positions in order. Blocks are merged into the running `(M, D, O)`
//! from first to last: `N = max(M, m)`, `a = exp(M - N)`, `b = exp(m - N)`, `(N, d b + D a, o b + O a)`. A block in which
//! a row sees no position leaves its state unchanged. Each K and V value is read once for all rows of the call, which
//! share one KV head and may belong to several sequences.

use std::marker::PhantomData;
use std::ops::Range;

use super::Kernel;
use super::kv::{KvFormat, MAX_HEAD, MAX_LATENT, PAGE};
use super::rows::RowKernel;
use super::simd::{Simd, exp};

/// Maximum number of query rows per call.
pub(crate) const MAX_ROWS: usize = 12;
/// Number of query rows up to which the kernel is compiled for each number. With more, there are [`MAX_ROWS`].
pub(crate) const EXACT_ROWS: usize = 8;
/// Number of positions whose weights are summed before they are merged with other blocks.
pub(crate) const BLOCK: usize = 128;
/// Lanes of a register that holds one value per row. A state has one such register of largest scores and one of totals.
pub(super) const LANES: usize = 16;
pub(super) const MASKED: f32 = -1e30;

/// One query row, and the positions that it attends to.
#[derive(Clone, Copy)]
pub(crate) struct QueryRow {
    /// Offset of its values in `query`.
    pub offset: usize,
    /// Offset of its values in the output of attention.
    pub output: usize,
    pub first: usize,
    /// Exclusive.
    pub end: usize,
    /// The score of a position without a value, or minus infinity.
    pub sink: f32,
}

/// The softmax state of several rows in plain memory: a register of largest scores, a register of totals, then the
/// weighted values of each row.
#[derive(Clone, Copy)]
pub(crate) struct State {
    start: *mut f32,
    value_stride: usize,
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
pub(crate) struct MergeStates<'a> {
    pub blocks: &'a [BlockState],
    pub rows: usize,
    /// Receives the result.
    pub into: State,
}

impl Kernel for MergeStates<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let MergeStates { blocks, rows, into } = self;
        // SAFETY: the caller guarantees that the states are valid and that no other thread uses them. A register that
        // begins at a later row ends inside the state.
        unsafe {
            into.clear::<S>(rows);
            for BlockState { state, first_row } in blocks {
                let largest = state.start.add(*first_row);
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

/// The scales of a scaled format, from one KV head's first scale on.
pub(crate) struct Scales {
    pub keys: *const f32,
    pub values: *const f32,
    /// Number of scales per page.
    pub page: usize,
}

pub(crate) struct AttendRows<'a, Kv: KvFormat> {
    pub rows: &'a [QueryRow],
    pub query: *const f32,
    pub scale: f32,
    pub head_size: usize,
    /// Base address of this layer and KV head. `key_page` is the number of elements per page.
    pub keys: *const Kv::Element,
    pub key_page: usize,
    pub values: *const Kv::Element,
    pub value_page: usize,
    pub scales: Scales,
    pub pages: &'a [u32],
    /// The range of positions to process. `from` is a page boundary.
    pub from: usize,
    pub to: usize,
    /// Receives the result.
    pub state: State,
    /// If 0, all blocks are merged into one state, and `from` is in the first block that the rows see. Otherwise each block
    /// has a separate state, and this is the distance between them in floats.
    pub state_stride: usize,
    pub format: PhantomData<Kv>,
}

impl<Kv: KvFormat> RowKernel for AttendRows<'_, Kv> {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Uses each query that is loaded for as many pages as there are registers for.
    #[inline(always)]
    unsafe fn run_rows<S: Simd, const N: usize>(self) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            // Constants of a type keep the compiler from generating the other cases.
            if S::MANY_REGISTERS {
                if Rows::<N>::ARE_FEW {
                    self.attend::<S, N, N, 0, 4>();
                } else {
                    self.attend::<S, N, N, 0, 2>();
                }
            } else if Rows::<N>::IS_ONE {
                self.attend::<S, N, N, 0, 4>();
            } else if Rows::<N>::ARE_FEW {
                self.attend::<S, N, N, 0, 2>();
            } else if Rows::<N>::ARE_SEVEN {
                self.attend::<S, N, 4, 3, 1>();
            } else if Rows::<N>::ARE_EIGHT {
                self.attend::<S, N, 4, 4, 1>();
            } else if Rows::<N>::ARE_MOST {
                self.attend::<S, N, 6, 6, 1>();
            } else {
                self.attend::<S, N, N, 0, 1>();
            }
        }
    }
}

/// A number of rows.
struct Rows<const N: usize>;

impl<const N: usize> Rows<N> {
    const IS_ONE: bool = N == 1;
    const ARE_FEW: bool = N < 4;
    const ARE_SEVEN: bool = N == 7;
    const ARE_EIGHT: bool = N == 8;
    const ARE_MOST: bool = N == MAX_ROWS;
}

impl<Kv: KvFormat> AttendRows<'_, Kv> {
    /// Processes `R` rows, of which the first `A` and then the other `B` are summed together, and `P` pages or columns at a
    /// time. The sums of so many rows and pages fit into the registers, and hide the latency of the additions.
    ///
    /// # Safety
    /// There are `R` rows, which is `A + B`, the pages cover `from..to`, and `head_size <= MAX_HEAD`.
    #[inline(always)]
    unsafe fn attend<S: Simd, const R: usize, const A: usize, const B: usize, const P: usize>(self) {
        let mut query = [0f32; MAX_HEAD * MAX_ROWS];
        // SAFETY: the caller guarantees that offsets are inside the query.
        unsafe {
            for r in 0..R {
                for d in 0..self.head_size {
                    query[d * R + r] = self.scale * *self.query.add(self.rows[r].offset + d);
                }
            }
            let mut scores = [[0f32; BLOCK]; R];
            let mut state = self.state;
            let mut at = self.from;
            while at < self.to {
                let end = (at / BLOCK * BLOCK + BLOCK).min(self.to);
                let pages = (end - at).div_ceil(PAGE);
                for first in (0..pages).step_by(P) {
                    self.score_pages::<S, R, A, P>(&query, at / PAGE, first..pages, 0, &mut scores);
                    if B > 0 {
                        self.score_pages::<S, R, B, P>(&query, at / PAGE, first..pages, A, &mut scores);
                    }
                }
                let (mut largest, mut totals) = ([MASKED; LANES], [0f32; LANES]);
                for r in 0..R {
                    let row = &mut scores[r][..pages * PAGE];
                    (largest[r], totals[r]) = softmax_weights::<S>(row, at, &self.rows[r]);
                }
                if Kv::SCALED {
                    self.scale_weights::<S, R>(&mut scores, at / PAGE, pages);
                }
                if at == self.from || self.state_stride > 0 {
                    state.clear::<S>(R);
                }
                let factors = state.merge_totals::<S>(largest.as_ptr(), totals.as_ptr());
                self.gather_rows::<S, R, A, P>(&scores, at / PAGE, pages, state, &factors, 0);
                if B > 0 {
                    self.gather_rows::<S, R, B, P>(&scores, at / PAGE, pages, state, &factors, A);
                }
                state.start = state.start.add(self.state_stride);
                at = end;
            }
        }
    }

    /// Scores the first `P` of `pages`, which are relative to `first_page`, for `G` of the rows. It prefetches what is read next: the values of
    /// the same pages and the keys of the pages after them. Pages are not adjacent, so the processor does not foresee them.
    ///
    /// # Safety
    /// The conditions of `attend` hold, and the pages are in the sequence's page list.
    #[inline(always)]
    unsafe fn score_pages<S: Simd, const R: usize, const G: usize, const P: usize>(
        &self,
        query: &[f32; MAX_HEAD * MAX_ROWS],
        first_page: usize,
        pages: Range<usize>,
        first_row: usize,
        scores: &mut [[f32; BLOCK]; R],
    ) {
        let last = self.pages.len() - 1;
        // The last page replaces pages past the end; the scores computed for the replacements are not stored.
        let page_at = |index: usize| self.pages[(first_page + index).min(last)] as usize;
        let here: [usize; P] = std::array::from_fn(|i| page_at((pages.start + i).min(pages.end - 1)));
        // SAFETY: guaranteed by the caller; prefetched addresses need not be readable.
        unsafe {
            let keys: [*const Kv::Element; P] =
                std::array::from_fn(|i| self.keys.add(here[i] * self.key_page));
            let ahead: [[*const u8; P]; 2] = [
                std::array::from_fn(|i| self.keys.add(page_at(pages.start + P + i) * self.key_page).cast()),
                std::array::from_fn(|i| self.values.add(here[i] * self.value_page).cast()),
            ];
            let mut sums = [[S::zero(); P]; G];
            for d in 0..self.head_size {
                if first_row == 0 {
                    for ahead in ahead[d % 2] {
                        S::prefetch(ahead.wrapping_add(d / 2 * 2 * PAGE * size_of::<Kv::Element>()));
                    }
                }
                let mut loaded = [S::zero(); P];
                for (loaded, keys) in loaded.iter_mut().zip(keys) {
                    *loaded = Kv::load::<S>(keys.add(d * PAGE));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let query = S::splat(*query.as_ptr().add(d * R + first_row + r));
                    for (sum, key) in sums.iter_mut().zip(loaded) {
                        *sum = S::fma(key, query, *sum);
                    }
                }
            }
            for i in 0..P.min(pages.len()) {
                if Kv::SCALED {
                    let scales = S::load(self.scales.keys.add(here[i] * self.scales.page));
                    for sums in &mut sums {
                        sums[i] = S::mul(sums[i], scales);
                    }
                }
                for (row, sums) in scores[first_row..].iter_mut().zip(&sums) {
                    S::store(row.as_mut_ptr().add((pages.start + i) * PAGE), sums[i]);
                }
            }
        }
    }

    /// Multiplies the weights by the scales of the values, because a value is its scale times the stored integer.
    ///
    /// # Safety
    /// The conditions of `attend` hold.
    #[inline(always)]
    unsafe fn scale_weights<S: Simd, const R: usize>(
        &self,
        weights: &mut [[f32; BLOCK]; R],
        first_page: usize,
        pages: usize,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            for p in 0..pages {
                let page = self.pages[first_page + p] as usize;
                let scales = S::load(self.scales.values.add(page * self.scales.page));
                for row in weights.iter_mut() {
                    let at = row.as_mut_ptr().add(p * PAGE);
                    S::store(at, S::mul(S::load(at), scales));
                }
            }
        }
    }

    /// Gathers the values of a block for `G` of the rows, `P` registers at a time, and merges them into the state.
    ///
    /// # Safety
    /// The conditions of `attend` hold.
    #[inline(always)]
    unsafe fn gather_rows<S: Simd, const R: usize, const G: usize, const P: usize>(
        &self,
        weights: &[[f32; BLOCK]; R],
        first_page: usize,
        pages: usize,
        state: State,
        factors: &Factors,
        first_row: usize,
    ) {
        let mut column = 0;
        // SAFETY: guaranteed by the caller.
        unsafe {
            while column + 16 * P <= self.state.value_stride {
                let at = [first_row, column];
                self.gather_values::<S, R, G, P>(weights, first_page, pages, state, factors, at);
                column += 16 * P;
            }
            while column < self.state.value_stride {
                let at = [first_row, column];
                self.gather_values::<S, R, G, 1>(weights, first_page, pages, state, factors, at);
                column += 16;
            }
        }
    }

    /// Gathers `C` registers of a block's values for `G` rows, from a row and a column on, and merges them into the state.
    ///
    /// # Safety
    /// The conditions of `attend` hold, and the columns are within `value_stride`.
    #[inline(always)]
    unsafe fn gather_values<S: Simd, const R: usize, const G: usize, const C: usize>(
        &self,
        weights: &[[f32; BLOCK]; R],
        first_page: usize,
        pages: usize,
        state: State,
        factors: &Factors,
        [first_row, column]: [usize; 2],
    ) {
        // SAFETY: guaranteed by the caller; `value_stride <= MAX_HEAD`.
        unsafe {
            let mut sums = [[S::zero(); C]; G];
            for p in 0..pages {
                let page = self.pages[first_page + p] as usize * self.value_page;
                let values = self.values.add(page + column);
                for token in 0..PAGE {
                    let mut loaded = [S::zero(); C];
                    for (c, loaded) in loaded.iter_mut().enumerate() {
                        *loaded = Kv::load::<S>(values.add(token * self.state.value_stride + 16 * c));
                    }
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let weight = S::splat(*weights[first_row + r].as_ptr().add(p * PAGE + token));
                        for (sum, value) in sums.iter_mut().zip(loaded) {
                            *sum = S::fma(value, weight, *sum);
                        }
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (c, sum) in sums.iter().enumerate() {
                    let row = first_row + r;
                    merge_values::<S>(state.values(row).add(column + 16 * c), *sum, factors, row);
                }
            }
        }
    }
}

/// Turns a block's scores, at positions `at..`, into weights, and returns the largest score and the sum of the weights.
/// Positions that the row does not see get weight 0.
///
/// # Safety
/// `scores` is a whole number of pages; call inside a dispatched kernel.
#[inline(always)]
pub(super) unsafe fn softmax_weights<S: Simd>(scores: &mut [f32], at: usize, row: &QueryRow) -> (f32, f32) {
    let low = row.first.saturating_sub(at).min(scores.len());
    let high = row.end.saturating_sub(at).min(scores.len());
    let masked = low > 0 || high < scores.len();
    if masked {
        scores[..low].fill(MASKED);
        scores[high.max(low)..].fill(MASKED);
    }
    // SAFETY: loads and stores stay inside `scores`.
    unsafe {
        let mut peak = S::splat(MASKED);
        for at in (0..scores.len()).step_by(PAGE) {
            peak = S::max(peak, S::load(scores.as_ptr().add(at)));
        }
        let largest = S::max_lane(peak);
        let shift = S::splat(-largest);
        for at in (0..scores.len()).step_by(PAGE) {
            let weight = exp::<S>(S::add(S::load(scores.as_ptr().add(at)), shift));
            S::store(scores.as_mut_ptr().add(at), weight);
        }
        if masked {
            scores[..low].fill(0.0);
            scores[high.max(low)..].fill(0.0);
        }
        let mut sum = S::zero();
        for at in (0..scores.len()).step_by(PAGE) {
            sum = S::add(sum, S::load(scores.as_ptr().add(at)));
        }
        (largest, S::sum(sum))
    }
}
