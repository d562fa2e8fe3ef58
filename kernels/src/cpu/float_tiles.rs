//! Products of float weight tiles with `f32` activations.
//!
//! Invariant: tiles of 16 rows store value `k` of every row contiguously, or in BF16 values `k` and `k + 1`. An output
//! is one chain of multiply-adds over the columns in order, whatever other tokens and tiles are computed beside it.

use std::marker::PhantomData;

use super::Kernel;
use super::simd::Simd;
use super::tile_format::{PREFETCH_BYTES, PREFETCH_TOKENS, TILE_ROWS};

/// A float format of weights, of which 16 are loaded at a time.
pub(crate) trait FloatFormat: Copy {
    const BYTES: usize;

    /// Loads 16 values.
    ///
    /// # Safety
    /// `from` is valid for 16 values; call inside a dispatched kernel.
    unsafe fn load<S: Simd>(from: *const u8) -> S::F;

    /// Loads two consecutive columns of 16 rows.
    ///
    /// # Safety
    /// `from` is valid for 32 values; call inside a dispatched kernel.
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(from: *const u8) -> [S::F; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe { [Self::load::<S>(from), Self::load::<S>(from.add(TILE_ROWS * Self::BYTES))] }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct F32;
#[derive(Clone, Copy)]
pub(crate) struct F16;
#[derive(Clone, Copy)]
pub(crate) struct BF16;

impl FloatFormat for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: guaranteed by the caller.
        unsafe { S::load(from.cast()) }
    }
}

impl FloatFormat for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: guaranteed by the caller.
        unsafe { S::load_f16(from.cast()) }
    }
}

impl FloatFormat for BF16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: guaranteed by the caller.
        unsafe { S::load_bf16(from.cast()) }
    }

    #[inline(always)]
    unsafe fn load_pair<S: Simd>(from: *const u8) -> [S::F; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe { S::load_bf16_pairs(from.cast()) }
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
                        tiles: self.tiles.add(row * self.columns * Format::BYTES),
                        columns: self.columns,
                        rows,
                        input: self.input.add(token * self.columns),
                        out: self.out.add(token * self.stride + row),
                        stride: self.stride,
                        format: PhantomData,
                    };
                    token += match (tiles, self.tokens - token) {
                        (4, _) => product.compute::<S, 4, 1>(),
                        (2, 8..) => product.compute::<S, 2, 8>(),
                        (2, 4..) => product.compute::<S, 2, 4>(),
                        (2, 2..) => product.compute::<S, 2, 2>(),
                        (2, _) => product.compute::<S, 2, 1>(),
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
            let column_bytes = TILE_ROWS * Format::BYTES;
            let tile_bytes = column_bytes * self.columns;
            for k in (0..self.columns / 2 * 2).step_by(2) {
                let mut weights = [[S::zero(); 2]; W];
                for (tile, weights) in weights.iter_mut().enumerate() {
                    let from = self.tiles.add(tile * tile_bytes + k * column_bytes);
                    *weights = Format::load_pair::<S>(from);
                    if T <= PREFETCH_TOKENS {
                        let ahead = from.wrapping_add(PREFETCH_BYTES);
                        for line in 0..2 * column_bytes / 64 {
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
                        let last = self.tiles.add(tile * tile_bytes + k * column_bytes);
                        *sum = S::fma(Format::load::<S>(last), x, *sum);
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
