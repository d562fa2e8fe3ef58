//! 4-bit integers with a scale for each group of a row, in the packings of compressed-tensors, GPTQ and AWQ.
//!
//! Invariant: a value is (integer − zero point) × scale. Integers stay packed: as Q4_0 if all zero points are 8, as INT4
//! otherwise, and only scales that half precision does not hold make a matrix F32.

use std::collections::BTreeMap;
use std::ops::Range;

use half::f16;
use skep_kernels::DType;

use super::{BLOCK, StoredAs, bytes_of, expect_type, insert, matrix_shape, scales_of, take};
use crate::checkpoint::{Format, TensorLocation};
use crate::config::{Int4Coding, IntegerPacking};
use crate::error::ModelError;
use crate::mapping::Mapping;

/// Number of integers in a word.
const WORD: usize = 8;
/// The column, of eight consecutive ones, of each integer of a word of AWQ, from the lowest bits on.
const AWQ_COLUMNS: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
/// The zero point of integers that are stored with a fixed offset.
const MIDDLE: u8 = 8;

/// Returns the end of the names of tensors with integers.
pub(super) fn codes_suffix(packing: IntegerPacking) -> &'static str {
    match packing {
        IntegerPacking::Rows => ".weight_packed",
        IntegerPacking::Gptq { .. } | IntegerPacking::Awq => ".qweight",
    }
}

/// Joins the tensors of a module into its weight.
pub(super) fn join(
    module: &str,
    coding: Int4Coding,
    tensors: &mut BTreeMap<String, TensorLocation>,
    files: &[Mapping],
) -> Result<(), ModelError> {
    let Int4Coding { packing, group, symmetric } = coding;
    let suffix = codes_suffix(packing);
    let name = format!("{module}{suffix}");
    let codes = take(tensors, module, suffix)?;
    expect_type(&name, &codes, "I32")?;
    // GPTQ and AWQ store the transposed weight; words run along its inputs or along its outputs.
    let [rows, columns] = match packing {
        IntegerPacking::Rows => matrix_shape(&name, &codes.shape, [1, WORD])?,
        IntegerPacking::Gptq { .. } => {
            let [columns, rows] = matrix_shape(&name, &codes.shape, [WORD, 1])?;
            [rows, columns]
        }
        IntegerPacking::Awq => {
            let [columns, rows] = matrix_shape(&name, &codes.shape, [1, WORD])?;
            [rows, columns]
        }
    };
    let group = group.unwrap_or(columns);
    if group == 0 || !group.is_multiple_of(BLOCK) || !columns.is_multiple_of(group) {
        let problem = format!("rows of {columns} values are not whole groups of {group} values");
        return Err(ModelError::tensor(name, problem));
    }
    let groups = columns / group;
    if let Some(location) = tensors.remove(&format!("{module}.weight_shape")) {
        check_stated_shape(&format!("{module}.weight_shape"), &location, [rows, columns], files)?;
    }
    if let Some(location) = tensors.remove(&format!("{module}.g_idx")) {
        check_order(&format!("{module}.g_idx"), &location, columns, group, files)?;
    }
    let (scales, zeros) = match packing {
        IntegerPacking::Rows => (".weight_scale", ".weight_zero_point"),
        IntegerPacking::Gptq { .. } | IntegerPacking::Awq => (".scales", ".qzeros"),
    };
    let (scale_shape, zero_shape) = match packing {
        IntegerPacking::Rows => ([rows, groups], [rows.div_ceil(WORD), groups]),
        IntegerPacking::Gptq { .. } | IntegerPacking::Awq => ([groups, rows], [groups, rows.div_ceil(WORD)]),
    };
    let scale_location = take(tensors, module, scales)?;
    let scales = scales_of(&format!("{module}{scales}"), scale_location, &[&scale_shape])?;
    let zeros = match (packing, symmetric) {
        (IntegerPacking::Rows, true) => None,
        _ => {
            let location = take(tensors, module, zeros)?;
            let name = format!("{module}{zeros}");
            expect_type(&name, &location, "I32")?;
            if location.shape != zero_shape {
                let problem =
                    format!("has the shape {:?}, but its weight needs {zero_shape:?}", location.shape);
                return Err(ModelError::tensor(name, problem));
            }
            Some((location.file, location.bytes))
        }
    };
    let location = TensorLocation {
        format: Format::Weights(if symmetric { DType::Q4_0 } else { DType::Int4 }),
        shape: vec![rows, columns],
        stored: StoredAs::Int4 { packing, group, scales, zeros },
        ..codes
    };
    insert(format!("{module}.weight"), location, tensors)
}

