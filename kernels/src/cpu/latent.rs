//! Attention of a few query rows over pages of latents, of which a part is also the values.
//!
//! Invariant: as in [`super::attention`], a row's result has the same bits whatever rows share its call. A score is one
//! sum over the columns in order, lane by lane and then over the lanes; blocks, weights and merging are those of
//! [`super::attention`]. Each latent is read once for the scores of all rows of the call, and once for their values.
//! The tier that rounds to BF16 has the products and the order of [`super::latent_bf16`]. Latents in 8 bits are stored
//! here, and read by [`super::latent_bytes`].

// Loops over registers are written with indices, so that they stay in registers.
#![allow(clippy::needless_range_loop)]

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::Kernel;
use super::attention::{BLOCK, QueryRow, softmax_weights};
use super::attention_bf16::{gather_pairs, round_weights};
use super::kv::{KvFormat, PAGE, scale, storable};
use super::latent_bf16::{AtOnce, Workspace};
use super::row_parts::row_parts;
use super::rows::{RowKernel, count};
use super::simd::Simd;
use super::softmax_state::{LANES, MASKED, State, ValueBlock};

/// Number of values of a latent that share a scale in scaled formats.
pub(crate) const SCALE_RUN: usize = 128;

/// The layout of a page, in bytes: the latents of 16 tokens, their scales if the format has some, and their rotated
/// keys. Scaled formats keep the rotated keys in 16 bits.
#[derive(Clone, Copy)]
pub(crate) struct LatentPage {
    /// Number of values of a latent, and of a rotated key; both are multiples of 16.
    pub latent: usize,
    pub rotated: usize,
    pub element: usize,
    pub rotated_element: usize,
    pub scaled: bool,
}

impl LatentPage {
    /// Returns the number of scales of one token.
    pub const fn scales(&self) -> usize {
        if self.scaled { self.latent.div_ceil(SCALE_RUN) } else { 0 }
    }

    /// Returns the offset of the scales in a page, in bytes.
    pub const fn scales_at(&self) -> usize {
        PAGE * self.latent * self.element
    }

    /// Returns the offset of the rotated keys in a page, in bytes.
    pub const fn rotated_at(&self) -> usize {
        self.scales_at() + PAGE * self.scales() * 4
    }

    /// Returns the size of a page in bytes.
    pub const fn bytes(&self) -> usize {
        self.rotated_at() + PAGE * self.rotated * self.rotated_element
    }
}

/// Stores the latent and the rotated key of one position.
pub(crate) struct StoreLatent<'a, L: KvFormat, R: KvFormat> {
    pub latent: &'a [f32],
    /// The rotated key, which may be shorter than the page's; the rest becomes zero.
    pub rotated: &'a [f32],
    pub page: LatentPage,
    pub to: *mut u8,
    pub slot: usize,
    pub formats: PhantomData<(L, R)>,
}

impl<L: KvFormat, R: KvFormat> Kernel for StoreLatent<'_, L, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let StoreLatent { latent, rotated, page, to, slot, .. } = self;
        // SAFETY: the caller guarantees that the page and the slot exist and that the latent has the page's length.
        unsafe {
            let values = to.cast::<L::Element>().add(slot * page.latent);
            let scales = to.add(page.scales_at()).cast::<f32>().add(slot * page.scales());
            for (run, part) in latent.chunks(SCALE_RUN).enumerate() {
                let factor = if L::SCALED { scale(part, scales.add(run)) } else { 1.0 };
                for at in (0..part.len()).step_by(16) {
                    let column = run * SCALE_RUN + at;
                    L::store::<S>(values.add(column), storable::<S, L>(&part[at..], factor));
                }
            }
            let keys = to.add(page.rotated_at()).cast::<R::Element>().add(slot * page.rotated);
            for at in (0..page.rotated).step_by(16) {
                let part = rotated.get(at..).unwrap_or_default();
                R::store::<S>(keys.add(at), storable::<S, R>(part, 1.0));
            }
        }
    }
}

