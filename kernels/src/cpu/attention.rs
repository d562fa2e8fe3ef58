//! Attention of a few query rows over a range of KV pages, with a softmax that is merged block by block.
//!
//! Invariant: a row's result has the same bits whatever rows share its call and whichever thread computes which block.
//! Its positions are cut into blocks of [`BLOCK`] at absolute multiples of [`BLOCK`]. For each block the kernel computes
//! the largest score `m`, the sum `d` of the weights `exp(score - m)` (in each lane over pages in order, then over lanes)
//! and the values `o`, which are weighted sums over positions in order. Blocks are merged into the running `(M, D, O)`
//! from first to last: `N = max(M, m)`, `a = exp(M - N)`, `b = exp(m - N)`, `(N, d b + D a, o b + O a)`. A block in which
//! a row sees no position leaves its state unchanged. Each K and V value is read once for all rows of the call, which
//! share one KV head and may belong to several sequences. [`super::attention_bf16`] has the products of the tier that rounds.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::attention_bf16::{gather_pairs, round_weights};
use super::kv::{KvFormat, MAX_HEAD, PAGE};
use super::row_parts::row_parts;
use super::rows::{RowKernel, count};
use super::simd::{Simd, exp, exp_for_bf16};
use super::softmax_state::{LANES, MASKED, State, ValueBlock};

/// Maximum number of query rows per call.
pub(crate) const MAX_ROWS: usize = 12;
/// Number of query rows up to which the kernel is compiled for each number. With more, there are [`MAX_ROWS`].
pub(crate) const EXACT_ROWS: usize = 8;
/// Number of positions whose weights are summed before they are merged with other blocks.
pub(crate) const BLOCK: usize = 128;

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
    pub head: usize,
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
    const USES_BF16_DOTS: bool = Kv::ROUNDED;
    const NEEDS_BF16_DOTS: bool = Kv::PAIRED;

    fn rows(&self) -> usize {
        self.rows.len()
    }

    #[inline(always)]
    unsafe fn run_rows<S: Simd, const N: usize>(self) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            // Constants of a type keep the compiler from generating the other case.
            if Rows::<N>::ARE_FEW {
                self.attend::<S, N, 4>();
            } else {
                self.attend::<S, N, 2>();
            }
        }
    }
}

/// A number of rows.
struct Rows<const N: usize>;

impl<const N: usize> Rows<N> {
    const ARE_FEW: bool = N < 4;
}

/// Registers that lie across two cache lines take twice as long to load and store.
#[repr(align(64))]
struct Aligned<T>(T);

