//! Weights that a checkpoint of safetensors keeps as codes and scales: 4-bit integers in groups, and 8-bit floats in blocks.
//!
//! Invariant: content has exactly the values that codes and scales stand for. Integers stay packed, as blocks of 32; 8-bit
//! floats, for which there is no kernel, become F32. The names of the tensors are those of compressed-tensors
//! (`weight_packed`, `weight_scale`, `weight_shape`) and of DeepSeek's FP8 (`weight`, `weight_scale_inv`).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use half::f16;
use skep_kernels::{DType, dequantize};

use super::{Format, Tensor, TensorLocation};
use crate::config::WeightCoding;
use crate::error::ModelError;
use crate::mapping::Mapping;

/// Number of values in a group of integers, and of the blocks that they become.
const GROUP: usize = 32;
/// Number of integers in a word.
const WORD: usize = 8;
/// The largest number of values that are decoded at once.
const MAX_DECODED_VALUES: usize = 1 << 32;

/// How the bytes of a tensor stand for its values.
#[derive(Clone, Debug, Default)]
pub(super) enum StoredAs {
    #[default]
    Values,
    Int4 {
        scales: Scales,
    },
    Fp8 {
        scales: Scales,
        block: [usize; 2],
    },
}

/// The location of a tensor's scales.
#[derive(Clone, Debug)]
pub(super) struct Scales {
    dtype: DType,
    file: usize,
    bytes: Range<usize>,
}

/// How the bytes of a tensor stand for its values, with the scales.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Coding<'a> {
    Values,
    Int4 { scales: &'a [u8], dtype: DType },
    Fp8 { scales: &'a [u8], dtype: DType, block: [usize; 2] },
}

impl StoredAs {
    pub(super) fn coding<'a>(&self, files: &'a [Mapping]) -> Coding<'a> {
        let bytes = |scales: &Scales| &files[scales.file][scales.bytes.clone()];
        match self {
            StoredAs::Values => Coding::Values,
            StoredAs::Int4 { scales } => Coding::Int4 { scales: bytes(scales), dtype: scales.dtype },
            StoredAs::Fp8 { scales, block } => {
                Coding::Fp8 { scales: bytes(scales), dtype: scales.dtype, block: *block }
            }
        }
    }
}

/// Joins the codes and scales of each weight into one tensor with the name of the weight.
pub(super) fn join(
    coding: Option<&WeightCoding>,
    tensors: &mut BTreeMap<String, TensorLocation>,
    files: &[Mapping],
) -> Result<(), ModelError> {
    let names = |suffix: &str| -> Vec<String> {
        tensors.keys().filter_map(|name| name.strip_suffix(suffix)).map(str::to_owned).collect()
    };
    let (packed, blocks) = (names(".weight_packed"), names(".weight_scale_inv"));
    match coding {
        Some(WeightCoding::PackedInt4) => {
            packed.iter().try_for_each(|module| join_int4(module, tensors, files))
        }
        Some(WeightCoding::Fp8 { block }) => {
            blocks.iter().try_for_each(|module| join_fp8(module, *block, tensors))
        }
        None => Ok(()),
    }
}

fn take(
    tensors: &mut BTreeMap<String, TensorLocation>,
    module: &str,
    suffix: &str,
) -> Result<TensorLocation, ModelError> {
    let name = format!("{module}.{suffix}");
    tensors.remove(&name).ok_or_else(|| ModelError::tensor(name, "is missing beside the rest of its weight"))
}

fn scales_of(name: &str, location: TensorLocation, shape: [usize; 2]) -> Result<Scales, ModelError> {
    if location.shape != shape {
        let problem = format!("has the shape {:?}, but its weight needs scales of {shape:?}", location.shape);
        return Err(ModelError::tensor(name, problem));
    }
    match location.format {
        Format::Weights(dtype @ (DType::F32 | DType::F16 | DType::BF16)) => {
            Ok(Scales { dtype, file: location.file, bytes: location.bytes })
        }
        Format::Weights(dtype) => Err(ModelError::tensor(name, format!("has the type {dtype}"))),
        Format::Other(format) => {
            Err(ModelError::tensor(name, format!("has the type {format}; supported: F32, F16, BF16")))
        }
    }
}

