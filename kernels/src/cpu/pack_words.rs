//! Packs whole tiles with vectors. The words of 16 rows are turned at once, so that a lane of each register is a row.
//!
//! Invariant: every byte is the one that [`super::pack`] writes row by row, and no byte outside of a row is read.

// Loops over registers are written with indices, so that they stay in registers.
#![allow(clippy::needless_range_loop)]

use super::simd::Simd;
use super::tile_format::{BIT_PLANE, HALF_ROW, NIBBLES, SIX_BIT, TILE_ROWS, TWO_BITS};
use super::{Kernel, dispatch};
use crate::{DType, Isa};

/// Size in bytes of a register, and of the part of a row that is turned at once.
const REGISTER: usize = 64;

type Rows<'a> = [&'a [u8]; TILE_ROWS];

/// Packs the first bytes of 16 rows into `tile`, and returns how many of each row. The others, which may be all of them, are left
/// to the caller. The portable tier has no vectors that would pay.
pub(crate) fn pack_words(isa: Isa, dtype: DType, rows: &Rows<'_>, tile: &mut [u8]) -> usize {
    let row_bytes = rows[0].len();
    assert!(rows.iter().all(|row| row.len() == row_bytes), "the rows of a tile are equally long");
    assert_eq!(tile.len(), TILE_ROWS * row_bytes, "a tile is as long as its rows");
    let step = match dtype {
        DType::F32 | DType::BF16 | DType::F16 => REGISTER,
        DType::Q2K | DType::Q5K => dtype.block_bytes(),
        // With the 16 registers of AVX2, these are packed faster row by row.
        DType::Q4K | DType::Q6K if isa != Isa::Avx2 => dtype.block_bytes(),
        _ => return 0,
    };
    if isa == Isa::Portable {
        return 0;
    }
    let steps = row_bytes / step;
    // SAFETY: all steps are inside of the rows and, 16 times as long, inside of the tile.
    unsafe { dispatch(isa, PackWords { dtype, rows, tile, step, steps }) };
    steps * step
}

struct PackWords<'a> {
    dtype: DType,
    rows: &'a Rows<'a>,
    tile: &'a mut [u8],
    step: usize,
    steps: usize,
}

impl Kernel for PackWords<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let PackWords { dtype, rows, tile, step, steps } = self;
        for at in 0..steps {
            let group = &mut tile[at * step * TILE_ROWS..][..step * TILE_ROWS];
            let at = at * step;
            // SAFETY: the caller guarantees that rows and tile have the step.
            unsafe {
                match dtype {
                    DType::F16 => pack_halves::<S>(rows, at, group),
                    DType::Q2K => pack_q2_k::<S>(rows, at, group),
                    DType::Q4K => pack_q4_k::<S>(rows, at, group),
                    DType::Q5K => pack_q5_k::<S>(rows, at, group),
                    DType::Q6K => pack_q6_k::<S>(rows, at, group),
                    _ => pack_floats::<S>(rows, at, group),
                }
            }
        }
    }
}

/// Returns 16 words of each row. Lane `r` of register `w` is word `w` of row `r`.
///
/// # Safety
/// Every row has 64 bytes from `at`; call inside a dispatched kernel.
#[inline(always)]
unsafe fn turned<S: Simd>(rows: &Rows<'_>, at: usize) -> [S::I; 16] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut words = [S::zero_i(); 16];
        for row in 0..TILE_ROWS {
            debug_assert!(at + REGISTER <= rows[row].len());
            words[row] = S::load_i(rows[row].as_ptr().add(at));
        }
        S::transpose(words)
    }
}

/// Returns the eight registers from `from`.
#[inline(always)]
fn eight<R: Copy>(registers: &[R], from: usize) -> [R; 8] {
    let mut found = [registers[from]; 8];
    found.copy_from_slice(&registers[from..from + 8]);
    found
}

/// Returns the lanes of a register.
///
/// # Safety
/// Call inside a dispatched kernel.
#[inline(always)]
unsafe fn lanes<S: Simd>(register: S::I) -> [u32; 16] {
    let mut lanes = [0u32; 16];
    // SAFETY: a register has 64 bytes.
    unsafe { S::store_i(lanes.as_mut_ptr().cast(), register) };
    for lane in 0..16 {
        lanes[lane] = u32::from_le(lanes[lane]);
    }
    lanes
}

/// Writes 64 bytes.
///
/// # Safety
/// Call inside a dispatched kernel.
#[inline(always)]
unsafe fn put<S: Simd>(group: &mut [u8], at: usize, register: S::I) {
    let to = &mut group[at..][..REGISTER];
    // SAFETY: the slice has 64 bytes.
    unsafe { S::store_i(to.as_mut_ptr(), register) }
}

