//! 8-bit floats (E4M3) with a scale for each block of rows and columns, for each row, or for a whole matrix.
//!
//! Invariant: a value is code × scale, rounded once to F32. Codes stay packed if every 32 columns of a row share a scale.

use std::collections::BTreeMap;
use std::ops::Range;

use skep_kernels::DType;
use skep_kernels::dequantize::f8_e4m3;

use super::{BLOCK, StoredAs, bytes_of, expect_type, insert, matrix_shape, scales_of, take};
use crate::checkpoint::{Format, TensorLocation};
use crate::config::Fp8Coding;
use crate::error::ModelError;

/// The largest value of a code.
const LARGEST: f32 = 448.0;

/// Returns the end of the names of tensors with scales.
pub(super) fn scales_suffix(coding: Fp8Coding) -> &'static str {
    match coding {
        Fp8Coding::Blocks { inverse_name: true, .. } => ".weight_scale_inv",
        Fp8Coding::Blocks { inverse_name: false, .. } | Fp8Coding::RowsOrWhole => ".weight_scale",
    }
}

/// Joins the tensors of a module into its weight.
pub(super) fn join(
    module: &str,
    coding: Fp8Coding,
    tensors: &mut BTreeMap<String, TensorLocation>,
) -> Result<(), ModelError> {
    let name = format!("{module}.weight");
    let suffix = scales_suffix(coding);
    let codes = take(tensors, module, ".weight")?;
    let scales = take(tensors, module, suffix)?;
    expect_type(&name, &codes, "F8_E4M3")?;
    let [rows, columns] = matrix_shape(&name, &codes.shape, [1, 1])?;
    // The scale of the activations is for kernels that round them; these do not.
    tensors.remove(&format!("{module}.input_scale"));
    let scales_name = format!("{module}{suffix}");
    let (block, scales) = match coding {
        Fp8Coding::Blocks { block, .. } => {
            let shape = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
            (block, scales_of(&scales_name, scales, &[&shape])?)
        }
        Fp8Coding::RowsOrWhole => {
            let block = if scales.shape == [rows, 1] { [1, columns] } else { [rows, columns] };
            (block, scales_of(&scales_name, scales, &[&[rows, 1], &[1], &[]])?)
        }
    };
    let format = Format::Weights(format_of(columns, block[1]));
    insert(name, TensorLocation { format, stored: StoredAs::Fp8 { scales, block }, ..codes }, tensors)
}

/// Returns the format of codes in memory: packed if each scale covers whole blocks of a row.
pub(crate) fn format_of(columns: usize, columns_of_scale: usize) -> DType {
    let covers_blocks = columns_of_scale >= columns || columns_of_scale.is_multiple_of(BLOCK);
    if columns.is_multiple_of(BLOCK) && covers_blocks { DType::F8E4M3 } else { DType::F32 }
}

/// Returns a description of the first of some codes of a row, from column `first` on, that is not a number.
fn no_number(row: usize, first: usize, codes: &[u8]) -> Option<String> {
    let at = codes.iter().position(|code| code & 127 == 127)?;
    let place = [row, first + at];
    Some(format!("its value at {place:?} is not a number"))
}

/// A matrix of codes.
#[derive(Clone, Copy)]
pub(super) struct Weight<'a> {
    pub(super) columns: usize,
    pub(super) block: [usize; 2],
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [f32],
}

impl Weight<'_> {
    /// Checks that all values are finite.
    pub(super) fn check(&self, name: &str) -> Result<(), ModelError> {
        self.check_scales(name)?;
        let mut rows = self.codes.chunks_exact(self.columns).enumerate();
        match rows.find_map(|(row, codes)| no_number(row, 0, codes)) {
            None => Ok(()),
            Some(problem) => Err(ModelError::tensor(name, problem)),
        }
    }

    /// Checks that no scale makes a code infinite.
    pub(super) fn check_scales(&self, name: &str) -> Result<(), ModelError> {
        match self.scales.iter().find(|scale| !(*scale * LARGEST).is_finite()) {
            None => Ok(()),
            Some(scale) => Err(ModelError::tensor(name, format!("its scale {scale:e} is too large"))),
        }
    }

    /// Returns the scales of a row, one for each block of columns.
    fn scales_of_row(&self, row: usize) -> &[f32] {
        let across = self.columns.div_ceil(self.block[1]);
        &self.scales[row / self.block[0] * across..][..across]
    }

    /// Packs some blocks of a row, and returns an error if one of their codes is not a number.
    pub(super) fn pack_checked(
        &self,
        row: usize,
        blocks: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), String> {
        let first = blocks.start * BLOCK;
        let codes = &self.codes[row * self.columns..][first..blocks.end * BLOCK];
        self.pack(row, blocks, out);
        no_number(row, first, codes).map_or(Ok(()), Err)
    }

    /// Packs some blocks of a row into `out`, which has room for exactly these.
    fn pack(&self, row: usize, blocks: Range<usize>, out: &mut [u8]) {
        let scales = self.scales_of_row(row);
        let codes = &self.codes[row * self.columns..][blocks.start * BLOCK..];
        let out = out.chunks_exact_mut(DType::F8E4M3.block_bytes());
        for ((block, codes), out) in blocks.zip(codes.chunks_exact(BLOCK)).zip(out) {
            let (scale, kept) = out.split_at_mut(size_of::<f32>());
            scale.copy_from_slice(&scales[block * BLOCK / self.block[1]].to_le_bytes());
            kept.copy_from_slice(codes);
        }
    }

    /// Returns blocks of codes, or values.
    pub(super) fn content(&self, format: DType) -> Vec<u8> {
        if format == DType::F8E4M3 {
            let across = self.columns / BLOCK;
            let row_bytes = across * format.block_bytes();
            let mut blocks = vec![0; self.codes.len() / self.columns * row_bytes];
            let rows = blocks.chunks_exact_mut(row_bytes.max(1)).enumerate();
            rows.for_each(|(row, out)| self.pack(row, 0..across, out));
            return blocks;
        }
        let table: Vec<f32> = (0..=u8::MAX).map(f8_e4m3).collect();
        let mut values = Vec::with_capacity(self.codes.len());
        for (row, codes) in self.codes.chunks_exact(self.columns).enumerate() {
            let scales = self.scales_of_row(row);
            let row = codes.iter().enumerate();
            values.extend(row.map(|(at, code)| table[usize::from(*code)] * scales[at / self.block[1]]));
        }
        bytes_of(&values)
    }
}
