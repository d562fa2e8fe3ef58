//! The operations around a product of a layer: the norm before it, the product, and what follows. For few rows of dense weights,
//! one or two kernels compute them instead of three, with the same bits.

use super::products::matmul_params;
use super::{ACTIVATION_BYTES, GatedProduct, Matrix, Pages, Product, ProductRows, Products, Qkv, RmsNorm};
use super::{holds, norm_params, qkv_params};
use crate::KernelError;
use crate::cuda::device::Device;
use crate::cuda::gemv_fused::{self, FusedGemvParams};
use crate::cuda::matmul::{MatmulParams, OutputFormat, Weights};
use crate::cuda::qkv::QkvParams;
use crate::cuda::rms_norm::RmsNormParams;
use crate::cuda::{Activation, PageFormat};

impl Device {
    /// Norms rows if they are not normed yet, multiplies them by a matrix, which holds the queries, keys and values of all heads,
    /// applies bias, norms and rotation to the products, and writes keys and values into their pages.
    pub fn normed_qkv(
        &self,
        matrix: &Matrix<'_>,
        normed: &ProductRows<'_>,
        of: &Qkv<'_>,
        pages: &Pages<'_>,
        activation: Activation,
        products: Products<'_>,
    ) -> Result<(), KernelError> {
        same_rows(normed, of.rows)?;
        let product = Product {
            x: normed.x(),
            rows: of.rows,
            y: of.qkv,
            y_stride: matrix.outputs,
            output_format: OutputFormat::Activations,
        };
        let heads_have_norms = of.q_norm.is_some() || of.k_norm.is_some();
        // A warp has two values of a head, but the scale of FP8 needs all of them.
        let is_whole_head_needed = heads_have_norms || pages.format() == PageFormat::Fp8;
        let has_kernel = matrix.weights == Weights::Plain && !is_whole_head_needed && of.rows > 0;
        let whole = norm_within(matrix, normed, products).filter(|_| has_kernel);
        if whole.is_none() {
            self.norm_rows(normed, activation)?;
        }
        let is_fused = whole.is_some()
            || has_kernel && self.is_gemv_fastest(&matmul_params(matrix, &product)?, activation, products)?;
        if !is_fused {
            self.matmul(matrix, &product, activation, products)?;
            return self.qkv(of, pages, activation);
        }
        let params = FusedGemvParams {
            product: matmul_params(matrix, &product)?,
            norm: whole.map_or(Ok(RmsNormParams::NONE), norm_params)?,
            qkv: qkv_params(of, pages)?,
        };
        let launch = gemv_fused::qkv(&params, activation)?;
        // SAFETY: the slices match the shapes; the caller guarantees the slots.
        unsafe { self.launch(&launch, &params) }
    }

    /// Norms rows into `of.x` if they are not normed yet, and computes `silu(gate) · up` of their products with a matrix that holds
    /// the outputs of the gate first.
    pub fn normed_gated(
        &self,
        matrix: &Matrix<'_>,
        normed: &ProductRows<'_>,
        of: &GatedProduct<'_>,
        activation: Activation,
        products: Products<'_>,
    ) -> Result<(), KernelError> {
        let GatedProduct { x, rows, gate_up, out } = *of;
        same_rows(normed, rows)?;
        debug_assert!(x.address() == normed.x().address(), "the product's rows are those of the norm");
        let Some(norm) = norm_within(matrix, normed, products) else {
            self.norm_rows(normed, activation)?;
            return self.gated_matmul(matrix, of, activation, products);
        };
        let width = matrix.outputs / 2;
        let (y_stride, output_format) = (matrix.outputs, OutputFormat::Activations);
        let product = matmul_params(matrix, &Product { x, rows, y: gate_up, y_stride, output_format })?;
        holds("gemv_normed_gated", "out", out, &[rows as usize, width as usize, ACTIVATION_BYTES])?;
        let params = FusedGemvParams {
            product: MatmulParams { y: out.address(), y_stride: width, ..product },
            norm: norm_params(norm)?,
            qkv: QkvParams::NONE,
        };
        let launch = gemv_fused::normed_gated(&params, activation)?;
        // SAFETY: the slices match the shapes.
        unsafe { self.launch(&launch, &params) }
    }
}

/// Returns the norm of the rows if the kernel of their product computes it. That saves two launches, which no library makes up for.
/// Products in a fixed order have kernels of their own.
fn norm_within<'a, 'b>(
    matrix: &Matrix<'_>,
    normed: &'a ProductRows<'b>,
    products: Products<'_>,
) -> Option<&'a RmsNorm<'b>> {
    let ProductRows::Norm(norm) = normed else { return None };
    let is_apart = norm.sum.address() != norm.residual.address();
    let is_within = matches!(products, Products::Fastest { .. })
        && matrix.weights == Weights::Plain
        && is_apart
        && gemv_fused::norms(norm.rows, norm.width);
    is_within.then_some(norm)
}

/// Checks that as many rows are multiplied as are normed.
fn same_rows(normed: &ProductRows<'_>, rows: u32) -> Result<(), KernelError> {
    let expected = || format!("the {} rows of the norm", normed.count());
    crate::cuda::require(rows == normed.count(), "gemv_fused", "rows", rows, expected)
}
