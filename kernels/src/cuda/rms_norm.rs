//! The residual sum and its norm.

use super::{Activation, Address, Launch, WARP};
use crate::KernelError;
use crate::device_constants::device_constant;

/// Number of chunks of eight values that a thread holds.
const CHUNKS: u32 = device_constant!("rms_norm.cu", "CHUNKS");
const MAX_THREADS: u32 = 1024;

/// The parameters of the kernel: `residual += x`, then `out` is the norm of `residual` times `weight`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmsNormParams {
    /// `[rows, width]`, added to the residual. With [`Address::NONE`], nothing is added.
    pub x: Address,
    /// `[rows, width]`, read and written.
    pub residual: Address,
    /// `[width]`.
    pub weight: Address,
    /// `[rows, width]`.
    pub out: Address,
    /// A multiple of 8.
    pub width: u32,
    pub epsilon: f32,
}

/// Returns the launch for this number of rows.
pub fn launch(params: &RmsNormParams, rows: u32, activation: Activation) -> Result<Launch, KernelError> {
    let width = params.width;
    super::multiple_of_8("rms_norm", "width", width)?;
    super::at_most("rms_norm", "width", width, MAX_THREADS * CHUNKS * 8)?;
    let threads = (width / 8).div_ceil(CHUNKS).next_multiple_of(WARP);
    Ok(Launch::new(format!("rms_norm_{}", activation.suffix()), [rows, 1, 1], threads))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cuda::host, random::Random};

    fn check(activation: Activation, rows: usize, width: usize, adds: bool) {
        let mut random = Random::fresh();
        let x = activation.random(&mut random, rows * width);
        let weight = activation.random(&mut random, width);
        let mut residual = activation.random(&mut random, rows * width);
        let mut out = activation.zeros(rows * width);
        let before = residual.values().to_vec();
        let params = RmsNormParams {
            x: if adds { x.address() } else { Address::NONE },
            residual: residual.address(),
            weight: weight.address(),
            out: out.address(),
            width: width as u32,
            epsilon: 1e-5,
        };
        let launch = launch(&params, rows as u32, activation).expect("good shapes");
        let mut expected = Vec::new();
        for (row, x) in before.chunks(width).zip(x.values().chunks(width)) {
            let sum: Vec<f64> = row
                .iter()
                .zip(x)
                .map(|(a, b)| activation.decode(*a) + if adds { activation.decode(*b) } else { 0.0 })
                .map(|sum| activation.decode(activation.encode(sum as f32)))
                .collect();
            let mean = sum.iter().map(|value| value * value).sum::<f64>() / width as f64;
            let scale = 1.0 / (mean + 1e-5).sqrt();
            let weights = weight.values().iter().map(|weight| activation.decode(*weight));
            expected.extend(sum.iter().zip(weights).map(|(value, weight)| value * scale * weight));
        }
        host::run(&launch, &params, &mut [residual.values_mut(), out.values_mut()]);
        activation.assert_close(out.values(), &expected, 1e-5);
        let kept = residual.values() == before;
        assert_eq!(kept, !adds, "the residual must change if and only if something is added");
    }

    #[test]
    fn rows_of_all_widths_are_normalized_with_and_without_a_sum() {
        for activation in Activation::ALL {
            for width in [8, 64, 576, 1000, 4096, 8192] {
                check(activation, 3, width, true);
                check(activation, 1, width, false);
            }
        }
    }

    #[test]
    fn rows_too_wide_for_a_block_are_rejected() {
        let none = Address::NONE;
        let params =
            RmsNormParams { x: none, residual: none, weight: none, out: none, width: 40_000, epsilon: 0.0 };
        let error = launch(&params, 1, Activation::F16).expect_err("too wide").to_string();
        assert!(error.contains("40000") && error.contains("32768"), "{error}");
    }
}
