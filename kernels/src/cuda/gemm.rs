//! Products of many rows with weights in the format of the activations, on tensor cores.

use super::matmul::MatmulParams;
use super::{Activation, Family, Kernel, Launch, WARP};
use crate::KernelError;
use crate::device_constants::device_constant;

/// Number of warps per block.
const WARPS: u32 = device_constant!("gemm.cu", "GEMM_WARPS");
const TILE_OUTPUTS: u32 = device_constant!("gemm.cu", "GEMM_OUTPUTS");
const STRIDE: u32 = device_constant!("gemm.cu", "TILE_INPUTS") + device_constant!("gemm.cu", "GEMM_PAD");
/// Maximum size of a grid's second dimension.
const MAX_TILES: u32 = 65_535;

/// Returns the launch for any number of rows.
pub fn launch(params: &MatmulParams, activation: Activation) -> Result<Launch, KernelError> {
    params.check("gemm", 8)?;
    // Up to 64 rows, small tiles multiply fewer zeros, and weights are still read only once or twice.
    let tile_rows = if params.rows <= 64 { 32 } else { 128 };
    let row_tiles = params.rows.div_ceil(tile_rows);
    super::at_most("gemm", "tiles of rows", row_tiles, MAX_TILES)?;
    let kernel = Kernel::of(Family::Gemm).size(tile_rows).activation(activation);
    let grid = [params.outputs.div_ceil(TILE_OUTPUTS), row_tiles, 1];
    let shared_bytes = 2 * (tile_rows + TILE_OUTPUTS) * STRIDE * 2;
    Ok(Launch { shared_bytes, ..Launch::new(kernel, grid, WARPS * WARP) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cuda::matmul::tests::Made, random::Random};

    #[test]
    fn products_of_many_rows() {
        let mut random = Random::fresh();
        // The inputs are not multiples of those of a tile.
        for (rows, inputs, outputs) in [(9, 520, 70), (33, 264, 5), (131, 264, 66)] {
            for activation in Activation::ALL {
                Made::plain(activation, &mut random, inputs, outputs).check(rows, activation);
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_in_any_batch() {
        let mut random = Random::fresh();
        for activation in Activation::ALL {
            Made::plain(activation, &mut random, 264, 66).check_company(activation);
        }
    }
}
