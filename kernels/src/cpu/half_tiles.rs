//! Products of F16 weight tiles with activations, both rounded to integers in blocks of 32 columns.
//!
//! Invariant: an integer has at most 13 bits and a sign, so that the products of a block are added in 32 bits without
//! rounding. An output adds its blocks in order. The number of tokens in a group and of tiles beside each other does not
//! affect the result.

// Loops over registers are written with indices, so that they stay in registers.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::quantize::PAIRS;
use super::tile_format::TILE_ROWS;

/// Size in bytes of a pair of columns of one tile.
const PAIR_BYTES: usize = 4 * TILE_ROWS;
/// Size in bytes of a block of one tile.
const BLOCK_BYTES: usize = PAIRS * PAIR_BYTES;
/// Number of blocks of a tile that are converted at once. With two tiles and eight tokens, they fill half of an L1 cache.
const PANEL_BLOCKS: usize = 8;
/// Distance in bytes at which weights are prefetched: one panel. One token, with two threads and weights from memory, reads
/// 58 GB/s with 2 KiB, 71 with 4 KiB, 87 with 8 KiB.
const AHEAD: usize = PANEL_BLOCKS * BLOCK_BYTES;

/// A group of up to 8 tokens whose activations are integers.
#[derive(Clone, Copy)]
pub(crate) struct IntegerGroup {
    /// Pairs of integers, `[block][pair of columns][token]`.
    pub pairs: *const u32,
    /// Scales, `[block][token]`.
    pub scales: *const f32,
    pub tokens: usize,
}

impl IntegerGroup {
    /// Returns the group without its first blocks.
    ///
    /// # Safety
    /// The group has the blocks.
    #[inline(always)]
    unsafe fn after(self, blocks: usize) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe {
            IntegerGroup {
                pairs: self.pairs.add(blocks * PAIRS * self.tokens),
                scales: self.scales.add(blocks * self.tokens),
                tokens: self.tokens,
            }
        }
    }
}

/// Multiplies consecutive tiles with groups of consecutive tokens.
pub(crate) struct HalfRange<'a> {
    pub tiles: *const u8,
    pub tile_bytes: usize,
    pub columns: usize,
    /// Number of rows, starting at the first tile. The last tile may be partial.
    pub rows: usize,
    pub groups: &'a [IntegerGroup],
    /// Output of the first row and token. Consecutive tokens are `stride` values apart.
    pub out: *mut f32,
    pub stride: usize,
}

/// Blocks of one or two tiles whose weights are integers.
struct Panel {
    /// Pairs of columns of each block.
    integers: [[[__m512i; PAIRS]; PANEL_BLOCKS]; 2],
    /// Scales of the rows of each block.
    scales: [[__m512; PANEL_BLOCKS]; 2],
}

