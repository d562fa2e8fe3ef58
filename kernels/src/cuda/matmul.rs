//! Products with weights of any format, for any number of rows.
//!
//! `gemv` is for few rows of dense weights and bound by reading the weights; `gemm` is for many rows and uses tensor cores. The
//! two add up in different orders. Where the bits of a row must not depend on the number of rows, `gemm` is used for all of
//! them. `products` is for quantized weights, and adds up in one order.

use super::{Activation, Address, Launch, gemm, gemv, products};
use crate::{DType, KernelError};

/// The parameters of `gemv`, `gemm` and `products`, which compute `y = x · weightsᵀ + bias`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MatmulParams {
    /// `[rows, inputs]`.
    pub x: Address,
    /// `[outputs, inputs]`, in the format of the weights.
    pub weights: Address,
    /// `[outputs]`, in the format of the activations. It may be [`Address::NONE`].
    pub bias: Address,
    /// `[rows, y_stride]`. Each row starts with the outputs.
    pub y: Address,
    pub rows: u32,
    pub inputs: u32,
    pub outputs: u32,
    pub y_stride: u32,
    pub output_format: OutputFormat,
}

impl MatmulParams {
    /// Describes a product of rows `[rows, inputs]` with plain weights `[outputs, inputs]` into `[rows, outputs]`, without a
    /// bias.
    pub fn dense([x, weights, y]: [Address; 3], [rows, inputs, outputs]: [u32; 3]) -> Self {
        MatmulParams {
            x,
            weights,
            bias: Address::NONE,
            y,
            rows,
            inputs,
            outputs,
            y_stride: outputs,
            output_format: OutputFormat::Activations,
        }
    }

    /// Checks the shape for weights in blocks of this many values.
    pub(super) fn check(&self, op: &'static str, block: u32) -> Result<(), KernelError> {
        let stride = || format!("at least the {} outputs", self.outputs);
        super::require(self.y_stride >= self.outputs, op, "y_stride", self.y_stride, stride)?;
        let whole = self.inputs > 0 && self.inputs.is_multiple_of(block);
        super::require(whole, op, "inputs", self.inputs, || format!("a multiple of {block}"))
    }
}

/// The number format in which a product is stored.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFormat {
    Activations = 0,
    F32 = 1,
}

/// The memory layout of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Values in the format of the activations.
    Plain,
    /// Quantized weights of this format, in [tiles](super::tiles).
    Tiles(DType),
}

/// Returns the launch of the fastest kernel for the number of rows.
pub fn launch(
    params: &MatmulParams,
    weights: Weights,
    activation: Activation,
) -> Result<Launch, KernelError> {
    match (weights, params.rows) {
        (Weights::Tiles(dtype), _) => products::launch(params, dtype, activation),
        (Weights::Plain, 0..=gemv::MAX_ROWS) => gemv::launch(params, activation),
        (Weights::Plain, _) => gemm::launch(params, activation),
    }
}

/// Returns the launch of the kernel that adds up a row's products in the same order for any number of rows.
pub fn in_fixed_order(
    params: &MatmulParams,
    weights: Weights,
    activation: Activation,
) -> Result<Launch, KernelError> {
    match weights {
        Weights::Tiles(dtype) => products::launch(params, dtype, activation),
        Weights::Plain => gemm::launch(params, activation),
    }
}

