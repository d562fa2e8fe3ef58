//! Attention of a few query rows over a range of KV pages, with a running softmax.
//!
//! Invariant: each K and V value is read once for all rows of the call, which share one KV head.

use std::marker::PhantomData;
use std::ops::Range;

use super::Kernel;
use super::kv::{KvFormat, MAX_HEAD, PAGE};
use super::simd::{Simd, exp};

/// Query rows of one call at most.
pub(crate) const MAX_ROWS: usize = 8;
/// Pages between two updates of the running softmax.
const SPAN: usize = 4;
const MASKED: f32 = -1e30;
/// So many rows keep the arithmetic busy by themselves.
const MANY_ROWS: usize = 5;

/// One query row: which positions it sees.
#[derive(Clone, Copy, Default)]
pub(crate) struct QueryRow {
    /// Offset of its values in `query` and `out`.
    pub offset: usize,
    pub first: usize,
    /// Exclusive.
    pub end: usize,
}

/// Softmax state of some rows: the largest score, the sum of weights, and the weighted values.
pub(crate) struct Partial {
    pub largest: [f32; MAX_ROWS],
    pub total: [f32; MAX_ROWS],
    pub values: [[f32; MAX_HEAD]; MAX_ROWS],
}

pub(crate) struct AttendRows<'a, Kv: KvFormat> {
    pub rows: &'a [QueryRow],
    pub query: *const f32,
    pub scale: f32,
    pub head_size: usize,
    pub value_stride: usize,
    /// Base of this layer and KV head, and elements between pages.
    pub keys: *const Kv::Element,
    pub key_page: usize,
    pub values: *const Kv::Element,
    pub value_page: usize,
    /// Scales of a scaled format: base of this KV head, and scales between pages.
    pub key_scales: *const f32,
    pub value_scales: *const f32,
    pub scale_page: usize,
    pub pages: &'a [u32],
    /// Positions to look at, from a page boundary.
    pub from: usize,
    pub to: usize,
    pub partial: &'a mut Partial,
    pub format: PhantomData<Kv>,
}

impl Default for Partial {
    fn default() -> Self {
        Partial { largest: [MASKED; MAX_ROWS], total: [0.0; MAX_ROWS], values: [[0.0; MAX_HEAD]; MAX_ROWS] }
    }
}

impl<Kv: KvFormat> Kernel for AttendRows<'_, Kv> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: passed on.
        unsafe {
            match self.rows.len() {
                0 => {}
                1 => self.attend::<S, 1, 4>(),
                2 => self.attend::<S, 2, 4>(),
                3 => self.attend::<S, 3, 4>(),
                4 => self.attend::<S, 4, 2>(),
                5 => self.attend::<S, 5, 1>(),
                6 => self.attend::<S, 6, 1>(),
                7 => self.attend::<S, 7, 1>(),
                _ => self.attend::<S, 8, 1>(),
            }
        }
    }
}

