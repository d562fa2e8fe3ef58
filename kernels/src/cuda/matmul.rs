//! Products with weights of any format, for any number of rows.
//!
//! `gemv` is for few rows and bound by reading the weights; `gemm` is for many rows and uses tensor cores. The two add up in
//! different orders. Where the bits of a row must not depend on the number of rows, `gemm` is used for all of them.

use super::{Activation, Address, Launch, gemm, gemv};
use crate::{DType, KernelError, device_constants::device_constant};

const INT4_GROUP: u32 = device_constant!("formats/blocks.cuh", "Int4", "GROUP");

/// The parameters of `gemv` and `gemm`, which compute `y = x · weightsᵀ + bias`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MatmulParams {
    /// `[rows, inputs]`.
    pub x: Address,
    /// `[outputs, inputs]`, in the format of the weights.
    pub weights: Address,
    /// The scales, for formats that store them separately.
    pub scales: Address,
    /// `[outputs]`, in the format of the activations. It may be [`Address::NONE`].
    pub bias: Address,
    /// `[rows, y_stride]`. Each row starts with the outputs.
    pub y: Address,
    pub rows: u32,
    pub inputs: u32,
    pub outputs: u32,
    pub y_stride: u32,
    pub output_format: OutputFormat,
    /// FP8: number of rows and columns of weights that share a scale.
    pub scale_rows: u32,
    pub scale_columns: u32,
}

