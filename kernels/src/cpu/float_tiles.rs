//! Products of float weight tiles with `f32` activations.
//!
//! Invariant: tiles of 16 rows store value `k` of every row contiguously. An output is the sum of four chains of
//! multiply-adds, one for each remainder of the column index modulo 4, in order; columns after the last full group of
//! four continue the first chain. The chains are added as `(0 + 1) + (2 + 3)`, whatever other tokens are in the batch.

use std::marker::PhantomData;

use super::Kernel;
use super::simd::Simd;
use super::tile_format::TILE_ROWS;

/// A float format of weights, of which 16 are loaded at a time.
pub(crate) trait FloatFormat: Copy {
    const BYTES: usize;

    /// Loads 16 values.
    ///
    /// # Safety
    /// `from` is valid for 16 values; call inside a dispatched kernel.
    unsafe fn load<S: Simd>(from: *const u8) -> S::F;
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
        let mut spill = [0f32; 4 * TILE_ROWS];
        // SAFETY: tiles, inputs and outputs are as long as the fields say; a partial tile goes through `spill`.
        unsafe {
            for tile in 0..self.rows.div_ceil(TILE_ROWS) {
                let rows = (self.rows - tile * TILE_ROWS).min(TILE_ROWS);
                let mut at = 0;
                while at < self.tokens {
                    let tokens = (self.tokens - at).min(4);
                    let out = self.out.add(at * self.stride + tile * TILE_ROWS);
                    let whole = rows == TILE_ROWS;
                    let (to, stride) =
                        if whole { (out, self.stride) } else { (spill.as_mut_ptr(), TILE_ROWS) };
                    let product = FloatProduct::<Format> {
                        tile: self.tiles.add(tile * TILE_ROWS * self.columns * Format::BYTES),
                        columns: self.columns,
                        input: self.input.add(at * self.columns),
                        out: to,
                        stride,
                        format: PhantomData,
                    };
                    match tokens {
                        1 => product.compute::<S, 1>(),
                        2 => product.compute::<S, 2>(),
                        3 => product.compute::<S, 3>(),
                        _ => product.compute::<S, 4>(),
                    }
                    if !whole {
                        for t in 0..tokens {
                            let from = spill.as_ptr().add(t * TILE_ROWS);
                            std::ptr::copy_nonoverlapping(from, out.add(t * self.stride), rows);
                        }
                    }
                    at += tokens;
                }
            }
        }
    }
}

/// Multiplies one tile with up to 4 tokens.
struct FloatProduct<Format> {
    tile: *const u8,
    columns: usize,
    input: *const f32,
    out: *mut f32,
    stride: usize,
    format: PhantomData<Format>,
}

impl<Format: FloatFormat> FloatProduct<Format> {
    /// Computes the products of `T` tokens.
    ///
    /// # Safety
    /// The tile has `columns` columns, `input` has `T` rows of `columns` values, and `out` has room for 16 values per token.
    #[inline(always)]
    unsafe fn compute<S: Simd, const T: usize>(&self) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            // Four sums per token hide the latency of the multiply-add.
            let mut sums = [[S::zero(); 4]; T];
            let step = 16 * Format::BYTES;
            let whole = self.columns / 4 * 4;
            for k in (0..whole).step_by(4) {
                for part in 0..4 {
                    let weight = Format::load::<S>(self.tile.add((k + part) * step));
                    for (t, sum) in sums.iter_mut().enumerate() {
                        let x = S::splat(*self.input.add(t * self.columns + k + part));
                        sum[part] = S::fma(weight, x, sum[part]);
                    }
                }
            }
            for k in whole..self.columns {
                let weight = Format::load::<S>(self.tile.add(k * step));
                for (t, sum) in sums.iter_mut().enumerate() {
                    sum[0] = S::fma(weight, S::splat(*self.input.add(t * self.columns + k)), sum[0]);
                }
            }
            for (t, sum) in sums.iter().enumerate() {
                let total = S::add(S::add(sum[0], sum[1]), S::add(sum[2], sum[3]));
                S::store(self.out.add(t * self.stride), total);
            }
        }
    }
}
