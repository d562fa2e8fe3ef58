//! Products of BF16 weight tiles with activations rounded to BF16, by the dot products of AVX-512 BF16.
//!
//! Invariant: an output is one chain of dot products of pairs of columns, in order; the last column of an odd number is
//! a pair with zero. The number of tokens in a group and of tiles beside each other does not affect the result.

use std::arch::x86_64::*;

use super::tile_format::{PREFETCH_BYTES, PREFETCH_TOKENS, TILE_ROWS};

/// Bytes of a pair of columns of one tile.
const PAIR_BYTES: usize = 4 * TILE_ROWS;

/// A group of up to 8 tokens whose activations are rounded, `[pair of columns][token]`.
#[derive(Clone, Copy)]
pub(crate) struct PairGroup {
    pub pairs: *const u32,
    pub tokens: usize,
}

/// Multiplies consecutive tiles with groups of consecutive tokens.
pub(crate) struct Bf16Range<'a> {
    pub tiles: *const u8,
    pub tile_bytes: usize,
    pub columns: usize,
    /// Number of rows, starting at the first tile. The last tile may be partial.
    pub rows: usize,
    pub groups: &'a [PairGroup],
    /// Output of the first row and token. Consecutive tokens are `stride` values apart.
    pub out: *mut f32,
    pub stride: usize,
}

impl Bf16Range<'_> {
    /// Computes all products.
    ///
    /// # Safety
    /// The machine supports [`crate::Isa::Avx512Bf16`], and the pointers are valid for all that the fields describe.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(crate) unsafe fn run(&self) {
        let mut row = 0;
        while row < self.rows {
            // Two tiles share each activation that is loaded.
            let rows = (self.rows - row).min(2 * TILE_ROWS);
            let mut token = 0;
            for group in self.groups {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    let product = Bf16Product {
                        tiles: self.tiles.add(row / TILE_ROWS * self.tile_bytes),
                        tile_bytes: self.tile_bytes,
                        columns: self.columns,
                        rows,
                        pairs: group.pairs,
                        out: self.out.add(token * self.stride + row),
                        stride: self.stride,
                    };
                    if rows > TILE_ROWS {
                        product.group::<2>(group.tokens);
                    } else {
                        product.group::<1>(group.tokens);
                    }
                }
                token += group.tokens;
            }
            row += rows;
        }
    }
}

/// Multiplies one or two tiles with a group of tokens.
struct Bf16Product {
    tiles: *const u8,
    tile_bytes: usize,
    columns: usize,
    rows: usize,
    pairs: *const u32,
    out: *mut f32,
    stride: usize,
}

impl Bf16Product {
    /// # Safety
    /// The conditions of [`Bf16Range::run`] hold; there are `tokens` tokens and `W` tiles.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn group<const W: usize>(&self, tokens: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match tokens {
                1 => self.compute::<W, 1>(),
                2 => self.compute::<W, 2>(),
                3 => self.compute::<W, 3>(),
                4 => self.compute::<W, 4>(),
                5 => self.compute::<W, 5>(),
                6 => self.compute::<W, 6>(),
                7 => self.compute::<W, 7>(),
                _ => self.compute::<W, 8>(),
            }
        }
    }

    /// # Safety
    /// The conditions of [`Self::group`] hold, for `T` tokens.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn compute<const W: usize, const T: usize>(&self) {
        // SAFETY: guaranteed by the caller; outputs past the last row are masked.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); W]; T];
            for pair in 0..self.columns / 2 {
                let mut weights = [_mm512_setzero_si512(); W];
                for (tile, weights) in weights.iter_mut().enumerate() {
                    let from = self.tiles.add(tile * self.tile_bytes + pair * PAIR_BYTES);
                    *weights = _mm512_loadu_si512(from.cast());
                    if T <= PREFETCH_TOKENS {
                        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(PREFETCH_BYTES).cast());
                    }
                }
                add_products(&mut sums, &weights, self.pairs.add(pair * T));
            }
            if self.columns % 2 == 1 {
                let pair = self.columns / 2;
                let mut weights = [_mm512_setzero_si512(); W];
                for (tile, weights) in weights.iter_mut().enumerate() {
                    let last = self.tiles.add(tile * self.tile_bytes + pair * PAIR_BYTES);
                    *weights = _mm512_cvtepu16_epi32(_mm256_loadu_si256(last.cast()));
                }
                add_products(&mut sums, &weights, self.pairs.add(pair * T));
            }
            for (token, sums) in sums.iter().enumerate() {
                for (tile, sum) in sums.iter().enumerate() {
                    let rows = (self.rows - tile * TILE_ROWS).min(TILE_ROWS);
                    let out = self.out.add(token * self.stride + tile * TILE_ROWS);
                    _mm512_mask_storeu_ps(out, (0xffff_u32 >> (TILE_ROWS - rows)) as __mmask16, *sum);
                }
            }
        }
    }
}

/// Adds the products of a pair of columns with the pairs of `T` tokens.
///
/// # Safety
/// `pairs` is valid for `T` pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn add_products<const W: usize, const T: usize>(
    sums: &mut [[__m512; W]; T],
    weights: &[__m512i; W],
    pairs: *const u32,
) {
    for (token, sums) in sums.iter_mut().enumerate() {
        // SAFETY: guaranteed by the caller.
        let x = unsafe { _mm512_set1_epi32(pairs.add(token).read() as i32) };
        for (sum, weights) in sums.iter_mut().zip(weights) {
            *sum = _mm512_dpbf16_ps(*sum, as_bf16(*weights), as_bf16(x));
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn as_bf16(pairs: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes, and every bit pattern is valid.
    unsafe { std::mem::transmute(pairs) }
}

/// Multiplies registers with groups of 6 pairs, for [`crate::arithmetic`].
///
/// # Safety
/// The machine supports [`crate::Isa::Avx512Bf16`].
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) unsafe fn many_products(operands: &[u32; 240], passes: usize) -> f32 {
    let mut sums = [[_mm512_setzero_ps(); 2]; 6];
    let weights = [_mm512_set1_epi32(0x3f00_3f00), _mm512_set1_epi32(0x3e80_3e80)];
    for _ in 0..passes {
        let operands = std::hint::black_box(operands);
        for group in operands.as_chunks::<6>().0 {
            // SAFETY: the group holds 6 pairs.
            unsafe { add_products(&mut sums, &weights, group.as_ptr()) }
        }
    }
    let mut total = _mm512_setzero_ps();
    for [first, second] in sums {
        total = _mm512_add_ps(total, _mm512_add_ps(first, second));
    }
    _mm512_cvtss_f32(total)
}
