//! The GGUF container, versions 2 and 3, little-endian: metadata, tensor directory and aligned tensor data.
//!
//! Invariant: a parsed `GgufFile` is consistent with the length of its file. Every array and tensor lies inside the
//! file, and no allocation is sized by a number that the file merely declares. This module does not know what the
//! metadata keys mean.

mod cursor;
pub(crate) mod header;
mod names;
#[cfg(test)]
mod tests;
mod value;
#[cfg(test)]
pub(crate) mod writer;

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use skep_kernels::DType;

use crate::error::ModelError;
use cursor::Cursor;
pub(crate) use names::{expert_names, hugging_face_name};
pub(crate) use value::{Array, Value};

const MAGIC: &[u8; 4] = b"GGUF";
const MAX_DIMENSIONS: u32 = 4;
const MAX_NAME_BYTES: usize = 1024;
/// Alignment of the data of tensors, unless a key states another one.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;

/// The parsed header of a GGUF file.
#[derive(Debug)]
pub(crate) struct GgufFile {
    path: PathBuf,
    metadata: BTreeMap<String, Value>,
    tensors: Vec<GgufTensor>,
}

/// The location of a tensor in its file.
#[derive(Debug)]
pub(crate) struct GgufTensor {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    /// Row-major shape, outermost dimension first.
    pub(crate) shape: Vec<usize>,
    /// The number of its file, from 0; only a model in several files has others.
    pub(crate) file: usize,
    pub(crate) bytes: Range<usize>,
}

impl GgufFile {
    /// Parses the header of `file` and checks it against the length of the file.
    pub(crate) fn parse(path: &Path, file: &[u8]) -> Result<Self, ModelError> {
        parse(path, file).map_err(|problem| match problem {
            Problem::Damaged(problem) => ModelError::Malformed { path: path.to_owned(), problem },
            Problem::Model(error) => error,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Adds the tensors of another file of the same model, which has this number.
    pub(crate) fn append(&mut self, other: GgufFile, number: usize) -> Result<(), ModelError> {
        let known: HashSet<&str> = self.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        if let Some(twice) = other.tensors.iter().find(|tensor| known.contains(tensor.name.as_str())) {
            let problem = format!("appears again in {}", other.path.display());
            return Err(ModelError::tensor(twice.name.as_str(), problem));
        }
        self.tensors.extend(other.tensors.into_iter().map(|tensor| GgufTensor { file: number, ..tensor }));
        Ok(())
    }

    pub(crate) fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// Returns the keys of the metadata in their order, each with the bytes of its type and its value. `file` is the content of
    /// the file that was parsed.
    pub(crate) fn raw_keys<'a>(&self, file: &'a [u8]) -> Result<Vec<(&'a str, &'a [u8])>, ModelError> {
        let read = || -> Result<Vec<(&'a str, &'a [u8])>, String> {
            let mut cursor = Cursor::new(file);
            // The magic, the version and the number of tensors come first.
            cursor.take(16, "the header")?;
            let count = cursor.u64("the metadata count")?;
            let mut keys = Vec::new();
            for _ in 0..count {
                let key = cursor.string("a metadata key")?;
                let start = cursor.position();
                Value::read(&mut cursor, key)?;
                keys.push((key, &file[start..cursor.position()]));
            }
            Ok(keys)
        };
        read().map_err(|problem| ModelError::Malformed { path: self.path.clone(), problem })
    }

    /// Reads a whole number, whichever integer type the file stores it in.
    pub(crate) fn unsigned(&self, key: &str) -> Result<Option<u64>, ModelError> {
        self.typed(key, "a whole number", Value::as_u64)
    }

    pub(crate) fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(crate) fn boolean(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.typed(key, "a boolean", Value::as_bool)
    }

    pub(crate) fn string(&self, key: &str) -> Result<Option<&str>, ModelError> {
        self.typed(key, "a string", Value::as_str)
    }

    pub(crate) fn array(&self, key: &str) -> Result<Option<&Array>, ModelError> {
        self.typed(key, "an array", Value::as_array)
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(value) => Ok(Some(value)),
                None => Err(ModelError::config(key, format!("is {}, not {wanted}", value.describe()))),
            },
        }
    }
}

