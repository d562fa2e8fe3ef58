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

use super::kv::{KvFormat, MAX_HEAD, PAGE};
use super::row_parts::row_parts;
use super::rows::RowKernel;
use super::simd::{Simd, exp};
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
    /// The score of a position without a value, or minus infinity.
    pub sink: f32,
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

impl<Kv: KvFormat> AttendRows<'_, Kv> {
    /// Processes `R` rows, with many registers `P` pages or columns at a time: `R * P` independent sums hide the latency of the
    /// additions.
    ///
    /// # Safety
    /// There are `R` rows, the pages cover `from..to`, and `head_size <= MAX_HEAD`.
    #[inline(always)]
    unsafe fn attend<S: Simd, const R: usize, const P: usize>(self) {
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
                macro_rules! score {
                    ($first:tt, $rows:tt, $pages:tt) => {{
                        let part = RowPart { first: $first, of: R };
                        for first in (0..pages).step_by($pages) {
                            let pages = first..pages;
                            self.score_pages::<S, { $rows }, { $pages }>(
                                &query,
                                part,
                                at / PAGE,
                                pages,
                                &mut scores,
                            );
                        }
                    }};
                }
                row_parts!(S, R, P, score);
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
                let block = ValueBlock { weights: &scores, first_page: at / PAGE, pages, state, factors };
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
                row_parts!(S, R, P, gather);
                state = state.after(self.state_stride);
                at = end;
            }
        }
    }

    /// Scores the first `P` of `pages`, which are relative to `first_page`, for `R` rows. The first part of the rows prefetches
    /// what is read next: the values of the same pages and the keys of the pages after them. Pages are not adjacent, so the
    /// processor does not foresee them.
    ///
    /// # Safety
    /// The conditions of `attend` hold, the part has `R` rows, and the pages are in the sequence's page list.
    #[inline(always)]
    unsafe fn score_pages<S: Simd, const R: usize, const P: usize>(
        &self,
        query: &[f32; MAX_HEAD * MAX_ROWS],
        part: RowPart,
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
            let ahead: [[*const u8; P]; 2] = [
                std::array::from_fn(|i| self.keys.add(page_at(pages.start + P + i) * self.key_page).cast()),
                std::array::from_fn(|i| self.values.add(here[i] * self.value_page).cast()),
            ];
            let mut sums = [[S::zero(); P]; R];
            for d in 0..self.head_size {
                if part.first == 0 {
                    for ahead in ahead[d % 2] {
                        S::prefetch(ahead.wrapping_add(d / 2 * 2 * PAGE * size_of::<Kv::Element>()));
                    }
                }
                let mut loaded = [S::zero(); P];
                for (loaded, keys) in loaded.iter_mut().zip(keys) {
                    *loaded = Kv::load::<S>(keys.add(d * PAGE));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let query = S::splat(*query.as_ptr().add(d * part.of + part.first + r));
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
                for (row, sums) in scores[part.first..].iter_mut().zip(&sums) {
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
                let values = self.values.add(page + column);
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

/// Some of the rows of a call: those from `first` on, among `of`.
#[derive(Clone, Copy)]
struct RowPart {
    first: usize,
    of: usize,
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
