//! The residual sum and its norm.

use super::{Activation, Address, Family, Kernel, Launch, WARP};
use crate::KernelError;
use crate::device_constants::device_constant;

/// Number of chunks of eight values that a thread holds.
pub(super) const CHUNKS: u32 = device_constant!("rms_norm.cuh", "CHUNKS");
const MAX_THREADS: u32 = 1024;

/// The parameters of the kernel: `sum = residual + x`, and `out` is the norm of `sum` times `weight`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmsNormParams {
    /// `[rows, width]`, added to the residual. With [`Address::NONE`], nothing is added.
    pub x: Address,
    /// `[rows, width]`.
    pub residual: Address,
    /// `[rows, width]`. It may be the residual.
    pub sum: Address,
    /// `[width]`.
    pub weight: Address,
    /// `[rows, width]`.
    pub out: Address,
    /// A multiple of 8.
    pub width: u32,
    pub epsilon: f32,
}

impl RmsNormParams {
    /// Stands for no norm.
    pub const NONE: Self = RmsNormParams {
        x: Address::NONE,
        residual: Address::NONE,
        sum: Address::NONE,
        weight: Address::NONE,
        out: Address::NONE,
        width: 0,
        epsilon: 0.0,
    };
}

/// Returns the launch for this number of rows.
pub fn launch(params: &RmsNormParams, rows: u32, activation: Activation) -> Result<Launch, KernelError> {
    let width = params.width;
    super::multiple_of_8("rms_norm", "width", width)?;
    super::at_most("rms_norm", "width", width, MAX_THREADS * CHUNKS * 8)?;
    let threads = (width / 8).div_ceil(CHUNKS).next_multiple_of(WARP);
    Ok(Launch::new(Kernel::of(Family::RmsNorm).activation(activation), [rows, 1, 1], threads))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cuda::host::{self, Buffer},
        random::Random,
    };

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
            sum: residual.address(),
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
    fn sums_in_a_buffer_of_their_own_leave_the_residual_as_it_is() {
        let activation = Activation::Bf16;
        let mut random = Random::fresh();
        let [x, residual, weight] = [0; 3].map(|_| activation.random(&mut random, 2 * 576));
        for adds in [true, false] {
            let mut found = [0; 2].map(|_| activation.zeros(2 * 576));
            let mut expected =
                [residual.values(), found[1].values()].map(|values| Buffer::new(values.to_vec()));
            let params = |sum: &Buffer, residual: &Buffer, out: &Buffer| RmsNormParams {
                x: if adds { x.address() } else { Address::NONE },
                residual: residual.address(),
                sum: sum.address(),
                weight: weight.address(),
                out: out.address(),
                width: 576,
                epsilon: 1e-5,
            };
            let [sum, out] = &mut expected;
            let in_place = params(sum, sum, out);
            let launch = launch(&in_place, 2, activation).expect("good shapes");
            host::run(&launch, &in_place, &mut [sum.values_mut(), out.values_mut()]);
            let [sum, out] = &mut found;
            let apart = params(sum, &residual, out);
            host::run(&launch, &apart, &mut [sum.values_mut(), out.values_mut()]);
            assert!(found.iter().zip(&expected).all(|(found, expected)| found.values() == expected.values()));
        }
    }

    #[test]
    fn rows_too_wide_for_a_block_are_rejected() {
        let params = RmsNormParams { width: 40_000, ..RmsNormParams::NONE };
        let error = launch(&params, 1, Activation::F16).expect_err("too wide").to_string();
        assert!(error.contains("40000") && error.contains("32768"), "{error}");
    }
}
