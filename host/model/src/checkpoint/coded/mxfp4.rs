//! 4-bit floats with a power of two for every 32 of them, as gpt-oss stores the experts of a layer.
//!
//! Invariant: the values stay packed. A byte of a checkpoint holds two neighbors of a row, one of a block of GGUF two
//! values that are 16 apart. Rows of gates and ups alternate, and are separated here.

use std::collections::BTreeMap;

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

/// Returns the blocks of every `step`-th row from `first` on.
pub(super) fn content(
    name: &str,
    codes: &[u8],
    scales: &[u8],
    columns: usize,
    first: usize,
    step: usize,
) -> Result<Vec<u8>, ModelError> {
    let across = columns / BLOCK;
    let rows = codes.chunks_exact((columns / 2).max(1)).zip(scales.chunks_exact(across.max(1)));
    let mut blocks = Vec::with_capacity(codes.len() / step / 16 * DType::Mxfp4.block_bytes());
    for (row, (codes, scales)) in rows.enumerate().skip(first).step_by(step) {
        for (at, (codes, scale)) in codes.chunks_exact(BLOCK / 2).zip(scales).enumerate() {
            if *scale >= TOO_LARGE {
                let problem = format!("the power of two of block [{row}, {at}] is not a finite number");
                return Err(ModelError::tensor(name, problem));
            }
            blocks.push(*scale);
            let value = |at: usize| codes[at / 2] >> (4 * (at % 2)) & 15;
            blocks.extend((0..BLOCK / 2).map(|at| value(at) | value(at + BLOCK / 2) << 4));
        }
    }
    Ok(blocks)
}