/// Computes attention over pages of latents whose format has no scales. [`super::latent_bytes`] is for the others.
pub(crate) struct AttendLatents<'a, Kv: KvFormat> {
    pub rows: &'a [QueryRow],
    /// The queries: for each row, as many values as a latent and a rotated key have.
    pub query: *const f32,
    pub scale: f32,
    pub page: LatentPage,
    pub latents: *const u8,
    pub pages: &'a [u32],
    /// The range of positions to process. `from` is a page boundary.
    pub from: usize,
    pub to: usize,
    /// Receives the result. `state_stride` is as in [`super::attention::AttendRows`].
    pub state: State,
    pub state_stride: usize,
    pub format: PhantomData<Kv>,
}

impl<Kv: KvFormat> RowKernel for AttendLatents<'_, Kv> {
    const USES_BF16_DOTS: bool = Self::ROUNDED;

    fn rows(&self) -> usize {
        self.rows.len()
    }

    #[inline(always)]
    unsafe fn run_rows<S: Simd, const N: usize>(self) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            // Constants of a type keep the compiler from generating the other cases.
            if AtOnce::<S, Kv, N>::EIGHT {
                self.attend::<S, N, 8>();
            } else if AtOnce::<S, Kv, N>::FOUR {
                self.attend::<S, N, 4>();
            } else {
                self.attend::<S, N, 2>();
            }
        }
    }
}

