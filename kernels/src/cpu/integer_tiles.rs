//! Products of quantized weight tiles with quantized activations, the core operation of prefill and decode.
//!
//! Invariant: each output depends only on its token and its row. The integers of a block of 32 columns are summed
//! exactly. The output is one chain of multiply-adds over the blocks in order, which adds for each block the dot product
//! and then the minimum term, or those of both halves. A tier that subtracts the zero of a format from its integers needs no
//! minimum term. The numbers of tokens in the group and of tiles beside each other do not affect the result.

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
        let mut row = 0;
        // SAFETY: tiles, groups and outputs are as long as the fields say; a partial tile goes through `spill`.
        unsafe {
            while row < self.rows {
                let rows = self.rows - row;
                let tiles = if S::MANY_REGISTERS && rows >= 2 * TILE_ROWS { 2 } else { 1 };
                let rows = rows.min(tiles * TILE_ROWS);
                let mut token = 0;
                for &(group, tokens) in self.groups {
                    let out = self.out.add(token * self.stride + row);
                    let whole = rows == tiles * TILE_ROWS;
                    let (to, stride) =
                        if whole { (out, self.stride) } else { (spill.as_mut_ptr(), TILE_ROWS) };
                    let product = TileProduct::<Format> {
                        tile: self.tiles.add(row / TILE_ROWS * self.tile_bytes),
                        tile_bytes: self.tile_bytes,
                        blocks: self.blocks,
                        group,
                        tokens,
                        is_first: token == 0,
                        out: to,
                        stride,
                        format: PhantomData,
                    };
                    if S::MANY_REGISTERS {
                        product.wide_group::<S>(tiles);
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
                    token += tokens;
                }
                row += rows;
            }
        }
    }
}

/// Multiplies one tile, or several, with one group.
struct TileProduct<Format> {
    tile: *const u8,
    tile_bytes: usize,
    blocks: usize,
    group: GroupView,
    /// Number of tokens in the group.
    tokens: usize,
    /// The group is the first one that these tiles are multiplied with.
    is_first: bool,
    out: *mut f32,
    stride: usize,
    format: PhantomData<Format>,
}

