//! The products of attention with latents in BF16, for tiers with dot products of BF16 numbers.
//!
//! Invariant: as in [`super::latent`], a row's result has the same bits whatever rows share its call. Scaled queries,
//! latents, rotated keys and the weights of positions are rounded; scores, the softmax and all sums are in float32. The
//! columns of a latent, and then those of a rotated key, are cut into runs of 32, the last of which may be filled up
//! with zeros. Lane `i` of a score is one chain of dot products of columns `2 i` and `2 i + 1` of each run, in order of
//! the runs; lanes are added in the order of [`Simd::sum`]. A value is one chain of dot products of pairs of positions,
//! in order, as in [`super::attention_bf16`].
//!
//! Pages are not turned as in [`super::latent_bytes`]: adding the lanes of 16 tokens takes 45 operations a row, whereas
//! turning a page of 576 columns takes 1,440 whatever the number of rows is.

// Loops over registers are written with indices, so that they stay in registers.
#![allow(clippy::needless_range_loop)]

use std::marker::PhantomData;

use super::attention::{BLOCK, MAX_ROWS};
use super::kv::{KvFormat, MAX_LATENT, PAGE};
use super::latent::{AttendLatents, LatentPage};
use super::simd::Simd;

/// Number of columns of a register of pairs.
const RUN: usize = 32;
/// Maximum number of runs of a latent and a rotated key.
const MAX_RUNS: usize = 2 * MAX_LATENT / RUN;

/// The buffers that a call with `N` rows reads again and again.
#[repr(align(64))]
pub(super) struct Workspace<const N: usize> {
    /// The rounded queries: 16 pairs of columns for each run and row.
    queries: [[[u32; RUN / 2]; N]; MAX_RUNS],
    /// The lanes of the scores of a page, for each row and token.
    lanes: [[[f32; 16]; PAGE]; N],
}

/// The bytes that a call has on the stack for what it reads again and again.
pub(crate) const STACK_BYTES: usize = size_of::<Workspace<MAX_ROWS>>();

/// The number of tokens whose scores, and of registers of values, that `N` rows compute at once. `N` times as many
/// independent sums hide the latency of the additions, and fit into the registers.
pub(super) struct AtOnce<S, Kv, const N: usize>(PhantomData<(S, Kv)>);

impl<S: Simd, Kv: KvFormat, const N: usize> AtOnce<S, Kv, N> {
    /// If true, the number is 8.
    pub const EIGHT: bool = S::BF16_DOTS && AttendLatents::<Kv>::ROUNDED && N < 3;
    /// If true, the number is 4 unless it is 8. Otherwise it is 2.
    pub const FOUR: bool = S::BF16_DOTS && AttendLatents::<Kv>::ROUNDED && N < 7;
}

impl<Kv: KvFormat> AttendLatents<'_, Kv> {
    /// Returns whether the tier rounds latents of the format.
    #[inline(always)]
    pub(super) fn rounds<S: Simd>() -> bool {
        S::BF16_DOTS && Self::ROUNDED
    }

    /// Scales and rounds the queries of all rows.
    ///
    /// # Safety
    /// There are `N` rows, whose queries exist; `workspace` is valid for writes; call inside a dispatched kernel.
    #[inline(always)]
    pub(super) unsafe fn round_queries<S: Simd, const N: usize>(&self, workspace: *mut Workspace<N>) {
        let LatentPage { latent, rotated, .. } = self.page;
        // SAFETY: a query has as many values as a latent and a rotated key, both of which are whole registers.
        unsafe {
            let scale = S::splat(self.scale);
            for r in 0..N {
                let mut query = self.query.add(self.rows[r].offset);
                let mut run = 0;
                for width in [latent, rotated] {
                    for column in (0..width).step_by(RUN) {
                        let low = S::mul(S::load(query.add(column)), scale);
                        let high = match column + 16 < width {
                            true => S::mul(S::load(query.add(column + 16)), scale),
                            false => S::zero(),
                        };
                        let to = &raw mut (*workspace).queries[run][r];
                        S::store_i(to.cast(), S::round_bf16(low, high));
                        run += 1;
                    }
                    query = query.add(width);
                }
            }
        }
    }

    /// Scores a page for all rows, `T` tokens at a time, and prefetches the page `ahead`. Pages are not adjacent, so
    /// the processor does not foresee them.
    ///
    /// # Safety
    /// The conditions of [`Self::round_queries`] hold, which has written to `workspace`; the page exists and is page
    /// `index` of its block.
    #[inline(always)]
    pub(super) unsafe fn score_pairs<S: Simd, const N: usize, const T: usize>(
        &self,
        page: *const u8,
        ahead: *const u8,
        index: usize,
        workspace: *mut Workspace<N>,
        scores: &mut [[f32; BLOCK]; N],
    ) {
        let LatentPage { latent, rotated, .. } = self.page;
        // SAFETY: guaranteed by the caller; a run is cut where a latent or a rotated key ends.
        unsafe {
            let lanes = (&raw mut (*workspace).lanes).cast::<f32>();
            let parts = [(0, latent), (self.page.rotated_at(), rotated)];
            for token in (0..PAGE).step_by(T) {
                let mut sums = [[S::zero(); T]; N];
                let mut queries = (&raw const (*workspace).queries).cast::<u8>();
                for (offset, width) in parts {
                    let from = page.add(offset).cast::<Kv::Element>().add(token * width);
                    let ahead = ahead.wrapping_add(offset).cast::<Kv::Element>().wrapping_add(token * width);
                    let mut column = 0;
                    while column + RUN <= width {
                        let at = [from.add(column), ahead.wrapping_add(column)];
                        add_run::<S, Kv, N, T, true>(at, width, queries, &mut sums);
                        queries = queries.add(64 * N);
                        column += RUN;
                    }
                    if column < width {
                        let at = [from.add(column), ahead.wrapping_add(column)];
                        add_run::<S, Kv, N, T, false>(at, width, queries, &mut sums);
                        queries = queries.add(64 * N);
                    }
                }
                for r in 0..N {
                    for t in 0..T {
                        S::store(lanes.add((r * PAGE + token + t) * 16), sums[r][t]);
                    }
                }
            }
            for r in 0..N {
                let mut rows = [S::zero(); PAGE];
                for token in 0..PAGE {
                    rows[token] = S::load(lanes.add((r * PAGE + token) * 16));
                }
                S::store(scores[r].as_mut_ptr().add(index * PAGE), S::sum_each(rows));
            }
        }
    }
}

/// Adds the products of a run of columns of `T` tokens with the queries of `N` rows, and prefetches the same columns of
/// the page ahead. A run that is not whole has 16 columns.
///
/// # Safety
/// The tokens have the columns, and are `width` values apart; there are the queries; call inside a dispatched kernel.
#[inline(always)]
unsafe fn add_run<S: Simd, Kv: KvFormat, const N: usize, const T: usize, const WHOLE: bool>(
    [from, ahead]: [*const Kv::Element; 2],
    width: usize,
    queries: *const u8,
    sums: &mut [[S::F; T]; N],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut pairs = [S::zero_i(); T];
        for t in 0..T {
            S::prefetch(ahead.wrapping_add(t * width).cast());
            let from = from.add(t * width);
            let high = if WHOLE { Kv::load::<S>(from.add(16)) } else { S::zero() };
            pairs[t] = S::round_bf16(Kv::load::<S>(from), high);
        }
        for r in 0..N {
            let query = S::load_i(queries.add(64 * r));
            for t in 0..T {
                sums[r][t] = S::dot_bf16(sums[r][t], pairs[t], query);
            }
        }
    }
}