impl MatmulParams {
    /// Describes a product of rows `[rows, inputs]` with plain weights `[outputs, inputs]` into `[rows, outputs]`, without a
    /// bias.
    pub fn dense([x, weights, y]: [Address; 3], [rows, inputs, outputs]: [u32; 3]) -> Self {
        MatmulParams {
            x,
            weights,
            scales: Address::NONE,
            bias: Address::NONE,
            y,
            rows,
            inputs,
            outputs,
            y_stride: outputs,
            output_format: OutputFormat::Activations,
            scale_rows: 0,
            scale_columns: 0,
        }
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
    /// Quantized blocks as in GGUF.
    Blocks(DType),
    /// 4-bit integers, eight per word, with one bf16 scale per group of 32.
    Int4,
    /// e4m3 values with one float32 scale per block of `scale_rows` by `scale_columns` weights. If the block is larger than
    /// the matrix, there is one scale.
    Fp8,
}

/// Returns the launch of the fastest kernel for the number of rows.
pub fn launch(
    params: &MatmulParams,
    weights: Weights,
    activation: Activation,
) -> Result<Launch, KernelError> {
    match params.rows {
        0..=gemv::MAX_ROWS => gemv::launch(params, weights, activation),
        _ => gemm::launch(params, weights, activation),
    }
}

impl Weights {
    /// Returns the part of the kernel names for this format, after checking the shape and the scales.
    pub(super) fn format(self, op: &'static str, params: &MatmulParams) -> Result<&'static str, KernelError> {
        let (format, block) = match self {
            Weights::Plain => ("plain", 8),
            Weights::Blocks(dtype) => block_format(op, dtype)?,
            Weights::Int4 => ("int4", INT4_GROUP),
            Weights::Fp8 => ("fp8", 8),
        };
        let stride = || format!("at least the {} outputs", params.outputs);
        super::require(params.y_stride >= params.outputs, op, "y_stride", params.y_stride, stride)?;
        let whole = params.inputs > 0 && params.inputs.is_multiple_of(block);
        super::require(whole, op, "inputs", params.inputs, || format!("a multiple of {block}"))?;
        if self == Weights::Fp8 {
            super::multiple_of_8(op, "scale_columns", params.scale_columns)?;
            super::require(params.scale_rows > 0, op, "scale_rows", 0, || "at least 1".to_owned())?;
        }
        Ok(format)
    }
}

/// Returns whether products read blocks of a format as they are in files.
pub fn reads_blocks(dtype: DType) -> bool {
    block_format("matmul", dtype).is_ok()
}

/// Returns the part of the kernel names for a format, and the number of values per block.
pub(super) fn block_format(op: &'static str, dtype: DType) -> Result<(&'static str, u32), KernelError> {
    let name = match dtype {
        DType::Q4_0 => "q4_0",
        DType::Q4_1 => "q4_1",
        DType::Q8_0 => "q8_0",
        DType::Q4K => "q4_k",
        DType::Q6K => "q6_k",
        DType::F32
        | DType::F16
        | DType::BF16
        | DType::Q5_0
        | DType::Q5_1
        | DType::Q2K
        | DType::Q3K
        | DType::Q5K
        | DType::Iq4Nl
        | DType::Iq4Xs
        | DType::Mxfp4
        | DType::Int4
        | DType::F8E4M3 => {
            let supported = "Q4_0, Q4_1, Q8_0, Q4_K and Q6_K";
            return Err(KernelError::Format { op, found: dtype, supported });
        }
    };
    Ok((name, dtype.block_len() as u32))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{
        cuda::host::{self, Buffer},
        cuda::swiglu::{self, SwigluParams},
        dequantize,
        random::Random,
    };
    use half::{bf16, f16};

    /// Weights in their memory layout, their separate scales, and the values that they represent.
    pub(in crate::cuda) struct Made {
        weights: Weights,
        memory: Buffer,
        scales: Vec<u8>,
        values: Vec<f32>,
        inputs: usize,
        outputs: usize,
        /// FP8: the side of the square of weights that share a scale.
        square: usize,
    }

    impl Made {
        /// Makes random weights of every format.
        pub(in crate::cuda) fn of_every_format(
            random: &mut Random,
            inputs: usize,
            outputs: usize,
        ) -> Vec<Self> {
            let mut all: Vec<Made> = [DType::Q4_0, DType::Q4_1, DType::Q8_0, DType::Q4K, DType::Q6K]
                .map(|dtype| Made::blocks(dtype, random, inputs, outputs))
                .into();
            all.push(Made::int4(random, inputs - 32, outputs));
            // One scale per block, and one scale for the whole matrix.
            all.extend([128, 1024].map(|square| Made::fp8(random, inputs + 8, outputs, square)));
            all
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
            let memory = weights;
            Made { weights: Weights::Plain, memory, scales: Vec::new(), values, inputs, outputs, square: 0 }
        }

        /// Makes random blocks. Any bytes form valid blocks, except that the scales have to be numbers of moderate size.
        fn blocks(dtype: DType, random: &mut Random, inputs: usize, outputs: usize) -> Self {
            let scale_offsets: &[usize] = match dtype {
                DType::Q4_0 | DType::Q8_0 => &[0],
                DType::Q4_1 | DType::Q4K => &[0, 2],
                _ => &[208],
            };
            let mut bytes = Vec::new();
            for _ in 0..inputs * outputs / dtype.block_len() {
                let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| random.next_u64() as u8).collect();
                for offset in scale_offsets {
                    let scale = f16::from_f32(random.signed() / 16.0).to_le_bytes();
                    block[*offset..offset + 2].copy_from_slice(&scale);
                }
                bytes.extend(block);
            }
            let mut values = vec![0.0; inputs * outputs];
            dequantize(dtype, &bytes, &mut values).expect("whole blocks");
            let weights = Weights::Blocks(dtype);
            let memory = packed(&bytes);
            Made { weights, memory, scales: Vec::new(), values, inputs, outputs, square: 0 }
        }

        fn int4(random: &mut Random, inputs: usize, outputs: usize) -> Self {
            let bytes: Vec<u8> = (0..inputs * outputs / 2).map(|_| random.next_u64() as u8).collect();
            let scales: Vec<bf16> =
                (0..inputs * outputs / 32).map(|_| bf16::from_f32(random.signed() / 8.0)).collect();
            let value = |i: usize| {
                let nibble = bytes[i / 2] >> (4 * (i % 2)) & 15;
                (f32::from(nibble) - 8.0) * scales[i / 32].to_f32()
            };
            let values = (0..inputs * outputs).map(value).collect();
            let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            let memory = packed(&bytes);
            Made { weights: Weights::Int4, memory, scales, values, inputs, outputs, square: 0 }
        }

        fn fp8(random: &mut Random, inputs: usize, outputs: usize, square: usize) -> Self {
            // All bit patterns except NaN, which is 0x7f with either sign.
            let bytes: Vec<u8> = (0..inputs * outputs)
                .map(|_| random.next_u64() as u8)
                .map(|bits| if bits & 0x7f == 0x7f { 0 } else { bits })
                .collect();
            let columns = inputs.div_ceil(square);
            let scales: Vec<f32> =
                (0..outputs.div_ceil(square) * columns).map(|_| random.signed() / 64.0).collect();
            let scale = |i: usize| scales[i / inputs / square * columns + i % inputs / square];
            let values = bytes.iter().enumerate().map(|(i, bits)| e4m3(*bits) * scale(i)).collect();
            let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            let memory = packed(&bytes);
            Made { weights: Weights::Fp8, memory, scales, values, inputs, outputs, square }
        }

        /// Returns the format, the memory and the values of weights in blocks, or `None` for other formats.
        pub(in crate::cuda) fn as_blocks(&self) -> Option<(DType, &[u16], &[f32])> {
            match self.weights {
                Weights::Blocks(dtype) => Some((dtype, self.memory.values(), &self.values)),
                Weights::Plain | Weights::Int4 | Weights::Fp8 => None,
            }
        }

        /// Checks the products of random rows. With `rounds_weights`, the kernel rounds the weights to the activation format.
        pub(in crate::cuda) fn check(&self, rows: usize, activation: Activation, rounds_weights: bool) {
            let Made { inputs, outputs, .. } = *self;
            let x = activation.random(&mut Random::fresh(), rows * inputs);
            let mut y = activation.zeros(rows * outputs);
            let params = self.params(rows, &x, &y);
            let launch = launch(&params, self.weights, activation).expect("good shapes");
            host::run(&launch, &params, &mut [y.values_mut()]);
            let expected = self.products(&x, activation, rounds_weights);
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
            let launch = gemv::launch(&params, self.weights, activation).expect("good shapes");
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
            let launch = gemv::gated(&params, self.weights, activation).expect("good shapes");
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
                let launch = gemm::launch(&params, self.weights, activation).expect("good shapes");
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
                scales: host::address(&self.scales),
                bias: Address::NONE,
                y: y.address(),
                rows: rows as u32,
                inputs: self.inputs as u32,
                outputs: self.outputs as u32,
                y_stride: self.outputs as u32,
                output_format: OutputFormat::Activations,
                scale_rows: self.square as u32,
                scale_columns: self.square as u32,
            }
        }