/// The reason why parsing failed.
pub(crate) enum Problem {
    /// The container itself is damaged. The caller adds the path.
    Damaged(String),
    Model(ModelError),
}

impl From<String> for Problem {
    fn from(problem: String) -> Self {
        Self::Damaged(problem)
    }
}

fn parse(path: &Path, file: &[u8]) -> Result<GgufFile, Problem> {
    let mut cursor = Cursor::new(file);
    if cursor.take(4, "the magic")? != MAGIC {
        return Err("it does not begin with the letters GGUF".to_owned().into());
    }
    let version = cursor.u32("the version")?;
    match version {
        2 | 3 => {}
        1 => {
            return Err("GGUF version 1 is not supported; convert the model to version 3".to_owned().into());
        }
        _ if matches!(version.swap_bytes(), 1..=3) => {
            return Err("a big-endian GGUF file is not supported; convert it to little-endian"
                .to_owned()
                .into());
        }
        _ => return Err(format!("GGUF version {version} is not supported; use version 2 or 3").into()),
    }
    let tensor_count = cursor.u64("the tensor count")?;
    let key_count = cursor.u64("the metadata count")?;
    let metadata = read_metadata(&mut cursor, key_count)?;
    let alignment = read_alignment(&metadata)?;
    let directory = read_directory(&mut cursor, tensor_count)?;
    let data_start = (cursor.position() as u64).next_multiple_of(alignment);
    let tensors = directory
        .into_iter()
        .map(|entry| entry.location(data_start, alignment, file.len() as u64))
        .collect::<Result<_, Problem>>()?;
    Ok(GgufFile { path: path.to_owned(), metadata, tensors })
}

fn read_metadata(cursor: &mut Cursor<'_>, count: u64) -> Result<BTreeMap<String, Value>, Problem> {
    // A key takes at least 13 bytes: its length, its type and one byte of value.
    cursor.fits(count, 13, "metadata keys")?;
    let mut metadata = BTreeMap::new();
    for _ in 0..count {
        let key = cursor.string("a metadata key")?;
        let value = Value::read(cursor, key)?;
        if metadata.insert(key.to_owned(), value).is_some() {
            return Err(format!("metadata key `{key}` appears twice").into());
        }
    }
    Ok(metadata)
}

fn read_alignment(metadata: &BTreeMap<String, Value>) -> Result<u64, Problem> {
    let Some(value) = metadata.get("general.alignment") else { return Ok(DEFAULT_ALIGNMENT) };
    match value.as_u64() {
        Some(alignment) if alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT => Ok(alignment),
        _ => Err(Problem::Model(ModelError::config(
            "general.alignment",
            format!("is {}, not a power of two up to {MAX_ALIGNMENT}", value.describe()),
        ))),
    }
}

/// An entry of the tensor directory whose data has not been located yet.
struct Entry {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    offset: u64,
}

fn read_directory(cursor: &mut Cursor<'_>, count: u64) -> Result<Vec<Entry>, Problem> {
    // A tensor takes at least 32 bytes: its name's length, a dimension count, one dimension, a type and an offset.
    cursor.fits(count, 32, "tensors")?;
    let mut entries = Vec::new();
    let mut seen = HashSet::new();
    for _ in 0..count {
        let name = cursor.string("a tensor name")?;
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            return Err(
                format!("a tensor name has {} bytes; 1..={MAX_NAME_BYTES} are allowed", name.len()).into()
            );
        }
        if !seen.insert(name) {
            return Err(Problem::Model(ModelError::tensor(name, "appears twice")));
        }
        entries.push(read_entry(cursor, name)?);
    }
    Ok(entries)
}

