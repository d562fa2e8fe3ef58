//! Reads parts of the dense model's weights as values.
//!
//! Invariant: one weight is open at a time, values are finite, and rows of rotated heads come in the order of Hugging Face.

use std::borrow::Cow;
use std::ops::Range;

use skep_kernels::{DType, dequantize};

use crate::checkpoint::Checkpoint;
use crate::error::ModelError;

/// A part of a weight.
#[derive(Clone, Debug)]
pub(super) struct Slice {
    /// The name of the weight.
    pub(super) name: String,
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
    pub(super) factor: f32,
    /// Size of the heads whose rows are in the order of interleaved pairs, and are read in that of halves.
    pub(super) interleaved: Option<usize>,
}

impl Slice {
    /// Returns the row of the weight that is this row of the slice.
    fn source(&self, row: usize) -> usize {
        let row = self.rows.start + row;
        let Some(head) = self.interleaved else { return row };
        let (first, within, half) = (row / head * head, row % head, head / 2);
        match within < half {
            true => first + 2 * within,
            false => first + 2 * (within - half) + 1,
        }
    }
}

/// Reads slices, and keeps the weight of the last one open.
pub(super) struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    last: Option<Weight<'a>>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint) -> Self {
        Reader { checkpoint, last: None }
    }

    /// Returns the values of some rows of a slice.
    pub(super) fn rows(&mut self, slice: &Slice, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let weight = match self.last.take() {
            Some(weight) if weight.name == slice.name => weight,
            last => {
                if let Some(last) = last {
                    self.checkpoint.release(&last.name);
                }
                Weight::open(self.checkpoint, &slice.name)?
            }
        };
        let weight = self.last.insert(weight);
        let mut values = Vec::with_capacity(rows.len() * slice.columns.len());
        match slice.interleaved {
            None => {
                let first = slice.rows.start;
                weight.read(first + rows.start..first + rows.end, &slice.columns, &mut values)?;
            }
            Some(_) => {
                for row in rows {
                    let source = slice.source(row);
                    weight.read(source..source + 1, &slice.columns, &mut values)?;
                }
            }
        }
        if slice.factor != 1.0 {
            values.iter_mut().for_each(|value| *value *= slice.factor);
        }
        match values.iter().all(|value| value.is_finite()) {
            true => Ok(values),
            false => Err(ModelError::tensor(&slice.name, "has values that are not finite")),
        }
    }
}

/// A weight whose blocks are known. A vector is a column.
struct Weight<'a> {
    name: String,
    dtype: DType,
    columns: usize,
    row_bytes: usize,
    content: Cow<'a, [u8]>,
}

impl<'a> Weight<'a> {
    fn open(checkpoint: &'a Checkpoint, name: &str) -> Result<Self, ModelError> {
        let tensor = checkpoint.tensor(name)?;
        let columns = tensor.shape.get(1).copied().unwrap_or(1);
        let (dtype, content) = tensor.content()?;
        let row_bytes = dtype.row_bytes(columns).ok_or_else(|| {
            ModelError::tensor(name, format!("rows of {columns} values are not whole blocks of {dtype}"))
        })?;
        Ok(Weight { name: name.to_owned(), dtype, columns, row_bytes, content })
    }

    /// Appends the values of some columns of some rows.
    fn read(&self, rows: Range<usize>, columns: &Range<usize>, out: &mut Vec<f32>) -> Result<(), ModelError> {
        let decode = |bytes: Range<usize>, values: &mut [f32]| {
            let bytes = self.content.get(bytes).unwrap_or_default();
            dequantize(self.dtype, bytes, values)
                .map_err(|error| ModelError::tensor(self.name.as_str(), error.to_string()))
        };
        if *columns == (0..self.columns) {
            let start = out.len();
            out.resize(start + rows.len() * self.columns, 0.0);
            return decode(rows.start * self.row_bytes..rows.end * self.row_bytes, &mut out[start..]);
        }
        // Only the blocks that have some of the columns are decoded.
        let (block, bytes) = (self.dtype.block_len(), self.dtype.block_bytes());
        let blocks = columns.start / block..columns.end.div_ceil(block);
        let skipped = columns.start - blocks.start * block;
        let mut values = vec![0.0; blocks.len() * block];
        for row in rows {
            let first = row * self.row_bytes;
            decode(first + blocks.start * bytes..first + blocks.end * bytes, &mut values)?;
            out.extend_from_slice(&values[skipped..skipped + columns.len()]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_pairs_become_halves() {
        let slice =
            Slice { name: String::new(), rows: 0..8, columns: 0..1, factor: 1.0, interleaved: Some(4) };
        let sources: Vec<usize> = (0..8).map(|row| slice.source(row)).collect();
        assert_eq!(sources, [0, 2, 1, 3, 4, 6, 5, 7]);
        let plain = Slice { interleaved: None, rows: 3..8, ..slice };
        assert_eq!(plain.source(2), 5);
    }
}
