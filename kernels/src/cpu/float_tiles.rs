//! Products of float weight tiles with `f32` activations.
//!
//! Invariant: tiles of 16 rows store value `k` of every row contiguously, or in BF16 values `k` and `k + 1`. Tiles of 8-bit
//! floats have the scales of 32 columns before them. An output
//! is one chain of multiply-adds over the columns in order, whatever other tokens and tiles are computed beside it.

use std::marker::PhantomData;

use super::Kernel;
use super::simd::Simd;
use super::tile_format::{PREFETCH_BYTES, PREFETCH_TOKENS, TILE_ROWS};
use crate::dequantize::f8_e4m3;

/// A float format of weights, of which 16 are loaded at a time.
pub(crate) trait FloatFormat: Copy {
    /// Size in bytes of a value.
    const BYTES: usize;

    /// Returns the size in bytes of a tile.
    #[inline(always)]
    fn tile_bytes(columns: usize) -> usize {
        TILE_ROWS * Self::BYTES * columns
    }

    /// Returns the offset in bytes of column `k` in a tile.
    #[inline(always)]
    fn offset(k: usize) -> usize {
        k * TILE_ROWS * Self::BYTES
    }

    /// Loads the 16 values of column `k`, which is even.
    ///
    /// # Safety
    /// `tile` has the column; call inside a dispatched kernel.
    unsafe fn column<S: Simd>(tile: *const u8, k: usize) -> S::F;

    /// Loads the columns `k`, which is even, and `k + 1`.
    ///
    /// # Safety
    /// `tile` has the columns; call inside a dispatched kernel.
    unsafe fn pair<S: Simd>(tile: *const u8, k: usize) -> [S::F; 2];
}

#[derive(Clone, Copy)]
pub(crate) struct F32;
#[derive(Clone, Copy)]
pub(crate) struct F16;
#[derive(Clone, Copy)]
pub(crate) struct BF16;

/// Floats of 8 bits with a scale for every 32 columns of a row.
#[derive(Clone, Copy)]
pub(crate) struct F8;

/// The factor of stored scales: codes are loaded as that much smaller numbers.
pub(crate) const F8_RAISE: f32 = 256.0;
/// Size in bytes of the scales of 16 rows.
pub(crate) const F8_SCALES: usize = 4 * TILE_ROWS;
/// Number of columns with the same scales, and the size in bytes of their part of a tile.
const F8_COLUMNS: usize = 32;
const F8_BLOCK: usize = F8_SCALES + F8_COLUMNS * TILE_ROWS;

impl FloatFormat for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn column<S: Simd>(tile: *const u8, k: usize) -> S::F {
        // SAFETY: guaranteed by the caller.
        unsafe { S::load(tile.add(Self::offset(k)).cast()) }
    }

    #[inline(always)]
    unsafe fn pair<S: Simd>(tile: *const u8, k: usize) -> [S::F; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe { [Self::column::<S>(tile, k), Self::column::<S>(tile, k + 1)] }
    }
}

impl FloatFormat for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn column<S: Simd>(tile: *const u8, k: usize) -> S::F {
        // SAFETY: guaranteed by the caller.
        unsafe { S::load_f16(tile.add(Self::offset(k)).cast()) }
    }

    #[inline(always)]
    unsafe fn pair<S: Simd>(tile: *const u8, k: usize) -> [S::F; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe { [Self::column::<S>(tile, k), Self::column::<S>(tile, k + 1)] }
    }
}

impl FloatFormat for BF16 {
    const BYTES: usize = 2;

    /// Loads the last column of an odd number, which is not in a pair.
    #[inline(always)]
    unsafe fn column<S: Simd>(tile: *const u8, k: usize) -> S::F {
        // SAFETY: guaranteed by the caller.
        unsafe { S::load_bf16(tile.add(Self::offset(k)).cast()) }
    }

    #[inline(always)]
    unsafe fn pair<S: Simd>(tile: *const u8, k: usize) -> [S::F; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe { S::load_bf16_pairs(tile.add(Self::offset(k)).cast()) }
    }
}

impl F8 {
    /// Returns one value of a tile.
    pub(crate) fn value(tile: &[u8], column: usize, row: usize) -> f32 {
        let block = &tile[column / F8_COLUMNS * F8_BLOCK..][..F8_BLOCK];
        let scale = &block[4 * row..][..4];
        let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
        f8_e4m3(block[F8_SCALES + column % F8_COLUMNS * TILE_ROWS + row]) / F8_RAISE * scale
    }
}

/// Values are rounded after the multiplication by their scale, so that products have the bits of those of F32 weights with
/// the same values.
impl FloatFormat for F8 {
    const BYTES: usize = 1;

    #[inline(always)]
    fn tile_bytes(columns: usize) -> usize {
        columns / F8_COLUMNS * F8_BLOCK
    }

    #[inline(always)]
    fn offset(k: usize) -> usize {
        k / F8_COLUMNS * F8_BLOCK + F8_SCALES + k % F8_COLUMNS * TILE_ROWS
    }

    #[inline(always)]
    unsafe fn column<S: Simd>(tile: *const u8, k: usize) -> S::F {
        // SAFETY: guaranteed by the caller; columns come in pairs.
        unsafe { Self::pair::<S>(tile, k)[0] }
    }

    #[inline(always)]
    unsafe fn pair<S: Simd>(tile: *const u8, k: usize) -> [S::F; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let scale = S::load(tile.add(k / F8_COLUMNS * F8_BLOCK).cast());
            let [first, second] = S::load_f8_pair(tile.add(Self::offset(k)));
            [S::mul(first, scale), S::mul(second, scale)]
        }
    }
}

