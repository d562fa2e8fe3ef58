//! The layout of quantized weights on devices: tiles of 16 outputs in the order in which tensor cores take them, as
//! `formats/tiles.cuh` describes it.
//!
//! Invariant: a matrix in tiles represents the same values as the blocks that it was made of. Inputs and outputs that fill up
//! the last tiles have a scale of 0.

use half::f16;

use crate::device_constants::device_constant;
use crate::{DType, KernelError};

/// Number of outputs of a tile.
pub const TILE_OUTPUTS: usize = device_constant!("formats/tiles.cuh", "TILE_OUTPUTS") as usize;
/// The size of the quants that lanes load as two vectors.
const QUANTS: usize = device_constant!("formats/tiles.cuh", "TILE_QUANTS") as usize;
/// The size of the second vectors of scales.
const SCALES: usize = 128;

/// The tiles of one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    dtype: DType,
    /// The part of kernel names for the format.
    pub(super) name: &'static str,
    /// Number of inputs of a tile.
    pub(super) inputs: usize,
    /// Size of a tile.
    pub(super) bytes: usize,
}

macro_rules! tiles {
    ($dtype:ident, $name:literal, $struct:literal) => {
        Some(Tiles {
            dtype: DType::$dtype,
            name: $name,
            inputs: device_constant!("formats/tiles.cuh", $struct, "INPUTS") as usize,
            bytes: device_constant!("formats/tiles.cuh", $struct, "BYTES") as usize,
        })
    };
}

impl Tiles {
    /// Returns the tiles of a format, if kernels read it.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::Q4_0 => tiles!(Q4_0, "q4_0", "Q4_0"),
            DType::Q4_1 => tiles!(Q4_1, "q4_1", "Q4_1"),
            DType::Int4 => tiles!(Int4, "int4", "Int4"),
            DType::Q4K => tiles!(Q4K, "q4_k", "Q4_K"),
            DType::Q6K => tiles!(Q6K, "q6_k", "Q6_K"),
            DType::Q8_0 => tiles!(Q8_0, "q8_0", "Q8_0"),
            DType::F8E4M3 => tiles!(F8E4M3, "f8", "F8"),
            DType::F32
            | DType::F16
            | DType::BF16
            | DType::Q5_0
            | DType::Q5_1
            | DType::Q2K
            | DType::Q3K
            | DType::Q5K
            | DType::Iq4Nl
            | DType::Iq4Xs
            | DType::Mxfp4 => None,
        }
    }

    /// Returns the tiles of a format, or an error that lists those that kernels read.
    pub(super) fn read_by(op: &'static str, dtype: DType) -> Result<Self, KernelError> {
        let supported = "Q4_0, Q4_1, INT4, Q4_K, Q6_K, Q8_0 and FP8";
        Self::of(dtype).ok_or(KernelError::Format { op, found: dtype, supported })
    }

    /// Returns the size of 16 outputs, or `None` if the inputs are not whole blocks of the format.
    pub fn line_bytes(self, inputs: usize) -> Option<usize> {
        self.dtype.row_bytes(inputs)?;
        inputs.div_ceil(self.inputs).checked_mul(self.bytes)
    }

    /// Returns the size of a matrix, or `None` if its inputs are not whole blocks of the format or the size overflows.
    pub fn matrix_bytes(self, outputs: usize, inputs: usize) -> Option<usize> {
        self.line_bytes(inputs)?.checked_mul(outputs.div_ceil(TILE_OUTPUTS))
    }

    /// Converts rows of blocks of the format, `[outputs, inputs]`, to tiles. Outputs are the first of whole tiles.
    pub fn pack(self, blocks: &[u8], inputs: usize, tiles: &mut [u8]) -> Result<(), KernelError> {
        const OP: &str = "pack tiles";
        let partial = KernelError::PartialBlock { op: OP, dtype: self.dtype, values: inputs };
        let (Some(row_bytes), Some(line_bytes)) = (self.dtype.row_bytes(inputs), self.line_bytes(inputs))
        else {
            return Err(partial);
        };
        if row_bytes == 0 {
            return crate::error::expect_len(OP, "tiles", 0, tiles.len());
        }
        let outputs = blocks.len() / row_bytes;
        crate::error::expect_len(OP, "blocks", outputs * row_bytes, blocks.len())?;
        let expected = self.matrix_bytes(outputs, inputs).ok_or(partial)?;
        crate::error::expect_len(OP, "tiles", expected, tiles.len())?;
        tiles.fill(0);
        // A tile is as wide as whole blocks, or a block is as wide as whole tiles.
        let (len, bytes) = (self.dtype.block_len(), self.dtype.block_bytes());
        for (line, rows) in tiles.chunks_mut(line_bytes).zip(blocks.chunks(TILE_OUTPUTS * row_bytes)) {
            for (index, tile) in line.chunks_mut(self.bytes).enumerate() {
                let first = index * self.inputs;
                for (output, row) in rows.chunks(row_bytes).enumerate() {
                    let mut part = Part { tile: &mut *tile, output };
                    if len > self.inputs {
                        part.put(self.dtype, &row[first / len * bytes..][..bytes], first % len / self.inputs);
                        continue;
                    }
                    let here = row[first / len * bytes..].chunks(bytes).take(self.inputs / len);
                    here.enumerate().for_each(|(group, block)| part.put(self.dtype, block, group));
                }
            }
        }
        Ok(())
    }
}

