//! Quantizes activations to 8 or 14 bits per block of 32, or rounds them to BF16, in the order in which the kernels read them.
//!
//! Invariant: tokens are stored in groups; inside a group, block `b` (or pair `b` of columns) of its `n` tokens is
//! contiguous. A block that is all zero has scale 0. One that is not finite has scale 0 with 8 bits, and scale NaN with 14.

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
    /// -8 times the sum of the integers, `[block][token]`.
    pub totals: *const i32,
    /// The same as `totals`, but for the first 16 values of each block.
    pub low_totals: *const i32,
}

/// Quantizes the rows of a group of tokens.
pub(crate) struct QuantizeGroup {
    /// The first row. Consecutive rows are adjacent.
    pub rows: *const f32,
    pub blocks: usize,
    pub tokens: usize,
    pub bytes: *mut i8,
    pub scales: *mut f32,
    pub sums: *mut f32,
    pub low_sums: *mut f32,
    pub totals: *mut i32,
    pub low_totals: *mut i32,
}

/// Number of blocks that are quantized together.
const TOGETHER: usize = 16;

/// 16 values of each of 16 blocks.
#[repr(align(64))]
struct Columns([[f32; 16]; TOGETHER]);

impl Columns {
    /// Combines the 16 values of each block into one.
    ///
    /// # Safety
    /// It is called inside a dispatched kernel.
    #[inline(always)]
    unsafe fn combine<S: Simd>(&mut self, combine: unsafe fn(S::F, S::F) -> S::F) -> [f32; TOGETHER] {
        let mut combined = [0f32; TOGETHER];
        // SAFETY: each row is a register.
        unsafe {
            let mut rows = [S::zero_i(); TOGETHER];
            for (row, values) in rows.iter_mut().zip(&self.0) {
                *row = S::load_i(values.as_ptr().cast());
            }
            for (row, values) in S::transpose(rows).into_iter().zip(&mut self.0) {
                S::store_i(values.as_mut_ptr().cast(), row);
            }
            let mut all = S::load(self.0[0].as_ptr());
            for values in &self.0[1..] {
                all = combine(all, S::load(values.as_ptr()));
            }
            S::store(combined.as_mut_ptr(), all);
        }
        combined
    }
}

impl Kernel for QuantizeGroup {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let all = self.blocks * self.tokens;
        for first in (0..all).step_by(TOGETHER) {
            // SAFETY: guaranteed by the caller.
            unsafe { self.quantize::<S>(first, TOGETHER.min(all - first)) };
        }
    }
}

impl QuantizeGroup {
    /// Quantizes `count` blocks of the group from `first` on, at most [`TOGETHER`]. What is known of the blocks is computed in the
    /// lanes of registers, one for each block.
    ///
    /// # Safety
    /// The rows have 32 * blocks values each, and the arrays have room for them; call inside a dispatched kernel.
    #[inline(always)]
    unsafe fn quantize<S: Simd>(&self, first: usize, count: usize) {
        /// Twice as much as any sum of 16 integers, and a power of 2.
        const SHIFT: f32 = 4096.0;
        let mut columns = Columns([[0.0; 16]; TOGETHER]);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut values = [self.rows; TOGETHER];
            let (mut block, mut token) = (first / self.tokens, first % self.tokens);
            for values in &mut values[..count] {
                *values = self.rows.add((token * self.blocks + block) * 32);
                token += 1;
                if token == self.tokens {
                    (block, token) = (block + 1, 0);
                }
            }
            let negate = S::splat(-1.0);
            for (values, columns) in values[..count].iter().zip(&mut columns.0) {
                let (low, high) = (S::load(*values), S::load(values.add(16)));
                let low_abs = S::max(low, S::mul(low, negate));
                let high_abs = S::max(high, S::mul(high, negate));
                S::store(columns.as_mut_ptr(), S::max(low_abs, high_abs));
            }
            let largest = columns.combine::<S>(S::max);
            let usable = |largest: f32| largest > 1e-30 && largest < 1e30;
            let scales = largest.map(|largest| if usable(largest) { largest / 127.0 } else { 0.0 });
            let inverses = largest.map(|largest| if usable(largest) { 127.0 / largest } else { 0.0 });
            let bytes = self.bytes.add(first * 32);
            for (at, (values, columns)) in values[..count].iter().zip(&mut columns.0).enumerate() {
                let (low, high) = match inverses[at] {
                    0.0 => (S::zero(), S::zero()),
                    factor => (
                        to_integers::<S>(S::load(*values), factor),
                        to_integers::<S>(S::load(values.add(16)), factor),
                    ),
                };
                S::store_i8(bytes.add(at * 32), low);
                S::store_i8(bytes.add(at * 32 + 16), high);
                // The sums of both halves fit into one number without rounding.
                S::store(columns.as_mut_ptr(), S::fma(high, S::splat(SHIFT), low));
            }
            let both = columns.combine::<S>(S::add);
            let high = both.map(|both| (both * (1.0 / SHIFT)).round_ties_even());
            let low: [f32; TOGETHER] = std::array::from_fn(|at| both[at] - high[at] * SHIFT);
            let total: [f32; TOGETHER] = std::array::from_fn(|at| low[at] + high[at]);
            put(self.scales.add(first), scales, count);
            put(self.low_sums.add(first), std::array::from_fn(|at| scales[at] * low[at]), count);
            put(self.sums.add(first), std::array::from_fn(|at| scales[at] * total[at]), count);
            // Conversions that check their range are not done in registers.
            put(self.low_totals.add(first), low.map(|low| (-8.0 * low).to_int_unchecked()), count);
            put(self.totals.add(first), total.map(|total| (-8.0 * total).to_int_unchecked()), count);
        }
    }
}

