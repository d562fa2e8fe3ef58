//! The AVX2 tier, where two registers hold 16 lanes.
//!
//! Invariant: methods are inlined into functions that enable the tier's CPU features.

use std::arch::x86_64::*;

use super::avx2_dots::{self, signed, signed_dot};
use super::simd::{Blocks, Simd};

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

#[derive(Clone, Copy)]
pub(crate) struct F2(__m256, __m256);

#[derive(Clone, Copy)]
pub(crate) struct I2(pub(super) __m256i, pub(super) __m256i);

/// Defines two-operand operations on both halves.
macro_rules! both {
    ($($name:ident($vector:ident) = $intrinsic:ident;)*) => {$(
        #[inline(always)]
        unsafe fn $name(a: $vector, b: $vector) -> $vector {
            unsafe { $vector($intrinsic(a.0, b.0), $intrinsic(a.1, b.1)) }
        }
    )*};
}

// SAFETY: used only inside `dispatch`, which checks for the features; the caller guarantees that pointers are valid.
#[allow(clippy::missing_safety_doc)]
unsafe impl Simd for Avx2 {
    const MANY_REGISTERS: bool = false;
    const CENTERED_DOTS: bool = true;

    type F = F2;
    type I = I2;

    both! {
        add(F2) = _mm256_add_ps;
        sub(F2) = _mm256_sub_ps;
        mul(F2) = _mm256_mul_ps;
        div(F2) = _mm256_div_ps;
        max(F2) = _mm256_max_ps;
        min(F2) = _mm256_min_ps;
        add_i(I2) = _mm256_add_epi32;
        sub_i(I2) = _mm256_sub_epi32;
        and(I2) = _mm256_and_si256;
        or(I2) = _mm256_or_si256;
    }

