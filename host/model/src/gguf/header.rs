//! The header of a new GGUF file: its metadata and the directory of its tensors.
//!
//! Invariant: tensors follow each other in the order of the directory, each at a multiple of the alignment.

use skep_kernels::DType;

use super::code_of;
use crate::error::ModelError;

const VERSION: u32 = 3;
/// Codes of the types of metadata.
const U32: u32 = 4;
const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;

/// A tensor of a new file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewTensor<'a> {
    pub(crate) name: &'a str,
    /// Innermost dimension first, as in the file.
    pub(crate) dimensions: &'a [usize],
    pub(crate) dtype: DType,
}

impl NewTensor<'_> {
    /// Returns the number of bytes of the tensor.
    pub(crate) fn length(&self) -> usize {
        let values: usize = self.dimensions.iter().product();
        values / self.dtype.block_len() * self.dtype.block_bytes()
    }
}

/// Returns everything before the bytes of the tensors, without the padding to the alignment. Each key has the bytes of its type and
/// of its value.
pub(crate) fn header(
    keys: &[(String, Vec<u8>)],
    tensors: &[NewTensor<'_>],
    alignment: usize,
) -> Result<Vec<u8>, ModelError> {
    let mut header = b"GGUF".to_vec();
    header.extend(VERSION.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        header.extend(text(key));
        header.extend(value);
    }
    let mut offset = 0;
    for tensor in tensors {
        header.extend(text(tensor.name));
        header.extend((tensor.dimensions.len() as u32).to_le_bytes());
        header.extend(tensor.dimensions.iter().flat_map(|size| (*size as u64).to_le_bytes()));
        let code = code_of(tensor.dtype).ok_or_else(|| {
            ModelError::tensor(tensor.name, format!("GGUF files have no format {}", tensor.dtype))
        })?;
        header.extend(code.to_le_bytes());
        header.extend((offset as u64).to_le_bytes());
        offset = (offset + tensor.length()).next_multiple_of(alignment);
    }
    Ok(header)
}

/// Returns the value of a key with its type.
pub(crate) fn unsigned(value: u32) -> Vec<u8> {
    typed(U32, &value.to_le_bytes())
}

/// Returns the value of a key with its type.
pub(crate) fn float(value: f32) -> Vec<u8> {
    typed(F32, &value.to_le_bytes())
}

/// Returns the value of a key with its type.
pub(crate) fn boolean(value: bool) -> Vec<u8> {
    typed(BOOL, &[u8::from(value)])
}

/// Returns the value of a key with its type.
pub(crate) fn string(value: &str) -> Vec<u8> {
    typed(STRING, &text(value))
}

fn typed(code: u32, value: &[u8]) -> Vec<u8> {
    [&code.to_le_bytes()[..], value].concat()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}
