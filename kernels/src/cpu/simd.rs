//! The vector operations that kernels are written with, on vectors of 16 `f32` lanes or 64 bytes.
//!
//! Invariant: every tier computes the same integers. Floats differ between tiers only in rounding, and within a tier an
//! operation always rounds the same way: a multiply-add is fused either everywhere or nowhere. Loads and stores need no
//! alignment.

/// Blocks of integers of 32 columns of 16 rows: byte `4 r + j` of register `g` is the unsigned value of row `r` and column `4 g + j`.
pub(crate) trait Blocks {
    /// Upper bound of the integers.
    const LARGEST: u8;
    /// Whether columns 0 to 15 and 16 to 31 have separate sums and scales. Otherwise the second sum is zero.
    const HALVES: bool;
    /// The integer that stands for the number 0 in every block: 8, 16, 32 or 128.
    const ZERO: Option<u8> = None;

    /// Returns the integers of a block.
    ///
    /// # Safety
    /// `blocks` is valid for the block; call inside a dispatched kernel.
    unsafe fn integers<S: Simd>(blocks: *const u8, index: usize) -> [S::I; 8];
}

/// The vector types and operations of one tier.
///
/// # Safety
/// Methods may use instructions of the tier: call them only inside [`super::dispatch`]. Pointers must be valid for
/// 16 values or 64 bytes.
pub(crate) unsafe trait Simd: Copy {
    /// If false, the tier has no vector registers, and its vectors are arrays in memory.
    const HAS_VECTORS: bool = true;
    /// Whether there are enough registers for groups of 8 tokens; otherwise groups have 4.
    const MANY_REGISTERS: bool;
    /// Whether [`Self::dots`] subtracts 128 from the integers of blocks whose integers may exceed 127.
    const CENTERED_DOTS: bool;
    /// If true, the tier has [`Self::dot_bf16`] and the operations that round to BF16.
    const BF16_DOTS: bool = false;

    /// 16 floats.
    type F: Copy;
    /// 64 bytes, or 16 `i32`.
    type I: Copy;

    unsafe fn zero() -> Self::F;
    unsafe fn splat(value: f32) -> Self::F;
    unsafe fn load(from: *const f32) -> Self::F;
    unsafe fn store(to: *mut f32, value: Self::F);
    unsafe fn load_f16(from: *const u16) -> Self::F;
    unsafe fn load_bf16(from: *const u16) -> Self::F;
    /// Loads 16 pairs and returns their first and their second values.
    unsafe fn load_bf16_pairs(from: *const u16) -> [Self::F; 2];
    /// Loads twice 16 floats of 8 bits (E4M3), divided by 256. Codes that are not numbers count as 480.
    unsafe fn load_f8_pair(from: *const u8) -> [Self::F; 2];
    unsafe fn load_i8(from: *const i8) -> Self::F;
    unsafe fn store_f16(to: *mut u16, value: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// Computes a * b + c.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn round(a: Self::F) -> Self::F;
    /// Raises 2 to the power of each lane. Lanes must be whole numbers in -126..=127.
    unsafe fn exp2_whole(a: Self::F) -> Self::F;
    /// Multiplies each lane of `a` by the power of 2 that [`Self::exp2_whole`] returns for that of `n`. No product is below the
    /// smallest normal number.
    #[inline(always)]
    unsafe fn mul_exp2(a: Self::F, n: Self::F) -> Self::F {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::mul(a, Self::exp2_whole(n)) }
    }
    /// Adds the lanes in a fixed order that depends on the tier.
    unsafe fn sum(a: Self::F) -> f32;
    /// Adds the lanes of each register in the order of [`Self::sum`]: lane `i` of the result is the sum of register `i`.
    #[inline(always)]
    unsafe fn sum_each(registers: [Self::F; 16]) -> Self::F {
        let mut sums = [0f32; 16];
        // SAFETY: guaranteed by the caller.
        unsafe {
            for (sum, register) in sums.iter_mut().zip(registers) {
                *sum = Self::sum(register);
            }
            Self::load(sums.as_ptr())
        }
    }
    unsafe fn max_lane(a: Self::F) -> f32;
    /// Rounds to nearest and stores 16 bytes. Lanes must be in -127..=127.
    unsafe fn store_i8(to: *mut i8, value: Self::F);