impl HalfRange<'_> {
    /// Computes all products.
    ///
    /// # Safety
    /// The machine supports [`crate::Isa::Avx512`], and the pointers are valid for all that the fields describe.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub(crate) unsafe fn run(&self) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self.groups {
                // Weights that are multiplied once come from memory, one tile after the other, and stay in registers.
                [group] => self.each_tile(*group),
                groups => self.panels(groups),
            }
        }
    }

    /// Multiplies one tile at a time with a group.
    ///
    /// # Safety
    /// The conditions of [`Self::run`] hold.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn each_tile(&self, group: IntegerGroup) {
        for first in (0..self.rows).step_by(TILE_ROWS) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                match group.tokens {
                    1 => self.tile::<1>(first, group),
                    2 => self.tile::<2>(first, group),
                    3 => self.tile::<3>(first, group),
                    4 => self.tile::<4>(first, group),
                    5 => self.tile::<5>(first, group),
                    6 => self.tile::<6>(first, group),
                    7 => self.tile::<7>(first, group),
                    _ => self.tile::<8>(first, group),
                }
            }
        }
    }

    /// Multiplies the tile that begins with row `first` with `T` tokens.
    ///
    /// # Safety
    /// The conditions of [`Self::run`] hold; the group has `T` tokens.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn tile<const T: usize>(&self, first: usize, group: IntegerGroup) {
        // SAFETY: guaranteed by the caller; outputs past the last row are masked.
        unsafe {
            let tile = self.tiles.add(first / TILE_ROWS * self.tile_bytes);
            let mut sums = [_mm512_setzero_ps(); T];
            let whole = self.columns / (2 * PAIRS);
            for block in 0..whole {
                let weights = tile.add(block * BLOCK_BYTES);
                prefetch(weights.wrapping_add(AHEAD));
                add_block(&mut sums, weights, group.after(block));
            }
            if self.columns > whole * 2 * PAIRS {
                let last = self.last_block(tile);
                add_block(&mut sums, last.as_ptr().cast(), group.after(whole));
            }
            let mask = self.mask(first);
            for token in 0..T {
                _mm512_mask_storeu_ps(self.out.add(token * self.stride + first), mask, sums[token]);
            }
        }
    }

    /// Converts a panel at a time and multiplies it with all groups. The sums are kept in the outputs meanwhile.
    ///
    /// # Safety
    /// The conditions of [`Self::run`] hold.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn panels(&self, groups: &[IntegerGroup]) {
        let mut panel = Panel {
            integers: [[[_mm512_setzero_si512(); PAIRS]; PANEL_BLOCKS]; 2],
            scales: [[_mm512_setzero_ps(); PANEL_BLOCKS]; 2],
        };
        let blocks = self.columns.div_ceil(2 * PAIRS);
        for first in (0..self.rows).step_by(2 * TILE_ROWS) {
            // Two tiles share each activation that is loaded.
            let tiles = (self.rows - first).div_ceil(TILE_ROWS).min(2);
            // Outputs are written even if there are no columns.
            for from in (0..blocks.max(1)).step_by(PANEL_BLOCKS) {
                let count = PANEL_BLOCKS.min(blocks - from);
                let mut token = 0;
                // SAFETY: guaranteed by the caller.
                unsafe {
                    for tile in 0..tiles {
                        self.convert(&mut panel, tile, first + tile * TILE_ROWS, from, count);
                    }
                    for group in groups {
                        let part = Part { range: self, panel: &panel, first, token, from, count };
                        let group = group.after(from);
                        if tiles == 2 {
                            part.group::<2>(group);
                        } else {
                            part.group::<1>(group);
                        }
                        token += group.tokens;
                    }
                }
            }
        }
    }

    /// Converts `count` blocks of the tile that begins with row `first`.
    ///
    /// # Safety
    /// The conditions of [`Self::run`] hold, and the tile has the blocks.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn convert(&self, panel: &mut Panel, tile: usize, first: usize, from: usize, count: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let weights = self.tiles.add(first / TILE_ROWS * self.tile_bytes);
            for block in 0..count {
                let (integers, scales) = (&mut panel.integers[tile][block], &mut panel.scales[tile][block]);
                if (from + block + 1) * 2 * PAIRS <= self.columns {
                    let weights = weights.add((from + block) * BLOCK_BYTES);
                    prefetch(weights.wrapping_add(AHEAD));
                    *scales = convert_block(weights, integers);
                } else {
                    *scales = convert_block(self.last_block(weights).as_ptr().cast(), integers);
                }
            }
        }
    }

    /// Returns the last columns of a tile, which are fewer than a block has, followed by zeros.
    ///
    /// # Safety
    /// The tile has `columns` columns.
    unsafe fn last_block(&self, tile: *const u8) -> [[u8; PAIR_BYTES]; PAIRS] {
        let mut block = [[0; PAIR_BYTES]; PAIRS];
        let whole = self.columns / (2 * PAIRS);
        let bytes = self.columns % (2 * PAIRS) * 2 * TILE_ROWS;
        // SAFETY: guaranteed by the caller; a block is longer than what is left.
        unsafe {
            block.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(tile.add(whole * BLOCK_BYTES), bytes);
        }
        block
    }

    /// Returns the rows of the tile that begins with row `first`.
    fn mask(&self, first: usize) -> __mmask16 {
        (0xffff_u32 >> (TILE_ROWS - (self.rows - first).min(TILE_ROWS))) as __mmask16
    }
}