/// One output of a tile.
struct Part<'a> {
    tile: &'a mut [u8],
    output: usize,
}

impl Part<'_> {
    /// Writes a block. `index` is its number in the tile, or the number of the tile in the block if the block is larger.
    fn put(&mut self, dtype: DType, block: &[u8], index: usize) {
        match dtype {
            DType::Q4_0 => {
                self.put_scale(0, index, [block[0], block[1]]);
                self.put_nibbles(index, block[2..18].try_into().expect("16 bytes"));
            }
            DType::Q4_1 => {
                self.put_scale(0, index, [block[0], block[1]]);
                self.put_scale(1, index, [block[2], block[3]]);
                self.put_nibbles(index, block[4..20].try_into().expect("16 bytes"));
            }
            DType::Int4 => {
                self.put_scale(0, index, [block[0], block[1]]);
                let middle = f16::from_f32(f32::from(block[2]) - 8.0);
                self.put_scale(1, index, middle.to_le_bytes());
                self.put_nibbles(index, block[3..19].try_into().expect("16 bytes"));
            }
            DType::Q4K => self.put_q4_k(block, index),
            DType::Q6K => self.put_q6_k(block, index),
            DType::Q8_0 => {
                let at = QUANTS + 8 * (self.output % 8) + 4 * (self.output / 8) + 2 * index;
                self.tile[at..at + 2].copy_from_slice(&block[..2]);
                self.put_bytes(index, block[2..34].try_into().expect("32 bytes"));
            }
            DType::F8E4M3 => {
                let has_nan = block[4..].iter().any(|code| code & 0x7f == 0x7f);
                let nan = f32::NAN.to_le_bytes();
                let at = QUANTS + self.pair(8) + 4 * index;
                self.tile[at..at + 4].copy_from_slice(if has_nan { &nan } else { &block[..4] });
                self.put_bytes(index, block[4..36].try_into().expect("32 bytes"));
            }
            _ => unreachable!("`Tiles::of` returns no tiles of {dtype}"),
        }
    }

    /// Returns the offset of this output in a vector of 16 bytes per pair of outputs, of which each has `bytes`.
    fn pair(&self, bytes: usize) -> usize {
        16 * (self.output % 8) + bytes * (self.output / 8)
    }

    /// Writes one of the four half-precision scales of a vector.
    fn put_scale(&mut self, vector: usize, group: usize, scale: [u8; 2]) {
        let at = QUANTS + SCALES * vector + self.pair(8) + 2 * group;
        self.tile[at..at + 2].copy_from_slice(&scale);
    }

    /// Writes a word of a lane's quants.
    fn put_word(&mut self, quad: usize, index: usize, word: u32) {
        let at = QUANTS / 2 * (self.output / 8) + 64 * (self.output % 8) + 16 * quad + 4 * index;
        self.tile[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }

    /// Writes a group of nibbles, of which the first half are the lower ones of the bytes.
    fn put_nibbles(&mut self, group: usize, bytes: [u8; 16]) {
        let both = u128::from_le_bytes(bytes);
        for quad in 0..4 {
            let eight = (both >> (64 * (quad % 2) + 4 * (quad / 2))) as u64;
            self.put_word(quad, group, word_of(eight & 0x0f0f_0f0f_0f0f_0f0f));
        }
    }

    /// Writes a group of bytes.
    fn put_bytes(&mut self, group: usize, bytes: [u8; 32]) {
        for (index, four) in bytes.chunks_exact(4).enumerate() {
            let word = u32::from_le_bytes([four[0], four[2], four[1], four[3]]);
            self.put_word(index / 2, 2 * group + index % 2, word);
        }
    }

    fn put_q4_k(&mut self, block: &[u8], half: usize) {
        let scales = QUANTS + self.pair(8);
        for group in 0..4 {
            let (scale, least) = crate::dequantize::six_bit_pair(&block[4..16], 4 * half + group);
            self.tile[scales + group] = scale;
            self.tile[scales + 4 + group] = least;
            // Two groups share 32 bytes.
            let bytes = &block[16 + (2 * half + group / 2) * 32..][..32];
            for (quad, eight) in bytes.chunks_exact(8).enumerate() {
                let eight = u64::from_le_bytes(eight.try_into().expect("8 bytes")) >> (4 * (group % 2));
                self.put_word(quad, group, word_of(eight & 0x0f0f_0f0f_0f0f_0f0f));
            }
        }
        let steps = QUANTS + SCALES + 8 * (self.output % 8) + 4 * (self.output / 8);
        self.tile[steps..steps + 4].copy_from_slice(&block[..4]);
    }

    fn put_q6_k(&mut self, block: &[u8], half: usize) {
        const UPPER: usize = QUANTS;
        const STEPS: usize = UPPER + QUANTS / 2 + SCALES;
        let [lower, upper] = [&block[64 * half..][..64], &block[128 + 32 * half..][..32]];
        for quad in 0..4 {
            let mut words = [0_u32; 2];
            for group in 0..4 {
                // Four of the first 16 inputs and four of the second.
                let at = |bytes: &[u8]| {
                    let [first, second] = [0, 16].map(|step| {
                        u32::from_le_bytes(bytes[step + 4 * quad..][..4].try_into().expect("4 bytes"))
                    });
                    u64::from(first) | u64::from(second) << 32
                };
                let eight = at(&lower[32 * (group % 2)..]) >> (4 * (group / 2));
                self.put_word(quad, group, word_of(eight & 0x0f0f_0f0f_0f0f_0f0f));
                let eight = at(upper) >> (2 * group) & 0x0303_0303_0303_0303;
                // The pairs are two bits apart instead of four.
                let pairs = word_of(eight);
                for pair in 0..4 {
                    words[group / 2] |= (pairs >> (4 * pair) & 0x0003_0003) << (2 * (group % 2 * 4 + pair));
                }
            }
            let at = UPPER + 64 * (self.output % 8) + 16 * quad + 8 * (self.output / 8);
            self.tile[at..at + 4].copy_from_slice(&words[0].to_le_bytes());
            self.tile[at + 4..at + 8].copy_from_slice(&words[1].to_le_bytes());
        }
        let scales = UPPER + QUANTS / 2 + self.pair(8);
        self.tile[scales..scales + 8].copy_from_slice(&block[192 + 8 * half..][..8]);
        let step = STEPS + 4 * (self.output % 8) + 2 * (self.output / 8);
        self.tile[step..step + 2].copy_from_slice(&block[208..210]);
    }
}

/// Packs eight bytes below 16: the p-th pair to bits 4 · p of both halves of the word.
fn word_of(eight: u64) -> u32 {
    let every_other = |of: u64| {
        let of = of & 0x000f_000f_000f_000f;
        ((of | of >> 12 | of >> 24 | of >> 36) & 0xffff) as u32
    };
    every_other(eight) | every_other(eight >> 8) << 16
}
