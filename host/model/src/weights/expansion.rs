//! Loads the matrices of latent attention that expand a latent to the keys and values of each head.
//!
//! Invariant: a head's key matrix is kept transposed, because queries are multiplied by it. 8-bit floats stay packed if 32
//! rows share each scale; formats whose blocks cannot be transposed become F32, which holds their values exactly.

use std::borrow::Cow;
use std::ops::Range;

use skep_kernels::matmul::PackedMatrix;
use skep_kernels::{DType, dequantize};

use super::{WeightLoader, bytes_of};
use crate::checkpoint::Tensor;
use crate::config::{Expansion, Latent};
use crate::error::ModelError;

/// Number of 8-bit floats that share a scale, and the size of their block in bytes.
const F8_BLOCK: usize = 32;
const F8_BYTES: usize = 36;

type Heads = (Vec<PackedMatrix>, Vec<PackedMatrix>);

impl WeightLoader<'_> {
    /// Loads the matrices of the rank's heads from query to latent, `[latent, query]`, and from latent to value,
    /// `[value, latent]`. The tensor holds the rows of keys and then of values for each head.
    pub(crate) fn expansion(
        &mut self,
        prefix: &str,
        latent: &Latent,
        head_count: usize,
        heads: Range<usize>,
    ) -> Result<Heads, ModelError> {
        let Latent { rank, unrotated, value, expansion, .. } = *latent;
        if expansion == Expansion::Split {
            let mut part = |name: &str, shape| {
                self.matrices(&format!("{prefix}.{name}.weight"), head_count, shape, heads.clone())
            };
            return Ok((part("k_b_proj", [rank, unrotated])?, part("v_b_proj", [value, rank])?));
        }
        let name = format!("{prefix}.kv_b_proj.weight");
        let head_rows = unrotated + value;
        let tensor = self.tensor(&name, &[head_count * head_rows, rank])?;
        let own = heads.start * head_rows..heads.end * head_rows;
        self.begin(&name, &[own]);
        let (dtype, content) = match self.is_plan() {
            true => (tensor.dtype, Cow::Borrowed(tensor.data)),
            false => tensor.content()?,
        };
        let tensor = tensor.with_content(dtype, &content);
        let row_bytes = tensor.dtype.row_bytes(rank).ok_or_else(|| {
            let problem = format!("rows of {rank} values are not whole blocks of {}", tensor.dtype);
            ModelError::tensor(&name, problem)
        })?;
        let (mut absorb, mut values) = (Vec::new(), Vec::new());
        for head in heads {
            let keys = head * head_rows..head * head_rows + unrotated;
            let own = keys.end..keys.end + value;
            let bytes = move |rows: &Range<usize>| rows.start * row_bytes..rows.end * row_bytes;
            absorb.push(self.transposed_rows(&name, tensor, bytes(&keys), [unrotated, rank])?);
            let data = || Ok(Cow::Borrowed(&tensor.data[bytes(&own)]));
            values.push(self.packed(&name, tensor.dtype, [value, rank], data)?);
        }
        self.checkpoint().release(&name);
        Ok((absorb, values))
    }

    /// Packs some matrices of a tensor, `[matrices, rows, columns]`.
    fn matrices(
        &mut self,
        name: &str,
        count: usize,
        [rows, columns]: [usize; 2],
        range: Range<usize>,
    ) -> Result<Vec<PackedMatrix>, ModelError> {
        let tensor = self.tensor(name, &[count, rows, columns])?;
        self.begin(name, std::slice::from_ref(&range));
        let length = tensor.data.len() / count.max(1);
        let packed = range
            .map(|at| {
                let data = || Ok(Cow::Borrowed(&tensor.data[at * length..(at + 1) * length]));
                self.packed(name, tensor.dtype, [rows, columns], data)
            })
            .collect();
        self.checkpoint().release(name);
        packed
    }

    /// Packs the transposed matrix of some bytes of a tensor.
    fn transposed_rows(
        &mut self,
        name: &str,
        tensor: Tensor<'_>,
        bytes: Range<usize>,
        [rows, columns]: [usize; 2],
    ) -> Result<PackedMatrix, ModelError> {
        let transposed = match tensor.dtype {
            DType::F8E4M3 if self.is_plan() && rows.is_multiple_of(F8_BLOCK) => Some(Vec::new()),
            DType::F8E4M3 => transposed_f8(tensor.data.get(bytes.clone()).unwrap_or_default(), rows, columns),
            _ => None,
        };
        if let Some(blocks) = transposed {
            return self.packed(name, DType::F8E4M3, [columns, rows], || Ok(Cow::Owned(blocks)));
        }
        let dtype = match tensor.dtype {
            dtype @ (DType::F32 | DType::F16 | DType::BF16) => dtype,
            _ => DType::F32,
        };
        self.packed(name, dtype, [columns, rows], || {
            let data = &tensor.data[bytes];
            let data = match dtype == tensor.dtype {
                true => Cow::Borrowed(data),
                false => {
                    let mut values = vec![0.0; rows * columns];
                    dequantize(tensor.dtype, data, &mut values)
                        .map_err(|error| ModelError::tensor(name, error.to_string()))?;
                    Cow::Owned(bytes_of(&values))
                }
            };
            let size = dtype.block_bytes();
            let value = |row: usize, column: usize| &data[(row * columns + column) * size..][..size];
            let order = (0..columns).flat_map(|column| (0..rows).map(move |row| (row, column)));
            let values: Vec<&[u8]> = order.map(|(row, column)| value(row, column)).collect();
            Ok(Cow::Owned(values.concat()))
        })
    }
}

/// Transposes rows of 8-bit floats, or returns `None` if 32 rows do not share each scale.
fn transposed_f8(data: &[u8], rows: usize, columns: usize) -> Option<Vec<u8>> {
    if !rows.is_multiple_of(F8_BLOCK) || !columns.is_multiple_of(F8_BLOCK) {
        return None;
    }
    let across = columns / F8_BLOCK;
    let (blocks, _) = data.as_chunks::<F8_BYTES>();
    let mut out = Vec::with_capacity(data.len());
    for column in 0..columns {
        for first in (0..rows).step_by(F8_BLOCK) {
            let block = |row: usize| &blocks[row * across + column / F8_BLOCK];
            let scale = &block(first)[..4];
            if (first..first + F8_BLOCK).any(|row| block(row)[..4] != *scale) {
                return None;
            }
            out.extend(scale);
            out.extend((first..first + F8_BLOCK).map(|row| block(row)[4 + column % F8_BLOCK]));
        }
    }
    Some(out)
}
