//! Dot products of blocks of weights on AVX2, which has no instruction that multiplies bytes and adds to 32 bits.
//!
//! Invariant: a register of weights is unpacked where it is used, multiplied with all tokens, and not needed again. Sixteen registers
//! of 32 bytes hold the sums of four tokens and little else. Left to itself, the compiler unpacks a whole block into memory and
//! then reads it for each token, which takes up to a third more time.

use std::arch::asm;
use std::arch::x86_64::*;

use super::avx2::{Avx2, I2};
use super::simd::{Blocks, Simd};

/// Computes [`Simd::dots`].
///
/// # Safety
/// The conditions of [`Simd::dots`] hold.
#[inline(always)]
pub(super) unsafe fn dots<B: Blocks, const T: usize>(
    blocks: *const u8,
    index: usize,
    activations: *const i8,
) -> [[I2; 2]; T] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if B::LARGEST > 127 {
            wide_dots::<B, T>(blocks, index, activations)
        } else {
            narrow_dots::<B, T>(blocks, index, activations)
        }
    }
}

/// Returns the register that is multiplied in this step. Registers `z` and `z + 4` share bytes in most formats.
const fn register_of<B: Blocks>(step: usize) -> usize {
    if B::HALVES { step } else { step / 2 + step % 2 * 4 }
}

/// Returns for how many steps sums of products of pairs stay within 16 bits. It divides the number of steps of a sum.
const fn steps_in_16_bits<B: Blocks>() -> usize {
    match i16::MAX as usize / (2 * 127 * B::LARGEST as usize) {
        8.. if !B::HALVES => 8,
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// Computes [`Simd::dots`] of integers up to 127. As many products of a pair as 16 bits hold are added before their sums
/// are widened.
///
/// # Safety
/// The conditions of [`Simd::dots`] hold.
#[inline(always)]
unsafe fn narrow_dots<B: Blocks, const T: usize>(
    blocks: *const u8,
    index: usize,
    activations: *const i8,
) -> [[I2; 2]; T] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let steps = const { steps_in_16_bits::<B>() };
        let ones = _mm256_set1_epi16(1);
        let zero = Avx2::zero_i();
        let mut sums = [[zero; 2]; T];
        let mut pairs = [zero; T];
        let mut weights = [zero; 8];
        // A loop would not be unrolled.
        macro_rules! multiply {
            ($($step:literal)*) => {$(
                let register = const { register_of::<B>($step) };
                if B::HALVES || $step % 2 == 0 {
                    weights = B::integers::<Avx2>(here(blocks), index);
                }
                let I2(low, high) = weights[register];
                for (token, pairs) in pairs.iter_mut().enumerate() {
                    let four = four_of(activations, token, register);
                    let (low, high) = (_mm256_maddubs_epi16(low, four), _mm256_maddubs_epi16(high, four));
                    *pairs = if $step % steps == 0 {
                        I2(in_order(low), in_order(high))
                    } else {
                        let (low, high) = (_mm256_add_epi16(pairs.0, low), _mm256_add_epi16(pairs.1, high));
                        I2(in_order(low), in_order(high))
                    };
                }
                if $step % steps == steps - 1 {
                    for (sums, pairs) in sums.iter_mut().zip(pairs) {
                        let sum = &mut sums[usize::from(B::HALVES && $step >= 4)];
                        sum.0 = _mm256_add_epi32(sum.0, _mm256_madd_epi16(pairs.0, ones));
                        sum.1 = _mm256_add_epi32(sum.1, _mm256_madd_epi16(pairs.1, ones));
                    }
                }
            )*};
        }
        multiply!(0 1 2 3 4 5 6 7);
        sums
    }
}

/// Computes [`Simd::dots`] of integers up to 255, each less 128.
///
/// # Safety
/// The conditions of [`Simd::dots`] hold.
#[inline(always)]
unsafe fn wide_dots<B: Blocks, const T: usize>(
    blocks: *const u8,
    index: usize,
    activations: *const i8,
) -> [[I2; 2]; T] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let zero = Avx2::zero_i();
        let mut sums = [[zero; 2]; T];
        let mut weights = [zero; 8];
        macro_rules! multiply {
            ($($step:literal)*) => {$(
                let register = const { register_of::<B>($step) };
                if B::HALVES || $step % 2 == 0 {
                    weights = B::integers::<Avx2>(here(blocks), index);
                }
                let I2(low, high) = weights[register];
                let ((low, low_size), (high, high_size)) = (signed(low), signed(high));
                for (token, sums) in sums.iter_mut().enumerate() {
                    let four = four_of(activations, token, register);
                    let sum = &mut sums[usize::from(B::HALVES && $step >= 4)];
                    sum.0 = in_order(_mm256_add_epi32(sum.0, signed_dot(low, low_size, four)));
                    sum.1 = in_order(_mm256_add_epi32(sum.1, signed_dot(high, high_size, four)));
                }
            )*};
        }
        multiply!(0 1 2 3 4 5 6 7);
        sums
    }
}

/// Returns the value. The compiler computes it after those of earlier calls, and before what pointers of later calls of [`here`] point
/// to is read.
#[inline]
#[target_feature(enable = "avx2")]
fn in_order(mut value: __m256i) -> __m256i {
    // SAFETY: the statement has no instructions.
    unsafe { asm!("/* {0} */", inout(ymm_reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

/// Returns the pointer. The compiler does not know that it is the same, so it reads again what it points to.
#[inline(always)]
#[expect(clippy::pointers_in_nomem_asm_block, reason = "nothing reads what it points to")]
fn here(mut at: *const u8) -> *const u8 {
    // SAFETY: the statement has no instructions.
    unsafe { asm!("/* {0} */", inout(reg) at, options(nomem, nostack, preserves_flags)) };
    at
}

/// Returns the bytes less 128, and their absolute values.
///
/// # Safety
/// The conditions of the methods of [`Simd`] hold.
#[inline(always)]
pub(super) unsafe fn signed(bytes: __m256i) -> (__m256i, __m256i) {
    // SAFETY: only register arithmetic in the caller's tier.
    unsafe {
        let signed = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
        (signed, _mm256_abs_epi8(signed))
    }
}

/// Returns the dot products of 4 signed bytes, whose absolute values are `size`, in 32 bits. Those of 2 fit into 16 bits.
///
/// # Safety
/// The conditions of the methods of [`Simd`] hold.
#[inline(always)]
pub(super) unsafe fn signed_dot(signed: __m256i, size: __m256i, four: __m256i) -> __m256i {
    // SAFETY: only register arithmetic in the caller's tier.
    unsafe {
        let pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four, signed));
        _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
    }
}

/// Loads 4 bytes into every lane.
///
/// # Safety
/// The conditions of the methods of [`Simd`] hold.
#[inline(always)]
unsafe fn four_of(activations: *const i8, token: usize, register: usize) -> __m256i {
    // SAFETY: guaranteed by the caller.
    unsafe { _mm256_set1_epi32(activations.add(32 * token + 4 * register).cast::<i32>().read_unaligned()) }
}
