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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cuda::matmul::tests::Made, random::Random};

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
