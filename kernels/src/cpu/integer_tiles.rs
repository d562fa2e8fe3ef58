//! Products of quantized weight tiles with quantized activations, the core operation of prefill and decode.
//!
//! Invariant: each output depends only on its token and its row. The integers of a block of 32 columns are summed
//! exactly. The output is one chain of multiply-adds over the blocks in order, which adds for each block the dot product
//! and then the minimum term, or those of both halves. A tier that centers the integers needs no minimum term. The number
//! of tokens in the group does not affect the result.

use std::marker::PhantomData;

use super::Kernel;
use super::quantize::GroupView;
use super::simd::Simd;
use super::tile_format::{PREFETCH_BYTES, TILE_ROWS, TileFormat};

/// Multiplies consecutive tiles with consecutive groups of up to 8 tokens.
pub(crate) struct TileRange<'a, Format> {
    pub tiles: *const u8,
    pub tile_bytes: usize,
    pub blocks: usize,
    /// Number of rows, starting at the first tile. The last tile may be partial.
    pub rows: usize,
    /// A view of each group and the number of tokens in it.
    pub groups: &'a [(GroupView, usize)],
    /// Output of the first row and token. Consecutive tokens are `stride` values apart.
    pub out: *mut f32,
    pub stride: usize,
    pub format: PhantomData<Format>,
}

impl<Format: TileFormat> Kernel for TileRange<'_, Format> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut spill = [0f32; 8 * TILE_ROWS];
        // SAFETY: tiles, groups and outputs are as long as the fields say; a partial tile goes through `spill`.
        unsafe {
            for tile in 0..self.rows.div_ceil(TILE_ROWS) {
                let rows = (self.rows - tile * TILE_ROWS).min(TILE_ROWS);
                let mut out = self.out.add(tile * TILE_ROWS);
                for &(group, tokens) in self.groups {
                    let whole = rows == TILE_ROWS;
                    let (to, stride) =
                        if whole { (out, self.stride) } else { (spill.as_mut_ptr(), TILE_ROWS) };
                    let product = TileProduct::<Format> {
                        tile: self.tiles.add(tile * self.tile_bytes),
                        blocks: self.blocks,
                        group,
                        out: to,
                        stride,
                        format: PhantomData,
                    };
                    if S::MANY_REGISTERS {
                        match tokens {
                            1 => product.compute::<S, 1>(),
                            2 => product.compute::<S, 2>(),
                            3 => product.compute::<S, 3>(),
                            4 => product.compute::<S, 4>(),
                            5 => product.compute::<S, 5>(),
                            6 => product.compute::<S, 6>(),
                            7 => product.compute::<S, 7>(),
                            _ => product.compute::<S, 8>(),
                        }
                    } else {
                        match tokens {
                            1 => product.compute::<S, 1>(),
                            2 => product.compute::<S, 2>(),
                            3 => product.compute::<S, 3>(),
                            _ => product.compute::<S, 4>(),
                        }
                    }
                    if !whole {
                        for t in 0..tokens {
                            let from = spill.as_ptr().add(t * TILE_ROWS);
                            std::ptr::copy_nonoverlapping(from, out.add(t * self.stride), rows);
                        }
                    }
                    out = out.add(tokens * self.stride);
                }
            }
        }
    }
}

/// Multiplies one tile with one group.
struct TileProduct<Format> {
    tile: *const u8,
    blocks: usize,
    group: GroupView,
    out: *mut f32,
    stride: usize,
    format: PhantomData<Format>,
}

impl<Format: TileFormat> TileProduct<Format> {
    /// Computes the products of the group's `T` tokens.
    ///
    /// # Safety
    /// The tile has `blocks` blocks, the group has `T` tokens of `blocks` blocks, and `out` has room for 16 values per token.
    #[inline(always)]
    unsafe fn compute<S: Simd, const T: usize>(&self) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let has_minimum = !S::CENTERED_DOTS || Format::LARGEST <= 127;
            let mut sums = [S::zero(); T];
            for block in 0..self.blocks {
                let offset = block * T;
                let ahead = self.tile.wrapping_add((block * Format::BLOCK_BYTES) + PREFETCH_BYTES);
                for line in 0..Format::BLOCK_BYTES.div_ceil(64) {
                    S::prefetch(ahead.wrapping_add(line * 64));
                }
                let dots = S::dots::<Format, T>(self.tile, block, self.group.bytes.add(offset * 32));
                let scales = Format::scales::<S>(self.tile, block);
                for (t, (sum, dots)) in sums.iter_mut().zip(dots).enumerate() {
                    let scale = S::splat(*self.group.scales.add(offset + t));
                    let total = *self.group.sums.add(offset + t);
                    if Format::HALVES {
                        let low_total = *self.group.low_sums.add(offset + t);
                        let (low, high) = (S::to_f32(dots[0]), S::to_f32(dots[1]));
                        let both = S::fma(low, scales[0].0, S::mul(high, scales[1].0));
                        *sum = S::fma(both, scale, *sum);
                        if has_minimum {
                            *sum = S::fma(scales[0].1, S::splat(low_total), *sum);
                            *sum = S::fma(scales[1].1, S::splat(total - low_total), *sum);
                        }
                    } else {
                        *sum = S::fma(S::mul(S::to_f32(dots[0]), scales[0].0), scale, *sum);
                        if has_minimum {
                            *sum = S::fma(scales[0].1, S::splat(total), *sum);
                        }
                    }
                }
            }
            for (t, sum) in sums.iter().enumerate() {
                S::store(self.out.add(t * self.stride), *sum);
            }
        }
    }
}

/// Converts one block of a tile back to floats: `out[row][32]`.
pub(crate) struct UnpackBlock<Format> {
    pub tile: *const u8,
    pub block: usize,
    pub format: PhantomData<Format>,
}

impl<Format: TileFormat> Kernel for UnpackBlock<Format> {
    type Output = [[f32; 32]; 16];

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Self::Output {
        let mut out = [[0f32; 32]; 16];
        let mut lanes = [0f32; 16];
        // One-hot activations extract the integers with the same dot product that the kernels use.
        let mut one_hot = [0i8; 4];
        // SAFETY: the tile has the block; the arrays have the lengths that the loads need.
        unsafe {
            let weights = Format::integers::<S>(self.tile, self.block);
            let scales = Format::scales::<S>(self.tile, self.block);
            for k in 0..32 {
                one_hot[k % 4] = 1;
                let (scale, min) = scales[k / 16];
                let integer = S::to_f32(S::dot(S::zero_i(), weights[k / 4], one_hot.as_ptr()));
                S::store(lanes.as_mut_ptr(), S::fma(integer, scale, min));
                one_hot[k % 4] = 0;
                for (row, lane) in out.iter_mut().zip(lanes) {
                    row[k] = lane;
                }
            }
        }
        out
    }
}
