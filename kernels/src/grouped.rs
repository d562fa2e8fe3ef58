//! Products of many matrices, each with its own rows of one input: the experts of a mixture, or the heads of an
//! attention.
//!
//! Invariant: an output depends only on its row of weights and its row of the input, with the sums of
//! [`crate::matmul`], so it has the same bits however rows are grouped. A tile of a matrix is read once for up to 128
//! of its rows.

use std::ops::Range;

use crate::error::{expect_len, product};
use crate::matmul::{Activations, Group, PackedMatrix, Task, groups_of, tiles_per_task};
use crate::pool::SharedSlice;
use crate::{Isa, KernelError, WorkerPool};

/// A matrix times some consecutive rows of the input.
#[derive(Clone)]
pub struct GroupedProduct<'a> {
    pub matrix: &'a PackedMatrix,
    /// The rows of the input. Products either have the same rows or none in common.
    pub rows: Range<usize>,
    /// Row of the output for the first row of the input.
    pub out_row: usize,
    /// First column of the output.
    pub out_column: usize,
    /// Either empty or one value per row of the matrix.
    pub bias: &'a [f32],
}

impl<'a> GroupedProduct<'a> {
    fn whole(&self, stride: usize) -> Task<'a> {
        Task {
            matrix: self.matrix,
            first_tile: 0,
            tiles: 0,
            first_token: self.rows.start,
            tokens: self.rows.len(),
            out: self.out_row * stride + self.out_column,
            bias: self.bias,
        }
    }
}

/// Computes `out[row][column..] = input[row] × matrixᵀ + bias` for each product. `input` holds rows of `columns` values
/// and `out` rows of `stride` values; outputs that belong to no product keep their values.
#[allow(clippy::too_many_arguments)] // The operands of a product, as those of `matmul`.
pub fn grouped_matmul(
    pool: &WorkerPool,
    isa: Isa,
    products: &[GroupedProduct<'_>],
    input: &[f32],
    columns: usize,
    out: &mut [f32],
    stride: usize,
    scratch: &mut Activations,
) -> Result<(), KernelError> {
    const OP: &str = "grouped matmul";
    let rows = input.len() / columns.max(1);
    expect_len(OP, "the input length", product(OP, "the input", &[rows, columns])?, input.len())?;
    let out_rows = out.len() / stride.max(1);
    expect_len(OP, "the output length", product(OP, "the output", &[out_rows, stride])?, out.len())?;
    for each in products {
        expect_len(OP, "the column count", columns, each.matrix.columns())?;
        each.matrix.expect_weights(OP)?;
        if !each.bias.is_empty() {
            expect_len(OP, "the length of a bias", each.matrix.rows(), each.bias.len())?;
        }
        let outside = |what, index, count| Err(KernelError::OutOfRange { op: OP, what, index, count });
        if each.rows.end > rows || each.rows.start > each.rows.end {
            return outside("input row", each.rows.end, rows);
        }
        if each.out_row.checked_add(each.rows.len()).is_none_or(|end| end > out_rows) {
            return outside("output row", each.out_row, out_rows);
        }
        if each.out_column.checked_add(each.matrix.rows()).is_none_or(|end| end > stride) {
            return outside("output column", each.out_column, stride);
        }
    }
    let groups = input_groups(OP, isa, products)?;
    check_outputs(OP, products)?;
    scratch.convert(pool, isa, products.iter().map(|each| each.matrix), input, &groups, columns);
    let tasks = tasks(pool.threads(), products, stride);
    let out = SharedSlice::new(out);
    let scratch = &*scratch;
    pool.run(tasks.len(), |index| tasks[index].run(isa, input, &out, stride, scratch));
    Ok(())
}

/// Cuts products into tasks, of which each reads its tiles once for up to 128 rows.
fn tasks<'a>(threads: usize, products: &'a [GroupedProduct<'a>], stride: usize) -> Vec<Task<'a>> {
    let tiles = products.iter().filter(|each| !each.rows.is_empty()).map(|each| each.matrix.tiles()).sum();
    let tiles = tiles_per_task(threads, tiles);
    let mut order: Vec<&GroupedProduct<'_>> = products.iter().collect();
    // The threads finish together if the longest tasks come first.
    order.sort_by_key(|each| std::cmp::Reverse(each.rows.len()));
    order.into_iter().flat_map(|each| each.whole(stride).cut(tiles, stride)).collect()
}

/// Returns the groups of all rows that products read, in order.
fn input_groups(
    op: &'static str,
    isa: Isa,
    products: &[GroupedProduct<'_>],
) -> Result<Vec<Group>, KernelError> {
    let mut ranges: Vec<(usize, usize)> =
        products.iter().map(|each| (each.rows.start, each.rows.end)).filter(|(from, to)| from < to).collect();
    ranges.sort_unstable();
    ranges.dedup();
    if let Some(pair) = ranges.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        return Err(KernelError::Conflict { op, what: "the group of input row", index: pair[1].0 });
    }
    Ok(ranges.into_iter().flat_map(|(from, to)| groups_of(isa, from..to)).collect())
}

/// Checks that no output belongs to two products: sorted by their first row, products have either the same output rows
/// and different columns, or no row in common.
fn check_outputs(op: &'static str, products: &[GroupedProduct<'_>]) -> Result<(), KernelError> {
    let mut areas: Vec<[usize; 4]> = products
        .iter()
        .filter(|each| !each.rows.is_empty() && each.matrix.rows() > 0)
        .map(|each| {
            let columns = each.out_column + each.matrix.rows();
            [each.out_row, each.out_row + each.rows.len(), each.out_column, columns]
        })
        .collect();
    areas.sort_unstable();
    for pair in areas.windows(2) {
        let [[first, end, _, column_end], [next, next_end, column, _]] = [pair[0], pair[1]];
        let beside = first == next && end == next_end && column_end <= column;
        if !beside && next < end {
            return Err(KernelError::Conflict { op, what: "output row", index: next });
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "grouped_tests.rs"]
mod tests;
