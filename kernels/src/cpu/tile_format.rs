//! The packed layout of quantized weights: tiles of 16 rows, so that one dot-product instruction advances 16 outputs.
//!
//! Invariant: a tile takes exactly as many bytes as its 16 rows. In a block of 32 values, value `4 g + j` of row `r` is
//! byte `4 r + j` of register `g`; nibbles hold registers `z` (low) and `z + 4` (high). Rows past the end are zeros.

use std::marker::PhantomData;

use super::simd::Simd;

/// Number of rows per tile.
pub(crate) const TILE_ROWS: usize = 16;

/// Reads the tiles of one format. `block` counts blocks of 32 values along the row.
pub(crate) trait TileFormat: Copy {
    /// Average size in bytes of 32 columns of a tile.
    const BLOCK_BYTES: usize;
    /// Whether the two 16-value halves of a block have separate scales.
    const HALVES: bool;
    /// Whether integers may exceed 127.
    const WIDE: bool;

    /// Returns the unsigned integers of a block.
    ///
    /// # Safety
    /// `tile` holds the block; call inside a dispatched kernel.
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8];

    /// Returns `(scale, min)` for each half, where value = scale * integer + min.
    ///
    /// # Safety
    /// The conditions of `integers` hold.
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2];
}

#[derive(Clone, Copy)]
pub(crate) struct Q4_0;
#[derive(Clone, Copy)]
pub(crate) struct Q4_1;
#[derive(Clone, Copy)]
pub(crate) struct Q8_0;
#[derive(Clone, Copy)]
pub(crate) struct Q6K;
/// Q4_K, or Q5_K with its plane of fifth bits.
#[derive(Clone, Copy)]
pub(crate) struct SixBit<High: Copy>(PhantomData<High>);
#[derive(Clone, Copy)]
pub(crate) struct NoHigh;
#[derive(Clone, Copy)]
pub(crate) struct OneHigh;

pub(crate) type Q4K = SixBit<NoHigh>;
pub(crate) type Q5K = SixBit<OneHigh>;

/// Size in bytes of 32 columns of 4-bit integers.
pub(crate) const NIBBLES: usize = 256;
/// Size in bytes of 16 half-precision numbers.
pub(crate) const HALF_ROW: usize = 2 * TILE_ROWS;
/// Size in bytes of the 6-bit scales and mins of 16 rows.
pub(crate) const SIX_BIT: usize = 24;

impl TileFormat for Q4_0 {
    const BLOCK_BYTES: usize = 288;
    const HALVES: bool = false;
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: a block is 288 bytes; the rest is guaranteed by the caller.
        unsafe { nibbles::<S>(tile.add(block * 288)) }
    }

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: as above.
        let scale = unsafe { S::load_f16(tile.add(block * 288 + NIBBLES).cast()) };
        // SAFETY: register arithmetic.
        [(scale, unsafe { S::mul(scale, S::splat(-8.0)) }); 2]
    }
}

impl TileFormat for Q4_1 {
    const BLOCK_BYTES: usize = 320;
    const HALVES: bool = false;
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: a block is 320 bytes; the rest is guaranteed by the caller.
        unsafe { nibbles::<S>(tile.add(block * 320)) }
    }

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: as above.
        unsafe {
            let at = tile.add(block * 320 + NIBBLES);
            [(S::load_f16(at.cast()), S::load_f16(at.add(HALF_ROW).cast())); 2]
        }
    }
}

impl TileFormat for Q8_0 {
    const BLOCK_BYTES: usize = 544;
    const HALVES: bool = false;
    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: a block is 544 bytes; the rest is guaranteed by the caller.
        unsafe { std::array::from_fn(|g| S::load_i(tile.add(block * 544 + g * 64))) }
    }

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: as above.
        unsafe {
            let scale = S::load_f16(tile.add(block * 544 + 512).cast());
            [(scale, S::mul(scale, S::splat(-128.0))); 2]
        }
    }
}

impl TileFormat for Q6K {
    const BLOCK_BYTES: usize = 420;
    const HALVES: bool = true;
    const WIDE: bool = false;

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
    const BYTES: usize = 64;
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

impl<High: HighPlane> TileFormat for SixBit<High> {
    const BLOCK_BYTES: usize = High::GROUP / 8;
    const HALVES: bool = false;
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let at = Self::part(tile, block).add(SIX_BIT);
            let low = nibbles::<S>(at);
            if High::BYTES == 0 {
                return low;
            }
            let mask = S::splat_i8(0x10);
            let high = S::load_i(at.add(NIBBLES));
            [
                S::or(low[0], S::and(S::shl::<4>(high), mask)),
                S::or(low[1], S::and(S::shl::<3>(high), mask)),
                S::or(low[2], S::and(S::shl::<2>(high), mask)),
                S::or(low[3], S::and(S::shl::<1>(high), mask)),
                S::or(low[4], S::and(high, mask)),
                S::or(low[5], S::and(S::shr::<1>(high), mask)),
                S::or(low[6], S::and(S::shr::<2>(high), mask)),
                S::or(low[7], S::and(S::shr::<3>(high), mask)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: guaranteed by the caller; the arrays hold 16 bytes.
        unsafe {
            let group = tile.add((block / 8) * High::GROUP);
            let packed = Self::part(tile, block).cast::<[u64; 3]>().read_unaligned();
            let low = |word: u64| (word >> 6) & 0x0303_0303_0303_0303;
            let scale = [packed[0] & 0x3f3f_3f3f_3f3f_3f3f, packed[1] & 0x3f3f_3f3f_3f3f_3f3f];
            let min = [
                low(packed[0]) | ((packed[2] & 0x0f0f_0f0f_0f0f_0f0f) << 2),
                low(packed[1]) | (((packed[2] >> 4) & 0x0f0f_0f0f_0f0f_0f0f) << 2),
            ];
            let scale = S::mul(S::load_f16(group.cast()), S::load_i8(scale.as_ptr().cast()));
            let min = S::mul(S::load_f16(group.add(HALF_ROW).cast()), S::load_i8(min.as_ptr().cast()));
            [(scale, S::sub(S::zero(), min)); 2]
        }
    }
}

/// Splits 256 bytes into eight registers of 4-bit integers.
///
/// # Safety
/// `from` is valid for 256 bytes.
#[inline(always)]
unsafe fn nibbles<S: Simd>(from: *const u8) -> [S::I; 8] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mask = S::splat_i8(15);
        let q: [S::I; 4] = std::array::from_fn(|z| S::load_i(from.add(z * 64)));
        std::array::from_fn(|g| if g < 4 { S::and(q[g], mask) } else { S::and(S::shr::<4>(q[g - 4]), mask) })
    }
}
