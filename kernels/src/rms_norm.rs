//! Root-mean-square normalisation of rows.

use crate::cpu::dispatch;
use crate::cpu::elementwise::RmsNorm;
use crate::error::expect_len;
use crate::pool::SharedSlice;
use crate::{Isa, KernelError, WorkerPool};

/// out[row] = input[row] / rms(input[row]) * weight, for rows of `weight.len()` values.
pub fn rms_norm(
    pool: &WorkerPool,
    isa: Isa,
    input: &[f32],
    weight: &[f32],
    epsilon: f32,
    out: &mut [f32],
) -> Result<(), KernelError> {
    const OP: &str = "rms_norm";
    expect_len(OP, "the output length", input.len(), out.len())?;
    let width = weight.len().max(1);
    expect_len(OP, "the rest of the input after whole rows", 0, input.len() % width)?;
    let rows = input.len() / width;
    let out = SharedSlice::new(out);
    crate::pool::by_rows(pool, rows, width, |row| {
        let input = &input[row * width..][..width];
        // SAFETY: each row is one task's; the slices are safe.
        unsafe { dispatch(isa, RmsNorm { input, weight, epsilon, out: out.part(row * width, width) }) }
    });
    Ok(())
}

/// Normalises every run of `weight.len()` values in columns `from..to` of rows of `stride` values, in place.
pub fn rms_norm_heads(
    isa: Isa,
    rows: &mut [f32],
    stride: usize,
    columns: std::ops::Range<usize>,
    weight: &[f32],
    epsilon: f32,
) -> Result<(), KernelError> {
    const OP: &str = "rms_norm_heads";
    expect_len(OP, "the rest of the input after whole rows", 0, rows.len() % stride.max(1))?;
    if columns.end > stride {
        return Err(KernelError::OutOfRange { op: OP, what: "column", index: columns.end, count: stride });
    }
    let mut copy = vec![0.0; weight.len()];
    for row in rows.chunks_exact_mut(stride.max(1)) {
        for head in row[columns.clone()].chunks_exact_mut(weight.len().max(1)) {
            copy.copy_from_slice(head);
            // SAFETY: safe slices of equal lengths.
            unsafe { dispatch(isa, RmsNorm { input: &copy, weight, epsilon, out: head }) };
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn every_tier_agrees_with_double_precision() {
        let mut random = Random::fresh();
        let pool = WorkerPool::new(2).unwrap();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            for width in [1, 24, 64, 577] {
                let (input, weight) = (random.floats(width * 3), random.floats(width));
                let mut out = vec![0.0; width * 3];
                rms_norm(&pool, isa, &input, &weight, 1e-5, &mut out).unwrap();
                let mut in_place = input.clone();
                rms_norm_heads(isa, &mut in_place, width, 0..width, &weight, 1e-5).unwrap();
                assert_eq!(in_place, out);
                for (row, out) in input.chunks(width).zip(out.chunks(width)) {
                    let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
                    let rms = (squares / width as f64 + 1e-5).sqrt();
                    for ((x, w), out) in row.iter().zip(&weight).zip(out) {
                        let expected = f64::from(*x) / rms * f64::from(*w);
                        assert!((expected - f64::from(*out)).abs() < 1e-5, "{isa} {width}");
                    }
                }
            }
        }
        assert!(rms_norm(&pool, Isa::Portable, &[0.0; 5], &[0.0; 2], 1e-5, &mut [0.0; 5]).is_err());
    }
}
