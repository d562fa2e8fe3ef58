//! The parts of files that hold a tensor, so that they can be read before they are needed.
//!
//! Invariant: a part lies inside of its file. What is read ahead changes no value.

use std::ops::Range;

use super::Checkpoint;

/// A range of bytes of one of a checkpoint's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FilePart {
    pub(crate) file: usize,
    pub(crate) bytes: Range<usize>,
}

impl Checkpoint {
    /// Returns where some ranges of a tensor's outermost dimension are, and the scales and zero points of the whole tensor. Without
    /// ranges, or where rows are not apart from each other, it is the whole tensor.
    pub(crate) fn file_parts(&self, name: &str, ranges: &[Range<usize>]) -> Vec<FilePart> {
        let Some(location) = self.tensors.get(name) else { return Vec::new() };
        let mut parts = location.stored.companions();
        let whole = location.bytes.clone();
        let outer = location.shape.first().copied().unwrap_or(1).max(1);
        let (file, stride) = (location.file, whole.len() / outer);
        if ranges.is_empty() || !location.stored.has_rows_apart() {
            parts.push(FilePart { file, bytes: whole });
            return parts;
        }
        parts.extend(ranges.iter().map(|range| {
            let at = |row: usize| whole.start + row.min(outer) * stride;
            FilePart { file, bytes: at(range.start)..at(range.end) }
        }));
        parts
    }

    /// Lets the operating system read a part of a file in the background.
    pub(crate) fn will_read(&self, part: FilePart) {
        if let Some(file) = self.files.get(part.file) {
            file.will_read(part.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::fixtures::fixture;

    fn lengths(checkpoint: &Checkpoint, name: &str, ranges: &[Range<usize>]) -> Vec<usize> {
        checkpoint.file_parts(name, ranges).iter().map(|part| part.bytes.len()).collect()
    }

    #[test]
    fn parts_are_the_bytes_of_rows_and_of_what_their_values_depend_on() {
        let open = |name: &str| Checkpoint::open(&fixture(name)).unwrap();
        let (plain, name) = (open("llama-gqa"), "model.layers.0.self_attn.q_proj.weight");
        let tensor = plain.tensor(name).unwrap();
        let (rows, bytes) = (tensor.shape[0], tensor.data.len());
        assert_eq!(lengths(&plain, name, &[]), [bytes]);
        let halves = [0..rows / 2, rows / 2..rows];
        assert_eq!(lengths(&plain, name, &halves), [bytes / 2, bytes / 2]);
        let parts = plain.file_parts(name, &halves);
        assert_eq!(parts[0].bytes.end, parts[1].bytes.start);
        assert_eq!(&plain.files[parts[0].file][parts[0].bytes.clone()], &tensor.data[..bytes / 2]);
        parts.into_iter().for_each(|part| plain.will_read(part));
        // Codes of integers are half a byte each, and every 32 have a scale.
        let (packed, name) = (open("kimi-k2-int4"), "model.layers.1.mlp.experts.0.up_proj.weight");
        let shape = packed.tensor(name).unwrap().shape;
        let (rows, values) = (shape[0], shape[0] * shape[1]);
        let first = 0..rows / 2;
        let found = lengths(&packed, name, &[first]);
        assert_eq!((found.len(), found[1]), (2, values / 4), "{found:?}");
        assert!(found[0] == values / 32 * 2 || found[0] == values / 32 * 4, "{found:?}");
        assert_eq!(lengths(&packed, "none", &[]), [0; 0]);
    }
}
