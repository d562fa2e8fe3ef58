//! Quantizes activations to 8 bits per block of 32, or rounds them to BF16, in the order in which the kernels read them.
//!
//! Invariant: tokens are stored in groups; inside a group, block `b` (or pair `b` of columns) of its `n` tokens is
//! contiguous. A block that is all zero or not finite has scale 0.

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
pub(crate) struct QuantizeRow {
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

impl Kernel for QuantizeRow {
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
                let (low, high) = if usable {
                    (to_integers::<S>(low, inverse), to_integers::<S>(high, inverse))
                } else {
                    (S::zero(), S::zero())
                };
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

/// Multiplies and rounds to whole numbers in -127..=127.
///
/// # Safety
/// It is called inside a dispatched kernel.
#[inline(always)]
unsafe fn to_integers<S: Simd>(values: S::F, factor: f32) -> S::F {
    // SAFETY: only register arithmetic in the caller's tier.
    unsafe {
        let rounded = S::round(S::mul(values, S::splat(factor)));
        S::max(S::min(rounded, S::splat(127.0)), S::splat(-127.0))
    }
}

/// Rounds one token's row to BF16 and writes it into its group. The last value of an odd number is paired with zero.
pub(crate) struct RoundRow<'a> {
    pub row: &'a [f32],
    /// Number of tokens in the group. `token` is the index of this one.
    pub group: usize,
    pub token: usize,
    /// Rounded values, `[pair of columns][token]`.
    pub pairs: *mut u32,
}

impl Kernel for RoundRow<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the group has room for every pair of the row.
        unsafe {
            let to = self.pairs.add(self.token);
            let (pairs, last) = self.row.as_chunks::<2>();
            for (pair, [first, second]) in pairs.iter().enumerate() {
                *to.add(pair * self.group) = bf16_bits(*first) | bf16_bits(*second) << 16;
            }
            if let [last] = last {
                *to.add(pairs.len() * self.group) = bf16_bits(*last);
            }
        }
    }
}

/// Returns the bits of the nearest BF16 number, ties to even. What is not a number stays so.
#[inline(always)]
fn bf16_bits(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let kept = if value.is_nan() { bits | 0x0040_0000 } else { rounded };
    kept >> 16
}
