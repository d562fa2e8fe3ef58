//! Formats whose blocks have 256 values: eight parts of 32, with scales of their own below those of the block.

use std::marker::PhantomData;

use super::{
    BIT_PLANE, HALF_ROW, NIBBLES, SIX_BIT, SIX_BIT_SCALES, TILE_ROWS, TWO_BITS, TileFormat, nibbles,
    selected_integers, six_bit_pairs, two_bits, with_fifth_bits,
};
use crate::cpu::simd::{Blocks, Simd};
use crate::dequantize::IQ4_INTEGERS;

#[derive(Clone, Copy)]
pub(crate) struct Q2K;
#[derive(Clone, Copy)]
pub(crate) struct Q3K;
#[derive(Clone, Copy)]
pub(crate) struct Q6K;
#[derive(Clone, Copy)]
pub(crate) struct Iq4Xs;
/// Q4_K, or Q5_K with its plane of fifth bits.
#[derive(Clone, Copy)]
pub(crate) struct SixBit<High: Copy>(PhantomData<High>);
#[derive(Clone, Copy)]
pub(crate) struct NoHigh;
#[derive(Clone, Copy)]
pub(crate) struct OneHigh;

pub(crate) type Q4K = SixBit<NoHigh>;
pub(crate) type Q5K = SixBit<OneHigh>;

impl Q2K {
    const PART: usize = 2 * TILE_ROWS + TWO_BITS;
    const GROUP: usize = 2 * HALF_ROW + 8 * Self::PART;

    /// Returns the start of a block.
    ///
    /// # Safety
    /// The conditions of [`TileFormat::integers`] hold.
    #[inline(always)]
    unsafe fn part(tile: *const u8, block: usize) -> *const u8 {
        // SAFETY: guaranteed by the caller.
        unsafe { tile.add(block / 8 * Self::GROUP + 2 * HALF_ROW + block % 8 * Self::PART) }
    }
}

impl Blocks for Q2K {
    const HALVES: bool = true;
    const LARGEST: u8 = 3;

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: guaranteed by the caller.
        unsafe { two_bits::<S>(Self::part(tile, block).add(2 * TILE_ROWS)) }
    }
}

impl TileFormat for Q2K {
    const BLOCK_BYTES: usize = Self::GROUP / 8;

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: guaranteed by the caller; the arrays hold 16 bytes.
        unsafe {
            let group = tile.add(block / 8 * Self::GROUP);
            let (scale, min) = (S::load_f16(group.cast()), S::load_f16(group.add(HALF_ROW).cast()));
            let packed = Self::part(tile, block).cast::<[[u64; 2]; 2]>().read_unaligned();
            let (low, high) = (four_bit_pairs::<S>(packed[0]), four_bit_pairs::<S>(packed[1]));
            [
                (S::mul(scale, low.0), S::sub(S::zero(), S::mul(min, low.1))),
                (S::mul(scale, high.0), S::sub(S::zero(), S::mul(min, high.1))),
            ]
        }
    }
}

impl Q3K {
    const PART: usize = SIX_BIT + TWO_BITS + BIT_PLANE;
    const GROUP: usize = HALF_ROW + 8 * Self::PART;

    /// Returns the start of a block.
    ///
    /// # Safety
    /// The conditions of [`TileFormat::integers`] hold.
    #[inline(always)]
    unsafe fn part(tile: *const u8, block: usize) -> *const u8 {
        // SAFETY: guaranteed by the caller.
        unsafe { tile.add(block / 8 * Self::GROUP + HALF_ROW + block % 8 * Self::PART) }
    }
}

impl Blocks for Q3K {
    const HALVES: bool = true;
    const LARGEST: u8 = 7;

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let at = Self::part(tile, block).add(SIX_BIT);
            let low = two_bits::<S>(at);
            let mask = S::splat_i8(0x04);
            let high = S::load_i(at.add(TWO_BITS));
            [
                S::or(low[0], S::and(S::shl::<2>(high), mask)),
                S::or(low[1], S::and(S::shl::<1>(high), mask)),
                S::or(low[2], S::and(high, mask)),
                S::or(low[3], S::and(S::shr::<1>(high), mask)),
                S::or(low[4], S::and(S::shr::<2>(high), mask)),
                S::or(low[5], S::and(S::shr::<3>(high), mask)),
                S::or(low[6], S::and(S::shr::<4>(high), mask)),
                S::or(low[7], S::and(S::shr::<5>(high), mask)),
            ]
        }
    }
}

impl TileFormat for Q3K {
    const BLOCK_BYTES: usize = Self::GROUP / 8;

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let scale = S::load_f16(tile.add(block / 8 * Self::GROUP).cast());
            let (first, second) = six_bit_pairs::<S>(Self::part(tile, block));
            let first = S::mul(scale, S::sub(first, S::splat(32.0)));
            let second = S::mul(scale, S::sub(second, S::splat(32.0)));
            let four = S::splat(-4.0);
            [(first, S::mul(first, four)), (second, S::mul(second, four))]
        }
    }
}

impl Blocks for Q6K {
    const HALVES: bool = true;
    const LARGEST: u8 = 63;
    const ZERO: Option<u8> = Some(32);

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: 256 values are 32 + 8 * 416 bytes; the rest is guaranteed by the caller.
        unsafe {
            let at = tile.add((block / 8) * 3360 + 32 + (block % 8) * 416 + 32);
            let low = nibbles::<S>(at);
            let mask = S::splat_i8(0x30);
            let high = [S::load_i(at.add(NIBBLES)), S::load_i(at.add(NIBBLES + 64))];
            [
                S::or(low[0], S::and(S::shl::<4>(high[0]), mask)),
                S::or(low[1], S::and(S::shl::<2>(high[0]), mask)),
                S::or(low[2], S::and(high[0], mask)),
                S::or(low[3], S::and(S::shr::<2>(high[0]), mask)),
                S::or(low[4], S::and(S::shl::<4>(high[1]), mask)),
                S::or(low[5], S::and(S::shl::<2>(high[1]), mask)),
                S::or(low[6], S::and(high[1], mask)),
                S::or(low[7], S::and(S::shr::<2>(high[1]), mask)),
            ]
        }
    }
}