    unsafe fn zero_i() -> Self::I;
    unsafe fn load_i(from: *const u8) -> Self::I;
    unsafe fn splat_i8(value: u8) -> Self::I;
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    /// Shifts 32-bit lanes. The caller masks the bits that cross bytes.
    unsafe fn shr<const N: u32>(a: Self::I) -> Self::I;
    unsafe fn shl<const N: u32>(a: Self::I) -> Self::I;
    /// Replaces each byte, which must be below 16, by an entry of the table.
    unsafe fn lookup(table: &[u8; 16], bytes: Self::I) -> Self::I;
    /// Adds to each lane the dot product of its 4 unsigned bytes with the 4 signed bytes at `four`, none of which is -128.
    unsafe fn dot(sum: Self::I, bytes: Self::I, four: *const i8) -> Self::I;
    /// Returns the dot products of a block of 16 rows of weights with the activations of `T` tokens. Each token has 32 signed
    /// bytes, none of which is -128; those of consecutive tokens follow each other.
    #[inline(always)]
    unsafe fn dots<B: Blocks, const T: usize>(
        blocks: *const u8,
        index: usize,
        activations: *const i8,
    ) -> [[Self::I; 2]; T] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            // It has no loop over the weights, because a build that does not unroll it keeps the registers in memory.
            let [a, b, c, d, e, f, g, h] = B::integers::<Self>(blocks, index);
            let zero = Self::zero_i();
            let mut sums = [[zero; 2]; T];
            for (token, sums) in sums.iter_mut().enumerate() {
                let at = activations.add(32 * token);
                // Two independent chains halve the latency.
                let low = Self::dot(zero, a, at);
                let low = Self::dot(low, b, at.add(4));
                let low = Self::dot(low, c, at.add(8));
                let low = Self::dot(low, d, at.add(12));
                let high = Self::dot(zero, e, at.add(16));
                let high = Self::dot(high, f, at.add(20));
                let high = Self::dot(high, g, at.add(24));
                let high = Self::dot(high, h, at.add(28));
                *sums = if B::HALVES { [low, high] } else { [Self::add_i(low, high), zero] };
            }
            sums
        }
    }
    /// Rounds 32 floats to BF16, ties to even, and returns them in order: those of `low`, then those of `high`.
    unsafe fn round_bf16(low: Self::F, high: Self::F) -> Self::I {
        let _ = (low, high);
        unreachable!("only tiers with BF16_DOTS round to BF16")
    }
    /// Rounds to BF16, ties to even, and pairs each lane of `first` with that of `second`.
    unsafe fn bf16_pairs(first: Self::F, second: Self::F) -> Self::I {
        let _ = (first, second);
        unreachable!("only tiers with BF16_DOTS round to BF16")
    }
    /// Adds to each lane the dot product of two pairs of BF16 numbers.
    unsafe fn dot_bf16(sum: Self::F, a: Self::I, b: Self::I) -> Self::F {
        let _ = (sum, a, b);
        unreachable!("only tiers with BF16_DOTS multiply BF16 numbers")
    }
    /// Copies the 4 bytes at `from` to each lane.
    unsafe fn splat_4(from: *const u8) -> Self::I;
    /// Adds to each lane the dot product of two pairs of signed 16-bit integers, none of which is -32768.
    unsafe fn dot_pairs(sum: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// Returns the pair of bytes 0 and 2, and that of bytes 1 and 3 of each lane, as signed 16-bit integers.
    unsafe fn byte_pairs(a: Self::I) -> [Self::I; 2];
    /// Pairs each of 16 signed bytes at `a` with that at `b`, as signed 16-bit integers. No other bytes are read.
    unsafe fn load_pairs(a: *const i8, b: *const i8) -> Self::I;
    /// Rounds to nearest and stores 16 integers of 16 bits. Lanes must be in -32767..=32767.
    unsafe fn store_i16(to: *mut i16, value: Self::F);
    /// Turns 16 registers of 16 lanes: lane `i` of register `j` becomes lane `j` of register `i`.
    unsafe fn transpose(rows: [Self::I; 16]) -> [Self::I; 16];
    unsafe fn store_i(to: *mut u8, value: Self::I);
    unsafe fn to_f32(a: Self::I) -> Self::F;
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I;
    /// Prefetches the cache line at `at`, which need not be readable.
    unsafe fn prefetch(at: *const u8);
}

/// Raises e to the power of each lane, using the Cephes polynomial after reduction by ln 2. The relative error is below
/// 1e-6.
///
/// # Safety
/// The conditions of the methods of [`Simd`] hold.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    // SAFETY: only register arithmetic in the caller's tier.
    unsafe {
        let x = S::max(S::min(x, S::splat(88.0)), S::splat(-87.0));
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        let r = S::fma(n, S::splat(-0.693_359_4), x);
        let r = S::fma(n, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = S::fma(p, r, S::splat(c));
        }
        let p = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        S::mul_exp2(p, n)
    }
}

/// Raises e to the power of each lane, none of which is above 0, for results that are rounded to BF16. The relative error is
/// below 1.1e-4, a twentieth of what rounding changes: a cubic polynomial with the smallest largest error. NaN stays NaN.
///
/// # Safety
/// The conditions of the methods of [`Simd`] hold.
#[inline(always)]
pub(crate) unsafe fn exp_for_bf16<S: Simd>(x: S::F) -> S::F {
    // SAFETY: only register arithmetic in the caller's tier.
    unsafe {
        // If an operand is NaN, the result is the second one.
        let x = S::mul(S::max(S::splat(-87.0), x), S::splat(std::f32::consts::LOG2_E));
        let n = S::round(x);
        let r = S::fma(n, S::splat(-1.0), x);
        let mut p = S::splat(0.055_008_94);
        for c in [0.242_211, 0.693_282_9, 1.0] {
            p = S::fma(p, r, S::splat(c));
        }
        S::mul_exp2(p, n)
    }
}

#[cfg(test)]
#[path = "simd_tests.rs"]
mod tests;
