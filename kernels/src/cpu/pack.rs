//! Packs rows of blocks into tiles of 16 rows. Loading a model does this with every weight.
//!
//! Invariant: bytes are moved in words of 4, each directly to the offset from which [`super::tile_format`] reads it, so
//! that a model is packed as fast as its file can be read.

use super::tile_format::{HALF_ROW, NIBBLES, SIX_BIT, TILE_ROWS};
use crate::DType;
use crate::dequantize::six_bit_pair;

const LOW: u32 = 0x0f0f_0f0f;

/// Packs up to 16 rows into `tile`, which must be zeroed and as long as 16 rows.
pub(crate) fn pack_tile(dtype: DType, rows: &[&[u8]], tile: &mut [u8]) {
    match dtype {
        DType::F32 => pack_floats::<4>(rows, tile),
        DType::F16 | DType::BF16 => pack_floats::<2>(rows, tile),
        DType::Q4_0 => pack_groups::<18>(rows, tile, |block, lane| {
            (0..4).for_each(|z| lane.word(z * 64, word(block, 2 + 4 * z)));
            lane.half(NIBBLES, block, 0);
        }),
        DType::Q4_1 => pack_groups::<20>(rows, tile, |block, lane| {
            (0..4).for_each(|z| lane.word(z * 64, word(block, 4 + 4 * z)));
            lane.half(NIBBLES, block, 0);
            lane.half(NIBBLES + HALF_ROW, block, 2);
        }),
        DType::Q8_0 => pack_groups::<34>(rows, tile, |block, lane| {
            (0..8).for_each(|g| lane.word(g * 64, word(block, 2 + 4 * g) ^ 0x8080_8080));
            lane.half(512, block, 0);
        }),
        DType::Q4K => pack_groups::<144>(rows, tile, |block, lane| {
            for part in 0..8 {
                let values = values(|i| word(block, 16 + part / 2 * 32 + 4 * i) >> (4 * (part % 2)) & LOW);
                let start = 2 * HALF_ROW + part * (SIX_BIT + NIBBLES);
                lane.nibbles(start + SIX_BIT, values);
                lane.six_bit(start, &block[4..16], part);
            }
            lane.half(0, block, 0);
            lane.half(HALF_ROW, block, 2);
        }),
        DType::Q5K => pack_groups::<176>(rows, tile, |block, lane| {
            for part in 0..8 {
                let fifth = |i: usize| word(block, 16 + 4 * i) >> part & 0x0101_0101;
                let start = 2 * HALF_ROW + part * (SIX_BIT + NIBBLES + 64);
                lane.nibbles(
                    start + SIX_BIT,
                    values(|i| word(block, 48 + part / 2 * 32 + 4 * i) >> (4 * (part % 2)) & LOW),
                );
                let plane = (0..8).fold(0, |plane, g| plane | fifth(g) << g);
                lane.word(start + SIX_BIT + NIBBLES, plane);
                lane.six_bit(start, &block[4..16], part);
            }
            lane.half(0, block, 0);
            lane.half(HALF_ROW, block, 2);
        }),
        DType::Q6K => pack_groups::<210>(rows, tile, |block, lane| {
            for part in 0..8 {
                // Two halves of 128 values; in each, four runs of 32 share the 64 low bytes and 32 high bytes.
                let (half, run) = (part / 4, part % 4);
                let low = |i: usize| word(block, half * 64 + run % 2 * 32 + 4 * i) >> (4 * (run / 2)) & LOW;
                let high = |i: usize| word(block, 128 + half * 32 + 4 * i) >> (2 * run) & 0x0303_0303;
                let start = HALF_ROW + part * (2 * TILE_ROWS + NIBBLES + 128);
                lane.nibbles(start + 2 * TILE_ROWS, values(low));
                for plane in 0..2 {
                    let bits = (0..4).fold(0, |bits, i| bits | high(plane * 4 + i) << (2 * i));
                    lane.word(start + 2 * TILE_ROWS + NIBBLES + plane * 64, bits);
                }
                lane.byte(start, block[192 + 2 * part]);
                lane.byte(start + TILE_ROWS, block[193 + 2 * part]);
            }
            lane.half(0, block, 208);
        }),
    }
}

/// Writes one row's values into the packed blocks of 16 rows.
struct Lane<'a> {
    group: &'a mut [u8],
    lane: usize,
}

impl Lane<'_> {
    fn byte(&mut self, at: usize, value: u8) {
        self.group[at + self.lane] = value;
    }

    fn half(&mut self, at: usize, block: &[u8], from: usize) {
        self.group[at + 2 * self.lane..][..2].copy_from_slice(&block[from..from + 2]);
    }

    fn word(&mut self, at: usize, value: u32) {
        self.group[at + 4 * self.lane..][..4].copy_from_slice(&value.to_le_bytes());
    }

    /// Writes 32 values of 4 bits each: word `z` shares its bytes with word `z + 4`.
    fn nibbles(&mut self, at: usize, values: [u32; 8]) {
        for z in 0..4 {
            self.word(at + z * 64, values[z] | values[z + 4] << 4);
        }
    }

    /// Writes the 6-bit scale and min of a part: 16 bytes hold the scales and the low bits of the mins, 8 bytes hold the high
    /// bits of the mins.
    fn six_bit(&mut self, at: usize, packed: &[u8], part: usize) {
        let (scale, min) = six_bit_pair(packed, part);
        self.byte(at, scale | (min & 3) << 6);
        self.group[at + TILE_ROWS + self.lane % 8] |= (min >> 2) << (4 * (self.lane / 8));
    }
}

fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

fn values(word: impl Fn(usize) -> u32) -> [u32; 8] {
    std::array::from_fn(word)
}

/// Calls `pack` for each block of each row, group by group, so that a tile is written from front to back.
fn pack_groups<const BLOCK: usize>(
    rows: &[&[u8]],
    tile: &mut [u8],
    pack: impl Fn(&[u8; BLOCK], &mut Lane<'_>),
) {
    for (index, group) in tile.chunks_exact_mut(BLOCK * TILE_ROWS).enumerate() {
        for (lane, row) in rows.iter().enumerate() {
            if let Some(block) = row.as_chunks::<BLOCK>().0.get(index) {
                pack(block, &mut Lane { group, lane });
            }
        }
    }
}

/// Stores value `k` of every row side by side.
fn pack_floats<const SIZE: usize>(rows: &[&[u8]], tile: &mut [u8]) {
    for (lane, row) in rows.iter().enumerate() {
        let lanes = tile.as_chunks_mut::<SIZE>().0.iter_mut().skip(lane).step_by(TILE_ROWS);
        lanes.zip(row.as_chunks::<SIZE>().0).for_each(|(to, value)| *to = *value);
    }
}
