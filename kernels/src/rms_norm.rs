//! Root-mean-square normalization of rows.

use crate::cpu::dispatch;
use crate::cpu::elementwise::RmsNorm;
use crate::error::expect_len;
use crate::pool::SharedSlice;
use crate::{Isa, KernelError, WorkerPool};

/// Computes `out[row] = input[row] / rms(input[row]) * weight` for rows of `weight.len()` values.
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
    expect_len(OP, "the remainder of the input after whole rows", 0, input.len() % width)?;
    let rows = input.len() / width;
    let out = SharedSlice::new(out);
    crate::pool::by_rows(pool, rows, width, |row| {
        let input = &input[row * width..][..width];
        // SAFETY: each row belongs to one task; the slices are safe.
        unsafe { dispatch(isa, RmsNorm { input, weight, epsilon, out: out.part(row * width, width) }) }
    });
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
