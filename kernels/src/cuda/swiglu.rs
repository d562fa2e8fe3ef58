//! SwiGLU, the gate of the feed-forward block: silu(gate) · up.

use super::{Activation, Address, Family, Kernel, Launch};
use crate::KernelError;

const THREADS: u32 = 256;

/// The parameters of the kernel: `out = silu(gate) · up`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SwigluParams {
    /// `[rows, 2 · width]`. Each row holds the gate values, then the up values.
    pub gate_up: Address,
    /// `[rows, width]`.
    pub out: Address,
    pub rows: u32,
    pub width: u32,
}

/// Returns the launch. `width` must be a multiple of 8.
pub fn launch(params: &SwigluParams, activation: Activation) -> Result<Launch, KernelError> {
    super::multiple_of_8("swiglu", "width", params.width)?;
    let chunks = u64::from(params.rows) * u64::from(params.width / 8);
    let blocks = super::blocks("swiglu", chunks.div_ceil(THREADS.into()))?;
    Ok(Launch::new(Kernel::of(Family::Swiglu).activation(activation), [blocks, 1, 1], THREADS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cuda::host, random::Random};

    #[test]
    fn outputs_are_silu_of_the_gate_times_up() {
        for activation in Activation::ALL {
            for (rows, width) in [(1, 8), (3, 1536), (5, 264)] {
                let mut random = Random::fresh();
                let gate_up = activation.random(&mut random, rows * 2 * width);
                let mut out = activation.zeros(rows * width);
                let (gate_up_at, out_at) = (gate_up.address(), out.address());
                let (rows_32, width_32) = (rows as u32, width as u32);
                let params =
                    SwigluParams { gate_up: gate_up_at, out: out_at, rows: rows_32, width: width_32 };
                host::run(
                    &launch(&params, activation).expect("good shapes"),
                    &params,
                    &mut [out.values_mut()],
                );
                let expected: Vec<f64> = gate_up
                    .values()
                    .chunks(2 * width)
                    .flat_map(|row| row[..width].iter().zip(&row[width..]))
                    .map(|(gate, up)| (activation.decode(*gate), activation.decode(*up)))
                    .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
                    .collect();
                activation.assert_close(out.values(), &expected, 1e-6);
            }
        }
    }
}