        fn products(&self, x: &Buffer, activation: Activation, rounds_weights: bool) -> Vec<f64> {
            let rounded = |weight: &f32| match rounds_weights {
                true => activation.decode(activation.encode(*weight)),
                false => f64::from(*weight),
            };
            let weights: Vec<f64> = self.values.iter().map(rounded).collect();
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

    /// Copies bytes to a buffer that is aligned to 16 bytes like a device's buffers.
    fn packed(bytes: &[u8]) -> Buffer {
        Buffer::new(bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect())
    }

    fn e4m3(bits: u8) -> f32 {
        let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
        let magnitude = match exponent {
            0 => mantissa / 8.0 * 2f32.powi(-6),
            exponent => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
        };
        if bits & 0x80 == 0 { magnitude } else { -magnitude }
    }

    #[test]
    fn sums_include_the_bias_and_leave_gaps_between_rows_unchanged() {
        let mut random = Random::fresh();
        let (inputs, outputs, stride) = (64, 7, 12);
        for activation in Activation::ALL {
            let made = Made::blocks(DType::Q8_0, &mut random, inputs, outputs);
            let bias = activation.random(&mut random, outputs);
            for (rows, rounds_weights) in [(2, false), (20, true)] {
                let x = activation.random(&mut random, rows * inputs);
                let mut expected = made.products(&x, activation, rounds_weights);
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
                        ..made.params(rows, &x, &y)
                    };
                    let launch = launch(&params, made.weights, activation).expect("good shapes");
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
        }
    }

    #[test]
    fn unsupported_shapes_and_formats_are_rejected() {
        let none = Address::NONE;
        let good = MatmulParams {
            x: none,
            weights: none,
            scales: none,
            bias: none,
            y: none,
            rows: 1,
            inputs: 288,
            outputs: 3,
            y_stride: 3,
            output_format: OutputFormat::F32,
            scale_rows: 128,
            scale_columns: 128,
        };
        let refused =
            |params, weights| launch(&params, weights, Activation::F16).expect_err("rejected").to_string();
        let text = refused(good, Weights::Blocks(DType::Q4K));
        assert!(text.contains("288") && text.contains("multiple of 256"), "{text}");
        let text = refused(good, Weights::Blocks(DType::Q5K));
        assert!(text.contains("Q5_K") && text.contains("Q4_K and Q6_K"), "{text}");
        let text = refused(MatmulParams { rows: 99, scale_columns: 12, ..good }, Weights::Fp8);
        assert!(text.contains("gemm") && text.contains("scale_columns"), "{text}");
        assert!(launch(&good, Weights::Fp8, Activation::F16).is_ok());
    }
}