/// A panel that is multiplied with the tokens from `token` on.
struct Part<'a> {
    range: &'a HalfRange<'a>,
    panel: &'a Panel,
    /// First row of the first tile.
    first: usize,
    token: usize,
    /// First block of the panel, and number of blocks.
    from: usize,
    count: usize,
}

impl Part<'_> {
    /// # Safety
    /// The conditions of [`HalfRange::run`] hold; the panel has `W` tiles, and the group begins with its first block.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn group<const W: usize>(&self, group: IntegerGroup) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match group.tokens {
                1 => self.compute::<W, 1>(group),
                2 => self.compute::<W, 2>(group),
                3 => self.compute::<W, 3>(group),
                4 => self.compute::<W, 4>(group),
                5 => self.compute::<W, 5>(group),
                6 => self.compute::<W, 6>(group),
                7 => self.compute::<W, 7>(group),
                _ => self.compute::<W, 8>(group),
            }
        }
    }

    /// # Safety
    /// The conditions of [`Self::group`] hold, for `T` tokens.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn compute<const W: usize, const T: usize>(&self, group: IntegerGroup) {
        // SAFETY: guaranteed by the caller; outputs past the last row are masked.
        unsafe {
            let HalfRange { out, stride, .. } = *self.range;
            let out = out.add(self.token * stride + self.first);
            let mut sums = [[_mm512_setzero_ps(); W]; T];
            if self.from > 0 {
                for token in 0..T {
                    for tile in 0..W {
                        let mask = self.range.mask(self.first + tile * TILE_ROWS);
                        sums[token][tile] =
                            _mm512_maskz_loadu_ps(mask, out.add(token * stride + tile * TILE_ROWS));
                    }
                }
            }
            for block in 0..self.count {
                let mut dots = [[_mm512_setzero_si512(); W]; T];
                let pairs = group.pairs.add(block * PAIRS * T);
                for pair in 0..PAIRS {
                    for token in 0..T {
                        let x = _mm512_set1_epi32(pairs.add(pair * T + token).read() as i32);
                        for tile in 0..W {
                            let weights = self.panel.integers[tile][block][pair];
                            dots[token][tile] = _mm512_dpwssd_epi32(dots[token][tile], weights, x);
                        }
                    }
                }
                for token in 0..T {
                    let x = _mm512_set1_ps(group.scales.add(block * T + token).read());
                    for tile in 0..W {
                        let scales = self.panel.scales[tile][block];
                        sums[token][tile] = add_scaled(sums[token][tile], dots[token][tile], scales, x);
                    }
                }
            }
            for token in 0..T {
                for tile in 0..W {
                    let mask = self.range.mask(self.first + tile * TILE_ROWS);
                    _mm512_mask_storeu_ps(
                        out.add(token * stride + tile * TILE_ROWS),
                        mask,
                        sums[token][tile],
                    );
                }
            }
        }
    }
}

/// Prefetches a block, which need not be readable.
#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch(block: *const u8) {
    for pair in 0..PAIRS {
        _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(pair * PAIR_BYTES).cast());
    }
}

/// Adds the products of a block of one tile with `T` tokens.
///
/// # Safety
/// `weights` is valid for a block, and the group for one of `T` tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add_block<const T: usize>(sums: &mut [__m512; T], weights: *const u8, group: IntegerGroup) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let [up, down] = factors(weights);
        let mut dots = [_mm512_setzero_si512(); T];
        for pair in 0..PAIRS {
            let integers = integers(weights.add(pair * PAIR_BYTES), up);
            for token in 0..T {
                let x = _mm512_set1_epi32(group.pairs.add(pair * T + token).read() as i32);
                dots[token] = _mm512_dpwssd_epi32(dots[token], integers, x);
            }
        }
        for token in 0..T {
            let x = _mm512_set1_ps(group.scales.add(token).read());
            sums[token] = add_scaled(sums[token], dots[token], down, x);
        }
    }
}

