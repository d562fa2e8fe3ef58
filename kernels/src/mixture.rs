//! The rows of a mixture of experts: copies of the tokens in the order of their experts, and the weighted sum of the
//! experts' outputs.
//!
//! Invariant: a token's sum adds its experts in the order of its choices, so it does not depend on other tokens.

use crate::cpu::dispatch;
use crate::cpu::elementwise::AddScaled;
use crate::error::{expect_len, product};
use crate::pool::{SharedSlice, by_rows};
use crate::{Isa, KernelError, WorkerPool};

/// Copies `out[i] = input[rows[i]]` for rows of `width` values.
pub fn copy_rows(
    pool: &WorkerPool,
    input: &[f32],
    width: usize,
    rows: &[u32],
    out: &mut [f32],
) -> Result<(), KernelError> {
    const OP: &str = "copy rows";
    expect_len(OP, "the output length", product(OP, "the output", &[rows.len(), width])?, out.len())?;
    check(OP, rows, input.len() / width.max(1))?;
    let out = SharedSlice::new(out);
    by_rows(pool, rows.len(), width, |index| {
        // SAFETY: each row belongs to one task.
        let to = unsafe { out.part(index * width, width) };
        to.copy_from_slice(&input[rows[index] as usize * width..][..width]);
    });
    Ok(())
}

/// The outputs of experts that each token adds up.
#[derive(Clone, Copy, Debug)]
pub struct WeightedRows<'a> {
    /// The rows to add, `[token][choices]`.
    pub rows: &'a [u32],
    /// The factor of each row.
    pub weights: &'a [f32],
    /// Number of rows of each token.
    pub choices: usize,
}

/// Computes `out[token] += Σ weight × input[row]` over the rows of each token, in their order.
pub fn add_weighted_rows(
    pool: &WorkerPool,
    isa: Isa,
    input: &[f32],
    width: usize,
    chosen: WeightedRows<'_>,
    out: &mut [f32],
) -> Result<(), KernelError> {
    const OP: &str = "add weighted rows";
    let WeightedRows { rows, weights, choices } = chosen;
    let tokens = out.len() / width.max(1);
    expect_len(OP, "the output length", product(OP, "the output", &[tokens, width])?, out.len())?;
    expect_len(OP, "the number of rows", product(OP, "the rows", &[tokens, choices])?, rows.len())?;
    expect_len(OP, "the number of weights", rows.len(), weights.len())?;
    check(OP, rows, input.len() / width.max(1))?;
    let out = SharedSlice::new(out);
    by_rows(pool, tokens, width.saturating_mul(choices.max(1)), |token| {
        // SAFETY: each token belongs to one task.
        let to = unsafe { out.part(token * width, width) };
        for choice in token * choices..(token + 1) * choices {
            let from = &input[rows[choice] as usize * width..][..width];
            // SAFETY: slices of equal lengths.
            unsafe { dispatch(isa, AddScaled { to: &mut *to, from, factor: weights[choice] }) };
        }
    });
    Ok(())
}

fn check(op: &'static str, rows: &[u32], count: usize) -> Result<(), KernelError> {
    match rows.iter().find(|row| **row as usize >= count) {
        Some(row) => Err(KernelError::OutOfRange { op, what: "row", index: *row as usize, count }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_add_their_rows_with_their_weights() {
        let pool = WorkerPool::new(2).unwrap();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            let width = 19;
            let input: Vec<f32> = (0..3 * width).map(|x| x as f32).collect();
            let mut copied = vec![0.0; 4 * width];
            copy_rows(&pool, &input, width, &[2, 0, 0, 1], &mut copied).unwrap();
            assert_eq!(copied[..width], input[2 * width..]);
            assert_eq!(copied[3 * width..], input[width..2 * width]);
            let mut out = vec![1.0; 2 * width];
            let chosen = WeightedRows { rows: &[0, 3, 1, 2], weights: &[0.5, 2.0, 1.0, 0.25], choices: 2 };
            add_weighted_rows(&pool, isa, &copied, width, chosen, &mut out).unwrap();
            for at in 0..width {
                let (first, second) = (input[2 * width + at], input[width + at]);
                assert_eq!(out[at], 1.0 + 0.5 * first + 2.0 * second, "{isa}");
                assert_eq!(out[width + at], 1.0 + 1.25 * input[at], "{isa}");
            }
        }
    }

    #[test]
    fn rows_outside_and_wrong_lengths_are_errors() {
        let pool = WorkerPool::new(1).unwrap();
        assert!(copy_rows(&pool, &[0.0; 4], 2, &[2], &mut [0.0; 2]).is_err());
        assert!(copy_rows(&pool, &[0.0; 4], 2, &[1], &mut [0.0; 3]).is_err());
        let add = |rows: &[u32], weights: &[f32]| {
            let chosen = WeightedRows { rows, weights, choices: 1 };
            add_weighted_rows(&pool, Isa::Portable, &[0.0; 4], 2, chosen, &mut [0.0; 4])
        };
        assert!(add(&[0, 1], &[1.0, 1.0]).is_ok());
        assert!(
            add(&[0, 2], &[1.0, 1.0]).is_err() && add(&[0], &[1.0]).is_err() && add(&[0, 1], &[1.0]).is_err()
        );
    }
}
