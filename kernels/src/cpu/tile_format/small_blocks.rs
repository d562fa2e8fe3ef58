//! Formats whose blocks have 32 values.

use super::{
    BIT_PLANE, HALF_ROW, NIBBLES, TILE_ROWS, TileFormat, nibbles, selected_integers, with_fifth_bits,
};
use crate::cpu::simd::{Blocks, Simd};
use crate::dequantize::{IQ4_INTEGERS, MXFP4_INTEGERS, MXFP4_ZERO};

#[derive(Clone, Copy)]
pub(crate) struct Q4_0;
#[derive(Clone, Copy)]
pub(crate) struct Q4_1;
#[derive(Clone, Copy)]
pub(crate) struct Q5_0;
#[derive(Clone, Copy)]
pub(crate) struct Q5_1;
#[derive(Clone, Copy)]
pub(crate) struct Q8_0;
#[derive(Clone, Copy)]
pub(crate) struct Iq4Nl;
#[derive(Clone, Copy)]
pub(crate) struct Int4;
#[derive(Clone, Copy)]
pub(crate) struct Mxfp4;

impl Blocks for Q4_0 {
    const HALVES: bool = false;
    const LARGEST: u8 = 15;
    const ZERO: Option<u8> = Some(8);

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: a block is 288 bytes; the rest is guaranteed by the caller.
        unsafe { nibbles::<S>(tile.add(block * 288)) }
    }
}

impl TileFormat for Q4_0 {
    const BLOCK_BYTES: usize = 288;

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: as above.
        let scale = unsafe { S::load_f16(tile.add(block * 288 + NIBBLES).cast()) };
        // SAFETY: register arithmetic.
        [(scale, unsafe { S::mul(scale, S::splat(-8.0)) }); 2]
    }
}

impl Blocks for Q4_1 {
    const HALVES: bool = false;
    const LARGEST: u8 = 15;

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: a block is 320 bytes; the rest is guaranteed by the caller.
        unsafe { nibbles::<S>(tile.add(block * 320)) }
    }
}

impl TileFormat for Q4_1 {
    const BLOCK_BYTES: usize = 320;

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: as above.
        unsafe {
            let at = tile.add(block * 320 + NIBBLES);
            [(S::load_f16(at.cast()), S::load_f16(at.add(HALF_ROW).cast())); 2]
        }
    }
}

impl Blocks for Q5_0 {
    const HALVES: bool = false;
    const LARGEST: u8 = 31;
    const ZERO: Option<u8> = Some(16);

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let at = tile.add(block * Self::BLOCK_BYTES);
            with_fifth_bits::<S>(nibbles::<S>(at), at.add(NIBBLES))
        }
    }
}

impl TileFormat for Q5_0 {
    const BLOCK_BYTES: usize = NIBBLES + BIT_PLANE + HALF_ROW;

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let scale = S::load_f16(tile.add(block * Self::BLOCK_BYTES + NIBBLES + BIT_PLANE).cast());
            [(scale, S::mul(scale, S::splat(-16.0))); 2]
        }
    }
}

impl Blocks for Q5_1 {
    const HALVES: bool = false;
    const LARGEST: u8 = 31;

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let at = tile.add(block * Self::BLOCK_BYTES);
            with_fifth_bits::<S>(nibbles::<S>(at), at.add(NIBBLES))
        }
    }
}

impl TileFormat for Q5_1 {
    const BLOCK_BYTES: usize = NIBBLES + BIT_PLANE + 2 * HALF_ROW;

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let at = tile.add(block * Self::BLOCK_BYTES + NIBBLES + BIT_PLANE);
            [(S::load_f16(at.cast()), S::load_f16(at.add(HALF_ROW).cast())); 2]
        }
    }
}

impl Blocks for Q8_0 {
    const HALVES: bool = false;
    const LARGEST: u8 = 255;
    const ZERO: Option<u8> = Some(128);

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: a block is 544 bytes; the rest is guaranteed by the caller.
        unsafe {
            let at = tile.add(block * 544);
            [
                S::load_i(at),
                S::load_i(at.add(64)),
                S::load_i(at.add(128)),
                S::load_i(at.add(192)),
                S::load_i(at.add(256)),
                S::load_i(at.add(320)),
                S::load_i(at.add(384)),
                S::load_i(at.add(448)),
            ]
        }
    }
}

impl TileFormat for Q8_0 {
    const BLOCK_BYTES: usize = 544;

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: as above.
        unsafe {
            let scale = S::load_f16(tile.add(block * 544 + 512).cast());
            [(scale, S::mul(scale, S::splat(-128.0))); 2]
        }
    }
}

impl Blocks for Iq4Nl {
    const HALVES: bool = false;
    const LARGEST: u8 = 255;
    const ZERO: Option<u8> = Some(128);

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: guaranteed by the caller.
        unsafe { selected_integers::<S>(&IQ4_INTEGERS, tile.add(block * Self::BLOCK_BYTES)) }
    }
}

impl TileFormat for Iq4Nl {
    const BLOCK_BYTES: usize = NIBBLES + HALF_ROW;

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let scale = S::load_f16(tile.add(block * Self::BLOCK_BYTES + NIBBLES).cast());
            [(scale, S::mul(scale, S::splat(-128.0))); 2]
        }
    }
}

impl Blocks for Int4 {
    const HALVES: bool = false;
    const LARGEST: u8 = 15;

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: guaranteed by the caller.
        unsafe { nibbles::<S>(tile.add(block * Self::BLOCK_BYTES)) }
    }
}

impl TileFormat for Int4 {
    const BLOCK_BYTES: usize = NIBBLES + HALF_ROW + TILE_ROWS;

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let at = tile.add(block * Self::BLOCK_BYTES + NIBBLES);
            let (scale, zero) = (S::load_f16(at.cast()), S::load_i8(at.add(HALF_ROW).cast()));
            [(scale, S::sub(S::zero(), S::mul(scale, zero))); 2]
        }
    }
}

impl Blocks for Mxfp4 {
    const HALVES: bool = false;
    const LARGEST: u8 = 24;

    #[inline(always)]
    unsafe fn integers<S: Simd>(tile: *const u8, block: usize) -> [S::I; 8] {
        // SAFETY: guaranteed by the caller.
        unsafe { selected_integers::<S>(&MXFP4_INTEGERS, tile.add(block * Self::BLOCK_BYTES)) }
    }
}

impl TileFormat for Mxfp4 {
    const BLOCK_BYTES: usize = NIBBLES + TILE_ROWS;

    #[inline(always)]
    unsafe fn scales<S: Simd>(tile: *const u8, block: usize) -> [(S::F, S::F); 2] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let exponent = S::load_i8(tile.add(block * Self::BLOCK_BYTES + NIBBLES).cast());
            // The power is raised and lowered again, because the smallest one has no biased exponent.
            let raised = S::min(S::add(exponent, S::splat(1.0)), S::splat(127.0));
            let scale = S::mul(S::exp2_whole(raised), S::splat(0.25));
            [(scale, S::mul(scale, S::splat(-f32::from(MXFP4_ZERO)))); 2]
        }
    }
}
