//! Quantizes activations to 8 bits per block of 32, in the order in which the integer kernels read them.
//!
//! Invariant: tokens are stored in groups; inside a group, block `b` of its `n` tokens is contiguous. A block that is all
//! zero or not finite has scale 0.

use super::Kernel;
use super::simd::Simd;

/// Pointers to the quantized activations of one group of tokens.
#[derive(Clone, Copy)]
pub(crate) struct GroupView {
    /// Quantized values, `[block][token][32]`.
    pub bytes: *const i8,
    /// Scales, `[block][token]`.
    pub scales: *const f32,
    /// The scale times the sum of the integers, `[block][token]`.
    pub sums: *const f32,
    /// The same as `sums`, but for the first 16 values of each block.
    pub low_sums: *const f32,
}

/// Quantizes one token's row and writes it into its group.
pub(crate) struct QuantiseRow {
    pub row: *const f32,
    pub blocks: usize,
    /// Number of tokens in the group. `token` is the index of this one.
    pub group: usize,
    pub token: usize,
    pub bytes: *mut i8,
    pub scales: *mut f32,
    pub sums: *mut f32,
    pub low_sums: *mut f32,
}

impl Kernel for QuantiseRow {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the row has 32 * blocks values, and the group's arrays have room for group * blocks blocks.
        unsafe {
            let negate = S::splat(-1.0);
            for block in 0..self.blocks {
                let low = S::load(self.row.add(block * 32));
                let high = S::load(self.row.add(block * 32 + 16));
                let low_abs = S::max(low, S::mul(low, negate));
                let high_abs = S::max(high, S::mul(high, negate));
                let largest = S::max_lane(S::max(low_abs, high_abs));
                let usable = largest > 1e-30 && largest < 1e30;
                let (scale, inverse) = if usable { (largest / 127.0, 127.0 / largest) } else { (0.0, 0.0) };
                let limit = S::splat(127.0);
                let clamp =
                    |x| S::max(S::min(S::round(S::mul(x, S::splat(inverse))), limit), S::splat(-127.0));
                let (low, high) = if usable { (clamp(low), clamp(high)) } else { (S::zero(), S::zero()) };
                let offset = block * self.group + self.token;
                S::store_i8(self.bytes.add(offset * 32), low);
                S::store_i8(self.bytes.add(offset * 32 + 16), high);
                let low_sum = S::sum(low);
                *self.scales.add(offset) = scale;
                *self.low_sums.add(offset) = scale * low_sum;
                *self.sums.add(offset) = scale * (low_sum + S::sum(high));
            }
        }
    }
}
