//! Weights that a checkpoint of safetensors keeps as codes and scales: 4-bit integers, and floats of 8 and 4 bits.
//!
//! Invariant: content has exactly the values that codes and scales stand for, and they stay packed as blocks of 32; values
//! that no block holds exactly become F32. The names of the tensors are those of compressed-tensors (`weight_packed`,
//! `weight_scale`, `weight_zero_point`, `weight_shape`), of DeepSeek's FP8 (`weight`, `weight_scale_inv`), of GPTQ and AWQ
//! (`qweight`, `qzeros`, `scales`, `g_idx`), and of gpt-oss (`*_blocks`, `*_scales`).

mod floats;
mod integers;
mod mxfp4;
mod part;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use skep_kernels::{DType, dequantize};

use super::file_parts::FilePart;
use super::{Format, Tensor, TensorLocation};
use crate::config::{IntegerPacking, WeightCoding};
use crate::error::ModelError;
use crate::mapping::Mapping;

pub(crate) use floats::format_of as fp8_format;

/// Number of values of a block.
const BLOCK: usize = 32;
/// The largest number of values that are decoded at once.
const MAX_DECODED_VALUES: usize = 1 << 32;

/// How the bytes of a tensor stand for its values.
#[derive(Clone, Debug, Default)]
pub(super) enum StoredAs {
    #[default]
    Values,
    Int4 {
        packing: IntegerPacking,
        /// Number of values of a row that share a scale.
        group: usize,
        scales: Scales,
        /// The location of the packed zero points. Without them, all are 8.
        zeros: Option<(usize, Range<usize>)>,
    },
    Fp8 {
        scales: Scales,
        block: [usize; 2],
    },
    /// Rows of 4-bit floats, of which every `step`-th from `first` on belongs to the tensor.
    Mxfp4 {
        scales: (usize, Range<usize>),
        first: usize,
        step: usize,
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
    Int4 { packing: IntegerPacking, group: usize, scales: &'a [u8], dtype: DType, zeros: Option<&'a [u8]> },
    Fp8 { scales: &'a [u8], dtype: DType, block: [usize; 2] },
    Mxfp4 { scales: &'a [u8], first: usize, step: usize },
}

impl<'a> Coding<'a> {
    /// Returns the parameters of a coding as text, and the bytes beside the codes on which the values depend: scales and
    /// zero points. Returns `None` if the bytes are the values themselves.
    pub(crate) fn described(&self) -> Option<(String, Vec<&'a [u8]>)> {
        match *self {
            Coding::Values => None,
            Coding::Int4 { packing, group, scales, dtype, zeros } => {
                let companions = std::iter::once(scales).chain(zeros).collect();
                Some((format!("int4 {packing:?} {group} {dtype:?}\n"), companions))
            }
            Coding::Fp8 { scales, dtype, block } => {
                Some((format!("fp8 {block:?} {dtype:?}\n"), vec![scales]))
            }
            Coding::Mxfp4 { scales, first, step } => Some((format!("mxfp4 {first} {step}\n"), vec![scales])),
        }
    }
}

impl StoredAs {
    /// Returns the location of what the values depend on beside the codes.
    pub(super) fn companions(&self) -> Vec<FilePart> {
        let part = |file: usize, bytes: &Range<usize>| FilePart { file, bytes: bytes.clone() };
        let of = |scales: &Scales| part(scales.file, &scales.bytes);
        match self {
            StoredAs::Values => Vec::new(),
            StoredAs::Int4 { scales, zeros, .. } => {
                let zeros = zeros.iter().map(|(file, bytes)| part(*file, bytes));
                std::iter::once(of(scales)).chain(zeros).collect()
            }
            StoredAs::Fp8 { scales, .. } => vec![of(scales)],
            StoredAs::Mxfp4 { scales: (file, bytes), .. } => vec![part(*file, bytes)],
        }
    }

    /// Returns whether the bytes of a row are apart from those of other rows of the tensor.
    pub(super) fn has_rows_apart(&self) -> bool {
        match self {
            StoredAs::Values | StoredAs::Fp8 { .. } | StoredAs::Mxfp4 { .. } => true,
            StoredAs::Int4 { packing, .. } => *packing == IntegerPacking::Rows,
        }
    }

    pub(super) fn coding<'a>(&self, files: &'a [Mapping]) -> Coding<'a> {
        let bytes = |scales: &Scales| &files[scales.file][scales.bytes.clone()];
        match self {
            StoredAs::Values => Coding::Values,
            StoredAs::Int4 { packing, group, scales, zeros } => Coding::Int4 {
                packing: *packing,
                group: *group,
                scales: bytes(scales),
                dtype: scales.dtype,
                zeros: zeros.as_ref().map(|(file, range)| &files[*file][range.clone()]),
            },
            StoredAs::Fp8 { scales, block } => {
                Coding::Fp8 { scales: bytes(scales), dtype: scales.dtype, block: *block }
            }
            StoredAs::Mxfp4 { scales: (file, range), first, step } => {
                Coding::Mxfp4 { scales: &files[*file][range.clone()], first: *first, step: *step }
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
    match coding {
        Some(WeightCoding::Int4(coding)) => {
            let suffix = integers::codes_suffix(coding.packing);
            names(suffix).iter().try_for_each(|module| integers::join(module, *coding, tensors, files))
        }
        Some(WeightCoding::Fp8(coding)) => {
            let suffix = floats::scales_suffix(*coding);
            names(suffix).iter().try_for_each(|module| floats::join(module, *coding, tensors))
        }
        Some(WeightCoding::Mxfp4) => names("_blocks").iter().try_for_each(|name| mxfp4::join(name, tensors)),
        None => Ok(()),
    }
}

/// Removes a tensor of a module, which must exist.
fn take(
    tensors: &mut BTreeMap<String, TensorLocation>,
    module: &str,
    suffix: &str,
) -> Result<TensorLocation, ModelError> {
    let name = format!("{module}{suffix}");
    tensors
        .remove(&name)
        .ok_or_else(|| ModelError::tensor(name, "is missing, but other parts of its weight are present"))
}

/// Returns the location of scales, which must have one of some shapes.
fn scales_of(name: &str, location: TensorLocation, shapes: &[&[usize]]) -> Result<Scales, ModelError> {
    if !shapes.contains(&&location.shape[..]) {
        let wanted: Vec<String> = shapes.iter().map(|shape| format!("{shape:?}")).collect();
        let wanted = wanted.join(" or ");
        let problem = format!("has the shape {:?}, but its weight needs scales of {wanted}", location.shape);
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

/// Returns both sizes of a matrix, whose values must not be too many to decode at once.
fn matrix_shape(name: &str, shape: &[usize], of_words: [usize; 2]) -> Result<[usize; 2], ModelError> {
    let [rows, columns] = shape else {
        let problem = format!("has the shape {shape:?}; expected [rows, columns]");
        return Err(ModelError::tensor(name, problem));
    };
    let sizes = [rows.checked_mul(of_words[0]), columns.checked_mul(of_words[1])];
    match sizes {
        [Some(rows), Some(columns)]
            if rows.checked_mul(columns).is_some_and(|values| values <= MAX_DECODED_VALUES) =>
        {
            Ok([rows, columns])
        }
        _ => Err(ModelError::tensor(name, format!("{rows} × {columns} values are too many"))),
    }
}

fn insert(
    name: String,
    location: TensorLocation,
    tensors: &mut BTreeMap<String, TensorLocation>,
) -> Result<(), ModelError> {
    match tensors.insert(name.clone(), location) {
        None => Ok(()),
        Some(_) => Err(ModelError::tensor(name, "appears twice, packed and plain")),
    }
}

impl<'a> Tensor<'a> {
    /// Returns the number of bytes that the tensor takes in its file, with its scales and zero points.
    pub(crate) fn stored_bytes(&self) -> u64 {
        let companions =
            self.coding.described().map_or(0, |(_, parts)| parts.iter().map(|part| part.len()).sum());
        // Gates and ups are rows of one tensor.
        let sharing = if let Coding::Mxfp4 { step, .. } = self.coding { step.max(1) } else { 1 };
        ((self.data.len() + companions) / sharing) as u64
    }

    /// Returns the tensor with the bytes that [`Tensor::content`] returned.
    pub(crate) fn with_content<'b>(&self, dtype: DType, content: &'b [u8]) -> Tensor<'b>
    where
        'a: 'b,
    {
        Tensor { name: self.name, dtype, shape: self.shape, data: content, coding: Coding::Values }
    }

    /// Returns the tensor's blocks and their format. The format is that of the tensor, unless the blocks cannot hold its
    /// values exactly.
    pub fn content(&self) -> Result<(DType, Cow<'a, [u8]>), ModelError> {
        let columns = self.shape.get(1).copied().unwrap_or(1).max(1);
        let rows = self.shape.first().copied().unwrap_or(0);
        match self.coding {
            Coding::Values => Ok((self.dtype, Cow::Borrowed(self.data))),
            Coding::Int4 { packing, group, scales, dtype, zeros } => {
                let scales = &self.scales(scales, dtype)?[..];
                let codes = self.data;
                let weight = integers::Weight { packing, rows, columns, group, codes, scales, zeros };
                let (dtype, content) = weight.content(self.dtype);
                Ok((dtype, Cow::Owned(content)))
            }
            Coding::Fp8 { scales, dtype, block } => {
                let scales = &self.scales(scales, dtype)?[..];
                let weight = floats::Weight { columns, block, codes: self.data, scales };
                weight.check(self.name)?;
                Ok((self.dtype, Cow::Owned(weight.content(self.dtype))))
            }
            Coding::Mxfp4 { scales, first, step } => {
                let weight = mxfp4::Weight { columns, first, step, codes: self.data, scales };
                let content = weight.content().map_err(|problem| ModelError::tensor(self.name, problem))?;
                Ok((self.dtype, Cow::Owned(content)))
            }
        }
    }

    fn scales(&self, bytes: &[u8], dtype: DType) -> Result<Vec<f32>, ModelError> {
        let mut values = vec![0.0; bytes.len() / dtype.block_bytes()];
        dequantize(dtype, bytes, &mut values)
            .map_err(|error| ModelError::tensor(self.name, error.to_string()))?;
        match values.iter().all(|scale| scale.is_finite()) {
            true => Ok(values),
            false => Err(ModelError::tensor(self.name, "one of its scales is not a finite number")),
        }
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[cfg(test)]
mod family_tests;
#[cfg(test)]
mod fixture_tests;
#[cfg(test)]
pub(crate) mod tests;