/// Multiplies consecutive tiles with consecutive tokens.
pub(crate) struct FloatRange<Format> {
    pub tiles: *const u8,
    pub columns: usize,
    /// Number of rows, starting at the first tile. The last tile may be partial.
    pub rows: usize,
    /// Activations, `[token][column]`.
    pub input: *const f32,
    pub tokens: usize,
    /// Output of the first row and token. Consecutive tokens are `stride` values apart.
    pub out: *mut f32,
    pub stride: usize,
    pub format: PhantomData<Format>,
}

impl<Format: FloatFormat> Kernel for FloatRange<Format> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: tiles, inputs and outputs are as long as the fields say.
        unsafe {
            let mut row = 0;
            while row < self.rows {
                // Tiles beside each other share each activation that is loaded; for a single token, they hide the latency of
                // the multiply-adds.
                let tiles = (self.rows - row).div_ceil(TILE_ROWS);
                let tiles = match tiles {
                    4.. if self.tokens == 1 => 4,
                    2.. if S::MANY_REGISTERS || self.tokens == 1 => 2,
                    _ => 1,
                };
                let rows = (self.rows - row).min(tiles * TILE_ROWS);
                let mut token = 0;
                while token < self.tokens {
                    let product = FloatProduct::<Format> {
                        tiles: self.tiles.add(row / TILE_ROWS * Format::tile_bytes(self.columns)),
                        columns: self.columns,
                        rows,
                        input: self.input.add(token * self.columns),
                        out: self.out.add(token * self.stride + row),
                        stride: self.stride,
                        format: PhantomData,
                    };
                    token += match (tiles, self.tokens - token) {
                        (4, _) => product.compute::<S, 4, 1>(),
                        // Other tiers have two tiles only for one token. The constant keeps the compiler from generating more.
                        (2, 8..) if S::MANY_REGISTERS => product.compute::<S, 2, 8>(),
                        (2, 4..) if S::MANY_REGISTERS => product.compute::<S, 2, 4>(),
                        (2, 2..) if S::MANY_REGISTERS => product.compute::<S, 2, 2>(),
                        (2, _) => product.compute::<S, 2, 1>(),
                        // Two registers a tile and six tokens make twelve sums, as many as leave room for the operands.
                        (_, 6..) if !S::MANY_REGISTERS => product.compute::<S, 1, 6>(),
                        (_, 4..) => product.compute::<S, 1, 4>(),
                        (_, 2..) => product.compute::<S, 1, 2>(),
                        (_, _) => product.compute::<S, 1, 1>(),
                    };
                }
                row += rows;
            }
        }
    }
}

/// Multiplies a few tiles with a few tokens.
struct FloatProduct<Format> {
    tiles: *const u8,
    columns: usize,
    /// Number of rows. The last tile may be partial.
    rows: usize,
    input: *const f32,
    out: *mut f32,
    stride: usize,
    format: PhantomData<Format>,
}

impl<Format: FloatFormat> FloatProduct<Format> {
    /// Computes the products of `W` tiles with `T` tokens, and returns `T`.
    ///
    /// # Safety
    /// The tiles have `columns` columns, `input` has `T` rows of `columns` values, and `out` has room for `rows` values per
    /// token.
    #[inline(always)]
    unsafe fn compute<S: Simd, const W: usize, const T: usize>(&self) -> usize {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut sums = [[S::zero(); W]; T];
            let pair_bytes = 2 * TILE_ROWS * Format::BYTES;
            let tile_bytes = Format::tile_bytes(self.columns);
            for k in (0..self.columns / 2 * 2).step_by(2) {
                let mut weights = [[S::zero(); 2]; W];
                for (tile, weights) in weights.iter_mut().enumerate() {
                    let tile = self.tiles.add(tile * tile_bytes);
                    *weights = Format::pair::<S>(tile, k);
                    if T <= PREFETCH_TOKENS {
                        let ahead = tile.wrapping_add(Format::offset(k) + PREFETCH_BYTES);
                        for line in 0..pair_bytes.div_ceil(64) {
                            S::prefetch(ahead.wrapping_add(64 * line));
                        }
                    }
                }
                for (t, sums) in sums.iter_mut().enumerate() {
                    let x = self.input.add(t * self.columns + k);
                    let (first, second) = (S::splat(*x), S::splat(*x.add(1)));
                    for (sum, weights) in sums.iter_mut().zip(&weights) {
                        *sum = S::fma(weights[1], second, S::fma(weights[0], first, *sum));
                    }
                }
            }
            if self.columns % 2 == 1 {
                let k = self.columns - 1;
                for (t, sums) in sums.iter_mut().enumerate() {
                    let x = S::splat(*self.input.add(t * self.columns + k));
                    for (tile, sum) in sums.iter_mut().enumerate() {
                        let last = Format::column::<S>(self.tiles.add(tile * tile_bytes), k);
                        *sum = S::fma(last, x, *sum);
                    }
                }
            }
            for (t, sums) in sums.iter().enumerate() {
                for (tile, sum) in sums.iter().enumerate() {
                    let out = self.out.add(t * self.stride + tile * TILE_ROWS);
                    let rows = (self.rows - tile * TILE_ROWS).min(TILE_ROWS);
                    if rows == TILE_ROWS {
                        S::store(out, *sum);
                    } else {
                        let mut spill = [0f32; TILE_ROWS];
                        S::store(spill.as_mut_ptr(), *sum);
                        std::ptr::copy_nonoverlapping(spill.as_ptr(), out, rows);
                    }
                }
            }
        }
        T
    }
}
