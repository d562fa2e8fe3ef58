//! The packed layout of quantized weights: tiles of 16 rows, so that one dot-product instruction advances 16 outputs.
//!
//! Invariant: a tile takes exactly as many bytes as its 16 rows. In a block of 32 values, value `4 g + j` of row `r` is
//! byte `4 r + j` of register `g`; nibbles hold registers `z` (low) and `z + 4` (high). Rows past the end are zeros.

mod large_blocks;
mod small_blocks;
#[cfg(test)]
mod tests;

use super::simd::{Blocks, Simd};
pub(crate) use large_blocks::{Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K};
pub(crate) use small_blocks::{Int4, Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};

/// Number of rows per tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Number of tokens up to which kernels prefetch float weights, which come from memory then.
pub(crate) const PREFETCH_TOKENS: usize = 4;
/// Distance in bytes by which weights are prefetched ahead of the products: the hardware prefetcher stops at page boundaries, so
/// the first group of tokens would wait for weights that come from memory. For the groups after it, this costs less than it gains.
/// Measured with Q4_0 in the shape of SmolLM2, with two threads and AVX-512 VNNI, against no prefetch: 8 tokens take 30 % less time,
/// 16 take 18 %, 64 take 6 % and 256 take 4 %.
pub(crate) const PREFETCH_BYTES: usize = 4096;

/// Reads the tiles of one format. `block` counts blocks of 32 values along the row. In a format whose integers may exceed 127, the
/// minimum is -128 times the scale.
pub(crate) trait TileFormat: Blocks + Copy {
    /// Average size in bytes of 32 columns of a tile.
    const BLOCK_BYTES: usize;

    /// Returns `(scale, min)` for each half, where value = scale * integer + min.
    ///
    /// # Safety
    /// The conditions of [`Blocks::integers`] hold.
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2];
}

/// Invokes `$call!` with the tile format of a `DType` that is multiplied with rounded activations.
macro_rules! with_tile_format {
    ($dtype:expr, $call:ident) => {
        match $dtype {
            $crate::DType::Q4_0 => $call!($crate::cpu::tile_format::Q4_0),
            $crate::DType::Q4_1 => $call!($crate::cpu::tile_format::Q4_1),
            $crate::DType::Q5_0 => $call!($crate::cpu::tile_format::Q5_0),
            $crate::DType::Q5_1 => $call!($crate::cpu::tile_format::Q5_1),
            $crate::DType::Q8_0 => $call!($crate::cpu::tile_format::Q8_0),
            $crate::DType::Q2K => $call!($crate::cpu::tile_format::Q2K),
            $crate::DType::Q3K => $call!($crate::cpu::tile_format::Q3K),
            $crate::DType::Iq4Nl => $call!($crate::cpu::tile_format::Iq4Nl),
            $crate::DType::Iq4Xs => $call!($crate::cpu::tile_format::Iq4Xs),
            $crate::DType::Q4K => $call!($crate::cpu::tile_format::Q4K),
            $crate::DType::Int4 => $call!($crate::cpu::tile_format::Int4),
            $crate::DType::Mxfp4 => $call!($crate::cpu::tile_format::Mxfp4),
            $crate::DType::Q5K => $call!($crate::cpu::tile_format::Q5K),
            _ => $call!($crate::cpu::tile_format::Q6K),
        }
    };
}
pub(crate) use with_tile_format;

/// Size in bytes of 32 columns of 4-bit integers.
pub(crate) const NIBBLES: usize = 256;
/// Size in bytes of 16 half-precision numbers.
pub(crate) const HALF_ROW: usize = 2 * TILE_ROWS;
/// Size in bytes of the 6-bit scales and mins of 16 rows.
pub(crate) const SIX_BIT: usize = 24;
/// Size in bytes of 6-bit scales of 16 rows.
pub(crate) const SIX_BIT_SCALES: usize = 12;
/// Size in bytes of 32 columns of 2-bit integers.
pub(crate) const TWO_BITS: usize = 128;
/// Size in bytes of one bit for each of 32 columns.
pub(crate) const BIT_PLANE: usize = 64;

/// Reads pairs of 6-bit numbers of 16 rows.
///
/// # Safety
/// `from` is valid for [`SIX_BIT`] bytes; call inside a dispatched kernel.
#[inline(always)]
unsafe fn six_bit_pairs<S: Simd>(from: *const u8) -> (S::F, S::F) {
    // SAFETY: guaranteed by the caller; the arrays hold 16 bytes.
    unsafe {
        let packed = from.cast::<[u64; 3]>().read_unaligned();
        let low = |word: u64| (word >> 6) & 0x0303_0303_0303_0303;
        let first = [packed[0] & 0x3f3f_3f3f_3f3f_3f3f, packed[1] & 0x3f3f_3f3f_3f3f_3f3f];
        let second = [
            low(packed[0]) | ((packed[2] & 0x0f0f_0f0f_0f0f_0f0f) << 2),
            low(packed[1]) | (((packed[2] >> 4) & 0x0f0f_0f0f_0f0f_0f0f) << 2),
        ];
        (S::load_i8(first.as_ptr().cast()), S::load_i8(second.as_ptr().cast()))
    }
}

/// Adds a fifth bit to 4-bit integers.
///
/// # Safety
/// `plane` is valid for [`BIT_PLANE`] bytes; call inside a dispatched kernel.
#[inline(always)]
unsafe fn with_fifth_bits<S: Simd>(low: [S::I; 8], plane: *const u8) -> [S::I; 8] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mask = S::splat_i8(0x10);
        let high = S::load_i(plane);
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

/// Splits 128 bytes into eight registers of 2-bit integers.
///
/// # Safety
/// `from` is valid for [`TWO_BITS`] bytes; call inside a dispatched kernel.
#[inline(always)]
unsafe fn two_bits<S: Simd>(from: *const u8) -> [S::I; 8] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mask = S::splat_i8(0x03);
        let words = [S::load_i(from), S::load_i(from.add(64))];
        [
            S::and(words[0], mask),
            S::and(S::shr::<2>(words[0]), mask),
            S::and(S::shr::<4>(words[0]), mask),
            S::and(S::shr::<6>(words[0]), mask),
            S::and(words[1], mask),
            S::and(S::shr::<2>(words[1]), mask),
            S::and(S::shr::<4>(words[1]), mask),
            S::and(S::shr::<6>(words[1]), mask),
        ]
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
        let (a, b) = (S::load_i(from), S::load_i(from.add(64)));
        let (c, d) = (S::load_i(from.add(128)), S::load_i(from.add(192)));
        [
            S::and(a, mask),
            S::and(b, mask),
            S::and(c, mask),
            S::and(d, mask),
            S::and(S::shr::<4>(a), mask),
            S::and(S::shr::<4>(b), mask),
            S::and(S::shr::<4>(c), mask),
            S::and(S::shr::<4>(d), mask),
        ]
    }
}

/// Reads eight registers of the integers that 4 bits select. It has no loop, which might not be unrolled.
///
/// # Safety
/// `from` is valid for [`NIBBLES`] bytes; call inside a dispatched kernel.
#[inline(always)]
unsafe fn selected_integers<S: Simd>(table: &[u8; 16], from: *const u8) -> [S::I; 8] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let [a, b, c, d, e, f, g, h] = nibbles::<S>(from);
        [
            S::lookup(table, a),
            S::lookup(table, b),
            S::lookup(table, c),
            S::lookup(table, d),
            S::lookup(table, e),
            S::lookup(table, f),
            S::lookup(table, g),
            S::lookup(table, h),
        ]
    }
}