impl TileFormat for Q6K {
    const BLOCK_BYTES: usize = 420;

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: as above.
        unsafe {
            let group = tile.add((block / 8) * 3360);
            let scale = S::load_f16(group.cast());
            let at = group.add(32 + (block % 8) * 416);
            let first = S::mul(scale, S::load_i8(at.cast()));
            let second = S::mul(scale, S::load_i8(at.add(16).cast()));
            [(first, S::mul(first, S::splat(-32.0))), (second, S::mul(second, S::splat(-32.0)))]
        }
    }
}

/// The plane of fifth bits, whose size determines the offsets in Q4_K and Q5_K tiles.
pub(crate) trait HighPlane: Copy {
    const BYTES: usize;
    const GROUP: usize = 2 * HALF_ROW + 8 * (SIX_BIT + NIBBLES + Self::BYTES);
}
impl HighPlane for NoHigh {
    const BYTES: usize = 0;
}
impl HighPlane for OneHigh {
    const BYTES: usize = BIT_PLANE;
}

impl<High: HighPlane> SixBit<High> {
    /// Returns the start of a block.
    ///
    /// # Safety
    /// The conditions of [`TileFormat::integers`] hold.
    #[inline(always)]
    unsafe fn part(tile: *const u8, block: usize) -> *const u8 {
        // SAFETY: the caller guarantees that the block is inside the tile.
        unsafe {
            tile.add(
                (block / 8) * High::GROUP + 2 * HALF_ROW + (block % 8) * (SIX_BIT + NIBBLES + High::BYTES),
            )
        }
    }
}

impl<High: HighPlane> Blocks for SixBit<High> {
    const HALVES: bool = false;
    const LARGEST: u8 = if High::BYTES == 0 { 15 } else { 31 };

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let at = Self::part(tile, block).add(SIX_BIT);
            let low = nibbles::<S>(at);
            if High::BYTES == 0 {
                return low;
            }
            with_fifth_bits::<S>(low, at.add(NIBBLES))
        }
    }
}

impl<High: HighPlane> TileFormat for SixBit<High> {
    const BLOCK_BYTES: usize = High::GROUP / 8;

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: guaranteed by the caller; the arrays hold 16 bytes.
        unsafe {
            let group = tile.add((block / 8) * High::GROUP);
            let (scale, min) = six_bit_pairs::<S>(Self::part(tile, block));
            let scale = S::mul(S::load_f16(group.cast()), scale);
            let min = S::mul(S::load_f16(group.add(HALF_ROW).cast()), min);
            [(scale, S::sub(S::zero(), min)); 2]
        }
    }
}

impl Iq4Xs {
    const PART: usize = SIX_BIT_SCALES + NIBBLES;
    const GROUP: usize = HALF_ROW + 8 * Self::PART;

    /// Returns the start of a block.
    ///
    /// # Safety
    /// The conditions of [`TileFormat::integers`] hold.
    #[inline(always)]
    unsafe fn part(tile: *const u8, block: usize) -> *const u8 {
        // SAFETY: guaranteed by the caller.
        unsafe { tile.add(block / 8 * Self::GROUP + HALF_ROW + block % 8 * Self::PART) }
    }
}

impl Blocks for Iq4Xs {
    const HALVES: bool = false;
    const LARGEST: u8 = 255;
    const ZERO: Option<u8> = Some(128);

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: guaranteed by the caller.
        unsafe { selected_integers::<S>(&IQ4_INTEGERS, Self::part(tile, block).add(SIX_BIT_SCALES)) }
    }
}

impl TileFormat for Iq4Xs {
    const BLOCK_BYTES: usize = Self::GROUP / 8;

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: guaranteed by the caller; the array holds 16 bytes.
        unsafe {
            let scale = S::load_f16(tile.add(block / 8 * Self::GROUP).cast());
            let at = Self::part(tile, block);
            let low = at.cast::<u64>().read_unaligned();
            let high = u64::from(at.add(8).cast::<u32>().read_unaligned());
            let pair = |shift: u32| {
                let four = |shift: u32| (high >> shift) & 0x0303_0303;
                (four(shift) | four(shift + 2) << 32) << 4
            };
            let own = [low & 0x0f0f_0f0f_0f0f_0f0f | pair(0), (low >> 4) & 0x0f0f_0f0f_0f0f_0f0f | pair(4)];
            let scale = S::mul(scale, S::sub(S::load_i8(own.as_ptr().cast()), S::splat(32.0)));
            [(scale, S::mul(scale, S::splat(-128.0))); 2]
        }
    }
}

/// Splits bytes into their lower and upper 4 bits, one of each for 16 rows.
///
/// # Safety
/// It is called inside a dispatched kernel.
#[inline(always)]
unsafe fn four_bit_pairs<S: Simd>(packed: [u64; 2]) -> (S::F, S::F) {
    const MASK: u64 = 0x0f0f_0f0f_0f0f_0f0f;
    let low = [packed[0] & MASK, packed[1] & MASK];
    let high = [(packed[0] >> 4) & MASK, (packed[1] >> 4) & MASK];
    // SAFETY: the arrays hold 16 bytes.
    unsafe { (S::load_i8(low.as_ptr().cast()), S::load_i8(high.as_ptr().cast())) }
}