fn read_entry(cursor: &mut Cursor<'_>, name: &str) -> Result<Entry, Problem> {
    let bad = |problem: String| Problem::Model(ModelError::tensor(name, problem));
    let dimensions = cursor.u32("a dimension count")?;
    if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
        return Err(bad(format!("has {dimensions} dimensions; 1..={MAX_DIMENSIONS} are allowed")));
    }
    let mut shape = Vec::with_capacity(dimensions as usize);
    for _ in 0..dimensions {
        let size = cursor.u64("a dimension")?;
        match usize::try_from(size) {
            Ok(size) if size > 0 => shape.push(size),
            _ => return Err(bad(format!("has a dimension of {size}, which is not supported"))),
        }
    }
    shape.reverse(); // The file lists the innermost dimension first.
    let code = cursor.u32("a tensor type")?;
    let dtype = dtype_of(code).ok_or_else(|| {
        let formats: Vec<String> = formats().map(|dtype| dtype.to_string()).collect();
        let supported = formats.join(", ");
        bad(format!("has the type {} ({code}); supported: {supported}", ggml_type_name(code)))
    })?;
    let offset = cursor.u64("a tensor offset")?;
    Ok(Entry { name: name.to_owned(), dtype, shape, offset })
}

impl Entry {
    fn location(self, data_start: u64, alignment: u64, file_bytes: u64) -> Result<GgufTensor, Problem> {
        let bad = |problem: String| Problem::Model(ModelError::tensor(&self.name, problem));
        if !self.offset.is_multiple_of(alignment) {
            return Err(bad(format!(
                "starts at offset {}, which is not a multiple of the alignment {alignment}",
                self.offset
            )));
        }
        let length = tensor_bytes(self.dtype, &self.shape).ok_or_else(|| {
            bad(format!("has the shape {:?}, which the type {} cannot hold", self.shape, self.dtype))
        })?;
        let start = data_start.checked_add(self.offset);
        let end = start.and_then(|start| start.checked_add(length as u64));
        match (start, end) {
            (Some(start), Some(end)) if end <= file_bytes => Ok(GgufTensor {
                name: self.name,
                dtype: self.dtype,
                shape: self.shape,
                file: 0,
                bytes: start as usize..end as usize,
            }),
            _ => Err(bad(format!(
                "needs {length} bytes at offset {}, past the end of the file of {file_bytes} bytes; the file may be truncated",
                self.offset
            ))),
        }
    }
}

/// Returns the size of a tensor in bytes, or `None` if a row is not whole blocks or the size overflows.
pub(crate) fn tensor_bytes(dtype: DType, shape: &[usize]) -> Option<usize> {
    let (&row, outer) = shape.split_last()?;
    let rows = outer.iter().try_fold(1usize, |rows, size| rows.checked_mul(*size))?;
    dtype.row_bytes(row)?.checked_mul(rows)
}

/// Returns the formats of weights that files may have.
pub(crate) fn formats() -> impl Iterator<Item = DType> {
    (0..64).filter_map(dtype_of)
}

/// Returns the code of a format in files, or `None` if no file has it.
pub(crate) fn code_of(dtype: DType) -> Option<u32> {
    (0..64).find(|code| dtype_of(*code) == Some(dtype))
}

/// Returns whether GGUF files whose weights have the format of this name are read.
pub fn reads_weights(format: &str) -> bool {
    formats().any(|known| known.to_string() == format)
}

fn dtype_of(code: u32) -> Option<DType> {
    Some(match code {
        0 => DType::F32,
        1 => DType::F16,
        2 => DType::Q4_0,
        3 => DType::Q4_1,
        6 => DType::Q5_0,
        7 => DType::Q5_1,
        8 => DType::Q8_0,
        10 => DType::Q2K,
        11 => DType::Q3K,
        12 => DType::Q4K,
        13 => DType::Q5K,
        14 => DType::Q6K,
        20 => DType::Iq4Nl,
        23 => DType::Iq4Xs,
        30 => DType::BF16,
        39 => DType::Mxfp4,
        _ => return None,
    })
}

fn ggml_type_name(code: u32) -> &'static str {
    match code {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        _ => "unknown",
    }
}