/// Writes one byte of each lane.
#[inline(always)]
fn put_bytes(group: &mut [u8], at: usize, lanes: &[u32; 16], byte: usize) {
    let mut bytes = [0u8; TILE_ROWS];
    for lane in 0..TILE_ROWS {
        bytes[lane] = (lanes[lane] >> (8 * byte)) as u8;
    }
    group[at..][..TILE_ROWS].copy_from_slice(&bytes);
}

/// Writes the low halves of all lanes, and then the high ones.
///
/// # Safety
/// Call inside a dispatched kernel.
#[inline(always)]
unsafe fn put_halves<S: Simd>(group: &mut [u8], at: usize, register: S::I) {
    // SAFETY: guaranteed by the caller.
    let lanes = unsafe { lanes::<S>(register) };
    for half in 0..2 {
        let mut halves = [[0u8; 2]; TILE_ROWS];
        for lane in 0..TILE_ROWS {
            halves[lane] = ((lanes[lane] >> (16 * half)) as u16).to_le_bytes();
        }
        group[at + half * HALF_ROW..][..HALF_ROW].copy_from_slice(halves.as_flattened());
    }
}

/// Stores words of every row side by side: F32, or pairs of BF16.
///
/// # Safety
/// Every row has 64 bytes from `at`; call inside a dispatched kernel.
#[inline(always)]
unsafe fn pack_floats<S: Simd>(rows: &Rows<'_>, at: usize, group: &mut [u8]) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let words = turned::<S>(rows, at);
        for word in 0..16 {
            put::<S>(group, word * REGISTER, words[word]);
        }
    }
}

/// Stores F16 of every row side by side.
///
/// # Safety
/// Every row has 64 bytes from `at`; call inside a dispatched kernel.
#[inline(always)]
unsafe fn pack_halves<S: Simd>(rows: &Rows<'_>, at: usize, group: &mut [u8]) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let words = turned::<S>(rows, at);
        for word in 0..16 {
            put_halves::<S>(group, word * REGISTER, words[word]);
        }
    }
}

/// Joins the low or the high halves of bytes: those of word `z` and, above them, those of word `z + 4`.
///
/// # Safety
/// Call inside a dispatched kernel.
#[inline(always)]
unsafe fn put_nibbles<S: Simd>(group: &mut [u8], at: usize, words: [S::I; 8], is_high: bool) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (low, high) = (S::splat_i8(0x0f), S::splat_i8(0xf0));
        for z in 0..4 {
            let joined = if is_high {
                S::or(S::and(S::shr::<4>(words[z]), low), S::and(words[z + 4], high))
            } else {
                S::or(S::and(words[z], low), S::and(S::shl::<4>(words[z + 4]), high))
            };
            put::<S>(group, at + z * REGISTER, joined);
        }
    }
}

/// Writes 2 bits of each byte, from bit `SHIFT` on: those of four words share a byte.
///
/// # Safety
/// Call inside a dispatched kernel.
#[inline(always)]
unsafe fn put_two_bits<S: Simd, const SHIFT: u32>(group: &mut [u8], at: usize, words: [S::I; 8]) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mask = S::splat_i8(0x03);
        for plane in 0..2 {
            let [a, b, c, d] = [0, 1, 2, 3].map(|word| 4 * plane + word);
            let a = S::and(S::shr::<SHIFT>(words[a]), mask);
            let b = S::shl::<2>(S::and(S::shr::<SHIFT>(words[b]), mask));
            let c = S::shl::<4>(S::and(S::shr::<SHIFT>(words[c]), mask));
            let d = S::shl::<6>(S::and(S::shr::<SHIFT>(words[d]), mask));
            put::<S>(group, at + plane * REGISTER, S::or(S::or(a, b), S::or(c, d)));
        }
    }
}

