//! Products of few rows with quantised weights.

use super::{Activation, Address, Launch, WARP};
use crate::{DType, KernelError};

/// Outputs that a block takes, each with a warp.
const WARPS: u32 = 4;
/// As in the kernel.
pub const MAX_ROWS: u32 = 8;
const INT4_GROUP: u32 = 32;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GemvParams {
    /// `[rows, inputs]`
    pub x: Address,
    /// `[outputs, inputs]`, in the blocks of its format
    pub weights: Address,
    /// Of formats that keep theirs apart
    pub scales: Address,
    /// `[rows, outputs]`
    pub y: Address,
    pub rows: u32,
    pub inputs: u32,
    pub outputs: u32,
    /// FP8: rows and columns of weights that share a scale
    pub scale_rows: u32,
    pub scale_columns: u32,
}

/// How weights lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Blocks as in GGUF.
    Blocks(DType),
    /// Eight values a word; bf16 scales of groups of 32.
    Int4,
    /// e4m3 with float32 scales.
    Fp8,
}

pub fn launch(params: &GemvParams, weights: Weights, activation: Activation) -> Result<Launch, KernelError> {
    const OP: &str = "gemv";
    let (format, block) = match weights {
        Weights::Blocks(DType::Q4_0) => ("q4_0", 32),
        Weights::Blocks(DType::Q4_1) => ("q4_1", 32),
        Weights::Blocks(DType::Q8_0) => ("q8_0", 32),
        Weights::Blocks(DType::Q4K) => ("q4_k", 256),
        Weights::Blocks(DType::Q6K) => ("q6_k", 256),
        Weights::Int4 => ("int4", INT4_GROUP),
        Weights::Fp8 => ("fp8", 8),
        Weights::Blocks(other) => {
            let takes = "Q4_0, Q4_1, Q8_0, Q4_K and Q6_K".to_owned();
            let found = other.block_len() as u64;
            return Err(KernelError::Unsupported { op: OP, what: "the length of a block", found, takes });
        }
    };
    super::at_most(OP, "rows", params.rows, MAX_ROWS)?;
    let whole = params.inputs > 0 && params.inputs.is_multiple_of(block);
    super::supported(whole, OP, "inputs", params.inputs, || format!("a multiple of {block}"))?;
    if weights == Weights::Fp8 {
        super::multiple_of_8(OP, "scale_columns", params.scale_columns)?;
        super::supported(params.scale_rows > 0, OP, "scale_rows", 0, || "at least 1".to_owned())?;
    }
    let name = format!("gemv_{format}_{}", activation.suffix());
    Ok(Launch::new(name, [params.outputs.div_ceil(WARPS), 1, 1], WARPS * WARP))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cuda::host, dequantize, random::Random};
    use half::{bf16, f16};

    /// Weights as bytes, their scales apart, and what they stand for.
    struct Made {
        weights: Vec<u8>,
        scales: Vec<u8>,
        values: Vec<f32>,
    }

    fn check(
        weights: Weights,
        activation: Activation,
        made: &Made,
        shape: (usize, usize, usize),
        block: u32,
    ) {
        let (rows, inputs, outputs) = shape;
        let mut random = Random::fresh();
        let x = activation.random(&mut random, rows * inputs);
        let mut y = activation.zeros(rows * outputs);
        let params = GemvParams {
            x: x.address(),
            weights: host::address(&made.weights),
            scales: host::address(&made.scales),
            y: y.address(),
            rows: rows as u32,
            inputs: inputs as u32,
            outputs: outputs as u32,
            scale_rows: block,
            scale_columns: block,
        };
        host::run(
            &launch(&params, weights, activation).expect("good shapes"),
            &params,
            &mut [y.values_mut()],
        );
        let mut expected = Vec::new();
        for x in x.values().chunks(inputs) {
            for weights in made.values.chunks(inputs) {
                let products = x.iter().zip(weights).map(|(x, w)| activation.decode(*x) * f64::from(*w));
                expected.push(products.sum::<f64>());
            }
        }
        let largest = expected.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
        activation.assert_close(y.values(), &expected, 1e-5 * largest.max(1.0));
    }

    /// Any bytes are blocks, but for their scales: those have to be numbers of a sane size.
    fn blocks(dtype: DType, random: &mut Random, values: usize) -> Made {
        let count = values / dtype.block_len();
        let scale_places: &[usize] = match dtype {
            DType::Q4_0 | DType::Q8_0 => &[0],
            DType::Q4_1 | DType::Q4K => &[0, 2],
            _ => &[208],
        };
        let mut weights = Vec::new();
        for _ in 0..count {
            let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| random.next_u64() as u8).collect();
            for place in scale_places {
                let scale = f16::from_f32(random.signed() / 16.0).to_le_bytes();
                block[*place..place + 2].copy_from_slice(&scale);
            }
            weights.extend(block);
        }
        let mut made = Made { weights, scales: Vec::new(), values: vec![0.0; values] };
        dequantize(dtype, &made.weights, &mut made.values).expect("whole blocks");
        made
    }

    #[test]
    fn products_with_blocks_of_all_formats() {
        let mut random = Random::fresh();
        for dtype in [DType::Q4_0, DType::Q4_1, DType::Q8_0, DType::Q4K, DType::Q6K] {
            for (rows, inputs, outputs) in [(1, 256, 5), (3, 768, 9), (8, 512, 4)] {
                let made = blocks(dtype, &mut random, inputs * outputs);
                for activation in Activation::ALL {
                    check(Weights::Blocks(dtype), activation, &made, (rows, inputs, outputs), 0);
                }
            }
        }
    }

    #[test]
    fn products_with_packed_integers() {
        let (rows, inputs, outputs) = (2, 96, 7);
        let mut random = Random::fresh();
        let weights: Vec<u8> = (0..inputs * outputs / 2).map(|_| random.next_u64() as u8).collect();
        let scales: Vec<bf16> =
            (0..inputs * outputs / 32).map(|_| bf16::from_f32(random.signed() / 8.0)).collect();
        let values = (0..inputs * outputs).map(|i| {
            let nibble = weights[i / 2] >> (4 * (i % 2)) & 15;
            (f32::from(nibble) - 8.0) * scales[i / 32].to_f32()
        });
        let values = values.collect();
        let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let made = Made { weights, scales, values };
        for activation in Activation::ALL {
            check(Weights::Int4, activation, &made, (rows, inputs, outputs), 0);
        }
    }

    #[test]
    fn products_with_8_bit_floats_of_one_scale_and_of_one_a_block() {
        let (rows, inputs, outputs) = (2_usize, 264_usize, 150_usize);
        let mut random = Random::fresh();
        // Every number that is one; NaN is 0x7f.
        let weights: Vec<u8> = (0..inputs * outputs)
            .map(|_| random.next_u64() as u8)
            .map(|bits| if bits & 0x7f == 0x7f { 0 } else { bits })
            .collect();
        for block in [128, 512] {
            let columns = inputs.div_ceil(block);
            let scales: Vec<f32> =
                (0..outputs.div_ceil(block) * columns).map(|_| random.signed() / 64.0).collect();
            let values = weights
                .iter()
                .enumerate()
                .map(|(i, bits)| e4m3(*bits) * scales[i / inputs / block * columns + i % inputs / block]);
            let values = values.collect();
            let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            let made = Made { weights: weights.clone(), scales, values };
            check(Weights::Fp8, Activation::Bf16, &made, (rows, inputs, outputs), block as u32);
        }
    }

    fn e4m3(bits: u8) -> f32 {
        let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
        let magnitude = match exponent {
            0 => mantissa / 8.0 * 2f32.powi(-6),
            exponent => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
        };
        if bits & 0x80 == 0 { magnitude } else { -magnitude }
    }
}
