//! 4-bit floats with a power of two for every 32 of them, as gpt-oss stores the experts of a layer.
//!
//! Invariant: the values stay packed. A byte of a checkpoint holds two neighbors of a row, one of a block of GGUF two
//! values that are 16 apart. Rows of gates and ups alternate, and are separated here.

use std::collections::BTreeMap;
use std::ops::Range;

use skep_kernels::DType;

use super::{BLOCK, MAX_DECODED_VALUES, StoredAs, expect_type, insert};
use crate::checkpoint::{Format, TensorLocation};
use crate::error::ModelError;

/// The smallest exponent, with its bias, for which not all values are finite.
const TOO_LARGE: u8 = 253;

/// Joins the blocks and scales of a tensor of all experts into a matrix for each expert and projection.
pub(super) fn join(stem: &str, tensors: &mut BTreeMap<String, TensorLocation>) -> Result<(), ModelError> {
    let name = format!("{stem}_blocks");
    let (Some(blocks), Some(scales)) = (tensors.remove(&name), tensors.remove(&format!("{stem}_scales")))
    else {
        return Err(ModelError::tensor(
            format!("{stem}_scales"),
            "is missing, but other parts of its weight are present",
        ));
    };
    expect_type(&name, &blocks, "U8")?;
    expect_type(&format!("{stem}_scales"), &scales, "U8")?;
    let [count, rows, across, half] = blocks.shape[..] else {
        let problem = format!("has the shape {:?}; expected [experts, rows, blocks, 16]", blocks.shape);
        return Err(ModelError::tensor(name, problem));
    };
    if half != BLOCK / 2 || scales.shape != [count, rows, across] {
        let problem = format!("has the shape {:?} beside scales of {:?}", blocks.shape, scales.shape);
        return Err(ModelError::tensor(name, problem));
    }
    if rows.checked_mul(across).is_none_or(|blocks| blocks > MAX_DECODED_VALUES / BLOCK) {
        return Err(ModelError::tensor(name, format!("{rows} rows of {across} blocks are too many")));
    }
    let Some((prefix, part)) = stem.rsplit_once('.') else {
        return Err(ModelError::tensor(name, "is not in a module of experts"));
    };
    let parts: &[&str] = match part {
        "gate_up_proj" => &["gate_proj", "up_proj"],
        "down_proj" => &["down_proj"],
        _ => return Err(ModelError::tensor(name, "is not one of gate_up_proj, down_proj")),
    };
    if !rows.is_multiple_of(parts.len()) {
        return Err(ModelError::tensor(name, format!("{rows} rows do not alternate between gates and ups")));
    }
    let (length, scale_length) = (rows * across * half, rows * across);
    for expert in 0..count {
        for (first, part) in parts.iter().enumerate() {
            let start = blocks.bytes.start + expert * length;
            let scale_start = scales.bytes.start + expert * scale_length;
            let location = TensorLocation {
                format: Format::Weights(DType::Mxfp4),
                shape: vec![rows / parts.len(), across * BLOCK],
                file: blocks.file,
                bytes: start..start + length,
                stored: StoredAs::Mxfp4 {
                    scales: (scales.file, scale_start..scale_start + scale_length),
                    first,
                    step: parts.len(),
                },
            };
            insert(format!("{prefix}.{expert}.{part}.weight"), location, tensors)?;
        }
    }
    Ok(())
}

/// Rows of codes and of powers of two, of which every `step`-th from `first` on belongs to a matrix of `columns` columns.
#[derive(Clone, Copy)]
pub(super) struct Weight<'a> {
    pub(super) columns: usize,
    pub(super) first: usize,
    pub(super) step: usize,
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [u8],
}

impl Weight<'_> {
    /// Returns the blocks of the whole matrix.
    pub(super) fn content(&self) -> Result<Vec<u8>, String> {
        let across = self.columns / BLOCK;
        let stored = self.scales.len() / across.max(1);
        let rows = (self.first..stored).step_by(self.step.max(1)).len();
        let row_bytes = across * DType::Mxfp4.block_bytes();
        let mut blocks = vec![0; rows * row_bytes];
        let mut rows = blocks.chunks_exact_mut(row_bytes.max(1)).enumerate();
        rows.try_for_each(|(row, out)| self.pack(row, 0..across, out))?;
        Ok(blocks)
    }

    /// Packs some blocks of a row into `out`, which has room for exactly these. Returns an error if a value is not finite.
    pub(super) fn pack(&self, row: usize, blocks: Range<usize>, out: &mut [u8]) -> Result<(), String> {
        let across = self.columns / BLOCK;
        let stored = self.first + row * self.step;
        let codes = &self.codes[stored * self.columns / 2..][blocks.start * BLOCK / 2..];
        let scales = &self.scales[stored * across..];
        let out = out.chunks_exact_mut(DType::Mxfp4.block_bytes());
        for ((block, codes), out) in blocks.zip(codes.chunks_exact(BLOCK / 2)).zip(out) {
            let scale = scales[block];
            if scale >= TOO_LARGE {
                return Err(format!("the power of two of block [{stored}, {block}] is not a finite number"));
            }
            out[0] = scale;
            let value = |at: usize| codes[at / 2] >> (4 * (at % 2)) & 15;
            let pairs = out[1..].iter_mut().enumerate();
            pairs.for_each(|(at, pair)| *pair = value(at) | value(at + BLOCK / 2) << 4);
        }
        Ok(())
    }
}