fn check_stated_shape(
    name: &str,
    location: &TensorLocation,
    [rows, columns]: [usize; 2],
    files: &[Mapping],
) -> Result<(), ModelError> {
    expect_type(name, location, "I64").or_else(|_| expect_type(name, location, "I32"))?;
    let bytes = &files[location.file][location.bytes.clone()];
    let size = bytes.len() / 2;
    let stated: Vec<u64> = bytes
        .chunks_exact(size.max(1))
        .map(|value| value.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
        .collect();
    match stated == [rows as u64, columns as u64] {
        true => Ok(()),
        false => {
            let problem = format!("states {stated:?}, but the packed values have [{rows}, {columns}]");
            Err(ModelError::tensor(name, problem))
        }
    }
}

/// Checks that each column belongs to the group of its place.
fn check_order(
    name: &str,
    location: &TensorLocation,
    columns: usize,
    group: usize,
    files: &[Mapping],
) -> Result<(), ModelError> {
    expect_type(name, location, "I32")?;
    let bytes = &files[location.file][location.bytes.clone()];
    if location.shape != [columns] {
        let problem = format!("has the shape {:?}, but its weight has {columns} columns", location.shape);
        return Err(ModelError::tensor(name, problem));
    }
    let (numbers, _) = bytes.as_chunks::<4>();
    match numbers.iter().enumerate().find(|(at, number)| u32::from_le_bytes(**number) as usize != at / group)
    {
        None => Ok(()),
        Some((at, number)) => {
            let found = i32::from_le_bytes(*number);
            let problem = format!(
                "puts column {at} into group {found}: the columns were reordered by activation (act-order, `desc_act`), which is \
                 not supported"
            );
            Err(ModelError::tensor(name, problem))
        }
    }
}

/// A matrix of packed integers.
#[derive(Clone, Copy)]
pub(super) struct Weight<'a> {
    pub(super) packing: IntegerPacking,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) group: usize,
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [f32],
    pub(super) zeros: Option<&'a [u8]>,
}

impl Weight<'_> {
    /// Returns the blocks of the matrix and their format, which is `declared` if it can hold all values.
    pub(super) fn content(&self, declared: DType) -> (DType, Vec<u8>) {
        let format = self.format(declared);
        match self.blocks(format) {
            Some(blocks) => (format, blocks),
            None => (DType::F32, self.values()),
        }
    }

    /// Returns the format of the blocks: `declared`, unless its zero point is not that of all groups.
    pub(super) fn format(&self, declared: DType) -> DType {
        let all_middle = self.zeros.is_none_or(|_| {
            let groups = self.columns / self.group;
            (0..self.rows).all(|row| (0..groups).all(|group| self.zero(row, group) == MIDDLE))
        });
        if declared == DType::Q4_0 && all_middle { DType::Q4_0 } else { DType::Int4 }
    }

    /// Returns whether half precision holds every scale exactly, so that every block can be repacked.
    pub(super) fn has_exact_scales(&self) -> bool {
        self.scales.iter().all(|scale| f16::from_f32(*scale).to_f32() == *scale)
    }

    /// Repacks the integers, or returns `None` if half precision does not hold a scale exactly.
    fn blocks(&self, format: DType) -> Option<Vec<u8>> {
        let per_row = self.columns / BLOCK;
        let row_bytes = per_row * format.block_bytes();
        let mut blocks = vec![0; self.rows * row_bytes];
        let mut rows = blocks.chunks_exact_mut(row_bytes.max(1)).enumerate();
        let is_exact = rows.all(|(row, out)| self.repack(format, row, 0..per_row, out));
        is_exact.then_some(blocks)
    }

    /// Repacks some blocks of a row into `out`, which has room for exactly these. Returns `false` if half precision does not hold
    /// a scale exactly.
    pub(super) fn repack(&self, format: DType, row: usize, blocks: Range<usize>, out: &mut [u8]) -> bool {
        for (block, out) in blocks.zip(out.chunks_exact_mut(format.block_bytes())) {
            let group = block * BLOCK / self.group;
            let (scale, zero) = (self.scale(row, group), self.zero(row, group));
            let pairs = self.pairs(row, block * BLOCK);
            let mut half = f16::from_f32(scale);
            if half.to_f32() != scale {
                // The scale of a block of zeros does not matter.
                if pairs.iter().any(|pair| pair & 15 != zero || pair >> 4 != zero) {
                    return false;
                }
                half = f16::ZERO;
            }
            out[..2].copy_from_slice(&half.to_le_bytes());
            if format == DType::Int4 {
                out[2] = zero;
            }
            let codes = out.len() - pairs.len();
            out[codes..].copy_from_slice(&pairs);
        }
        true
    }

    /// Returns the integers of a block as its bytes hold them: each has a value of the first half and one of the second.
    fn pairs(&self, row: usize, first: usize) -> [u8; BLOCK / 2] {
        let mut pairs = [0; BLOCK / 2];
        if self.packing == IntegerPacking::Rows {
            // Bytes hold neighbors here. The loop has fixed bounds, so that it becomes a few vector instructions.
            let (low, high) = self.codes[(row * self.columns + first) / 2..][..BLOCK / 2].split_at(BLOCK / 4);
            for (pair, (low, high)) in pairs.as_chunks_mut::<2>().0.iter_mut().zip(low.iter().zip(high)) {
                *pair = [(low & 15) | (high << 4), (low >> 4) | (high & 0xf0)];
            }
            return pairs;
        }
        let mut values = [0; BLOCK];
        self.integers(row, first, &mut values);
        let (low, high) = values.split_at(BLOCK / 2);
        pairs.iter_mut().zip(low.iter().zip(high)).for_each(|(pair, (low, high))| *pair = low | (high << 4));
        pairs
    }

    fn values(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.rows * self.columns);
        let mut values = [0; BLOCK];
        for row in 0..self.rows {
            for first in (0..self.columns).step_by(BLOCK) {
                self.integers(row, first, &mut values);
                let group = first / self.group;
                let (scale, zero) = (self.scale(row, group), f32::from(self.zero(row, group)));
                out.extend(values.iter().map(|value| (f32::from(*value) - zero) * scale));
            }
        }
        bytes_of(&out)
    }

    /// Reads the integers of a row from column `first` on, which starts a block.
    fn integers(&self, row: usize, first: usize, values: &mut [u8; BLOCK]) {
        match self.packing {
            IntegerPacking::Rows => {
                let bytes = &self.codes[(row * self.columns + first) / 2..][..BLOCK / 2];
                for (at, byte) in bytes.iter().enumerate() {
                    values[2 * at] = byte & 15;
                    values[2 * at + 1] = byte >> 4;
                }
            }
            IntegerPacking::Gptq { .. } => {
                for (at, value) in values.iter_mut().enumerate() {
                    let column = first + at;
                    *value = nibble(self.codes, column / WORD * self.rows + row, column % WORD);
                }
            }
            IntegerPacking::Awq => {
                for (at, value) in values.iter_mut().enumerate() {
                    *value = self.awq(self.codes, first + at, row);
                }
            }
        }
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        match self.packing {
            IntegerPacking::Rows => self.scales[row * (self.columns / self.group) + group],
            IntegerPacking::Gptq { .. } | IntegerPacking::Awq => self.scales[group * self.rows + row],
        }
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        let Some(zeros) = self.zeros else { return MIDDLE };
        match self.packing {
            IntegerPacking::Rows => {
                nibble(zeros, row / WORD * (self.columns / self.group) + group, row % WORD)
            }
            IntegerPacking::Gptq { zero_offset } => {
                let words = self.rows.div_ceil(WORD);
                nibble(zeros, group * words + row / WORD, row % WORD) + zero_offset
            }
            IntegerPacking::Awq => self.awq(zeros, group, row),
        }
    }

    /// Returns the integer of an output in a line of words of AWQ.
    fn awq(&self, words: &[u8], line: usize, output: usize) -> u8 {
        let place = AWQ_COLUMNS.iter().position(|column| *column == output % WORD).unwrap_or(0);
        nibble(words, line * (self.rows / WORD) + output / WORD, place)
    }
}

