//! The files of a GGUF model, and its tensors under the names of single matrices.
//!
//! Invariant: all parts of a split file are there, belong together and hold as many tensors as the first one says. A tensor
//! of all experts of a layer appears as one tensor for each expert, which is a range of its bytes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::coded::StoredAs;
use super::{Format, TensorLocation};
use crate::error::ModelError;
use crate::gguf::{GgufFile, GgufTensor, expert_names, hugging_face_name};
use crate::mapping::Mapping;

/// Maximum number of parts of a split file.
const MAX_PARTS: u64 = 4096;

/// Opens a GGUF file, or all parts of the split one that it belongs to.
pub(super) fn open(path: &Path) -> Result<(GgufFile, Vec<Mapping>), ModelError> {
    let first = first_part(path);
    let mapping = Mapping::open(&first)?;
    let mut file = GgufFile::parse(&first, &mapping)?;
    let count = file.unsigned("split.count")?.unwrap_or(1);
    if count > MAX_PARTS {
        let problem = format!("{count} is above the {MAX_PARTS} parts that are allowed");
        return Err(ModelError::config("split.count", problem));
    }
    let mut mappings = vec![mapping];
    for number in 1..count {
        let wrong = |problem: String| ModelError::config("split.count", problem);
        let path = part_path(&first, number + 1).ok_or_else(|| {
            wrong(format!("is {count}, but {} is not named NAME-00001-of-{count:05}.gguf", first.display()))
        })?;
        let mapping = Mapping::open(&path)?;
        let part = GgufFile::parse(&path, &mapping)?;
        let found = (part.unsigned("split.no")?, part.unsigned("split.count")?);
        if found != (Some(number), Some(count)) {
            let problem = format!("{} is not part {number} of {count}, counted from 0", path.display());
            return Err(ModelError::config("split.no", problem));
        }
        file.append(part, number as usize)?;
        mappings.push(mapping);
    }
    match file.unsigned("split.tensors.count")? {
        Some(stated) if count > 1 && stated != file.tensors().len() as u64 => {
            let problem = format!("is {stated}, but the parts have {} tensors", file.tensors().len());
            Err(ModelError::config("split.tensors.count", problem))
        }
        _ => Ok((file, mappings)),
    }
}

/// Returns whether a file's name says that it is a part of a split file.
pub(super) fn is_part(path: &Path) -> bool {
    part_path(path, 1).is_some()
}

/// Returns the first part of the split file that `path` is a part of, or else the path itself.
pub(super) fn first_part(path: &Path) -> PathBuf {
    part_path(path, 1).unwrap_or_else(|| path.to_owned())
}

/// Returns the path of a part, counted from 1, of the split file that `path` is a part of: names end in
/// `-00001-of-00002.gguf`.
fn part_path(path: &Path, number: u64) -> Option<PathBuf> {
    let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, own) = rest.rsplit_once('-')?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(own) && is_number(count))
        .then(|| path.with_file_name(format!("{name}-{number:05}-of-{count}.gguf")))
}

/// Returns the tensors under the names of Hugging Face.
pub(super) fn tensors(file: &GgufFile) -> Result<BTreeMap<String, TensorLocation>, ModelError> {
    let mut tensors = BTreeMap::new();
    let four_norms = file.tensors().iter().any(|tensor| tensor.name == "blk.0.post_ffw_norm.weight");
    let mut insert = |name: String, location: TensorLocation| match tensors.insert(name.clone(), location) {
        None => Ok(()),
        Some(_) => {
            Err(ModelError::tensor(name, "appears twice, under its GGUF name and its Hugging Face name"))
        }
    };
    for tensor in file.tensors() {
        match expert_names(&tensor.name) {
            Some((prefix, parts)) => experts(tensor, &prefix, parts, &mut insert)?,
            None => insert(hugging_face_name(&tensor.name, four_norms), location(tensor))?,
        }
    }
    Ok(tensors)
}

fn location(tensor: &GgufTensor) -> TensorLocation {
    TensorLocation {
        format: Format::Weights(tensor.dtype),
        shape: tensor.shape.clone(),
        file: tensor.file,
        bytes: tensor.bytes.clone(),
        stored: StoredAs::Values,
    }
}

/// Adds the matrices of a tensor `[experts, rows, columns]`, whose rows may belong to several projections, or the biases of
/// a tensor `[experts, rows]`.
fn experts(
    tensor: &GgufTensor,
    prefix: &str,
    parts: &[&str],
    insert: &mut impl FnMut(String, TensorLocation) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let is_bias = tensor.name.ends_with(".bias");
    let (count, rows, columns) = match tensor.shape[..] {
        [count, rows, columns] if !is_bias => (count, rows, Some(columns)),
        [count, rows] if is_bias => (count, rows, None),
        _ => {
            let expected = if is_bias { "[experts, rows]" } else { "[experts, rows, columns]" };
            let problem = format!("has the shape {:?}; expected {expected}", tensor.shape);
            return Err(ModelError::tensor(tensor.name.as_str(), problem));
        }
    };
    if !rows.is_multiple_of(parts.len()) {
        let problem = format!("{rows} rows are not {} projections of equal size", parts.len());
        return Err(ModelError::tensor(tensor.name.as_str(), problem));
    }
    let (rows, length) = (rows / parts.len(), tensor.bytes.len() / count / parts.len());
    for expert in 0..count {
        for (index, part) in parts.iter().enumerate() {
            let start = tensor.bytes.start + (expert * parts.len() + index) * length;
            let bytes = start..start + length;
            let name = format!("{prefix}{expert}.{part}");
            let shape = std::iter::once(rows).chain(columns).collect();
            insert(name, TensorLocation { shape, bytes, ..location(tensor) })?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "gguf_files_tests.rs"]
mod tests;
