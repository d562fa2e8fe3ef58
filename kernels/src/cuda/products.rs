//! Products with quantized weights in tiles, for any number of rows. Every number adds up the products of a row in the same
//! order.

use super::matmul::MatmulParams;
use super::tiles::{TILE_OUTPUTS, Tiles};
use super::{Activation, Family, Kernel, Launch, WARP};
use crate::device_constants::device_constant;
use crate::{DType, KernelError};

const WARPS: u32 = device_constant!("products.cu", "PRODUCT_WARPS");
/// Maximum size of a grid's second dimension.
const MAX_BLOCKS: u32 = 65_535;

/// The part of a product that a block computes.
#[derive(Clone, Copy)]
struct Block {
    rows: u32,
    /// Number of sets of tiles of outputs, each with its own warps.
    sets: u32,
    /// Number of tiles of outputs of a set.
    tiles: u32,
    /// Number of tiles along the inputs that each warp has in shared memory, of each tile of outputs.
    stages: u32,
}

const OF_8: Block = Block {
    rows: 8,
    sets: device_constant!("products.cu", "SETS_OF_8"),
    tiles: device_constant!("products.cu", "TILES_OF_8"),
    stages: device_constant!("products.cu", "STAGES_OF_8"),
};
const OF_16: Block = Block {
    rows: 16,
    sets: device_constant!("products.cu", "SETS_OF_16"),
    tiles: device_constant!("products.cu", "TILES_OF_16"),
    stages: device_constant!("products.cu", "STAGES_OF_16"),
};
const OF_32: Block = Block {
    rows: 32,
    sets: device_constant!("products.cu", "SETS_OF_32"),
    tiles: device_constant!("products.cu", "TILES_OF_32"),
    stages: device_constant!("products.cu", "STAGES_OF_32"),
};
/// One tile of the gate, and one of the other outputs.
const GATED: Block =
    Block { rows: 8, sets: 1, tiles: 2, stages: device_constant!("products.cu", "STAGES_OF_GATED") };

/// Returns the launch for weights in tiles of this format.
pub fn launch(params: &MatmulParams, dtype: DType, activation: Activation) -> Result<Launch, KernelError> {
    let block = match params.rows {
        0..=8 => OF_8,
        9..=16 => OF_16,
        _ => OF_32,
    };
    let blocks = params.outputs.div_ceil(TILE_OUTPUTS as u32 * block.sets * block.tiles);
    block.launch(Family::Products, blocks, params, dtype, activation)
}

/// Returns the launch with a matrix that holds the outputs of a gate and then as many others. It stores `silu(gate) · up`, half
/// as many values as the matrix has outputs.
pub fn gated(params: &MatmulParams, dtype: DType, activation: Activation) -> Result<Launch, KernelError> {
    let family = Family::ProductsGated;
    let tiles = 2 * TILE_OUTPUTS as u32;
    let whole = || format!("a multiple of {tiles}");
    super::require(divides_gate(params.outputs), family.name(), "outputs", params.outputs, whole)?;
    let block = Block { rows: if params.rows <= 8 { 8 } else { 32 }, ..GATED };
    let half = MatmulParams { outputs: params.outputs / 2, ..*params };
    block.launch(family, params.outputs / tiles, &half, dtype, activation)
}

/// Returns whether the outputs of a gate and as many others are whole tiles.
pub fn divides_gate(outputs: u32) -> bool {
    outputs.is_multiple_of(2 * TILE_OUTPUTS as u32)
}

impl Block {
    fn launch(
        self,
        family: Family,
        blocks: u32,
        params: &MatmulParams,
        dtype: DType,
        activation: Activation,
    ) -> Result<Launch, KernelError> {
        let op = family.name();
        let tiles = Tiles::read_by(op, dtype)?;
        params.check(op, dtype.block_len() as u32)?;
        super::at_most(op, "blocks of outputs", blocks, MAX_BLOCKS)?;
        // Offsets of rows are words.
        super::at_most(op, "rows", params.rows, u32::MAX / params.inputs)?;
        let kernel = Kernel::of(family).format(dtype).size(self.rows).activation(activation);
        let grid = [params.rows.div_ceil(self.rows), blocks, 1];
        // Sums take the place of the tiles: four of a lane, for each tile of outputs and eight rows.
        let sums = self.tiles * self.rows / 8 * WARP * 16;
        let warps = self.sets * WARPS;
        let shared_bytes = warps * sums.max(self.stages * self.tiles * tiles.bytes as u32);
        Ok(Launch { shared_bytes, ..Launch::new(kernel, grid, warps * WARP) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cuda::matmul::tests::Made, random::Random};

    #[test]
    fn products_of_any_number_of_rows_with_all_formats() {
        let mut random = Random::fresh();
        for (rows, inputs, outputs) in
            [(1, 2304, 6), (3, 768, 9), (8, 512, 130), (13, 256, 37), (40, 512, 34)]
        {
            let every = Made::of_every_format(&mut random, inputs, outputs);
            for activation in Activation::ALL {
                every.iter().for_each(|made| made.check(rows, activation));
            }
        }
    }

    #[test]
    fn inputs_need_not_fill_the_last_tile() {
        let mut random = Random::fresh();
        let formats = [DType::Q4_0, DType::Q4_1, DType::Int4, DType::Q8_0, DType::F8E4M3];
        for (rows, inputs) in [(1, 32), (2, 224), (9, 1184), (33, 96)] {
            for dtype in formats {
                let made = Made::tiles(dtype, &mut random, inputs, 20);
                Activation::ALL.iter().for_each(|activation| made.check(rows, *activation));
            }
        }
    }

    #[test]
    fn gated_products_of_any_number_of_rows_with_all_formats() {
        let mut random = Random::fresh();
        for (rows, inputs, outputs) in [(1, 256, 32), (8, 768, 64), (35, 512, 96)] {
            let every = Made::of_every_format(&mut random, inputs, outputs);
            for activation in Activation::ALL {
                every.iter().for_each(|made| made.check_gated(rows, activation));
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_in_any_batch() {
        let mut random = Random::fresh();
        let every = Made::of_every_format(&mut random, 1280, 36);
        for activation in Activation::ALL {
            every.iter().for_each(|made| made.check_company(activation));
        }
    }

    #[test]
    fn values_that_are_not_numbers_stay_so() {
        let mut random = Random::fresh();
        Made::with_nan(&mut random).check_nan();
    }
}