fn expect_type(name: &str, location: &TensorLocation, wanted: &str) -> Result<(), ModelError> {
    match &location.format {
        Format::Other(format) if format == wanted => Ok(()),
        Format::Other(format) => {
            Err(ModelError::tensor(name, format!("has the type {format}; expected {wanted}")))
        }
        Format::Weights(dtype) => {
            Err(ModelError::tensor(name, format!("has the type {dtype}; expected {wanted}")))
        }
    }
}

fn join_int4(
    module: &str,
    tensors: &mut BTreeMap<String, TensorLocation>,
    files: &[Mapping],
) -> Result<(), ModelError> {
    let packed_name = format!("{module}.weight_packed");
    let packed = take(tensors, module, "weight_packed")?;
    let scales = take(tensors, module, "weight_scale")?;
    expect_type(&packed_name, &packed, "I32")?;
    let [rows, words] = packed.shape[..] else {
        let problem = format!("has the shape {:?}; expected [rows, words]", packed.shape);
        return Err(ModelError::tensor(packed_name, problem));
    };
    let columns =
        words.checked_mul(WORD).filter(|columns| columns.is_multiple_of(GROUP)).ok_or_else(|| {
            let problem = format!("rows of {words} words are not whole groups of {GROUP} values");
            ModelError::tensor(packed_name, problem)
        })?;
    if let Some(location) = tensors.remove(&format!("{module}.weight_shape")) {
        let name = format!("{module}.weight_shape");
        expect_type(&name, &location, "I64").or_else(|_| expect_type(&name, &location, "I32"))?;
        let bytes = &files[location.file][location.bytes.clone()];
        let size = bytes.len() / 2;
        let stated: Vec<u64> = bytes
            .chunks_exact(size.max(1))
            .map(|value| value.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
            .collect();
        if stated != [rows as u64, columns as u64] {
            let problem = format!("states {stated:?}, but the packed values have [{rows}, {columns}]");
            return Err(ModelError::tensor(name, problem));
        }
    }
    let scales = scales_of(&format!("{module}.weight_scale"), scales, [rows, columns / GROUP])?;
    let location = TensorLocation {
        format: Format::Weights(DType::Q4_0),
        shape: vec![rows, columns],
        stored: StoredAs::Int4 { scales },
        ..packed
    };
    insert(module, location, tensors)
}

fn join_fp8(
    module: &str,
    block: [usize; 2],
    tensors: &mut BTreeMap<String, TensorLocation>,
) -> Result<(), ModelError> {
    let name = format!("{module}.weight");
    let codes = take(tensors, module, "weight")?;
    let scales = take(tensors, module, "weight_scale_inv")?;
    expect_type(&name, &codes, "F8_E4M3")?;
    let [rows, columns] = codes.shape[..] else {
        let problem = format!("has the shape {:?}; expected [rows, columns]", codes.shape);
        return Err(ModelError::tensor(name, problem));
    };
    if rows.checked_mul(columns).is_none_or(|values| values > MAX_DECODED_VALUES) {
        return Err(ModelError::tensor(name, format!("{rows} × {columns} values are too many")));
    }
    let shape = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
    let scales = scales_of(&format!("{module}.weight_scale_inv"), scales, shape)?;
    let format = Format::Weights(DType::F32);
    insert(module, TensorLocation { format, stored: StoredAs::Fp8 { scales, block }, ..codes }, tensors)
}

fn insert(
    module: &str,
    location: TensorLocation,
    tensors: &mut BTreeMap<String, TensorLocation>,
) -> Result<(), ModelError> {
    let name = format!("{module}.weight");
    match tensors.insert(name.clone(), location) {
        None => Ok(()),
        Some(_) => Err(ModelError::tensor(name, "appears twice, packed and plain")),
    }
}

impl<'a> Tensor<'a> {
    /// Returns the tensor with the bytes that [`Tensor::content`] returned.
    pub(crate) fn with_content<'b>(&self, dtype: DType, content: &'b [u8]) -> Tensor<'b>
    where
        'a: 'b,
    {
        Tensor { name: self.name, dtype, shape: self.shape, data: content, coding: Coding::Values }
    }

    /// Returns the tensor's blocks and their format. The format is that of the tensor, unless the blocks cannot hold its
    /// values exactly; then it is F32.
    pub fn content(&self) -> Result<(DType, Cow<'a, [u8]>), ModelError> {
        match self.coding {
            Coding::Values => Ok((self.dtype, Cow::Borrowed(self.data))),
            Coding::Int4 { scales, dtype } => {
                let scales = self.floats(scales, dtype)?;
                Ok(match int4_blocks(self.data, &scales) {
                    Some(blocks) => (DType::Q4_0, Cow::Owned(blocks)),
                    None => (DType::F32, Cow::Owned(int4_values(self.data, &scales))),
                })
            }
            Coding::Fp8 { scales, dtype, block } => {
                let scales = self.floats(scales, dtype)?;
                let columns = self.shape.get(1).copied().unwrap_or(1).max(1);
                let values = fp8_values(self.data, &scales, columns, block);
                match values.iter().position(|value| !value.is_finite()) {
                    None => Ok((DType::F32, Cow::Owned(bytes_of(&values)))),
                    Some(at) => {
                        let place = [at / columns, at % columns];
                        Err(ModelError::tensor(self.name, format!("its value at {place:?} is not a number")))
                    }
                }
            }
        }
    }

    fn floats(&self, bytes: &[u8], dtype: DType) -> Result<Vec<f32>, ModelError> {
        let mut values = vec![0.0; bytes.len() / dtype.block_bytes()];
        dequantize(dtype, bytes, &mut values)
            .map_err(|error| ModelError::tensor(self.name, error.to_string()))?;
        match values.iter().all(|scale| scale.is_finite()) {
            true => Ok(values),
            false => Err(ModelError::tensor(self.name, "one of its scales is not a finite number")),
        }
    }
}