impl<Kv: KvFormat> AttendRows<'_, Kv> {
    /// Processes the rows, with many registers `P` pages or columns at a time: `R * P` independent sums hide the latency of the
    /// additions.
    ///
    /// # Safety
    /// The conditions of [`RowKernel::run_rows`] hold for `R` rows, the pages cover `from..to`, and `head_size <= MAX_HEAD`.
    #[inline(always)]
    unsafe fn attend<S: Simd, const R: usize, const P: usize>(self) {
        let rows = count::<S, R>(self.rows);
        let mut queries = MaybeUninit::<Aligned<[[f32; MAX_HEAD]; R]>>::uninit();
        let queries = queries.as_mut_ptr().cast::<f32>();
        // SAFETY: the caller guarantees that offsets are inside the query; `head_size <= MAX_HEAD`.
        unsafe {
            for (r, row) in self.rows[..rows].iter().enumerate() {
                let query = self.query.add(row.offset);
                for d in 0..self.head_size {
                    queries.add(r * MAX_HEAD + d).write(self.scale * *query.add(d));
                }
                if Self::rounds::<S>() {
                    self.round_query::<S>(queries.add(r * MAX_HEAD));
                }
            }
            let mut scores = Aligned([[0f32; BLOCK]; R]);
            let scores = &mut scores.0;
            let mut state = self.state;
            let mut at = self.from;
            while at < self.to {
                let end = (at / BLOCK * BLOCK + BLOCK).min(self.to);
                let pages = (end - at).div_ceil(PAGE);
                macro_rules! score {
                    ($first:tt, $rows:tt, $pages:tt) => {{
                        for first in (0..pages).step_by($pages) {
                            let pages = first..pages;
                            self.score_pages::<S, { $rows }, { $pages }>(
                                queries,
                                $first,
                                at / PAGE,
                                pages,
                                scores,
                            );
                        }
                    }};
                }
                row_parts!(S, rows, R, P, score);
                let (mut largest, mut totals) = ([MASKED; LANES], [0f32; LANES]);
                for r in 0..rows {
                    let row = &mut scores[r][..pages * PAGE];
                    (largest[r], totals[r]) =
                        softmax_weights::<S>(row, at, &self.rows[r], Self::rounds::<S>());
                }
                if Kv::SCALED {
                    self.scale_weights::<S>(&mut scores[..rows], at / PAGE, pages);
                }
                if at == self.from || self.state_stride > 0 {
                    state.clear::<S>(rows);
                }
                if Self::rounds::<S>() {
                    round_weights::<S>(scores[..rows].as_flattened_mut(), pages);
                }
                let factors = state.merge_totals::<S>(largest.as_ptr(), totals.as_ptr());
                let block = ValueBlock { weights: scores, first_page: at / PAGE, pages, state, factors };
                macro_rules! gather {
                    ($first:tt, $rows:tt, $columns:tt) => {{
                        let mut column = 0;
                        while column + 16 * $columns <= self.state.value_stride {
                            self.gather_values::<S, { $rows }, { $columns }>(&block, $first, column);
                            column += 16 * $columns;
                        }
                        while column < self.state.value_stride {
                            self.gather_values::<S, { $rows }, 1>(&block, $first, column);
                            column += 16;
                        }
                    }};
                }
                row_parts!(S, rows, R, P, gather);
                state = state.after(self.state_stride);
                at = end;
            }
        }
    }

    /// Scores the first `P` of `pages`, which are relative to `first_page`, for `R` rows from `first_row` on. The first rows
    /// prefetch what is read next: the values of the same pages and the keys of the pages after them. Pages are not adjacent, so
    /// the processor does not foresee them.
    ///
    /// # Safety
    /// The conditions of `attend` hold, there are the rows, each with [`MAX_HEAD`] values of `queries`, and the pages are in the
    /// sequence's page list.
    #[inline(always)]
    unsafe fn score_pages<S: Simd, const R: usize, const P: usize>(
        &self,
        queries: *const f32,
        first_row: usize,
        first_page: usize,
        pages: Range<usize>,
        scores: &mut [[f32; BLOCK]],
    ) {
        let last = self.pages.len() - 1;
        // The last page replaces pages past the end; the scores computed for the replacements are not stored.
        let page_at = |index: usize| self.pages[(first_page + index).min(last)] as usize;
        let here: [usize; P] = std::array::from_fn(|i| page_at((pages.start + i).min(pages.end - 1)));
        // SAFETY: guaranteed by the caller; prefetched addresses need not be readable.
        unsafe {
            let keys: [*const Kv::Element; P] =
                std::array::from_fn(|i| self.keys.add(here[i] * self.key_page));
            let keys_ahead: [*const u8; P] =
                std::array::from_fn(|i| self.keys.add(page_at(pages.start + P + i) * self.key_page).cast());
            let values_ahead: [*const u8; P] =
                std::array::from_fn(|i| self.values.add(here[i] * self.value_page).cast());
            let queries = queries.add(first_row * MAX_HEAD);
            let mut sums = [[S::zero(); P]; R];
            // Two columns of a page of 16 bits are a cache line.
            for d in (0..self.head_size).step_by(2) {
                if first_row == 0 {
                    for (keys, values) in keys_ahead.iter().zip(&values_ahead) {
                        S::prefetch(keys.wrapping_add(d * PAGE * size_of::<Kv::Element>()));
                        S::prefetch(values.wrapping_add(d * PAGE * size_of::<Kv::Element>()));
                    }
                }
                if Self::rounds::<S>() {
                    self.score_pair::<S, R, P>(queries, keys, d, &mut sums);
                    continue;
                }
                for d in d..self.head_size.min(d + 2) {
                    let mut loaded = [S::zero(); P];
                    for (loaded, keys) in loaded.iter_mut().zip(keys) {
                        *loaded = Kv::load::<S>(keys.add(d * PAGE));
                    }
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let query = S::splat(*queries.add(r * MAX_HEAD + d));
                        for (sum, key) in sums.iter_mut().zip(loaded) {
                            *sum = S::fma(key, query, *sum);
                        }
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
    unsafe fn scale_weights<S: Simd>(&self, weights: &mut [[f32; BLOCK]], first_page: usize, pages: usize) {
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

    /// Gathers `C` registers of a block's values, from `column` on, for `R` rows from `first` on, and merges them into the state.
    ///
    /// # Safety
    /// The conditions of `attend` hold, there are the rows, and the columns are within `value_stride`.
    #[inline(always)]
    unsafe fn gather_values<S: Simd, const R: usize, const C: usize>(
        &self,
        block: &ValueBlock<'_>,
        first: usize,
        column: usize,
    ) {
        // SAFETY: guaranteed by the caller; `value_stride <= MAX_HEAD`.
        unsafe {
            let weights: [*const f32; R] = std::array::from_fn(|r| block.weights[first + r].as_ptr());
            let mut sums = [[S::zero(); C]; R];
            for p in 0..block.pages {
                let page = self.pages[block.first_page + p] as usize * self.value_page;
                let values = self.values.add(page + column * Kv::COLUMN);
                if Self::rounds::<S>() {
                    gather_pairs::<S, Kv, R, C>(weights, p, values, self.state.value_stride, &mut sums);
                    continue;
                }
                for token in 0..PAGE {
                    let mut loaded = [S::zero(); C];
                    for (c, loaded) in loaded.iter_mut().enumerate() {
                        *loaded = Kv::load::<S>(values.add(token * self.state.value_stride + 16 * c));
                    }
                    for (weights, sums) in weights.iter().zip(&mut sums) {
                        let weight = S::splat(*weights.add(p * PAGE + token));
                        for (sum, value) in sums.iter_mut().zip(loaded) {
                            *sum = S::fma(value, weight, *sum);
                        }
                    }
                }
            }
            block.merge::<S, R, C>(&sums, first, column);
        }
    }
}

/// Turns a block's scores, at positions `at..`, into weights, and returns the largest score and the sum of the weights.
/// Positions that the row does not see get weight 0. If `rounds`, the weights will be rounded to BF16.
///
/// # Safety
/// `scores` is a whole number of pages; call inside a dispatched kernel.
#[inline(always)]
pub(super) unsafe fn softmax_weights<S: Simd>(
    scores: &mut [f32],
    at: usize,
    row: &QueryRow,
    rounds: bool,
) -> (f32, f32) {
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
        let mut sum = S::zero();
        for at in (0..scores.len()).step_by(PAGE) {
            let below = S::add(S::load(scores.as_ptr().add(at)), shift);
            let weight = if rounds { exp_for_bf16::<S>(below) } else { exp::<S>(below) };
            S::store(scores.as_mut_ptr().add(at), weight);
            sum = S::add(sum, weight);
        }
        if masked {
            scores[..low].fill(0.0);
            scores[high.max(low)..].fill(0.0);
            sum = S::zero();
            for at in (0..scores.len()).step_by(PAGE) {
                sum = S::add(sum, S::load(scores.as_ptr().add(at)));
            }
        }
        (largest, S::sum(sum))
    }
}
