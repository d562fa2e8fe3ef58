//! Measures the operations of a step one by one, each beside what it has to read, write and compute.
//!
//! Invariant: weights, and keys and values that a step reads once, are not in a cache when an operation reads them.
//! Activations may be, as in a step, where the operation before has just written them. This module knows numbers of heads and
//! of values, and no model.

mod counts;
mod list;
mod pool;
mod stand;

pub use counts::{Bound, Counts, Peaks, Rate};
pub use list::{Cases, Contexts, Operation, Prefix, Prompt, Role, Sizes};
pub use stand::Stand;

use super::Activation;
use super::blas::Blas;
use super::ceilings::{Gemm, copy_gb_per_s, gemm_tflops};
use super::device::Device;
use crate::KernelError;

/// The number format of activations in all measurements.
const ACTIVATION: Activation = Activation::Bf16;
/// Number of rows with which the highest rate of products is measured.
const PEAK_ROWS: u32 = 4096;

impl Peaks {
    /// Measures the upper bounds of a device: copies, and the best of cuBLASLt's products with the matrices of a layer.
    pub fn of(device: &Device, blas: Option<&Blas>, sizes: &Sizes) -> Result<Self, KernelError> {
        let copy_gb_per_s = copy_gb_per_s(device)?;
        let Some(blas) = blas else { return Ok(Peaks { copy_gb_per_s, product_tflops: None }) };
        let mut best = None::<f64>;
        for role in Role::OF_LAYER {
            let [inputs, outputs] = role.shape(sizes);
            let gemm = Gemm { rows: PEAK_ROWS, inputs, outputs, activation: ACTIVATION };
            let rate = gemm_tflops(device, blas, gemm)?;
            best = Some(best.map_or(rate, |best| best.max(rate)));
        }
        Ok(Peaks { copy_gb_per_s, product_tflops: best })
    }
}