/// Returns the integer of each value of a group, without the offset of 8. Words hold the first value in their lowest
/// bits, and are little-endian.
fn nibbles(group: &[u8]) -> impl Iterator<Item = u8> + '_ {
    group.iter().flat_map(|byte| [byte & 15, byte >> 4])
}

/// Repacks groups of integers as Q4_0 blocks, or returns `None` if half precision does not hold a scale exactly.
fn int4_blocks(packed: &[u8], scales: &[f32]) -> Option<Vec<u8>> {
    let mut blocks = Vec::with_capacity(scales.len() * DType::Q4_0.block_bytes());
    for (group, scale) in packed.chunks_exact(GROUP / 2).zip(scales) {
        let mut half = f16::from_f32(*scale);
        if half.to_f32() != *scale {
            // The scale of a group of zeros does not matter.
            if nibbles(group).any(|nibble| nibble != 8) {
                return None;
            }
            half = f16::ZERO;
        }
        blocks.extend(half.to_le_bytes());
        let mut values = [0; GROUP];
        values.iter_mut().zip(nibbles(group)).for_each(|(value, nibble)| *value = nibble);
        // A block's byte holds a value of its first half and one of its second.
        blocks.extend((0..GROUP / 2).map(|at| values[at] | values[at + GROUP / 2] << 4));
    }
    Some(blocks)
}

fn int4_values(packed: &[u8], scales: &[f32]) -> Vec<u8> {
    let groups = packed.chunks_exact(GROUP / 2).zip(scales);
    let values: Vec<f32> = groups
        .flat_map(|(group, scale)| nibbles(group).map(move |nibble| (f32::from(nibble) - 8.0) * scale))
        .collect();
    bytes_of(&values)
}

fn fp8_values(codes: &[u8], scales: &[f32], columns: usize, block: [usize; 2]) -> Vec<f32> {
    let across = columns.div_ceil(block[1]);
    let table: Vec<f32> = (0..=u8::MAX).map(fp8_value).collect();
    let rows = codes.chunks_exact(columns).enumerate();
    rows.flat_map(|(row, codes)| {
        let scales = &scales[row / block[0] * across..][..across];
        let table = &table;
        codes
            .iter()
            .enumerate()
            .map(move |(column, code)| table[usize::from(*code)] * scales[column / block[1]])
    })
    .collect()
}

/// Returns the value of a float of 8 bits with 4 bits of exponent and 3 of fraction. It has no infinities.
fn fp8_value(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction * 2f32.powi(-9),
        _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 128 != 0 { -magnitude } else { magnitude }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[cfg(test)]
#[path = "coded_tests.rs"]
pub(super) mod tests;