/// Writes bit `SHIFT` of each byte: those of eight words share a byte.
///
/// # Safety
/// Call inside a dispatched kernel.
#[inline(always)]
unsafe fn put_bits<S: Simd, const SHIFT: u32>(group: &mut [u8], at: usize, words: [S::I; 8]) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mask = S::splat_i8(0x01);
        let [a, b, c, d, e, f, g, h] = words;
        let a = S::and(S::shr::<SHIFT>(a), mask);
        let b = S::shl::<1>(S::and(S::shr::<SHIFT>(b), mask));
        let c = S::shl::<2>(S::and(S::shr::<SHIFT>(c), mask));
        let d = S::shl::<3>(S::and(S::shr::<SHIFT>(d), mask));
        let e = S::shl::<4>(S::and(S::shr::<SHIFT>(e), mask));
        let f = S::shl::<5>(S::and(S::shr::<SHIFT>(f), mask));
        let g = S::shl::<6>(S::and(S::shr::<SHIFT>(g), mask));
        let h = S::shl::<7>(S::and(S::shr::<SHIFT>(h), mask));
        let (low, high) = (S::or(S::or(a, b), S::or(c, d)), S::or(S::or(e, f), S::or(g, h)));
        put::<S>(group, at, S::or(low, high));
    }
}

/// Writes a byte for each of 16 runs of 16 values, in four words from the `first`. Two runs are a part, and parts are `stride` bytes
/// apart.
///
/// # Safety
/// Call inside a dispatched kernel.
#[inline(always)]
unsafe fn put_runs<S: Simd>(group: &mut [u8], at: usize, stride: usize, words: [S::I; 8], first: usize) {
    for word in 0..4 {
        // SAFETY: guaranteed by the caller.
        let bytes = unsafe { lanes::<S>(words[first + word]) };
        for byte in 0..4 {
            let part = 2 * word + byte / 2;
            put_bytes(group, at + part * stride + byte % 2 * TILE_ROWS, &bytes, byte);
        }
    }
}

/// Writes the scales and minimums of a block of Q4_K or Q5_K, whose first words are `words`: two numbers of half precision, and 6
/// bits of each scale and minimum of the eight parts, which are `stride` bytes apart.
///
/// # Safety
/// Call inside a dispatched kernel.
#[inline(always)]
unsafe fn put_scales<S: Simd>(group: &mut [u8], words: &[S::I; 16], stride: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        put_halves::<S>(group, 0, words[0]);
        let [two, four, six] = [S::splat_i8(0x03), S::splat_i8(0x0f), S::splat_i8(0x3f)];
        let above = S::splat_i8(0x30);
        // The first four scales and minimums keep the high bits of the other four above their own bits.
        let [scales, minimums, rest] = [words[1], words[2], words[3]];
        let parts = [
            (S::and(scales, six), S::and(minimums, six)),
            (
                S::or(S::and(rest, four), S::and(S::shr::<2>(scales), above)),
                S::or(S::and(S::shr::<4>(rest), four), S::and(S::shr::<2>(minimums), above)),
            ),
        ];
        for half in 0..2 {
            let (scale, minimum) = parts[half];
            let low = lanes::<S>(S::or(scale, S::shl::<6>(S::and(minimum, two))));
            let high = lanes::<S>(S::and(S::shr::<2>(minimum), four));
            for part in 0..4 {
                let at = 2 * HALF_ROW + (4 * half + part) * stride;
                put_bytes(group, at, &low, part);
                let to = &mut group[at + TILE_ROWS..][..TILE_ROWS / 2];
                for lane in 0..TILE_ROWS / 2 {
                    to[lane] = ((high[lane] | high[lane + TILE_ROWS / 2] << 4) >> (8 * part)) as u8;
                }
            }
        }
    }
}

/// Writes 4 bits of each integer of a block of Q4_K or Q5_K, which are in 128 bytes of every row. The eight parts are `stride` bytes
/// apart.
///
/// # Safety
/// Every row has the bytes from `at`; call inside a dispatched kernel.
#[inline(always)]
unsafe fn put_low_bits<S: Simd>(rows: &Rows<'_>, at: usize, group: &mut [u8], stride: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let words = [turned::<S>(rows, at), turned::<S>(rows, at + REGISTER)];
        for part in 0..8 {
            let quants = eight(&words[part / 4], part / 2 % 2 * 8);
            put_nibbles::<S>(group, 2 * HALF_ROW + part * stride + SIX_BIT, quants, part % 2 == 1);
        }
    }
}

/// Writes 2 bits of each of four runs of 32 integers, whose planes are `stride` bytes apart.
///
/// # Safety
/// Call inside a dispatched kernel.
#[inline(always)]
unsafe fn put_four_runs<S: Simd>(group: &mut [u8], at: usize, stride: usize, words: [S::I; 8]) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        put_two_bits::<S, 0>(group, at, words);
        put_two_bits::<S, 2>(group, at + stride, words);
        put_two_bits::<S, 4>(group, at + 2 * stride, words);
        put_two_bits::<S, 6>(group, at + 3 * stride, words);
    }
}

