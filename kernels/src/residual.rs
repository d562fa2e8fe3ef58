//! Residual connections: adds the output of a block to the hidden rows and normalizes the sums.

use crate::cpu::dispatch;
use crate::cpu::elementwise::AddNorm;
use crate::error::expect_len;
use crate::pool::SharedSlice;
use crate::{Isa, KernelError, WorkerPool};

/// Computes `hidden[row] += addend[row]` and then `out[row] = hidden[row] / rms(hidden[row]) * weight` while the row is
/// in the cache.
pub fn add_norm(
    pool: &WorkerPool,
    isa: Isa,
    hidden: &mut [f32],
    addend: &[f32],
    norm: Norm<'_>,
    out: &mut [f32],
) -> Result<(), KernelError> {
    const OP: &str = "add_norm";
    let Norm { weight, epsilon } = norm;
    expect_len(OP, "the addend length", hidden.len(), addend.len())?;
    expect_len(OP, "the output length", hidden.len(), out.len())?;
    let width = weight.len().max(1);
    expect_len(OP, "the remainder of the input after whole rows", 0, hidden.len() % width)?;
    let rows = hidden.len() / width;
    let (hidden, out) = (SharedSlice::new(hidden), SharedSlice::new(out));
    crate::pool::by_rows(pool, rows, width, |row| {
        let addend = &addend[row * width..][..width];
        // SAFETY: each row belongs to one task; the slices are safe and as long as the weight.
        unsafe {
            let (hidden, out) = (hidden.part(row * width, width), out.part(row * width, width));
            dispatch(isa, AddNorm { hidden, addend, weight, epsilon, out });
        }
    });
    Ok(())
}

/// The parameters of a root-mean-square norm, with one weight per value of a row.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    pub weight: &'a [f32],
    pub epsilon: f32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn every_tier_adds_and_normalizes_the_sum() {
        let mut random = Random::fresh();
        let pool = WorkerPool::new(2).unwrap();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            for (rows, width) in [(1, 1), (3, 24), (2, 577), (40, 576)] {
                let (before, addend) = (random.floats(rows * width), random.floats(rows * width));
                let weight = random.floats(width);
                let (mut hidden, mut out) = (before.clone(), vec![f32::NAN; rows * width]);
                let norm = Norm { weight: &weight, epsilon: 1e-5 };
                add_norm(&pool, isa, &mut hidden, &addend, norm, &mut out).unwrap();
                for row in 0..rows {
                    let sums: Vec<f32> =
                        (row * width..(row + 1) * width).map(|at| before[at] + addend[at]).collect();
                    assert_eq!(hidden[row * width..][..width], sums);
                    let squares: f64 = sums.iter().map(|x| f64::from(*x).powi(2)).sum();
                    let rms = (squares / width as f64 + 1e-5).sqrt();
                    for (at, sum) in sums.iter().enumerate() {
                        let expected = f64::from(*sum) / rms * f64::from(weight[at]);
                        assert!((expected - f64::from(out[row * width + at])).abs() < 1e-5, "{isa} {width}");
                    }
                }
            }
        }
    }

    #[test]
    fn lengths_that_differ_are_errors() {
        let pool = WorkerPool::new(1).unwrap();
        let run = |hidden: usize, addend: usize, out: usize| {
            let norm = Norm { weight: &[1.0; 4], epsilon: 1e-5 };
            let (mut hidden, mut out) = (vec![0.0; hidden], vec![0.0; out]);
            add_norm(&pool, Isa::Portable, &mut hidden, &vec![0.0; addend], norm, &mut out)
        };
        assert!(run(8, 8, 8).is_ok());
        assert!(run(8, 4, 8).is_err() && run(8, 8, 4).is_err() && run(6, 6, 6).is_err());
    }
}