impl<Kv: KvFormat> AttendLatents<'_, Kv> {
    /// If true, the tier with dot products of BF16 numbers rounds the operands.
    pub(super) const ROUNDED: bool = size_of::<Kv::Element>() == 2;

    /// Processes the rows, with many registers `T` tokens or registers of values at a time.
    ///
    /// # Safety
    /// The conditions of [`RowKernel::run_rows`] hold for `N` rows, their queries exist, and the pages cover `from..to`.
    #[inline(always)]
    unsafe fn attend<S: Simd, const N: usize, const T: usize>(&self) {
        let rows = count::<S, N>(self.rows);
        let mut scores = [[0f32; BLOCK]; N];
        let mut workspace = MaybeUninit::<Workspace<N>>::uninit();
        let workspace = workspace.as_mut_ptr();
        let mut state = self.state;
        let mut at = self.from;
        // SAFETY: guaranteed by the caller.
        unsafe {
            if Self::rounds::<S>() {
                self.round_queries::<S, N>(workspace);
            }
            while at < self.to {
                let end = (at / BLOCK * BLOCK + BLOCK).min(self.to);
                let pages = (end - at).div_ceil(PAGE);
                for index in 0..pages {
                    let page = self.page_at(at / PAGE + index);
                    if Self::rounds::<S>() {
                        let ahead = self.page_at((at / PAGE + index + 1).min(self.pages.len() - 1));
                        self.score_pairs::<S, N, T>(page, ahead, index, workspace, &mut scores);
                    } else {
                        self.score_page::<S, N>(page, index, rows, &mut scores);
                    }
                }
                let (mut largest, mut totals) = ([MASKED; LANES], [0f32; LANES]);
                for r in 0..rows {
                    let row = &mut scores[r][..pages * PAGE];
                    (largest[r], totals[r]) =
                        softmax_weights::<S>(row, at, &self.rows[r], Self::rounds::<S>());
                }
                if at == self.from || self.state_stride > 0 {
                    state.clear::<S>(rows);
                }
                if Self::rounds::<S>() {
                    round_weights::<S>(scores.as_flattened_mut(), pages);
                }
                let factors = state.merge_totals::<S>(largest.as_ptr(), totals.as_ptr());
                let block = ValueBlock { weights: &scores, first_page: at / PAGE, pages, state, factors };
                macro_rules! gather {
                    ($first:tt, $rows:tt, $columns:tt) => {{
                        let mut column = 0;
                        while column + 16 * $columns <= self.page.latent {
                            self.gather_values::<S, { $rows }, { $columns }>(&block, $first, column);
                            column += 16 * $columns;
                        }
                        while column < self.page.latent {
                            self.gather_values::<S, { $rows }, 1>(&block, $first, column);
                            column += 16;
                        }
                    }};
                }
                row_parts!(S, rows, N, T, gather);
                state = state.after(self.state_stride);
                at = end;
            }
        }
    }

    /// # Safety
    /// The sequence has the page.
    #[inline(always)]
    unsafe fn page_at(&self, index: usize) -> *const u8 {
        // SAFETY: guaranteed by the caller.
        unsafe { self.latents.add(self.pages[index] as usize * self.page.bytes()) }
    }

    /// Scores a page for all rows.
    ///
    /// # Safety
    /// The conditions of `attend` hold.
    #[inline(always)]
    unsafe fn score_page<S: Simd, const N: usize>(
        &self,
        page: *const u8,
        index: usize,
        rows: usize,
        scores: &mut [[f32; BLOCK]; N],
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            macro_rules! part {
                ($first:tt, $rows:tt, $tokens:tt) => {
                    self.score_rows::<S, { $rows }, $tokens>(page, index, $first, scores)
                };
            }
            row_parts!(S, rows, N, 2, part);
        }
    }

    /// Scores a page for `R` rows from `first` on, `T` tokens at a time.
    ///
    /// # Safety
    /// The conditions of `attend` hold, and there are the rows.
    #[inline(always)]
    unsafe fn score_rows<S: Simd, const R: usize, const T: usize>(
        &self,
        page: *const u8,
        index: usize,
        first: usize,
        scores: &mut [[f32; BLOCK]],
    ) {
        let LatentPage { latent, rotated, .. } = self.page;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let queries: [*const f32; R] =
                std::array::from_fn(|r| self.query.add(self.rows[first + r].offset));
            let values = page.cast::<Kv::Element>();
            let keys = page.add(self.page.rotated_at()).cast::<Kv::Element>();
            let mut token = 0;
            while token < PAGE {
                let mut sums = [[S::zero(); T]; R];
                let mut column = 0;
                while column < latent {
                    let mut loaded = [S::zero(); T];
                    for t in 0..T {
                        loaded[t] = Kv::load::<S>(values.add((token + t) * latent + column));
                    }
                    add_products::<S, R, T>(&queries, column, &loaded, &mut sums);
                    column += 16;
                }
                let mut column = 0;
                while column < rotated {
                    let mut loaded = [S::zero(); T];
                    for t in 0..T {
                        loaded[t] = Kv::load::<S>(keys.add((token + t) * rotated + column));
                    }
                    add_products::<S, R, T>(&queries, latent + column, &loaded, &mut sums);
                    column += 16;
                }
                for r in 0..R {
                    for t in 0..T {
                        scores[first + r][index * PAGE + token + t] = self.scale * S::sum(sums[r][t]);
                    }
                }
                token += T;
            }
        }
    }

    /// Sums `C` registers of a block's values for `R` rows from `first` on, from `column` on, and merges them into the state.
    ///
    /// # Safety
    /// The conditions of `attend` hold, there are the rows, and the columns are within the latent.
    #[inline(always)]
    unsafe fn gather_values<S: Simd, const R: usize, const C: usize>(
        &self,
        block: &ValueBlock<'_>,
        first: usize,
        column: usize,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let weights: [*const f32; R] = std::array::from_fn(|r| block.weights[first + r].as_ptr());
            let mut sums = [[S::zero(); C]; R];
            for p in 0..block.pages {
                let page = self.page_at(block.first_page + p);
                let values = page.cast::<Kv::Element>().add(column);
                if Self::rounds::<S>() {
                    gather_pairs::<S, Kv, R, C>(weights, p, values, self.page.latent, &mut sums);
                    continue;
                }
                for token in 0..PAGE {
                    let mut loaded = [S::zero(); C];
                    for c in 0..C {
                        loaded[c] = Kv::load::<S>(values.add(token * self.page.latent + 16 * c));
                    }
                    for r in 0..R {
                        let weight = S::splat(*weights[r].add(p * PAGE + token));
                        for c in 0..C {
                            sums[r][c] = S::fma(loaded[c], weight, sums[r][c]);
                        }
                    }
                }
            }
            block.merge::<S, R, C>(&sums, first, column);
        }
    }
}

/// Adds the products of `T` loaded registers with the queries of `R` rows at `column`.
///
/// # Safety
/// The queries have 16 values there; call inside a dispatched kernel.
#[inline(always)]
unsafe fn add_products<S: Simd, const R: usize, const T: usize>(
    queries: &[*const f32; R],
    column: usize,
    loaded: &[S::F; T],
    sums: &mut [[S::F; T]; R],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for r in 0..R {
            let query = S::load(queries[r].add(column));
            for t in 0..T {
                sums[r][t] = S::fma(loaded[t], query, sums[r][t]);
            }
        }
    }
}