/// Returns the launch of the kernel that computes `silu(gate) · up` with a matrix that holds the outputs of a gate and then as
/// many others, if there is one for the shape.
pub fn gated(
    params: &MatmulParams,
    weights: Weights,
    activation: Activation,
) -> Option<Result<Launch, KernelError>> {
    match weights {
        Weights::Tiles(dtype) if products::divides_gate(params.outputs) => {
            Some(products::gated(params, dtype, activation))
        }
        Weights::Plain if params.rows <= gemv::MAX_ROWS => Some(gemv::gated(params, activation)),
        Weights::Tiles(_) | Weights::Plain => None,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::cuda::host::{self, Buffer};
    use crate::cuda::swiglu::{self, SwigluParams};
    use crate::cuda::tiles::Tiles;
    use crate::{dequantize, random::Random};
    use half::f16;

    /// Weights in their memory layout, and the values that they represent.
    pub(in crate::cuda) struct Made {
        weights: Weights,
        memory: Buffer,
        values: Vec<f32>,
        inputs: usize,
        outputs: usize,
    }

    impl Made {
        /// Makes random weights of every quantized format.
        pub(in crate::cuda) fn of_every_format(
            random: &mut Random,
            inputs: usize,
            outputs: usize,
        ) -> Vec<Self> {
            let formats = DType::ALL.into_iter().filter(|dtype| Tiles::of(*dtype).is_some());
            formats.map(|dtype| Made::tiles(dtype, random, inputs, outputs)).collect()
        }

        /// Makes random weights in the format of the activations.
        pub(in crate::cuda) fn plain(
            activation: Activation,
            random: &mut Random,
            inputs: usize,
            outputs: usize,
        ) -> Self {
            let weights = activation.random(random, inputs * outputs);
            let values = weights.values().iter().map(|bits| activation.decode(*bits) as f32).collect();
            Made { weights: Weights::Plain, memory: weights, values, inputs, outputs }
        }

        /// Makes random tiles. Any bytes form valid blocks, except that the scales have to be numbers of moderate size, zero
        /// points have four bits, and bytes of FP8 are numbers.
        pub(in crate::cuda) fn tiles(
            dtype: DType,
            random: &mut Random,
            inputs: usize,
            outputs: usize,
        ) -> Self {
            let mut blocks = Vec::new();
            for _ in 0..inputs * outputs / dtype.block_len() {
                blocks.extend(random_block(dtype, random));
            }
            Made::packed(dtype, &blocks, inputs, outputs)
        }

        fn packed(dtype: DType, blocks: &[u8], inputs: usize, outputs: usize) -> Self {
            let mut values = vec![0.0; inputs * outputs];
            dequantize(dtype, blocks, &mut values).expect("whole blocks");
            let tiles = Tiles::of(dtype).expect("a format of tiles");
            let mut bytes = vec![0xff; tiles.matrix_bytes(outputs, inputs).expect("whole blocks")];
            tiles.pack(blocks, inputs, &mut bytes).expect("whole blocks");
            let words = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
            let memory = Buffer::new(words.collect());
            Made { weights: Weights::Tiles(dtype), memory, values, inputs, outputs }
        }

        /// Makes FP8 weights of three outputs, of which only the second has a value that is not a number.
        pub(in crate::cuda) fn with_nan(random: &mut Random) -> Self {
            let mut blocks: Vec<u8> = (0..9).flat_map(|_| random_block(DType::F8E4M3, random)).collect();
            blocks[36 * 4 + 9] = 0xff;
            Made::packed(DType::F8E4M3, &blocks, 96, 3)
        }

        pub(in crate::cuda) fn check_nan(&self) {
            let activation = Activation::Bf16;
            let x = activation.random(&mut Random::fresh(), self.inputs);
            let mut y = activation.zeros(self.outputs);
            let params = self.params(1, &x, &y);
            let launch = launch(&params, self.weights, activation).expect("good shapes");
            host::run(&launch, &params, &mut [y.values_mut()]);
            let is_nan: Vec<bool> = y.values().iter().map(|bits| activation.decode(*bits).is_nan()).collect();
            assert_eq!(is_nan, [false, true, false]);
        }

        /// Returns the format, the memory and the values of weights in tiles, or `None` for other weights.
        pub(in crate::cuda) fn as_tiles(&self) -> Option<(DType, &[u16], &[f32])> {
            match self.weights {
                Weights::Tiles(dtype) => Some((dtype, self.memory.values(), &self.values)),
                Weights::Plain => None,
            }
        }

        /// Checks the products of random rows.
        pub(in crate::cuda) fn check(&self, rows: usize, activation: Activation) {
            let Made { inputs, outputs, .. } = *self;
            let x = activation.random(&mut Random::fresh(), rows * inputs);
            let mut y = activation.zeros(rows * outputs);
            let params = self.params(rows, &x, &y);
            let launch = launch(&params, self.weights, activation).expect("good shapes");
            host::run(&launch, &params, &mut [y.values_mut()]);
            let expected = self.products(&x, activation);
            let largest = expected.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
            activation.assert_close(y.values(), &expected, 1e-5 * largest.max(1.0));
        }

        /// Checks that gated products of random rows are those of two kernels, one after the other.
        pub(in crate::cuda) fn check_gated(&self, rows: usize, activation: Activation) {
            let Made { inputs, outputs, .. } = *self;
            let mut random = Random::fresh();
            let (width, stride) = (outputs / 2, outputs / 2 + 3);
            // Products of two sums must not overflow.
            let small = (0..rows * inputs).map(|_| activation.encode(random.signed() / 64.0));
            let x = Buffer::new(small.collect());
            let bias = activation.random(&mut random, outputs);
            let mut gate_up = activation.zeros(rows * outputs);
            let params = MatmulParams { bias: bias.address(), ..self.params(rows, &x, &gate_up) };
            let launch = launch(&params, self.weights, activation).expect("good shapes");
            host::run(&launch, &params, &mut [gate_up.values_mut()]);
            let mut expected = activation.zeros(rows * width);
            let swiglu = SwigluParams {
                gate_up: gate_up.address(),
                out: expected.address(),
                rows: rows as u32,
                width: width as u32,
            };
            let launch = swiglu::launch(&swiglu, activation).expect("good shapes");
            host::run(&launch, &swiglu, &mut [expected.values_mut()]);
            let mut found = Buffer::new(vec![0x3c3c; rows * stride]);
            let params = MatmulParams { y: found.address(), y_stride: stride as u32, ..params };
            let launch = gated(&params, self.weights, activation).expect("a kernel").expect("good shapes");
            host::run(&launch, &params, &mut [found.values_mut()]);
            for (found, expected) in found.values().chunks(stride).zip(expected.values().chunks(width)) {
                let expected: Vec<f64> = expected.iter().map(|bits| activation.decode(*bits)).collect();
                activation.assert_close(&found[..width], &expected, 1e-6);
                assert!(
                    found[width..].iter().all(|word| *word == 0x3c3c),
                    "gaps between rows are not written"
                );
            }
        }

        /// Checks that the products of a row have the same bits alone and among other rows, at positions in different tiles,
        /// bands and lanes.
        pub(in crate::cuda) fn check_company(&self, activation: Activation) {
            let Made { inputs, outputs, .. } = *self;
            let mut random = Random::fresh();
            let row = activation.random(&mut random, inputs);
            let products = |rows: usize, at: usize, random: &mut Random| {
                let mut x = activation.random(random, rows * inputs);
                x.values_mut()[at * inputs..][..inputs].copy_from_slice(row.values());
                // Float32 sums, so that all bits are compared and not only the rounded result.
                let mut y = Buffer::new(vec![0; 2 * rows * outputs]);
                let params = MatmulParams { output_format: OutputFormat::F32, ..self.params(rows, &x, &y) };
                let launch = in_fixed_order(&params, self.weights, activation).expect("good shapes");
                host::run(&launch, &params, &mut [y.values_mut()]);
                y.values()[2 * at * outputs..][..2 * outputs].to_vec()
            };
            let alone = products(1, 0, &mut random);
            for (rows, at) in [(2, 1), (33, 32), (64, 23), (65, 40), (131, 130)] {
                let found = products(rows, at, &mut random);
                assert!(
                    found == alone,
                    "{activation:?}, row {at} of {rows}: its bits differ from those alone"
                );
            }
        }

        /// Returns the parameters of a product of these rows without a bias.
        fn params(&self, rows: usize, x: &Buffer, y: &Buffer) -> MatmulParams {
            MatmulParams {
                x: x.address(),
                weights: self.memory.address(),
                bias: Address::NONE,
                y: y.address(),
                rows: rows as u32,
                inputs: self.inputs as u32,
                outputs: self.outputs as u32,
                y_stride: self.outputs as u32,
                output_format: OutputFormat::Activations,
            }
        }

        /// Checks products with a bias in rows with gaps between them, in both formats.
        fn check_bias(&self, rows: usize, bias: &Buffer, activation: Activation) {
            let Made { inputs, outputs, .. } = *self;
            let stride = outputs + 5;
            let x = activation.random(&mut Random::fresh(), rows * inputs);
            let mut expected = self.products(&x, activation);
            for (value, bias) in expected.iter_mut().zip(bias.values().iter().cycle()) {
                *value += activation.decode(*bias);
            }
            for output_format in [OutputFormat::Activations, OutputFormat::F32] {
                let words = if output_format == OutputFormat::F32 { 2 } else { 1 };
                let mut y = Buffer::new(vec![0x3c3c; rows * stride * words]);
                let params = MatmulParams {
                    bias: bias.address(),
                    y_stride: stride as u32,
                    output_format,
                    ..self.params(rows, &x, &y)
                };
                let launch = launch(&params, self.weights, activation).expect("good shapes");
                host::run(&launch, &params, &mut [y.values_mut()]);
                let rows = y.values().chunks(stride * words).zip(expected.chunks(outputs));
                for (row, expected) in rows {
                    let (found, gap) = row.split_at(outputs * words);
                    assert!(gap.iter().all(|word| *word == 0x3c3c), "gaps between rows are not written");
                    if output_format == OutputFormat::Activations {
                        activation.assert_close(found, expected, 1e-4);
                        continue;
                    }
                    for (pair, expected) in found.chunks(2).zip(expected) {
                        let found = f32::from_bits(u32::from(pair[0]) | u32::from(pair[1]) << 16);
                        assert!((f64::from(found) - expected).abs() < 1e-4, "{found} for {expected}");
                    }
                }
            }
        }

        fn products(&self, x: &Buffer, activation: Activation) -> Vec<f64> {
            let weights: Vec<f64> = self.values.iter().map(|weight| f64::from(*weight)).collect();
            let x: Vec<f64> = x.values().iter().map(|x| activation.decode(*x)).collect();
            let mut expected = Vec::new();
            for x in x.chunks(self.inputs) {
                for weights in weights.chunks(self.inputs) {
                    expected.push(x.iter().zip(weights).map(|(x, w)| x * w).sum::<f64>());
                }
            }
            expected
        }
    }

    fn random_block(dtype: DType, random: &mut Random) -> Vec<u8> {
        let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| random.next_u64() as u8).collect();
        let halves: &[usize] = match dtype {
            DType::Q4_0 | DType::Q8_0 | DType::Int4 => &[0],
            DType::Q4_1 | DType::Q4K => &[0, 2],
            DType::Q6K => &[208],
            _ => &[],
        };
        for at in halves {
            block[*at..at + 2].copy_from_slice(&f16::from_f32(random.signed() / 16.0).to_le_bytes());
        }
        match dtype {
            DType::Int4 => block[2] &= 15,
            DType::F8E4M3 => {
                block[..4].copy_from_slice(&(random.signed() / 64.0).to_le_bytes());
                block[4..].iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code = 0);
            }
            _ => {}
        }
        block
    }

    #[test]
    fn sums_include_the_bias_and_leave_gaps_between_rows_unchanged() {
        let mut random = Random::fresh();
        for activation in Activation::ALL {
            let tiles = Made::tiles(DType::Q8_0, &mut random, 64, 7);
            let plain = Made::plain(activation, &mut random, 64, 7);
            let bias = activation.random(&mut random, 7);
            for (made, rows) in [(&tiles, 2), (&tiles, 20), (&plain, 2), (&plain, 20)] {
                made.check_bias(rows, &bias, activation);
            }
        }
    }

    #[test]
    fn unsupported_shapes_and_formats_are_rejected() {
        let good = MatmulParams {
            output_format: OutputFormat::F32,
            ..MatmulParams::dense([Address::NONE; 3], [1, 288, 3])
        };
        let refused =
            |params, weights| launch(&params, weights, Activation::F16).expect_err("rejected").to_string();
        let text = refused(good, Weights::Tiles(DType::Q4K));
        assert!(text.contains("288") && text.contains("multiple of 256"), "{text}");
        let text = refused(good, Weights::Tiles(DType::Q5K));
        assert!(text.contains("Q5_K") && text.contains("Q4_K, Q6_K"), "{text}");
        let text = refused(MatmulParams { rows: 99, inputs: 12, ..good }, Weights::Plain);
        assert!(text.contains("gemm") && text.contains("inputs"), "{text}");
        let text = refused(MatmulParams { y_stride: 2, ..good }, Weights::Tiles(DType::Q8_0));
        assert!(text.contains("y_stride") && text.contains("at least the 3 outputs"), "{text}");
        assert!(launch(&good, Weights::Tiles(DType::Q8_0), Activation::F16).is_ok());
    }
}
