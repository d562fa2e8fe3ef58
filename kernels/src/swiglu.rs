//! The gate of the feed-forward block: SwiGLU and its relatives.

use crate::cpu::dispatch;
use crate::cpu::elementwise::{ClampedGate, GeluGate, SwiGlu};
use crate::error::{expect_len, product};
use crate::pool::SharedSlice;
use crate::{Isa, KernelError, WorkerPool};

/// The function of a gate and an up value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Gate {
    /// silu(gate) * up
    #[default]
    Silu,
    /// gelu(gate) * up, with GELU approximated by a hyperbolic tangent.
    GeluTanh,
    /// (up + 1) * gate * sigmoid(1.702 * gate), with the gate at most `limit` and the up value within ± `limit`.
    Clamped { limit: f32 },
}

/// Computes `out[row] = silu(gate) * up`, where a row of `gate_up` holds `width` gate values and then `width` up values.
pub fn swiglu(
    pool: &WorkerPool,
    isa: Isa,
    gate_up: &[f32],
    width: usize,
    out: &mut [f32],
) -> Result<(), KernelError> {
    gated(pool, isa, Gate::Silu, gate_up, width, out)
}

/// Computes a gate like [`swiglu`], with any function.
pub fn gated(
    pool: &WorkerPool,
    isa: Isa,
    gate: Gate,
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
        let (from, up) = gate_up[row * width * 2..][..width * 2].split_at(width);
        // SAFETY: each row belongs to one task; the slices have equal lengths.
        unsafe {
            let out = out.part(row * width, width);
            out.copy_from_slice(from);
            match gate {
                Gate::Silu => dispatch(isa, SwiGlu { gate: out, up }),
                Gate::GeluTanh => dispatch(isa, GeluGate { gate: out, up }),
                Gate::Clamped { limit } => dispatch(isa, ClampedGate { gate: out, up, limit }),
            }
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

    #[test]
    fn the_other_gates_agree_with_double_precision() {
        let mut random = Random::fresh();
        let pool = WorkerPool::new(1).unwrap();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            let width = 53;
            let input: Vec<f32> = random.floats(width * 2).iter().map(|x| x * 20.0).collect();
            for gate in [Gate::GeluTanh, Gate::Clamped { limit: 7.0 }] {
                let mut out = vec![0.0; width];
                gated(&pool, isa, gate, &input, width, &mut out).unwrap();
                for at in 0..width {
                    let (x, up) = (f64::from(input[at]), f64::from(input[width + at]));
                    let expected = match gate {
                        Gate::Silu => unreachable!(),
                        Gate::GeluTanh => {
                            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                            0.5 * x * (1.0 + inner.tanh()) * up
                        }
                        Gate::Clamped { .. } => {
                            let (x, up) = (x.min(7.0), up.clamp(-7.0, 7.0));
                            (up + 1.0) * x / (1.0 + (-1.702 * x).exp())
                        }
                    };
                    let found = f64::from(out[at]);
                    assert!((expected - found).abs() < 1e-4 + expected.abs() * 1e-5, "{isa} {gate:?}");
                }
            }
        }
    }
}