impl<Kv: KvFormat> AttendRows<'_, Kv> {
    /// `R` rows, and `P` pages or columns at a time: `R * P` sums in flight hide the latency of their additions.
    ///
    /// # Safety
    /// `R` rows; pages cover `from..to`; `head_size <= MAX_HEAD`.
    #[inline(always)]
    unsafe fn attend<S: Simd, const R: usize, const P: usize>(mut self) {
        let mut query = [0f32; MAX_HEAD * R_MAX];
        // SAFETY: offsets are inside the query, by the caller's promise.
        unsafe {
            for r in 0..R {
                for d in 0..self.head_size {
                    query[d * R + r] = self.scale * *self.query.add(self.rows[r].offset + d);
                }
            }
            let mut scores = [[0f32; SPAN * PAGE]; R];
            let mut at = self.from;
            while at < self.to {
                let end = (at + SPAN * PAGE).min(self.to);
                let pages = (end - at).div_ceil(PAGE);
                for first in (0..pages).step_by(P) {
                    self.score_pages::<S, R, P>(&query, at / PAGE, first..pages, &mut scores);
                }
                let mut shrink = [1f32; R];
                for r in 0..R {
                    shrink[r] = soften::<S>(
                        &mut scores[r][..pages * PAGE],
                        at,
                        &self.rows[r],
                        &mut self.partial.largest[r],
                        &mut self.partial.total[r],
                    );
                }
                if Kv::SCALED {
                    self.scale_weights::<S, R>(&mut scores, at / PAGE, pages);
                }
                let mut column = 0;
                while column + 16 * P <= self.value_stride {
                    self.gather_values::<S, R, P>(&scores, at / PAGE, pages, &shrink, column);
                    column += 16 * P;
                }
                while column < self.value_stride {
                    self.gather_values::<S, R, 1>(&scores, at / PAGE, pages, &shrink, column);
                    column += 16;
                }
                at += SPAN * PAGE;
            }
        }
    }

    /// Scores the first `P` of `pages`, which count from `first_page`. Few rows ask for what is read next: the values of
    /// the same pages and the keys of the pages after them.
    ///
    /// # Safety
    /// As `attend`; the pages are among the sequence's.
    #[inline(always)]
    unsafe fn score_pages<S: Simd, const R: usize, const P: usize>(
        &self,
        query: &[f32; MAX_HEAD * R_MAX],
        first_page: usize,
        pages: Range<usize>,
        scores: &mut [[f32; SPAN * PAGE]; R],
    ) {
        let last = self.pages.len() - 1;
        // The last page stands in for those that there are not; its scores are left where they are.
        let place = |index: usize| self.pages[(first_page + index).min(last)] as usize;
        let here: [usize; P] = std::array::from_fn(|i| place((pages.start + i).min(pages.end - 1)));
        // SAFETY: the caller's promise; what is only asked for need not be there.
        unsafe {
            let keys: [*const Kv::Element; P] =
                std::array::from_fn(|i| self.keys.add(here[i] * self.key_page));
            let ahead: [[*const u8; P]; 2] = [
                std::array::from_fn(|i| self.keys.add(place(pages.start + P + i) * self.key_page).cast()),
                std::array::from_fn(|i| self.values.add(here[i] * self.value_page).cast()),
            ];
            let mut sums = [[S::zero(); P]; R];
            for d in 0..self.head_size {
                // With more rows the arithmetic takes longer than the reading.
                if R < MANY_ROWS {
                    for ahead in ahead[d % 2] {
                        S::prefetch(ahead.wrapping_add(d / 2 * 2 * PAGE * size_of::<Kv::Element>()));
                    }
                }
                let loaded: [S::F; P] = std::array::from_fn(|i| Kv::load::<S>(keys[i].add(d * PAGE)));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let query = S::splat(*query.as_ptr().add(d * R + r));
                    for (sum, key) in sums.iter_mut().zip(loaded) {
                        *sum = S::fma(key, query, *sum);
                    }
                }
            }
            for i in 0..P.min(pages.len()) {
                if Kv::SCALED {
                    let scales = S::load(self.key_scales.add(here[i] * self.scale_page));
                    sums.iter_mut().for_each(|sums| sums[i] = S::mul(sums[i], scales));
                }
                for (row, sums) in scores.iter_mut().zip(&sums) {
                    S::store(row.as_mut_ptr().add((pages.start + i) * PAGE), sums[i]);
                }
            }
        }
    }

    /// Values are worth their scale times what is stored.
    ///
    /// # Safety
    /// As `attend`.
    #[inline(always)]
    unsafe fn scale_weights<S: Simd, const R: usize>(
        &self,
        weights: &mut [[f32; SPAN * PAGE]; R],
        first_page: usize,
        pages: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            for p in 0..pages {
                let page = self.pages[first_page + p] as usize;
                let scales = S::load(self.value_scales.add(page * self.scale_page));
                for row in weights.iter_mut() {
                    let at = row.as_mut_ptr().add(p * PAGE);
                    S::store(at, S::mul(S::load(at), scales));
                }
            }
        }
    }

    /// Sums `C` registers of values, from `column` on.
    ///
    /// # Safety
    /// As `attend`; the columns are within `value_stride`.
    #[inline(always)]
    unsafe fn gather_values<S: Simd, const R: usize, const C: usize>(
        &mut self,
        weights: &[[f32; SPAN * PAGE]; R],
        first_page: usize,
        pages: usize,
        shrink: &[f32; R],
        column: usize,
    ) {
        // SAFETY: the caller's promise; `value_stride <= MAX_HEAD`.
        unsafe {
            let mut sums = [[S::zero(); C]; R];
            for (r, sums) in sums.iter_mut().enumerate() {
                for (c, sum) in sums.iter_mut().enumerate() {
                    let before = S::load(self.partial.values[r].as_ptr().add(column + 16 * c));
                    *sum = S::mul(before, S::splat(shrink[r]));
                }
            }
            for p in 0..pages {
                let page = self.pages[first_page + p] as usize * self.value_page;
                let values = self.values.add(page + column);
                for token in 0..PAGE {
                    let loaded: [S::F; C] = std::array::from_fn(|c| {
                        Kv::load::<S>(values.add(token * self.value_stride + 16 * c))
                    });
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let weight = S::splat(*weights[r].as_ptr().add(p * PAGE + token));
                        for (sum, value) in sums.iter_mut().zip(loaded) {
                            *sum = S::fma(value, weight, *sum);
                        }
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (c, sum) in sums.iter().enumerate() {
                    S::store(self.partial.values[r].as_mut_ptr().add(column + 16 * c), *sum);
                }
            }
        }
    }
}

const R_MAX: usize = MAX_ROWS;

/// Turns scores at positions `at..` into weights and returns the factor for what was summed before.
///
/// # Safety
/// `scores` is whole pages; inside a dispatched kernel.
#[inline(always)]
unsafe fn soften<S: Simd>(
    scores: &mut [f32],
    at: usize,
    row: &QueryRow,
    largest: &mut f32,
    total: &mut f32,
) -> f32 {
    let low = row.first.saturating_sub(at).min(scores.len());
    let high = row.end.saturating_sub(at).min(scores.len());
    let masked = low > 0 || high < scores.len();
    if masked {
        scores[..low].fill(MASKED);
        scores[high.max(low)..].fill(MASKED);
    }
    // SAFETY: loads and stores stay inside `scores`.
    unsafe {
        let mut peak = S::load(scores.as_ptr());
        for at in (PAGE..scores.len()).step_by(PAGE) {
            peak = S::max(peak, S::load(scores.as_ptr().add(at)));
        }
        let new = S::max_lane(peak).max(*largest);
        let shift = S::splat(-new);
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
        let shrink = if *largest == new { 1.0 } else { (*largest - new).exp() };
        *total = *total * shrink + S::sum(sum);
        *largest = new;
        shrink
    }
}