    #[inline(always)]
    unsafe fn zero() -> F2 {
        unsafe { F2(_mm256_setzero_ps(), _mm256_setzero_ps()) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> F2 {
        unsafe { F2(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> F2 {
        unsafe { F2(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: F2) {
        unsafe {
            _mm256_storeu_ps(to, value.0);
            _mm256_storeu_ps(to.add(8), value.1);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> F2 {
        unsafe {
            F2(
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> F2 {
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8).cast()));
            F2(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u16) -> [F2; 2] {
        unsafe {
            let low = _mm256_loadu_si256(from.cast());
            let high = _mm256_loadu_si256(from.add(16).cast());
            let second = _mm256_set1_epi32(!0xffff);
            [
                F2(
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                ),
                F2(
                    _mm256_castsi256_ps(_mm256_and_si256(low, second)),
                    _mm256_castsi256_ps(_mm256_and_si256(high, second)),
                ),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_f8_pair(from: *const u8) -> [F2; 2] {
        unsafe { [f8(from), f8(from.add(16))] }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> F2 {
        unsafe {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(8).cast()));
            F2(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, value: F2) {
        unsafe {
            _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value.0));
            _mm_storeu_si128(to.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value.1));
        }
    }
    #[inline(always)]
    unsafe fn fma(a: F2, b: F2, c: F2) -> F2 {
        unsafe { F2(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)) }
    }
    #[inline(always)]
    unsafe fn round(a: F2) -> F2 {
        unsafe {
            F2(
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a.0),
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn exp2_whole(a: F2) -> F2 {
        unsafe {
            let bias = _mm256_set1_epi32(127);
            F2(
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(a.0), bias))),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(a.1), bias))),
            )
        }
    }
    #[inline(always)]
    unsafe fn sum(a: F2) -> f32 {
        let mut lanes = [0f32; 8];
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), _mm256_add_ps(a.0, a.1)) };
        lanes.iter().sum()
    }
    #[inline(always)]
    unsafe fn max_lane(a: F2) -> f32 {
        let mut lanes = [0f32; 8];
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), _mm256_max_ps(a.0, a.1)) };
        lanes.iter().fold(f32::NEG_INFINITY, |all, lane| all.max(*lane))
    }
    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, value: F2) {
        unsafe {
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(value.0), _mm256_cvtps_epi32(value.1));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.cast(), bytes);
        }
    }

    #[inline(always)]
    unsafe fn zero_i() -> I2 {
        unsafe { I2(_mm256_setzero_si256(), _mm256_setzero_si256()) }
    }
    #[inline(always)]
    unsafe fn load_i(from: *const u8) -> I2 {
        unsafe { I2(_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())) }
    }
    #[inline(always)]
    unsafe fn splat_i8(value: u8) -> I2 {
        unsafe { I2(_mm256_set1_epi8(value as i8), _mm256_set1_epi8(value as i8)) }
    }
    #[inline(always)]
    unsafe fn shr<const N: u32>(a: I2) -> I2 {
        unsafe {
            let count = _mm_cvtsi32_si128(N as i32);
            I2(_mm256_srl_epi32(a.0, count), _mm256_srl_epi32(a.1, count))
        }
    }
    #[inline(always)]
    unsafe fn shl<const N: u32>(a: I2) -> I2 {
        unsafe {
            let count = _mm_cvtsi32_si128(N as i32);
            I2(_mm256_sll_epi32(a.0, count), _mm256_sll_epi32(a.1, count))
        }
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], bytes: I2) -> I2 {
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            I2(_mm256_shuffle_epi8(table, bytes.0), _mm256_shuffle_epi8(table, bytes.1))
        }
    }
    #[inline(always)]
    unsafe fn dot(sum: I2, bytes: I2, four: *const i8) -> I2 {
        unsafe {
            let four = _mm256_set1_epi32(four.cast::<i32>().read_unaligned());
            // u = s + 128 with signed s. 128 a is computed as 64 a * 2.
            let centre =
                _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(64), four), _mm256_set1_epi16(2));
            let half = |sum, bytes| {
                let (signed, size) = signed(bytes);
                _mm256_add_epi32(_mm256_add_epi32(sum, centre), signed_dot(signed, size, four))
            };
            I2(half(sum.0, bytes.0), half(sum.1, bytes.1))
        }
    }
    #[inline(always)]
    unsafe fn dots<B: Blocks, const T: usize>(
        blocks: *const u8,
        index: usize,
        activations: *const i8,
    ) -> [[I2; 2]; T] {
        unsafe { avx2_dots::dots::<B, T>(blocks, index, activations) }
    }
    #[inline(always)]
    unsafe fn splat_4(from: *const u8) -> I2 {
        unsafe {
            let four = _mm256_set1_epi32(from.cast::<i32>().read_unaligned());
            I2(four, four)
        }
    }
    #[inline(always)]
    unsafe fn dot_pairs(sum: I2, a: I2, b: I2) -> I2 {
        unsafe {
            let (low, high) = (_mm256_madd_epi16(a.0, b.0), _mm256_madd_epi16(a.1, b.1));
            I2(_mm256_add_epi32(sum.0, low), _mm256_add_epi32(sum.1, high))
        }
    }
    #[inline(always)]
    unsafe fn byte_pairs(a: I2) -> [I2; 2] {
        unsafe {
            let even = |half| _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(half));
            let odd = |half| _mm256_srai_epi16::<8>(half);
            [I2(even(a.0), even(a.1)), I2(odd(a.0), odd(a.1))]
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(a: *const i8, b: *const i8) -> I2 {
        unsafe {
            let (a, b) = (_mm_loadu_si128(a.cast()), _mm_loadu_si128(b.cast()));
            I2(_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)), _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b)))
        }
    }
    #[inline(always)]
    unsafe fn store_i16(to: *mut i16, value: F2) {
        unsafe {
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(value.0), _mm256_cvtps_epi32(value.1));
            _mm256_storeu_si256(to.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(words));
        }
    }
    #[inline(always)]
    unsafe fn transpose(rows: [I2; 16]) -> [I2; 16] {
        let mut turned = rows;
        unsafe {
            // The 8 by 8 values in each quarter are turned, and the quarters change places.
            for (from, to) in [(0, 0), (8, 8), (0, 8), (8, 0)] {
                let is_high = to == 8;
                let mut quarter = [_mm256_setzero_si256(); 8];
                for (row, value) in quarter.iter_mut().enumerate() {
                    let I2(low, high) = rows[from + row];
                    *value = if is_high { high } else { low };
                }
                for (row, value) in eights(quarter).into_iter().enumerate() {
                    let I2(low, high) = &mut turned[to + row];
                    *(if from == 8 { high } else { low }) = value;
                }
            }
        }
        turned
    }
    #[inline(always)]
    unsafe fn store_i(to: *mut u8, value: I2) {
        unsafe {
            _mm256_storeu_si256(to.cast(), value.0);
            _mm256_storeu_si256(to.add(32).cast(), value.1);
        }
    }
    #[inline(always)]
    unsafe fn to_f32(a: I2) -> F2 {
        unsafe { F2(_mm256_cvtepi32_ps(a.0), _mm256_cvtepi32_ps(a.1)) }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

/// Loads 16 floats of 8 bits. The bits below the sign, moved to the end of the exponent of a half, are the value divided by
/// 256.
///
/// # Safety
/// The conditions of the methods of [`Simd`] hold.
#[inline(always)]
unsafe fn f8(from: *const u8) -> F2 {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast()));
        let halves = _mm256_and_si256(_mm256_slli_epi16::<7>(wide), _mm256_set1_epi16(0xbfff_u16 as i16));
        F2(
            _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
            _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)),
        )
    }
}

/// Turns 8 by 8 values of 32 bits.
///
/// # Safety
/// The conditions of the methods of [`Simd`] hold.
#[inline(always)]
unsafe fn eights([a, b, c, d, e, f, g, h]: [__m256i; 8]) -> [__m256i; 8] {
    // SAFETY: only register arithmetic in the caller's tier.
    unsafe {
        let [a, b, c, d] = fours(a, b, c, d);
        let [e, f, g, h] = fours(e, f, g, h);
        [
            _mm256_permute2x128_si256::<0x20>(a, e),
            _mm256_permute2x128_si256::<0x20>(b, f),
            _mm256_permute2x128_si256::<0x20>(c, g),
            _mm256_permute2x128_si256::<0x20>(d, h),
            _mm256_permute2x128_si256::<0x31>(a, e),
            _mm256_permute2x128_si256::<0x31>(b, f),
            _mm256_permute2x128_si256::<0x31>(c, g),
            _mm256_permute2x128_si256::<0x31>(d, h),
        ]
    }
}

/// Turns 4 by 4 values of 32 bits in each half of a register.
///
/// # Safety
/// The conditions of the methods of [`Simd`] hold.
#[inline(always)]
unsafe fn fours(a: __m256i, b: __m256i, c: __m256i, d: __m256i) -> [__m256i; 4] {
    // SAFETY: only register arithmetic in the caller's tier.
    unsafe {
        let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab_low, cd_low),
            _mm256_unpackhi_epi64(ab_low, cd_low),
            _mm256_unpacklo_epi64(ab_high, cd_high),
            _mm256_unpackhi_epi64(ab_high, cd_high),
        ]
    }
}
