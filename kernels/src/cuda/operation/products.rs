//! Products with weights, and the choice among their kernels and cuBLASLt.

use super::{ACTIVATION_BYTES, GatedProduct, Matrix, Product, Products, address, holds};
use crate::cuda::blas::{self, Blas};
use crate::cuda::device::{Device, Slice};
use crate::cuda::expand::{self, ExpandParams};
use crate::cuda::matmul::{self, MatmulParams, OutputFormat, Weights};
use crate::cuda::tiles::{TILE_OUTPUTS, Tiles};
use crate::cuda::{Activation, Address, Launch, gemv, gemv_fused};
use crate::error::product;
use crate::{DType, KernelError};

/// Maximum number of rows that quantized weights are multiplied with as they are. With more rows it is faster to convert
/// them to dense weights first.
pub const MOST_UNEXPANDED_ROWS: u32 = 64;

/// Maximum number of rows of dense weights that the library is never asked for. Skep's kernels start before the one before them
/// has ended and fetch weights meanwhile, which saves about 3 µs per product on an H100. Timings of one product do not show it.
const MOST_ROWS_WITHOUT_LIBRARY: u32 = 2;

impl Device {
    /// Computes `y[rows, y_stride] = x[rows, inputs] · matrixᵀ + bias`, where each row of `y` starts with the outputs.
    pub fn matmul(
        &self,
        matrix: &Matrix<'_>,
        of: &Product<'_>,
        activation: Activation,
        products: Products<'_>,
    ) -> Result<(), KernelError> {
        if of.rows == 0 {
            return Ok(());
        }
        let params = matmul_params(matrix, of)?;
        match (matrix.weights, products) {
            (Weights::Tiles(dtype), Products::Fastest { library, expanded: Some(expanded) })
                if of.rows > MOST_UNEXPANDED_ROWS =>
            {
                self.expanded_matmul(&params, dtype, expanded, activation, library)
            }
            (weights, Products::FixedOrder) => {
                let launch = matmul::in_fixed_order(&params, weights, activation)?;
                // SAFETY: the slices match the shapes.
                unsafe { self.launch(&launch, &params) }
            }
            (Weights::Plain, Products::Fastest { library, .. }) => {
                self.dense_matmul(&params, activation, library)
            }
            (Weights::Tiles(_), Products::Fastest { .. }) => {
                let launch = matmul::launch(&params, matrix.weights, activation)?;
                // SAFETY: the slices match the shapes.
                unsafe { self.launch(&launch, &params) }
            }
        }
    }

    /// Computes `silu(gate) · up` of the products with a matrix that holds the outputs of the gate first.
    pub fn gated_matmul(
        &self,
        matrix: &Matrix<'_>,
        of: &GatedProduct<'_>,
        activation: Activation,
        products: Products<'_>,
    ) -> Result<(), KernelError> {
        let GatedProduct { x, rows, gate_up, out } = *of;
        let (y, y_stride, output_format) = (gate_up, matrix.outputs, OutputFormat::Activations);
        let product = Product { x, rows, y, y_stride, output_format };
        let width = matrix.outputs / 2;
        if rows > 0 && self.is_gated_at_once(matrix, &product, activation, products)? {
            holds("gated products", "out", out, &[rows as usize, width as usize, ACTIVATION_BYTES])?;
            let params = matmul_params(matrix, &product)?;
            let params = MatmulParams { y: out.address(), y_stride: width, ..params };
            if let Some(launch) = matmul::gated(&params, matrix.weights, activation) {
                // SAFETY: the slices match the shapes.
                return unsafe { self.launch(&launch?, &params) };
            }
        }
        self.matmul(matrix, &product, activation, products)?;
        self.swiglu(gate_up, out, rows, width, activation)
    }

    /// Returns whether a kernel that stores gated products is the fastest, if there is one.
    fn is_gated_at_once(
        &self,
        matrix: &Matrix<'_>,
        of: &Product<'_>,
        activation: Activation,
        products: Products<'_>,
    ) -> Result<bool, KernelError> {
        match (matrix.weights, products) {
            (Weights::Tiles(_), Products::Fastest { expanded: Some(_), .. }) => {
                Ok(of.rows <= MOST_UNEXPANDED_ROWS)
            }
            (Weights::Tiles(_), _) => Ok(true),
            (Weights::Plain, _) => self.is_gemv_fastest(&matmul_params(matrix, of)?, activation, products),
        }
    }

    /// Returns whether `gemv`, or a kernel that does more but computes the products in the same way, is the fastest for dense
    /// weights. The slices match the shapes.
    pub(super) fn is_gemv_fastest(
        &self,
        params: &MatmulParams,
        activation: Activation,
        products: Products<'_>,
    ) -> Result<bool, KernelError> {
        match products {
            // Steps of so few and narrow rows are bound by launches, of which the library needs one more.
            Products::Fastest { .. } if gemv_fused::norms(params.rows, params.inputs) => Ok(true),
            Products::Fastest { library, .. } if params.rows <= gemv::MAX_ROWS => {
                let own = gemv::launch(params, activation)?;
                Ok(self.faster_library(params, &own, activation, library)?.is_none())
            }
            Products::Fastest { .. } | Products::FixedOrder => Ok(false),
        }
    }

