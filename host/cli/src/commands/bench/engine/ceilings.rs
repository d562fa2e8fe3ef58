//! The highest rates of the device that a model runs on, measured in the same run.

use anyhow::Result;
use skep_kernels::cuda::Activation;
use skep_kernels::cuda::blas::Blas;
use skep_kernels::cuda::ceilings::{Gemm, copy_gb_per_s, gemm_tflops};
use skep_kernels::cuda::device::Device;
use skep_kernels::{Isa, KernelError, arithmetic, bandwidth};
use skep_model::{DType, DeviceChoice, ExecutorOptions, KvDtype, ModelConfig, Ordinals, physical_cores};

use super::subject::Loaded;
use super::work::Operations;

/// The highest rates of a device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ceilings {
    pub read_gb_per_s: f64,
    /// `None` if a device has no library to measure it with.
    pub products: Option<Products>,
}

/// Operations per second.
#[derive(Debug, Clone, Copy)]
pub(super) struct Products {
    pub weight_ops_per_s: f64,
    pub attention_ops_per_s: f64,
}

/// Inputs and outputs of the products with weights.
type Shapes = [(usize, usize); 4];

impl Ceilings {
    /// Measures the device that the model runs on, with steps of `rows` rows.
    pub(super) fn of(loaded: &Loaded, options: &ExecutorOptions, rows: usize) -> Result<Self> {
        match loaded.devices {
            DeviceChoice::Cuda(devices) => Ok(Self::of_devices(devices, loaded, options, rows)?),
            DeviceChoice::Cpu | DeviceChoice::Auto => {
                let threads = options.threads.unwrap_or_else(physical_cores);
                let isa = options.isa.unwrap_or_else(Isa::detect);
                Ok(Self::of_processor(isa, threads, loaded.dtype, options.kv))
            }
        }
    }

    /// Measures reads of a buffer far larger than the caches, and multiplications of values that stay in
    /// registers. Quantized weights are multiplied as 8-bit integers, and F16 weights as BF16 or, in blocks, as integers of 16 bits,
    /// two at a time like BF16. The rate of BF16 is that of float32 where the processor does not multiply BF16.
    fn of_processor(isa: Isa, threads: usize, weights: DType, kv: KvDtype) -> Self {
        let rate = arithmetic::measure(isa, threads);
        Ceilings {
            read_gb_per_s: bandwidth::measure_read_gb_per_s(threads),
            products: Some(Products {
                weight_ops_per_s: match weights {
                    DType::F32 => rate.f32_per_s,
                    DType::F16 | DType::BF16 => rate.bf16_per_s,
                    _ => rate.int8_per_s,
                },
                attention_ops_per_s: if kv == KvDtype::F32 { rate.f32_per_s } else { rate.bf16_per_s },
            }),
        }
    }

    /// Measures copies in the memory of a device, and cuBLASLt's products in the model's own shapes and in 16
    /// bits, on all devices together.
    fn of_devices(
        devices: Ordinals,
        loaded: &Loaded,
        options: &ExecutorOptions,
        rows: usize,
    ) -> Result<Self, KernelError> {
        let compiler = options.kernels.compiler();
        let (mut read_gb_per_s, mut ops_per_s) = (0.0, Some(0.0));
        for ordinal in devices.iter() {
            let device = Device::open(ordinal, &compiler)?;
            read_gb_per_s += copy_gb_per_s(&device)?;
            ops_per_s = match (ops_per_s, Blas::open(&device)) {
                (Some(others), Ok(blas)) => {
                    let activation = match loaded.dtype {
                        DType::F16 => Activation::F16,
                        _ => Activation::Bf16,
                    };
                    let activation = options.activations.unwrap_or(activation);
                    Some(others + ops_per_s_of(&device, &blas, &loaded.config, rows, activation)?)
                }
                (_, Err(error @ KernelError::NoCublas { .. })) => {
                    tracing::warn!(%error, "cannot measure the highest rate of products");
                    None
                }
                (_, Err(error)) => return Err(error),
                (None, Ok(_)) => None,
            };
        }
        let products = ops_per_s
            .map(|ops_per_s| Products { weight_ops_per_s: ops_per_s, attention_ops_per_s: ops_per_s });
        Ok(Ceilings { read_gb_per_s, products })
    }

    /// Returns the seconds that the operations take at least, if that is known.
    pub(super) fn compute_s(&self, operations: Operations) -> Option<f64> {
        let Products { weight_ops_per_s, attention_ops_per_s } = self.products?;
        Some(operations.weights / weight_ops_per_s + operations.attention / attention_ops_per_s)
    }

    /// Returns the time that reading these bytes takes at least, in seconds.
    pub(super) fn read_s(&self, bytes: f64) -> f64 {
        bytes / (self.read_gb_per_s * 1e9)
    }
}

/// Returns the rate of all products of a layer, each weighted by the time that it takes.
fn ops_per_s_of(
    device: &Device,
    blas: &Blas,
    config: &ModelConfig,
    rows: usize,
    activation: Activation,
) -> Result<f64, KernelError> {
    let rows = rows as u32;
    mean_rate(shapes(config), |inputs, outputs| {
        let gemm = Gemm { rows, inputs: inputs as u32, outputs: outputs as u32, activation };
        Ok(gemm_tflops(device, blas, gemm)? * 1e12)
    })
}

/// Returns the products of a layer: queries with keys and values, the output of attention, gate with up,
/// down.
fn shapes(config: &ModelConfig) -> Shapes {
    let (query, kv) = (config.head_count * config.head_size, config.kv_head_count * config.head_size);
    let (hidden, wide) = (config.hidden_size, config.feed_forward_size);
    [(hidden, query + 2 * kv), (query, hidden), (hidden, 2 * wide), (wide, hidden)]
}

/// Returns the rate of all products together, from the rate of each.
fn mean_rate(
    shapes: Shapes,
    mut rate: impl FnMut(usize, usize) -> Result<f64, KernelError>,
) -> Result<f64, KernelError> {
    let (mut operations, mut seconds) = (0.0, 0.0);
    for (inputs, outputs) in shapes {
        let product = inputs as f64 * outputs as f64;
        operations += product;
        seconds += product / rate(inputs, outputs)?;
    }
    Ok(operations / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_a_layer_is_weighted_by_time() {
        let config = ModelConfig::shape("llama-3.1-8b").expect("known");
        let shapes = shapes(&config);
        let weights: usize = shapes.iter().map(|(inputs, outputs)| inputs * outputs).sum();
        assert_eq!(weights, 218_103_808, "the number of weights in the matrices of a layer");
        let same = mean_rate(shapes, |_, _| Ok(5e14)).expect("rates");
        assert!((same / 5e14 - 1.0).abs() < 1e-12, "{same}");
        // Half of the operations at a tenth of the rate take ten elevenths of the time.
        let pieces = [(1, 4), (4, 1), (2, 4), (4, 4)];
        let slow = mean_rate(pieces, |inputs, outputs| Ok(if inputs * outputs == 16 { 1.0 } else { 10.0 }));
        assert_eq!(slow, Ok(32.0 / (16.0 + 1.6)));
    }

    #[test]
    fn without_a_rate_of_products_only_reading_is_bounded() {
        let ceilings = Ceilings { read_gb_per_s: 2.0, products: None };
        assert_eq!(ceilings.compute_s(Operations::default()), None);
        assert_eq!(ceilings.read_s(4e9), 2.0);
    }
}