/// Returns an integer of a word, counted from the lowest bits. Words are little-endian.
fn nibble(words: &[u8], word: usize, place: usize) -> u8 {
    words[word * 4 + place / 2] >> (4 * (place % 2)) & 15
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_kernels::dequantize;

    #[test]
    fn packed_integers_become_blocks_of_the_same_values() {
        // Two groups: the nibbles 0 to 15 twice, then twice 15 down to 0; the lowest bits come first.
        let up: Vec<u8> = (0..8).map(|at| (2 * at) | (2 * at + 1) << 4).collect();
        let down: Vec<u8> = up.iter().rev().map(|byte| byte.rotate_left(4)).collect();
        let packed = [&up[..], &up, &down, &down].concat();
        fn weight<'a>(codes: &'a [u8], columns: usize, scales: &'a [f32]) -> Weight<'a> {
            let packing = IntegerPacking::Rows;
            Weight { packing, rows: 1, columns, group: 32, codes, scales, zeros: None }
        }
        let (format, blocks) = weight(&packed, 64, &[0.5, -0.25]).content(DType::Q4_0);
        assert_eq!(format, DType::Q4_0);
        let mut values = vec![0.0; 64];
        dequantize(DType::Q4_0, &blocks, &mut values).unwrap();
        let expected = |at: usize| match at < 32 {
            true => (at as f32 % 16.0 - 8.0) * 0.5,
            false => (15.0 - at as f32 % 16.0 - 8.0) * -0.25,
        };
        assert_eq!(values, (0..64).map(expected).collect::<Vec<_>>());
        // A scale that half precision does not hold keeps its value in F32; that of a group of zeros does not matter.
        let small = 2f32.powi(-20) * 1.0078125;
        let scales = [0.5, small];
        let (format, exact) = weight(&packed, 64, &scales).content(DType::Q4_0);
        assert_eq!(format, DType::F32);
        assert_eq!(exact[4 * 33..][..4], ((14.0 - 8.0) * small).to_le_bytes());
        let middle = [0x88; 16];
        let scale = [small];
        let (format, zeros) = weight(&middle, 32, &scale).content(DType::Q4_0);
        assert_eq!(format, DType::Q4_0);
        dequantize(DType::Q4_0, &zeros, &mut values[..32]).unwrap();
        assert_eq!(values[..32], [0.0; 32]);
    }
}
