//! 8-bit floats (E4M3) with a scale for each block of rows and columns, for each row, or for a whole matrix.
//!
//! Invariant: a value is code × scale, rounded once to F32. Codes stay packed if every 32 columns of a row share a scale.

use std::collections::BTreeMap;

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
        if let Some(at) = self.codes.iter().position(|code| code & 127 == 127) {
            let place = [at / self.columns, at % self.columns];
            return Err(ModelError::tensor(name, format!("its value at {place:?} is not a number")));
        }
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

    /// Returns blocks of codes, or values.
    pub(super) fn content(&self, format: DType) -> Vec<u8> {
        let rows = self.codes.chunks_exact(self.columns).enumerate();
        if format == DType::F8E4M3 {
            let mut blocks = Vec::with_capacity(self.codes.len() / BLOCK * format.block_bytes());
            for (row, codes) in rows {
                let scales = self.scales_of_row(row);
                for (at, codes) in codes.chunks_exact(BLOCK).enumerate() {
                    blocks.extend(scales[at * BLOCK / self.block[1]].to_le_bytes());
                    blocks.extend(codes);
                }
            }
            return blocks;
        }
        let table: Vec<f32> = (0..=u8::MAX).map(f8_e4m3).collect();
        let mut values = Vec::with_capacity(self.codes.len());
        for (row, codes) in rows {
            let scales = self.scales_of_row(row);
            let row = codes.iter().enumerate();
            values.extend(row.map(|(at, code)| table[usize::from(*code)] * scales[at / self.block[1]]));
        }
        bytes_of(&values)
    }
}