    /// Computes a product with dense weights. The slices match the shapes.
    fn dense_matmul(
        &self,
        params: &MatmulParams,
        activation: Activation,
        library: Option<&Blas>,
    ) -> Result<(), KernelError> {
        let launch = matmul::launch(params, Weights::Plain, activation)?;
        if let Some(library) = self.faster_library(params, &launch, activation, library)? {
            // SAFETY: the slices match the shapes.
            match unsafe { library.matmul(params, activation) } {
                Err(KernelError::NoAlgorithm { .. }) => {}
                done => return done,
            }
        }
        // SAFETY: the slices match the shapes.
        unsafe { self.launch(&launch, params) }
    }

    /// Converts as many outputs at a time as there is room for to dense weights, and computes their products. The other slices
    /// match the shapes.
    fn expanded_matmul(
        &self,
        params: &MatmulParams,
        dtype: DType,
        expanded: Slice<'_>,
        activation: Activation,
        library: Option<&Blas>,
    ) -> Result<(), KernelError> {
        const OP: &str = "expand";
        let MatmulParams { inputs, outputs, output_format, .. } = *params;
        let line = product(OP, "16 outputs", &[TILE_OUTPUTS, inputs as usize, ACTIVATION_BYTES])?;
        holds(OP, "expanded", expanded, &[line])?;
        let lines = expanded.bytes() / line;
        let partial = KernelError::PartialBlock { op: OP, dtype, values: inputs as usize };
        let line_bytes = Tiles::read_by(OP, dtype)?.line_bytes(inputs as usize).ok_or(partial)?;
        let at = |address: Address, count: usize, bytes: usize| Address(address.0 + (count * bytes) as u64);
        for first in (0..outputs as usize).step_by(lines * TILE_OUTPUTS) {
            let part = ExpandParams {
                weights: at(params.weights, first / TILE_OUTPUTS, line_bytes),
                out: expanded.address(),
                inputs,
                outputs: outputs.min((first + lines * TILE_OUTPUTS) as u32) - first as u32,
            };
            let launch = expand::launch(&part, dtype, activation)?;
            // SAFETY: the slices match the shapes, and the outputs fit into the slice for dense weights.
            unsafe { self.launch(&launch, &part) }?;
            let bias = match params.bias {
                Address::NONE => Address::NONE,
                bias => at(bias, first, ACTIVATION_BYTES),
            };
            let y = at(params.y, first, sum_bytes(output_format));
            let dense = MatmulParams { weights: part.out, bias, y, outputs: part.outputs, ..*params };
            self.dense_matmul(&dense, activation, library)?;
        }
        Ok(())
    }

    /// Returns the library if it computes a product with dense weights faster than this launch of Skep's kernels. Products that
    /// the library does not support are left to these kernels, which support more.
    fn faster_library<'a>(
        &self,
        params: &MatmulParams,
        own: &Launch,
        activation: Activation,
        library: Option<&'a Blas>,
    ) -> Result<Option<&'a Blas>, KernelError> {
        let Some(library) = library else { return Ok(None) };
        if params.rows <= MOST_ROWS_WITHOUT_LIBRARY || blas::ProductLayout::of(params, activation).is_err() {
            return Ok(None);
        }
        if params.rows > gemv::MAX_ROWS {
            return Ok(Some(library));
        }
        // SAFETY: the caller has checked that the slices match the shapes.
        let launch = || unsafe { self.launch(own, params) };
        // SAFETY: as above.
        let is_slower = unsafe { library.is_slower_than(params, activation, launch) }?;
        Ok(if is_slower == Some(false) { Some(library) } else { None })
    }
}

/// Checks the slices of a product, and returns its parameters.
pub(super) fn matmul_params(matrix: &Matrix<'_>, of: &Product<'_>) -> Result<MatmulParams, KernelError> {
    const OP: &str = "matmul";
    let Product { x, rows, y, y_stride, output_format } = *of;
    let Matrix { data, bias, outputs, inputs, .. } = *matrix;
    holds(OP, "weights", data, &[matrix.bytes()?])?;
    if let Some(bias) = bias {
        holds(OP, "bias", bias, &[outputs as usize, ACTIVATION_BYTES])?;
    }
    let last = product(OP, "y", &[rows as usize - 1, y_stride as usize])?;
    holds(OP, "x", x, &[rows as usize, inputs as usize, ACTIVATION_BYTES])?;
    holds(OP, "y", y, &[last.saturating_add(outputs as usize), sum_bytes(output_format)])?;
    Ok(MatmulParams {
        x: x.address(),
        weights: data.address(),
        bias: address(bias),
        y: y.address(),
        rows,
        inputs,
        outputs,
        y_stride,
        output_format,
    })
}

fn sum_bytes(format: OutputFormat) -> usize {
    match format {
        OutputFormat::F32 => 4,
        OutputFormat::Activations => ACTIVATION_BYTES,
    }
}
