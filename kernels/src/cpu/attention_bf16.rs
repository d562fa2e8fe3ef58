//! The products of attention in BF16, for tiers with dot products of BF16 numbers.
//!
//! Queries and the weights of positions are rounded here. Keys and values in 16 bits were rounded when they were stored, and those in
//! other formats are rounded when they are read. Scores, the softmax and all sums are in float32. A score is one chain of dot products
//! of pairs of columns, and a value one of pairs of positions, both in order.

use super::attention::{AttendRows, BLOCK};
use super::kv::{KvFormat, MAX_HEAD, PAGE};
use super::simd::Simd;

impl<Kv: KvFormat> AttendRows<'_, Kv> {
    /// Returns whether the tier rounds keys and values of the format.
    #[inline(always)]
    pub(super) fn rounds<S: Simd>() -> bool {
        S::BF16_DOTS && Kv::ROUNDED
    }

    /// Rounds a scaled query in its place. Pair `i` of columns takes the place of value `i`.
    ///
    /// # Safety
    /// `query` is valid for [`MAX_HEAD`] values, of which the first `head_size` are set; call inside a dispatched kernel.
    #[inline(always)]
    pub(super) unsafe fn round_query<S: Simd>(&self, query: *mut f32) {
        // SAFETY: guaranteed by the caller. What is read comes before what is written.
        unsafe {
            for d in self.head_size..self.head_size.next_multiple_of(32) {
                query.add(d).write(0.0);
            }
            for d in (0..self.head_size).step_by(32) {
                let rounded = S::round_bf16(S::load(query.add(d)), S::load(query.add(d + 16)));
                S::store_i(query.add(d / 2).cast(), rounded);
            }
        }
    }

    /// Adds the products of columns `d` and `d + 1` of `P` pages of keys and `R` rounded queries.
    ///
    /// # Safety
    /// The queries and pages exist; call inside a dispatched kernel.
    #[inline(always)]
    pub(super) unsafe fn score_pair<S: Simd, const R: usize, const P: usize>(
        &self,
        queries: *const f32,
        keys: [*const Kv::Element; P],
        d: usize,
        sums: &mut [[S::F; P]; R],
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut pairs = [S::zero_i(); P];
            // The last column of an odd number is a pair with itself, of which the query has zero.
            let next = if d + 1 < self.head_size { PAGE } else { 0 };
            for (pairs, keys) in pairs.iter_mut().zip(keys) {
                let first = keys.add(d * PAGE);
                *pairs = Kv::load_pairs::<S>(first, first.add(next));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let query = S::splat_4(queries.add(r * MAX_HEAD + d / 2).cast());
                for (sum, pairs) in sums.iter_mut().zip(pairs) {
                    *sum = S::dot_bf16(*sum, pairs, query);
                }
            }
        }
    }
}

/// Adds the values of a page, which are `stride` elements apart, times the rounded weights of its positions.
///
/// # Safety
/// `weights` point to those of a block, of which the page is page `page`; call inside a dispatched kernel.
#[inline(always)]
pub(super) unsafe fn gather_pairs<S: Simd, Kv: KvFormat, const R: usize, const C: usize>(
    weights: [*const f32; R],
    page: usize,
    values: *const Kv::Element,
    stride: usize,
    sums: &mut [[S::F; C]; R],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for token in (0..PAGE).step_by(2) {
            let mut pairs = [S::zero_i(); C];
            for (c, pairs) in pairs.iter_mut().enumerate() {
                let first = values.add(token * stride + 16 * c * Kv::COLUMN);
                *pairs = Kv::load_pairs::<S>(first, first.add(stride));
            }
            for (weights, sums) in weights.iter().zip(&mut *sums) {
                let weight = S::splat_4(weights.add((page * PAGE + token) / 2).cast());
                for (sum, pairs) in sums.iter_mut().zip(pairs) {
                    *sum = S::dot_bf16(*sum, pairs, weight);
                }
            }
        }
    }
}

/// Rounds the weights of the positions of a block for all rows, in their places. Pair `i` of positions takes the place of weight `i`.
///
/// # Safety
/// Call inside a dispatched kernel.
#[inline(always)]
pub(super) unsafe fn round_weights<S: Simd>(weights: &mut [f32], pages: usize) {
    for row in weights.chunks_exact_mut(BLOCK) {
        for at in (0..pages * PAGE).step_by(2 * PAGE) {
            // SAFETY: `BLOCK` is a multiple of two pages. What is read comes before what is written.
            unsafe {
                let row = row.as_mut_ptr();
                let rounded = S::round_bf16(S::load(row.add(at)), S::load(row.add(at + PAGE)));
                S::store_i(row.add(at / 2).cast(), rounded);
            }
        }
    }
}
