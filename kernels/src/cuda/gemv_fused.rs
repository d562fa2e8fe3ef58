//! Products of few rows with dense weights, together with the norm before them and with what follows. The results have the same
//! bits as those of the separate kernels.

use super::gemv::{MAX_ROWS, WARPS};
use super::matmul::{MatmulParams, OutputFormat};
use super::qkv::QkvParams;
use super::rms_norm::RmsNormParams;
use super::{Activation, Address, Family, Kernel, Launch, WARP};
use crate::KernelError;

/// Maximum width of rows that every block norms for itself. With wider rows, the blocks would read about as many values to
/// norm as weights, and the product takes much longer than the launch of a norm.
const MAX_NORMED_WIDTH: u32 = 2048;
/// Maximum number of values of the rows that every block norms, which it keeps in shared memory.
const MAX_NORMED_VALUES: u32 = 8192;
const OP: &str = "gemv_fused";

/// The parameters of the kernels. What a kernel does not use is not read.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FusedGemvParams {
    /// With a norm, `x` is not used. For the QKV projection, `y` is not used.
    pub product: MatmulParams,
    /// The norm of the product's rows. `sum` must not be the residual, and `out` is not used.
    pub norm: RmsNormParams,
    /// The rows of the QKV projection. It must not have norms of heads.
    pub qkv: QkvParams,
}

/// Returns whether rows may be normed by every block of a product.
pub fn norms(rows: u32, width: u32) -> bool {
    (1..=MAX_ROWS).contains(&rows) && width <= MAX_NORMED_WIDTH && rows * width <= MAX_NORMED_VALUES
}

/// Returns the launch of the QKV projection, for at most [`MAX_ROWS`] rows. They are normed first if the norm has a width.
pub fn qkv(params: &FusedGemvParams, activation: Activation) -> Result<Launch, KernelError> {
    let FusedGemvParams { product, norm, qkv } = params;
    super::multiple_of_8(OP, "head_size", qkv.head_size)?;
    let heads = qkv.heads.saturating_add(qkv.kv_heads.saturating_mul(2));
    let outputs = heads.saturating_mul(qkv.head_size);
    let all = || format!("the {outputs} values of all heads");
    super::require(product.outputs == outputs, OP, "outputs", product.outputs, all)?;
    let has_norms = qkv.q_norm != Address::NONE || qkv.k_norm != Address::NONE;
    super::require(!has_norms, OP, "norms of heads", 1, || "heads without norms".to_owned())?;
    let family = if norm.width == 0 { Family::GemvQkv } else { Family::GemvNormedQkv };
    launch(family, params, activation)
}

/// Returns the launch of the norm and the product with a matrix that holds the outputs of a gate and then as many others. It
/// stores `silu(gate) · up`.
pub fn normed_gated(params: &FusedGemvParams, activation: Activation) -> Result<Launch, KernelError> {
    let outputs = params.product.outputs;
    super::require(outputs.is_multiple_of(2), OP, "outputs", outputs, || "a multiple of 2".to_owned())?;
    super::multiple_of_8(OP, "the width of the norm", params.norm.width)?;
    launch(Family::GemvNormedGated, params, activation)
}

fn launch(family: Family, params: &FusedGemvParams, activation: Activation) -> Result<Launch, KernelError> {
    let FusedGemvParams { product, norm, .. } = params;
    super::at_most(OP, "rows", product.rows, MAX_ROWS)?;
    let pairs = product.outputs / 2;
    MatmulParams { outputs: pairs, ..*product }.check(OP, 8)?;
    let is_activations = product.output_format == OutputFormat::Activations;
    super::require(is_activations, OP, "output_format", 1, || "activations".to_owned())?;
    let grid = [pairs.div_ceil(WARPS), 1, 1];
    let launch = Launch::new(Kernel::of(family).activation(activation), grid, WARPS * WARP);
    if norm.width == 0 {
        return Ok(launch);
    }
    let inputs = product.inputs;
    super::require(norm.width == inputs, OP, "the width of the norm", norm.width, || format!("{inputs}"))?;
    let (rows, values) = (product.rows, product.rows.saturating_mul(inputs));
    super::require(norms(rows, inputs), OP, "the number of normed values", values, || {
        format!("at most {MAX_NORMED_VALUES} in rows of at most {MAX_NORMED_WIDTH}")
    })?;
    let apart = norm.sum != norm.residual || norm.sum == Address::NONE;
    super::require(apart, OP, "the residual", 0, || "sums in another buffer".to_owned())?;
    Ok(Launch { shared_bytes: values * 2, ..launch })
}

#[cfg(test)]
#[path = "gemv_fused_tests.rs"]
mod tests;