impl<Format: TileFormat> TileProduct<Format> {
    /// Computes the products of one or two tiles with the group's tokens.
    ///
    /// # Safety
    /// The conditions of [`Self::wide`] hold for all of the group's tokens.
    #[inline(always)]
    unsafe fn wide_group<S: Simd>(&self, tiles: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if (tiles, self.tokens) == (2, 8) {
                // Two tiles share each activation that is loaded.
                self.wide::<S, 2, 4>(0);
                return self.wide::<S, 2, 4>(4);
            }
            for tile in 0..tiles {
                let tile = TileProduct::<Format> {
                    tile: self.tile.add(tile * self.tile_bytes),
                    out: self.out.add(tile * TILE_ROWS),
                    ..*self
                };
                match self.tokens {
                    1 => tile.wide::<S, 1, 1>(0),
                    2 => tile.wide::<S, 1, 2>(0),
                    3 => tile.wide::<S, 1, 3>(0),
                    4 => tile.wide::<S, 1, 4>(0),
                    5 => tile.wide::<S, 1, 5>(0),
                    6 => tile.wide::<S, 1, 6>(0),
                    7 => tile.wide::<S, 1, 7>(0),
                    _ => tile.wide::<S, 1, 8>(0),
                }
            }
        }
    }

    /// Computes the products of `N` tiles with `T` of the group's tokens, from `first` on, with many registers. The integers are
    /// taken from memory when they are needed, so that the sums stay in registers.
    ///
    /// # Safety
    /// Each tile has `blocks` blocks, the group has the tokens, with `blocks` blocks each, and `out` has room for 16 values of each
    /// tile per token.
    #[inline(always)]
    unsafe fn wide<S: Simd, const N: usize, const T: usize>(&self, first: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            // Two independent chains halve the latency of few sums.
            let has_two_chains = Format::HALVES || N * T <= 4;
            let mut sums = [[S::zero(); T]; N];
            for block in 0..self.blocks {
                let offset = block * self.tokens + first;
                if N == 1 || (self.is_first && first == 0) {
                    self.prefetch::<S, N>(block);
                }
                let mut low = [[S::zero_i(); T]; N];
                let mut high = low;
                if Format::ZERO.is_some() {
                    for t in 0..T {
                        let whole = starting_dot::<S, Format>(self.group.totals.add(offset + t));
                        let half = starting_dot::<S, Format>(self.group.low_totals.add(offset + t));
                        for n in 0..N {
                            low[n][t] = if Format::HALVES { half } else { whole };
                            high[n][t] = if Format::HALVES { S::sub_i(whole, half) } else { S::zero_i() };
                        }
                    }
                }
                let bytes = self.group.bytes.add(offset * 32);
                macro_rules! step {
                    ($step:tt) => {
                        let mut registers = [[S::zero_i(); 2]; N];
                        for n in 0..N {
                            let all = Format::integers::<S>(self.tile.add(n * self.tile_bytes), block);
                            registers[n] = [all[$step], all[$step + 4]];
                        }
                        for t in 0..T {
                            let at = bytes.add(32 * t + 4 * $step);
                            for n in 0..N {
                                low[n][t] = S::dot(low[n][t], registers[n][0], at);
                            }
                            for n in 0..N {
                                let sum = if has_two_chains { &mut high[n][t] } else { &mut low[n][t] };
                                *sum = S::dot(*sum, registers[n][1], at.add(16));
                            }
                        }
                    };
                }
                step!(0);
                step!(1);
                step!(2);
                step!(3);
                for n in 0..N {
                    let scales = Format::scales::<S>(self.tile.add(n * self.tile_bytes), block);
                    for t in 0..T {
                        let mut dots = [low[n][t], high[n][t]];
                        if has_two_chains && !Format::HALVES {
                            dots[0] = S::add_i(low[n][t], high[n][t]);
                        }
                        self.add_block::<S>(
                            &mut sums[n][t],
                            dots,
                            &scales,
                            offset + t,
                            Format::ZERO.is_none(),
                        );
                    }
                }
            }
            for (n, sums) in sums.iter().enumerate() {
                for (t, sum) in sums.iter().enumerate() {
                    S::store(self.out.add((first + t) * self.stride + n * TILE_ROWS), *sum);
                }
            }
        }
    }

    /// Prefetches what is multiplied after a block of `N` tiles.
    ///
    /// # Safety
    /// It is called inside a dispatched kernel.
    #[inline(always)]
    unsafe fn prefetch<S: Simd, const N: usize>(&self, block: usize) {
        let distance = if N == 1 { PREFETCH_BYTES } else { N * self.tile_bytes };
        for n in 0..N {
            let ahead = self.tile.wrapping_add(n * self.tile_bytes + block * Format::BLOCK_BYTES + distance);
            for line in 0..Format::BLOCK_BYTES.div_ceil(64) {
                // SAFETY: prefetched addresses need not be readable.
                unsafe { S::prefetch(ahead.wrapping_add(line * 64)) };
            }
        }
    }

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
                self.prefetch::<S, 1>(block);
                let dots = S::dots::<Format, T>(self.tile, block, self.group.bytes.add(offset * 32));
                let scales = Format::scales::<S>(self.tile, block);
                for (t, (sum, dots)) in sums.iter_mut().zip(dots).enumerate() {
                    self.add_block::<S>(sum, dots, &scales, offset + t, has_minimum);
                }
            }
            for (t, sum) in sums.iter().enumerate() {
                S::store(self.out.add(t * self.stride), *sum);
            }
        }
    }

    /// Adds the dot products of a block of a token, at `offset` of the group, to the token's sum.
    ///
    /// # Safety
    /// The group has the block; call inside a dispatched kernel.
    #[inline(always)]
    unsafe fn add_block<S: Simd>(
        &self,
        sum: &mut S::F,
        dots: [S::I; 2],
        scales: &[(S::F, S::F); 2],
        offset: usize,
        has_minimum: bool,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let scale = S::splat(*self.group.scales.add(offset));
            if Format::HALVES {
                let (low, high) = (S::to_f32(dots[0]), S::to_f32(dots[1]));
                let both = S::fma(low, scales[0].0, S::mul(high, scales[1].0));
                *sum = S::fma(both, scale, *sum);
                if has_minimum {
                    let total = *self.group.sums.add(offset);
                    let low_total = *self.group.low_sums.add(offset);
                    *sum = S::fma(scales[0].1, S::splat(low_total), *sum);
                    *sum = S::fma(scales[1].1, S::splat(total - low_total), *sum);
                }
            } else {
                *sum = S::fma(S::mul(S::to_f32(dots[0]), scales[0].0), scale, *sum);
                if has_minimum {
                    *sum = S::fma(scales[0].1, S::splat(*self.group.sums.add(offset)), *sum);
                }
            }
        }
    }
}

/// Returns the dot product of a block's zeros, to which those of its integers are added, from -8 times the sum of the activations.
///
/// # Safety
/// The format has a zero, and `total` is valid; call inside a dispatched kernel.
#[inline(always)]
unsafe fn starting_dot<S: Simd, Format: TileFormat>(total: *const i32) -> S::I {
    const {
        assert!(
            matches!(Format::ZERO, None | Some(8 | 16 | 32 | 128)),
            "no shift turns -8 times the sum of the activations into -ZERO times the sum"
        );
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        let eight = S::splat_4(total.cast());
        match Format::ZERO {
            Some(16) => S::shl::<1>(eight),
            Some(32) => S::shl::<2>(eight),
            Some(128) => S::shl::<4>(eight),
            _ => eight,
        }
    }
}

/// Converts one row of a tile back to floats.
pub(crate) struct UnpackRow<'a, Format> {
    pub tile: *const u8,
    /// The index of the row in the tile.
    pub row: usize,
    /// A whole number of blocks, which the tile has.
    pub out: &'a mut [f32],
    pub format: PhantomData<Format>,
}

impl<Format: TileFormat> Kernel for UnpackRow<'_, Format> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut lanes = [0f32; TILE_ROWS];
        // One-hot activations extract the integers with the same dot product that the kernels use.
        let mut one_hot = [0i8; 4];
        for (block, out) in self.out.chunks_exact_mut(32).enumerate() {
            // SAFETY: the tile has the block; the arrays have the lengths that the loads need.
            unsafe {
                let weights = Format::integers::<S>(self.tile, block);
                let scales = Format::scales::<S>(self.tile, block);
                for (k, out) in out.iter_mut().enumerate() {
                    one_hot[k % 4] = 1;
                    let (scale, min) = scales[k / 16];
                    let integer = S::to_f32(S::dot(S::zero_i(), weights[k / 4], one_hot.as_ptr()));
                    S::store(lanes.as_mut_ptr(), S::fma(integer, scale, min));
                    one_hot[k % 4] = 0;
                    *out = lanes[self.row % TILE_ROWS];
                }
            }
        }
    }
}
