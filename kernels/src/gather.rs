//! Reads rows of a packed matrix by index, as for token embeddings.

use crate::error::{expect_len, product};
use crate::matmul::PackedMatrix;
use crate::pool::SharedSlice;
use crate::{Isa, KernelError, WorkerPool};

/// Computes `out[i] = table[rows[i]]`.
pub fn gather(
    pool: &WorkerPool,
    isa: Isa,
    table: &PackedMatrix,
    rows: &[u32],
    out: &mut [f32],
) -> Result<(), KernelError> {
    const OP: &str = "gather";
    let width = table.columns();
    table.expect_weights(OP)?;
    expect_len(OP, "the output length", product(OP, "the output", &[rows.len(), width])?, out.len())?;
    if let Some(row) = rows.iter().find(|row| **row as usize >= table.rows()) {
        return Err(KernelError::OutOfRange {
            op: OP,
            what: "row",
            index: *row as usize,
            count: table.rows(),
        });
    }
    let out = SharedSlice::new(out);
    crate::pool::by_rows(pool, rows.len(), width, |index| {
        // SAFETY: each row belongs to one task.
        table.unpack_row(isa, rows[index] as usize, unsafe { out.part(index * width, width) });
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::buffer::Arena;

    #[test]
    fn rows_are_gathered_in_order_and_unknown_rows_are_errors() {
        let values: Vec<f32> = (0..60).map(|x| x as f32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let pool = WorkerPool::new(2).unwrap();
        let table = PackedMatrix::pack(&pool, &mut Arena::default(), DType::F32, 20, 3, &bytes).unwrap();
        let mut out = [0.0; 9];
        gather(&pool, Isa::detect(), &table, &[19, 0, 19], &mut out).unwrap();
        assert_eq!(out, [57.0, 58.0, 59.0, 0.0, 1.0, 2.0, 57.0, 58.0, 59.0]);
        assert!(gather(&pool, Isa::detect(), &table, &[20], &mut out[..3]).is_err());
    }
}