/// Converts a block and returns its scales.
///
/// # Safety
/// `weights` is valid for a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn convert_block(weights: *const u8, to: &mut [__m512i; PAIRS]) -> __m512 {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let [up, down] = factors(weights);
        for pair in 0..PAIRS {
            to[pair] = integers(weights.add(pair * PAIR_BYTES), up);
        }
        down
    }
}

/// Adds what the integers of a block stand for.
#[inline]
#[target_feature(enable = "avx512f")]
fn add_scaled(sum: __m512, dots: __m512i, weights: __m512, x: __m512) -> __m512 {
    _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), _mm512_mul_ps(weights, x), sum)
}

/// Returns the powers of 2 that make integers of each row's weights in a block, and weights of the integers. The largest
/// weight of a row becomes an integer of 13 bits, whose lowest two are 0. If a row has a weight that is not finite, the
/// second factor is NaN.
///
/// # Safety
/// `weights` is valid for a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn factors(weights: *const u8) -> [__m512; 2] {
    /// The exponent of numbers that are not finite.
    const LAST: i32 = 31;
    /// Exponents of halves and floats are stored with 15 and 127 added. `1.0`, whose significand has 11 bits, becomes `1 << 12`.
    const UP: i32 = 127 + 15 + 12;
    const DOWN: i32 = 127 - 15 - 12;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut largest = [_mm512_setzero_si512(); 2];
        for pair in 0..PAIRS {
            let halves = _mm512_loadu_si512(weights.add(pair * PAIR_BYTES).cast());
            // Without the sign, they are in the order of their magnitudes.
            let twice = _mm512_add_epi16(halves, halves);
            largest[pair % 2] = _mm512_max_epu16(largest[pair % 2], twice);
        }
        let largest = _mm512_max_epu16(largest[0], largest[1]);
        let high = _mm512_extracti64x4_epi64::<1>(largest);
        let largest = _mm256_max_epu16(_mm512_castsi512_si256(largest), high);
        // Subnormal numbers, whose exponent is 0, have one bit less, and become integers of 13 bits as well.
        let exponents = _mm512_srli_epi32::<11>(_mm512_cvtepu16_epi32(largest));
        let up = _mm512_slli_epi32::<23>(_mm512_sub_epi32(_mm512_set1_epi32(UP), exponents));
        let down = _mm512_slli_epi32::<23>(_mm512_add_epi32(_mm512_set1_epi32(DOWN), exponents));
        let unknown = _mm512_cmpeq_epi32_mask(exponents, _mm512_set1_epi32(LAST));
        let down = _mm512_mask_mov_ps(_mm512_castsi512_ps(down), unknown, _mm512_set1_ps(f32::NAN));
        [_mm512_castsi512_ps(up), down]
    }
}

/// Returns the integers nearest to a pair of columns times the factors, ties to even, in pairs.
///
/// # Safety
/// `weights` is valid for two columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn integers(weights: *const u8, up: __m512) -> __m512i {
    /// A number whose last bit is 1. The sum with an integer has the integer in its low bits.
    const SHIFT: f32 = 12_582_912.0;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let first = _mm512_cvtph_ps(_mm256_loadu_si256(weights.cast()));
        let second = _mm512_cvtph_ps(_mm256_loadu_si256(weights.add(PAIR_BYTES / 2).cast()));
        let first = _mm512_castps_si512(_mm512_fmadd_ps(first, up, _mm512_set1_ps(SHIFT)));
        let second = _mm512_castps_si512(_mm512_fmadd_ps(second, up, _mm512_set1_ps(SHIFT)));
        _mm512_mask_blend_epi16(0x5555_5555, _mm512_slli_epi32::<16>(second), first)
    }
}

#[cfg(test)]
#[path = "half_tiles_tests.rs"]
mod tests;
