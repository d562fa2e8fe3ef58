//! Products of few rows with weights of any format, with one warp per output.

use super::matmul::{MatmulParams, Weights};
use super::{Activation, Launch, WARP};
use crate::KernelError;
use crate::device_constants::device_constant;

/// Number of outputs per block, each computed by one warp.
const WARPS: u32 = 4;
/// Maximum number of rows.
pub const MAX_ROWS: u32 = device_constant!("gemv.cu", "MAX_ROWS");

/// Returns the launch for at most [`MAX_ROWS`] rows. Fails for shapes that the format of the weights does not allow.
pub fn launch(
    params: &MatmulParams,
    weights: Weights,
    activation: Activation,
) -> Result<Launch, KernelError> {
    super::at_most("gemv", "rows", params.rows, MAX_ROWS)?;
    let name = format!("gemv_{}_{}", weights.format("gemv", params)?, activation.suffix());
    Ok(Launch::new(name, [params.outputs.div_ceil(WARPS), 1, 1], WARPS * WARP))
}

/// Returns the launch for at most [`MAX_ROWS`] rows with a matrix that holds the outputs of a gate and then as many others.
/// It stores `silu(gate) · up`, half as many values as the matrix has outputs.
pub fn gated(params: &MatmulParams, weights: Weights, activation: Activation) -> Result<Launch, KernelError> {
    const OP: &str = "gemv_gated";
    super::at_most(OP, "rows", params.rows, MAX_ROWS)?;
    let whole = params.outputs.is_multiple_of(2);
    super::require(whole, OP, "outputs", params.outputs, || "a multiple of 2".to_owned())?;
    let width = params.outputs / 2;
    let format = weights.format(OP, &MatmulParams { outputs: width, ..*params })?;
    let name = format!("gemv_gated_{format}_{}", activation.suffix());
    Ok(Launch::new(name, [width.div_ceil(WARPS), 1, 1], WARPS * WARP))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cuda::matmul::tests::Made, random::Random};

    #[test]
    fn gated_products_of_few_rows_with_all_formats() {
        let mut random = Random::fresh();
        for (rows, inputs, outputs) in [(1, 256, 16), (3, 768, 48), (MAX_ROWS as usize, 512, 80)] {
            let every = Made::of_every_format(&mut random, inputs, outputs);
            for activation in Activation::ALL {
                every.iter().for_each(|made| made.check_gated(rows, activation));
                Made::plain(activation, &mut random, inputs + 8, outputs).check_gated(rows, activation);
            }
        }
    }

    #[test]
    fn products_of_few_rows_with_all_formats() {
        let mut random = Random::fresh();
        for (rows, inputs, outputs) in [(1, 256, 5), (3, 768, 9), (MAX_ROWS as usize, 512, 130), (2, 2304, 6)]
        {
            let every = Made::of_every_format(&mut random, inputs, outputs);
            for activation in Activation::ALL {
                every.iter().for_each(|made| made.check(rows, activation, false));
                // Not a multiple of the inputs that a warp takes at a time.
                let plain = Made::plain(activation, &mut random, inputs + 8, outputs);
                plain.check(rows, activation, false);
            }
        }
    }
}
