//! Conversion of weights in tiles to the format of the activations.

use super::tiles::{TILE_OUTPUTS, Tiles};
use super::{Activation, Address, Family, Kernel, Launch, WARP};
use crate::device_constants::device_constant;
use crate::{DType, KernelError};

const WARPS: u32 = device_constant!("expand.cu", "EXPAND_WARPS");
/// Maximum size of a grid's second dimension.
const MAX_BLOCKS: u32 = 65_535;

/// The parameters of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ExpandParams {
    /// The tiles of the first output.
    pub weights: Address,
    /// `[outputs, inputs]`.
    pub out: Address,
    pub inputs: u32,
    pub outputs: u32,
}

/// Returns the launch for tiles of this format.
pub fn launch(params: &ExpandParams, dtype: DType, activation: Activation) -> Result<Launch, KernelError> {
    const OP: &str = "expand";
    let tiles = Tiles::read_by(OP, dtype)?;
    let block = dtype.block_len() as u32;
    let whole = params.inputs > 0 && params.inputs.is_multiple_of(block);
    super::require(whole, OP, "inputs", params.inputs, || format!("a multiple of {block}"))?;
    let lines = params.outputs.div_ceil(TILE_OUTPUTS as u32);
    super::at_most(OP, "tiles of outputs", lines, MAX_BLOCKS)?;
    let kernel = Kernel::of(Family::Expand).format(dtype).activation(activation);
    let grid = [params.inputs.div_ceil(tiles.inputs as u32 * WARPS), lines, 1];
    Ok(Launch::new(kernel, grid, WARPS * WARP))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{host::Buffer, matmul::tests::Made};
    use crate::{cuda::host, random::Random};

    #[test]
    fn weights_in_tiles_are_converted_to_activations() {
        let mut random = Random::fresh();
        for (inputs, outputs) in [(256, 5), (1280, 34)] {
            for made in Made::of_every_format(&mut random, inputs, outputs) {
                let Some((dtype, tiles, values)) = made.as_tiles() else { continue };
                for activation in Activation::ALL {
                    let mut out = Buffer::new(vec![0x3c3c; inputs * outputs + 8]);
                    let params = ExpandParams {
                        weights: host::address(tiles),
                        out: out.address(),
                        inputs: inputs as u32,
                        outputs: outputs as u32,
                    };
                    let launch = launch(&params, dtype, activation).expect("good shapes");
                    host::run(&launch, &params, &mut [out.values_mut()]);
                    let (found, behind) = out.values().split_at(inputs * outputs);
                    let expected: Vec<f64> = values.iter().map(|value| f64::from(*value)).collect();
                    activation.assert_close(found, &expected, 1e-6);
                    assert_eq!(behind, [0x3c3c; 8]);
                }
            }
        }
    }
}