/// Stores the first `count` values.
///
/// # Safety
/// `to` is valid for them.
#[inline(always)]
unsafe fn put<T: Copy>(to: *mut T, values: [T; TOGETHER], count: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if count == TOGETHER {
            to.cast::<[T; TOGETHER]>().write_unaligned(values);
        } else {
            to.copy_from_nonoverlapping(values.as_ptr(), count);
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

/// Number of pairs of columns in a block of integers of 14 bits.
pub(crate) const PAIRS: usize = 16;
/// The integer of the largest activation of a block. Its products with 32 integers up to 8,188 have a sum below 2 to the
/// power of 31.
const LARGEST: f32 = 8191.0;

/// Rounds one token's row to integers of 13 bits and a sign, with a scale for each 32 columns, and writes it into its
/// group. Columns that complete the last block are 0.
pub(crate) struct RoundBlocks<'a> {
    pub row: &'a [f32],
    /// Number of tokens in the group. `token` is the index of this one.
    pub group: usize,
    pub token: usize,
    /// Pairs of integers, `[block][pair of columns][token]`.
    pub pairs: *mut u32,
    /// Scales, `[block][token]`.
    pub scales: *mut f32,
}

impl Kernel for RoundBlocks<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for (block, row) in self.row.chunks(2 * PAIRS).enumerate() {
            let mut values = [0f32; 2 * PAIRS];
            values[..row.len()].copy_from_slice(row);
            // Without the sign, the bits are in the order of the magnitudes, and those of NaN are above all others.
            let mut largest = 0;
            for value in &values {
                largest = largest.max(value.to_bits() & 0x7fff_ffff);
            }
            let largest = f32::from_bits(largest);
            let (scale, factor) = match largest {
                largest if !largest.is_finite() => (f32::NAN, 0.0),
                1e-30.. => (largest / LARGEST, LARGEST / largest),
                _ => (0.0, 0.0),
            };
            let mut integers = [0i16; 2 * PAIRS];
            // SAFETY: the group has room for every block of the row.
            unsafe {
                if factor > 0.0 {
                    let factor = S::splat(factor);
                    let (low, high) = (S::load(values.as_ptr()), S::load(values.as_ptr().add(16)));
                    S::store_i16(integers.as_mut_ptr(), S::mul(low, factor));
                    S::store_i16(integers.as_mut_ptr().add(16), S::mul(high, factor));
                }
                let to = self.pairs.add(block * PAIRS * self.group + self.token);
                for (pair, [first, second]) in integers.as_chunks::<2>().0.iter().enumerate() {
                    *to.add(pair * self.group) = u32::from(*first as u16) | u32::from(*second as u16) << 16;
                }
                *self.scales.add(block * self.group + self.token) = scale;
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
