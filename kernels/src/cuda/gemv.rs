//! Products of few rows with weights in the format of the activations, with one warp per output.

use super::matmul::MatmulParams;
use super::{Activation, Family, Kernel, Launch, WARP};
use crate::KernelError;
use crate::device_constants::device_constant;

/// Number of outputs per block, each computed by one warp.
pub(super) const WARPS: u32 = 4;
/// Maximum number of rows.
pub const MAX_ROWS: u32 = device_constant!("gemv.cuh", "MAX_ROWS");

/// Returns the launch for at most [`MAX_ROWS`] rows.
pub fn launch(params: &MatmulParams, activation: Activation) -> Result<Launch, KernelError> {
    launch_of(Family::Gemv, params.outputs, params, activation)
}

/// Returns the launch for at most [`MAX_ROWS`] rows with a matrix that holds the outputs of a gate and then as many others.
/// It stores `silu(gate) · up`, half as many values as the matrix has outputs.
pub fn gated(params: &MatmulParams, activation: Activation) -> Result<Launch, KernelError> {
    let family = Family::GemvGated;
    let whole = params.outputs.is_multiple_of(2);
    super::require(whole, family.name(), "outputs", params.outputs, || "a multiple of 2".to_owned())?;
    launch_of(family, params.outputs / 2, params, activation)
}

fn launch_of(
    family: Family,
    outputs: u32,
    params: &MatmulParams,
    activation: Activation,
) -> Result<Launch, KernelError> {
    let op = family.name();
    super::at_most(op, "rows", params.rows, MAX_ROWS)?;
    MatmulParams { outputs, ..*params }.check(op, 8)?;
    let kernel = Kernel::of(family).activation(activation);
    Ok(Launch::new(kernel, [outputs.div_ceil(WARPS), 1, 1], WARPS * WARP))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cuda::matmul::tests::Made, random::Random};

    // The inputs are not multiples of those that a warp takes at a time.
    #[test]
    fn gated_products_of_few_rows() {
        let mut random = Random::fresh();
        for (rows, inputs, outputs) in [(1, 264, 16), (3, 776, 48), (MAX_ROWS as usize, 520, 80)] {
            for activation in Activation::ALL {
                Made::plain(activation, &mut random, inputs, outputs).check_gated(rows, activation);
            }
        }
    }

    #[test]
    fn products_of_few_rows() {
        let mut random = Random::fresh();
        for (rows, inputs, outputs) in [(1, 264, 5), (3, 776, 9), (MAX_ROWS as usize, 520, 130), (2, 2312, 6)]
        {
            for activation in Activation::ALL {
                Made::plain(activation, &mut random, inputs, outputs).check(rows, activation);
            }
        }
    }
}
