//! Packs rows of blocks into tiles of 16 rows. Loading a model does this with every weight.
//!
//! Invariant: bytes are moved in words of 4, each directly to the offset from which [`super::tile_format`] reads it, so
//! that a model is packed as fast as its file can be read. [`super::pack_words`] packs whole tiles of the most common formats
//! with vectors, and writes the same bytes.

use super::float_tiles::{F8_RAISE, F8_SCALES};
use super::pack_words::pack_words;
use super::tile_format::{BIT_PLANE, HALF_ROW, NIBBLES, SIX_BIT, SIX_BIT_SCALES, TILE_ROWS, TWO_BITS};
use crate::dequantize::{iq4_scale, q3_scale, six_bit_pair};
use crate::{DType, Isa};

const LOW: u32 = 0x0f0f_0f0f;

/// Packs up to 16 rows into `tile`, which must be zeroed and as long as 16 rows. Every tier writes the same bytes.
pub(crate) fn pack_tile(isa: Isa, dtype: DType, rows: &[&[u8]], tile: &mut [u8]) {
    let Ok(whole) = rows.try_into() else { return pack_rows(dtype, rows, tile) };
    let packed = pack_words(isa, dtype, whole, tile);
    if packed < whole[0].len() {
        pack_rows(dtype, &whole.map(|row| &row[packed..]), &mut tile[TILE_ROWS * packed..]);
    }
}

