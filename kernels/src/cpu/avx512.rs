//! The AVX-512 tiers, with VNNI, and with or without dot products of BF16 numbers. One register holds 16 lanes.
//!
//! Invariant: methods are inlined into functions that enable the tier's CPU features.

use std::arch::x86_64::*;

use super::simd::Simd;

/// The tier with dot products of BF16 numbers if `BF16`, and otherwise the one without.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const BF16: bool>;

// SAFETY: used only inside `dispatch`, which checks for the features; the caller guarantees that pointers are valid.
#[allow(clippy::missing_safety_doc)]
unsafe impl<const BF16: bool> Simd for Avx512<BF16> {
    const MANY_REGISTERS: bool = true;
    const CENTERED_DOTS: bool = false;
    const BF16_DOTS: bool = BF16;

    type F = __m512;
    type I = __m512i;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m512) {
        unsafe { _mm512_storeu_ps(to, value) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u16) -> [__m512; 2] {
        unsafe {
            let pairs = _mm512_loadu_si512(from.cast());
            let second = _mm512_and_si512(pairs, _mm512_set1_epi32(!0xffff));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(second)]
        }
    }
    #[inline(always)]
    unsafe fn load_f8_pair(from: *const u8) -> [__m512; 2] {
        // The bits below the sign, moved to the end of the exponent of a half, are the value divided by 256.
        unsafe {
            let wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(from.cast()));
            let halves = _mm512_and_si512(_mm512_slli_epi16::<7>(wide), _mm512_set1_epi16(0xbfff_u16 as i16));
            [
                _mm512_cvtph_ps(_mm512_castsi512_si256(halves)),
                _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(halves)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, value: __m512) {
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value)) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn exp2_whole(a: __m512) -> __m512 {
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }
    #[inline(always)]
    unsafe fn mul_exp2(a: __m512, n: __m512) -> __m512 {
        unsafe { _mm512_scalef_ps(a, n) }
    }
    #[inline(always)]
    unsafe fn sum(a: __m512) -> f32 {
        // The reduction intrinsic does not specify the order of additions.
        unsafe {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(a)));
            let eight = _mm256_add_ps(_mm512_castps512_ps256(a), high);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn sum_each(registers: [__m512; 16]) -> __m512 {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = registers;
        // Each step adds the halves of what a register has of each sum, and puts two registers into one.
        unsafe {
            let fours =
                [four_sums(a, e, i, m), four_sums(b, f, j, n), four_sums(c, g, k, o), four_sums(d, h, l, p)];
            let twos = [two_lanes(fours[0], fours[1]), two_lanes(fours[2], fours[3])];
            let even = _mm512_shuffle_ps::<0x88>(twos[0], twos[1]);
            _mm512_add_ps(even, _mm512_shuffle_ps::<0xdd>(twos[0], twos[1]))
        }
    }
    #[inline(always)]
    unsafe fn max_lane(a: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(a) }
    }
    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, value: __m512) {
        unsafe { _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(value))) }
    }

    #[inline(always)]
    unsafe fn zero_i() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn load_i(from: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn splat_i8(value: u8) -> __m512i {
        unsafe { _mm512_set1_epi8(value as i8) }
    }
    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn shr<const N: u32>(a: __m512i) -> __m512i {
        unsafe { _mm512_srli_epi32::<N>(a) }
    }
    #[inline(always)]
    unsafe fn shl<const N: u32>(a: __m512i) -> __m512i {
        unsafe { _mm512_slli_epi32::<N>(a) }
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], bytes: __m512i) -> __m512i {
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, bytes)
        }
    }
    #[inline(always)]
    unsafe fn dot(sum: __m512i, bytes: __m512i, four: *const i8) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(sum, bytes, _mm512_set1_epi32(four.cast::<i32>().read_unaligned())) }
    }
    #[inline(always)]
    unsafe fn round_bf16(low: __m512, high: __m512) -> __m512i {
        unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
    }
    #[inline(always)]
    unsafe fn bf16_pairs(first: __m512, second: __m512) -> __m512i {
        /// Lane `i` of 16 bits comes from lane `i / 2` of the first half or of the second one.
        const PAIRED: [u16; 32] = {
            let mut from = [0; 32];
            let mut lane = 0;
            while lane < 32 {
                from[lane] = (lane / 2 + lane % 2 * 16) as u16;
                lane += 1;
            }
            from
        };
        unsafe {
            let paired = _mm512_loadu_si512(PAIRED.as_ptr().cast());
            _mm512_permutexvar_epi16(paired, Self::round_bf16(first, second))
        }
    }
    #[inline(always)]
    unsafe fn dot_bf16(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
        unsafe {
            _mm512_dpbf16_ps(
                sum,
                std::mem::transmute::<__m512i, __m512bh>(a),
                std::mem::transmute::<__m512i, __m512bh>(b),
            )
        }
    }
    #[inline(always)]
    unsafe fn splat_4(from: *const u8) -> __m512i {
        unsafe { _mm512_set1_epi32(from.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn dot_pairs(sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_dpwssd_epi32(sum, a, b) }
    }
    #[inline(always)]
    unsafe fn byte_pairs(a: __m512i) -> [__m512i; 2] {
        unsafe { [_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(a)), _mm512_srai_epi16::<8>(a)] }
    }
    #[inline(always)]
    unsafe fn load_pairs(a: *const i8, b: *const i8) -> __m512i {
        unsafe {
            let (a, b) = (_mm_loadu_si128(a.cast()), _mm_loadu_si128(b.cast()));
            let pairs = _mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b));
            _mm512_cvtepi8_epi16(pairs)
        }
    }
    #[inline(always)]
    unsafe fn store_i16(to: *mut i16, value: __m512) {
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(value))) }
    }
    #[inline(always)]
    unsafe fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = rows;
        unsafe {
            let quarters = [fours(a, b, c, d), fours(e, f, g, h), fours(i, j, k, l), fours(m, n, o, p)];
            let [r0, r4, r8, r12] = lanes([quarters[0][0], quarters[1][0], quarters[2][0], quarters[3][0]]);
            let [r1, r5, r9, r13] = lanes([quarters[0][1], quarters[1][1], quarters[2][1], quarters[3][1]]);
            let [r2, r6, r10, r14] = lanes([quarters[0][2], quarters[1][2], quarters[2][2], quarters[3][2]]);
            let [r3, r7, r11, r15] = lanes([quarters[0][3], quarters[1][3], quarters[2][3], quarters[3][3]]);
            [r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14, r15]
        }
    }
    #[inline(always)]
    unsafe fn store_i(to: *mut u8, value: __m512i) {
        unsafe { _mm512_storeu_si512(to.cast(), value) }
    }
    #[inline(always)]
    unsafe fn to_f32(a: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(a) }
    }

    #[inline(always)]
    unsafe fn add_i(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub_i(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_sub_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

/// Turns 4 by 4 values of 32 bits in each 128-bit part.
///
/// # Safety
/// The conditions of the methods of [`Simd`] hold.
#[inline(always)]
unsafe fn fours(a: __m512i, b: __m512i, c: __m512i, d: __m512i) -> [__m512i; 4] {
    // SAFETY: only register arithmetic in the caller's tier.
    unsafe {
        let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(ab_low, cd_low),
            _mm512_unpackhi_epi64(ab_low, cd_low),
            _mm512_unpacklo_epi64(ab_high, cd_high),
            _mm512_unpackhi_epi64(ab_high, cd_high),
        ]
    }
}

/// Turns the four 128-bit parts of four registers.
///
/// # Safety
/// The conditions of the methods of [`Simd`] hold.
#[inline(always)]
unsafe fn lanes([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    // SAFETY: only register arithmetic in the caller's tier.
    unsafe {
        let (ab_low, ab_high) = (_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0xee>(a, b));
        let (cd_low, cd_high) = (_mm512_shuffle_i32x4::<0x44>(c, d), _mm512_shuffle_i32x4::<0xee>(c, d));
        [
            _mm512_shuffle_i32x4::<0x88>(ab_low, cd_low),
            _mm512_shuffle_i32x4::<0xdd>(ab_low, cd_low),
            _mm512_shuffle_i32x4::<0x88>(ab_high, cd_high),
            _mm512_shuffle_i32x4::<0xdd>(ab_high, cd_high),
        ]
    }
}

/// Adds the lanes of four registers until four lanes of each are left, which become a 128-bit part of the result.
///
/// # Safety
/// The conditions of the methods of [`Simd`] hold.
#[inline(always)]
unsafe fn four_sums(a: __m512, b: __m512, c: __m512, d: __m512) -> __m512 {
    // SAFETY: only register arithmetic in the caller's tier.
    unsafe {
        let (ab_low, ab_high) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
        let (cd_low, cd_high) = (_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
        let (ab, cd) = (_mm512_add_ps(ab_low, ab_high), _mm512_add_ps(cd_low, cd_high));
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd))
    }
}

/// Adds the halves of each 128-bit part of two registers. Each part of the result has two lanes of the first and of the
/// second one.
///
/// # Safety
/// The conditions of the methods of [`Simd`] hold.
#[inline(always)]
unsafe fn two_lanes(a: __m512, b: __m512) -> __m512 {
    // SAFETY: only register arithmetic in the caller's tier.
    unsafe {
        let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
        let low = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        _mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
    }
}