/// Packs a block of Q2_K.
///
/// # Safety
/// Every row has the block from `at`; call inside a dispatched kernel.
#[inline(always)]
unsafe fn pack_q2_k<S: Simd>(rows: &Rows<'_>, at: usize, group: &mut [u8]) {
    const STRIDE: usize = 2 * TILE_ROWS + TWO_BITS;
    // SAFETY: guaranteed by the caller: a block has 84 bytes.
    unsafe {
        // 16 bytes hold scales and minimums, 64 bytes the integers; two numbers of half precision follow.
        put_runs::<S>(group, 2 * HALF_ROW, STRIDE, eight(&turned::<S>(rows, at), 0), 0);
        let words = turned::<S>(rows, at + 16);
        for half in 0..2 {
            let quants = eight(&words, 8 * half);
            let to = 2 * HALF_ROW + 4 * half * STRIDE + 2 * TILE_ROWS;
            put_four_runs::<S>(group, to, STRIDE, quants);
        }
        put_halves::<S>(group, 0, turned::<S>(rows, at + 20)[15]);
    }
}

/// Packs a block of Q4_K.
///
/// # Safety
/// Every row has the block from `at`; call inside a dispatched kernel.
#[inline(always)]
unsafe fn pack_q4_k<S: Simd>(rows: &Rows<'_>, at: usize, group: &mut [u8]) {
    const STRIDE: usize = SIX_BIT + NIBBLES;
    // SAFETY: guaranteed by the caller: a block has 144 bytes.
    unsafe {
        let first = turned::<S>(rows, at);
        put_scales::<S>(group, &first, STRIDE);
        // The last 128 of the 144 bytes hold the integers.
        put_low_bits::<S>(rows, at + 16, group, STRIDE);
    }
}

/// Packs a block of Q5_K.
///
/// # Safety
/// Every row has the block from `at`; call inside a dispatched kernel.
#[inline(always)]
unsafe fn pack_q5_k<S: Simd>(rows: &Rows<'_>, at: usize, group: &mut [u8]) {
    const STRIDE: usize = SIX_BIT + NIBBLES + BIT_PLANE;
    // SAFETY: guaranteed by the caller: a block has 176 bytes.
    unsafe {
        let first = turned::<S>(rows, at);
        put_scales::<S>(group, &first, STRIDE);
        let fifths = eight(&first, 4);
        let plane = 2 * HALF_ROW + SIX_BIT + NIBBLES;
        put_bits::<S, 0>(group, plane, fifths);
        put_bits::<S, 1>(group, plane + STRIDE, fifths);
        put_bits::<S, 2>(group, plane + 2 * STRIDE, fifths);
        put_bits::<S, 3>(group, plane + 3 * STRIDE, fifths);
        put_bits::<S, 4>(group, plane + 4 * STRIDE, fifths);
        put_bits::<S, 5>(group, plane + 5 * STRIDE, fifths);
        put_bits::<S, 6>(group, plane + 6 * STRIDE, fifths);
        put_bits::<S, 7>(group, plane + 7 * STRIDE, fifths);
        // The last 128 of the 176 bytes hold the low bits.
        put_low_bits::<S>(rows, at + 48, group, STRIDE);
    }
}

/// Packs a block of Q6_K.
///
/// # Safety
/// Every row has the block from `at`; call inside a dispatched kernel.
#[inline(always)]
unsafe fn pack_q6_k<S: Simd>(rows: &Rows<'_>, at: usize, group: &mut [u8]) {
    const STRIDE: usize = 2 * TILE_ROWS + NIBBLES + TWO_BITS;
    // SAFETY: guaranteed by the caller: a block has 210 bytes.
    unsafe {
        let high = turned::<S>(rows, at + 128);
        // Two halves of 128 values; in each, four runs of 32 share the 64 low bytes and 32 high bytes.
        for half in 0..2 {
            let low = turned::<S>(rows, at + 64 * half);
            let high = eight(&high, 8 * half);
            let quants = HALF_ROW + 4 * half * STRIDE + 2 * TILE_ROWS;
            for run in 0..4 {
                let low = eight(&low, run % 2 * 8);
                put_nibbles::<S>(group, quants + run * STRIDE, low, run / 2 == 1);
            }
            put_four_runs::<S>(group, quants + NIBBLES, STRIDE, high);
        }
        // Bytes 192 to 207 hold the scales of 16 runs.
        put_runs::<S>(group, HALF_ROW, STRIDE, eight(&turned::<S>(rows, at + 144), 8), 4);
        for row in 0..TILE_ROWS {
            group[2 * row..][..2].copy_from_slice(&rows[row][at + 208..at + 210]);
        }
    }
}