/// Packs up to 16 rows, one after the other in each block.
fn pack_rows(dtype: DType, rows: &[&[u8]], tile: &mut [u8]) {
    match dtype {
        DType::F32 => pack_floats::<4>(rows, tile),
        DType::F16 => pack_floats::<2>(rows, tile),
        DType::BF16 => pack_pairs(rows, tile),
        DType::Q4_0 | DType::Iq4Nl => pack_groups::<18>(rows, tile, |block, lane| {
            (0..4).for_each(|z| lane.word(z * 64, word(block, 2 + 4 * z)));
            lane.half(NIBBLES, block, 0);
        }),
        DType::Int4 => pack_groups::<19>(rows, tile, |block, lane| {
            (0..4).for_each(|z| lane.word(z * 64, word(block, 3 + 4 * z)));
            lane.half(NIBBLES, block, 0);
            lane.byte(NIBBLES + HALF_ROW, block[2]);
        }),
        DType::Mxfp4 => pack_groups::<17>(rows, tile, |block, lane| {
            (0..4).for_each(|z| lane.word(z * 64, word(block, 1 + 4 * z)));
            // The exponent is stored without its bias.
            lane.byte(NIBBLES, (i16::from(block[0]) - 127).min(127) as u8);
        }),
        DType::F8E4M3 => pack_groups::<36>(rows, tile, |block, lane| {
            let scale = f32::from_bits(word(block, 0)) * F8_RAISE;
            lane.word(0, scale.to_bits());
            (0..32).for_each(|column| lane.byte(F8_SCALES + column * TILE_ROWS, block[4 + column]));
        }),
        DType::Q4_1 => pack_groups::<20>(rows, tile, |block, lane| {
            (0..4).for_each(|z| lane.word(z * 64, word(block, 4 + 4 * z)));
            lane.half(NIBBLES, block, 0);
            lane.half(NIBBLES + HALF_ROW, block, 2);
        }),
        DType::Q5_0 => pack_groups::<22>(rows, tile, |block, lane| {
            (0..4).for_each(|z| lane.word(z * 64, word(block, 6 + 4 * z)));
            lane.word(NIBBLES, bit_plane(word(block, 2)));
            lane.half(NIBBLES + BIT_PLANE, block, 0);
        }),
        DType::Q5_1 => pack_groups::<24>(rows, tile, |block, lane| {
            (0..4).for_each(|z| lane.word(z * 64, word(block, 8 + 4 * z)));
            lane.word(NIBBLES, bit_plane(word(block, 4)));
            lane.half(NIBBLES + BIT_PLANE, block, 0);
            lane.half(NIBBLES + BIT_PLANE + HALF_ROW, block, 2);
        }),
        DType::Q8_0 => pack_groups::<34>(rows, tile, |block, lane| {
            (0..8).for_each(|g| lane.word(g * 64, word(block, 2 + 4 * g) ^ 0x8080_8080));
            lane.half(512, block, 0);
        }),
        DType::Q2K => pack_groups::<84>(rows, tile, |block, lane| {
            for part in 0..8 {
                let start = 2 * HALF_ROW + part * (2 * TILE_ROWS + TWO_BITS);
                lane.byte(start, block[2 * part]);
                lane.byte(start + TILE_ROWS, block[2 * part + 1]);
                lane.two_bits(start + 2 * TILE_ROWS, two_bits(&block[16..], part));
            }
            lane.half(0, block, 80);
            lane.half(HALF_ROW, block, 82);
        }),
        DType::Q3K => pack_groups::<110>(rows, tile, |block, lane| {
            for part in 0..8 {
                let start = HALF_ROW + part * (SIX_BIT + TWO_BITS + BIT_PLANE);
                let scale = |half| q3_scale(&block[96..108], 2 * part + half);
                lane.six_bit(start, (scale(0), scale(1)));
                lane.two_bits(start + SIX_BIT, two_bits(&block[32..], part));
                let third = |i: usize| word(block, 4 * i) >> part & 0x0101_0101;
                let plane = (0..8).fold(0, |plane, g| plane | third(g) << g);
                lane.word(start + SIX_BIT + TWO_BITS, plane);
            }
            lane.half(0, block, 108);
        }),
        DType::Iq4Xs => pack_groups::<136>(rows, tile, |block, lane| {
            for part in 0..8 {
                let start = HALF_ROW + part * (SIX_BIT_SCALES + NIBBLES);
                lane.six_bit_scale(start, iq4_scale(&block[2..8], part));
                let quants = |z: usize| word(block, 8 + 16 * part + 4 * z);
                (0..4).for_each(|z| lane.word(start + SIX_BIT_SCALES + z * 64, quants(z)));
            }
            lane.half(0, block, 0);
        }),
        DType::Q4K => pack_groups::<144>(rows, tile, |block, lane| {
            for part in 0..8 {
                let values = values(|i| word(block, 16 + part / 2 * 32 + 4 * i) >> (4 * (part % 2)) & LOW);
                let start = 2 * HALF_ROW + part * (SIX_BIT + NIBBLES);
                lane.nibbles(start + SIX_BIT, values);
                lane.six_bit(start, six_bit_pair(&block[4..16], part));
            }
            lane.half(0, block, 0);
            lane.half(HALF_ROW, block, 2);
        }),
        DType::Q5K => pack_groups::<176>(rows, tile, |block, lane| {
            for part in 0..8 {
                let fifth = |i: usize| word(block, 16 + 4 * i) >> part & 0x0101_0101;
                let start = 2 * HALF_ROW + part * (SIX_BIT + NIBBLES + BIT_PLANE);
                lane.nibbles(
                    start + SIX_BIT,
                    values(|i| word(block, 48 + part / 2 * 32 + 4 * i) >> (4 * (part % 2)) & LOW),
                );
                let plane = (0..8).fold(0, |plane, g| plane | fifth(g) << g);
                lane.word(start + SIX_BIT + NIBBLES, plane);
                lane.six_bit(start, six_bit_pair(&block[4..16], part));
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
                let start = HALF_ROW + part * (2 * TILE_ROWS + NIBBLES + TWO_BITS);
                lane.nibbles(start + 2 * TILE_ROWS, values(low));
                lane.two_bits(start + 2 * TILE_ROWS + NIBBLES, values(high));
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

    /// Writes 32 values of 2 bits each: word `p` holds values `4 p` to `4 p + 3` of each byte of the row.
    fn two_bits(&mut self, at: usize, values: [u32; 8]) {
        for plane in 0..2 {
            let bits = (0..4).fold(0, |bits, i| bits | values[plane * 4 + i] << (2 * i));
            self.word(at + plane * 64, bits);
        }
    }

    /// Writes a pair of 6-bit numbers: 16 bytes hold the first ones and the low bits of the second ones, 8 bytes hold the
    /// high bits of the second ones.
    fn six_bit(&mut self, at: usize, (first, second): (u8, u8)) {
        self.byte(at, first | (second & 3) << 6);
        self.group[at + TILE_ROWS + self.lane % 8] |= (second >> 2) << (4 * (self.lane / 8));
    }

    /// Writes a 6-bit number: 8 bytes hold the low bits, 4 bytes hold the high bits.
    fn six_bit_scale(&mut self, at: usize, scale: u8) {
        self.group[at + self.lane % 8] |= (scale & 15) << (4 * (self.lane / 8));
        self.group[at + 8 + self.lane % 4] |= (scale >> 4) << (2 * (self.lane / 4));
    }
}

fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Returns the words of one of eight runs of 32 values of 2 bits: four runs share 32 bytes.
fn two_bits(bytes: &[u8], part: usize) -> [u32; 8] {
    values(|i| word(bytes, part / 4 * 32 + 4 * i) >> (2 * (part % 4)) & 0x0303_0303)
}

/// Spreads 32 bits, one for each value, over the bytes of a word: bit `g` of byte `j` belongs to value `4 g + j`.
fn bit_plane(bits: u32) -> u32 {
    (0..4).fold(0, |plane, byte| {
        // Every fourth bit, moved together in steps.
        let every = bits >> byte & 0x1111_1111;
        let every = (every | every >> 3) & 0x0303_0303;
        let every = (every | every >> 6) & 0x000f_000f;
        plane | ((every | every >> 12) & 0xff) << (8 * byte)
    })
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
        // With this bound on lanes, the compiler omits the checks of nearly all stores.
        for (lane, row) in rows.iter().enumerate().take(TILE_ROWS) {
            if let Some(block) = row.get(index * BLOCK..).and_then(<[u8]>::first_chunk) {
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

/// Stores pairs of consecutive values of every row side by side, and so the last value of an odd number.
fn pack_pairs(rows: &[&[u8]], tile: &mut [u8]) {
    let even = rows.first().map_or(0, |row| row.len() / 4 * 4);
    let (pairs, rest) = tile.split_at_mut(even * TILE_ROWS);
    let halves: Vec<(&[u8], &[u8])> = rows.iter().map(|row| row.split_at(even)).collect();
    pack_floats::<4>(&halves.iter().map(|(pairs, _)| *pairs).collect::<Vec<_>>(), pairs);
    pack_floats::<2>(&halves.iter().map(|(_, rest)| *rest).collect::<Vec<_>>(), rest);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn every_tier_packs_the_bytes_that_are_packed_row_by_row() {
        let mut random = Random::fresh();
        for dtype in DType::ALL {
            // The number of blocks is not a multiple of what is packed at once.
            for blocks in [1, 2, 3, 7, 33, 64, 71] {
                let row_bytes = blocks * dtype.block_bytes();
                for count in [1, 15, 16] {
                    let data: Vec<u8> = (0..count * row_bytes).map(|_| random.next_u64() as u8).collect();
                    let rows: Vec<&[u8]> = data.chunks_exact(row_bytes).collect();
                    let mut expected = vec![0; TILE_ROWS * row_bytes];
                    pack_rows(dtype, &rows, &mut expected);
                    for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
                        let mut tile = vec![0; TILE_ROWS * row_bytes];
                        pack_tile(isa, dtype, &rows, &mut tile);
                        assert!(tile == expected, "{dtype} on {isa}: {count} rows of {blocks} blocks");
                    }
                }
            }
        }
    }
}
