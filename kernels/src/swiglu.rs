//! SwiGLU, the gate of the feed-forward block.

use crate::cpu::dispatch;
use crate::cpu::elementwise::SwiGlu;
use crate::error::{expect_len, product};
use crate::pool::SharedSlice;
use crate::{Isa, KernelError, WorkerPool};

/// Computes `out[row] = silu(gate) * up`, where a row of `gate_up` holds `width` gate values and then `width` up values.
pub fn swiglu(
    pool: &WorkerPool,
    isa: Isa,
    gate_up: &[f32],
    width: usize,
    out: &mut [f32],
) -> Result<(), KernelError> {
    const OP: &str = "swiglu";
    let rows = out.len() / width.max(1);
    expect_len(OP, "the output length", product(OP, "the output", &[rows, width])?, out.len())?;
    expect_len(OP, "the input length", product(OP, "the input", &[rows, width, 2])?, gate_up.len())?;
    let out = SharedSlice::new(out);
    crate::pool::by_rows(pool, rows, width, |row| {
        let (gate, up) = gate_up[row * width * 2..][..width * 2].split_at(width);
        // SAFETY: each row belongs to one task.
        unsafe {
            let out = out.part(row * width, width);
            out.copy_from_slice(gate);
            dispatch(isa, SwiGlu { gate: out, up });
        }
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
            let (rows, width) = (3, 53);
            let input: Vec<f32> = random.floats(rows * width * 2).iter().map(|x| x * 20.0).collect();
            let mut out = vec![0.0; rows * width];
            swiglu(&pool, isa, &input, width, &mut out).unwrap();
            for (row, out) in input.chunks(width * 2).zip(out.chunks(width)) {
                for at in 0..width {
                    let (gate, up) = (f64::from(row[at]), f64::from(row[width + at]));
                    let expected = gate / (1.0 + (-gate).exp()) * up;
                    assert!((expected - f64::from(out[at])).abs() < 1e-4 + expected.abs() * 1e-5, "{isa}");
                }
            }
        }
        assert!(swiglu(&pool, Isa::Portable, &[0.0; 5], 2, &mut [0.0; 2]).is_err());
    }
}
