//! Decodes the part of a coded matrix that one rank holds, on several threads.
//!
//! Invariant: a part has the bytes that cutting it out of [`Tensor::content`] gives, and nothing outside of it is read but scales
//! and zero points.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use skep_kernels::{DType, WorkerPool};

use super::{BLOCK, Coding, floats, integers, mxfp4};
use crate::checkpoint::Tensor;
use crate::error::ModelError;

/// Number of bytes that a thread decodes at once.
const BYTES_AT_ONCE: usize = 1 << 18;

impl Tensor<'_> {
    /// Returns some rows and columns of a coded matrix in blocks, and the format of the blocks. The threads of `pool` share the
    /// rows. Returns `None` if the matrix is not coded, the columns are not whole blocks, or its values may become F32: such a
    /// part is cut out of [`Tensor::content`].
    pub(crate) fn part(
        &self,
        pool: &WorkerPool,
        rows: &[Range<usize>],
        columns: &Range<usize>,
    ) -> Result<Option<(DType, Vec<u8>)>, ModelError> {
        let &[height, width] = self.shape else { return Ok(None) };
        let is_inside = columns.end <= width && rows.iter().all(|rows| rows.end <= height);
        let is_whole = columns.start.is_multiple_of(BLOCK) && columns.end.is_multiple_of(BLOCK);
        if self.dtype.block_len() != BLOCK || !is_inside || !is_whole {
            return Ok(None);
        }
        let blocks = columns.start / BLOCK..columns.end / BLOCK;
        let packed = |format: DType, fill: &Fill<'_>| {
            let row_bytes = blocks.len() * format.block_bytes();
            let content = filled(pool, rows, row_bytes, fill).map(|content| Some((format, content)));
            content.map_err(|problem| ModelError::tensor(self.name, problem))
        };
        match self.coding {
            Coding::Values => Ok(None),
            Coding::Int4 { packing, group, scales, dtype, zeros } => {
                let scales = &self.scales(scales, dtype)?[..];
                let codes = self.data;
                let weight =
                    integers::Weight { packing, rows: height, columns: width, group, codes, scales, zeros };
                if !weight.has_exact_scales() {
                    return Ok(None);
                }
                let format = weight.format(self.dtype);
                packed(format, &|row, out| match weight.repack(format, row, blocks.clone(), out) {
                    true => Ok(()),
                    false => Err(format!("a scale of row {row} is not one of half precision")),
                })
            }
            Coding::Fp8 { scales, dtype, block } => {
                let scales = &self.scales(scales, dtype)?[..];
                let weight = floats::Weight { columns: width, block, codes: self.data, scales };
                weight.check_scales(self.name)?;
                packed(self.dtype, &|row, out| weight.pack_checked(row, blocks.clone(), out))
            }
            Coding::Mxfp4 { scales, first, step } => {
                let weight = mxfp4::Weight { columns: width, first, step, codes: self.data, scales };
                packed(self.dtype, &|row, out| weight.pack(row, blocks.clone(), out))
            }
        }
    }
}

/// Writes the bytes of a row.
type Fill<'a> = dyn Fn(usize, &mut [u8]) -> Result<(), String> + Sync + 'a;

/// Returns `row_bytes` bytes for each of some rows, which the threads of `pool` fill.
fn filled(
    pool: &WorkerPool,
    rows: &[Range<usize>],
    row_bytes: usize,
    fill: &Fill<'_>,
) -> Result<Vec<u8>, String> {
    let rows: Vec<usize> = rows.iter().cloned().flatten().collect();
    let mut all = vec![0; rows.len() * row_bytes];
    if row_bytes == 0 {
        return Ok(all);
    }
    let at_once = (BYTES_AT_ONCE / row_bytes).max(1);
    let parts: Vec<_> =
        all.chunks_mut(at_once * row_bytes).zip(rows.chunks(at_once)).map(Mutex::new).collect();
    let failed: Mutex<Option<(usize, String)>> = Mutex::new(None);
    pool.run(parts.len(), |number| {
        let mut part = parts[number].lock().unwrap_or_else(PoisonError::into_inner);
        let (out, rows) = &mut *part;
        for (out, row) in out.chunks_exact_mut(row_bytes).zip(rows.iter()) {
            if let Err(problem) = fill(*row, out) {
                let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                // The first problem of the matrix is named, whichever thread finds one first.
                if failed.as_ref().is_none_or(|(first, _)| number < *first) {
                    *failed = Some((number, problem));
                }
                return;
            }
        }
    });
    drop(parts);
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, problem)) => Err(problem),
        None => Ok(all),
    }
}
