//! Reads the directory of a safetensors file. The `safetensors` crate parses the header; this module bounds it and
//! locates the bytes of each tensor.
//!
//! Invariant: every returned range lies inside the file and fits its type and shape. This module gives tensor names
//! no meaning.

use std::ops::Range;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use skep_kernels::DType;

use crate::error::ModelError;

/// The location of a tensor in its file.
#[derive(Debug)]
pub(crate) struct FileTensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    /// Row-major shape, outermost dimension first.
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Range<usize>,
}

/// Maximum number of dimensions. Tensors with more are not supported.
const MAX_DIMENSIONS: usize = 8;

/// Returns the tensors of a safetensors file, ordered by their offset.
pub(crate) fn parse(path: &Path, file: &[u8]) -> Result<Vec<FileTensor>, ModelError> {
    let (header_bytes, metadata) =
        SafeTensors::read_metadata(file).map_err(|error| ModelError::Malformed {
            path: path.to_owned(),
            problem: format!("its safetensors header is invalid: {error}; the file may be truncated"),
        })?;
    let data_start = header_bytes + 8;
    let mut tensors = Vec::new();
    for (name, info) in metadata.tensors() {
        let refuse = |problem: String| ModelError::tensor(&name, problem);
        if info.shape.len() > MAX_DIMENSIONS {
            return Err(refuse(format!(
                "has {} dimensions; up to {MAX_DIMENSIONS} are allowed",
                info.shape.len()
            )));
        }
        let (start, end) = info.data_offsets;
        let bytes = match (data_start.checked_add(start), data_start.checked_add(end)) {
            (Some(start), Some(end)) if start <= end && end <= file.len() => start..end,
            _ => return Err(refuse(format!("its bytes {start}..{end} are outside the file"))),
        };
        tensors.push(FileTensor { name, dtype: info.dtype, shape: info.shape.clone(), bytes });
    }
    tensors.sort_by_key(|tensor| tensor.bytes.start);
    Ok(tensors)
}

/// Returns the weight format of a safetensors type, or `None` if the type is not a weight format.
pub(crate) fn weight_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        _ => None,
    }
}
