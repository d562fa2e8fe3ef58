//! The arguments of a step's operations: slices of device memory, their shapes, and parameters.
//!
//! Invariant: nothing is checked here, because every operation checks all of its arguments.

use crate::KernelError;
use crate::cuda::PageFormat;
use crate::cuda::blas::Blas;
use crate::cuda::device::{HostBuffer, Slice};
use crate::cuda::embedding::Table;
use crate::cuda::matmul::{OutputFormat, Weights};
use crate::cuda::qkv::Pairing;
use crate::cuda::sample::Choice;
use crate::cuda::tiles::Tiles;
use crate::error::product;

/// Size of an activation in bytes.
pub const ACTIVATION_BYTES: usize = 2;

/// A matrix on a device, `[outputs, inputs]`.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub weights: Weights,
    pub data: Slice<'a>,
    /// `[outputs]`, in the format of the activations.
    pub bias: Option<Slice<'a>>,
    pub outputs: u32,
    pub inputs: u32,
}

/// Rows to multiply with a matrix, and the destination of the products.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    /// `[rows, inputs]`.
    pub x: Slice<'a>,
    pub rows: u32,
    /// `[rows, y_stride]`. Each row starts with the outputs.
    pub y: Slice<'a>,
    pub y_stride: u32,
    pub output_format: OutputFormat,
}

/// Rows to multiply with a matrix that holds the outputs of a gate and then as many others, and the destination of
/// `silu(gate) · up`.
#[derive(Clone, Copy)]
pub struct GatedProduct<'a> {
    /// `[rows, inputs]`.
    pub x: Slice<'a>,
    pub rows: u32,
    /// `[rows, outputs]`, for products that a kernel of their own computes.
    pub gate_up: Slice<'a>,
    /// `[rows, outputs / 2]`.
    pub out: Slice<'a>,
}

/// The kernels that may compute a product.
#[derive(Clone, Copy)]
pub enum Products<'a> {
    /// The fastest kernel for the number of rows. Dense weights with many rows use cuBLASLt, if it is given. Quantized weights
    /// with many rows are converted to dense ones in the slice, which may be shorter than a whole matrix, if it is given.
    Fastest { library: Option<&'a Blas>, expanded: Option<Slice<'a>> },
    /// Only kernels that add up a row's products in the same order for any number of rows.
    FixedOrder,
}

/// A lookup in an embedding table. The table may hold only a range of the tokens; other tokens get zeros.
#[derive(Clone, Copy)]
pub struct Embedding<'a> {
    /// u32 `[rows]`.
    pub tokens: Slice<'a>,
    pub table: Slice<'a>,
    pub format: Table,
    pub out: Slice<'a>,
    pub rows: u32,
    pub width: u32,
    /// The first token in the table. `count` is the number of tokens in it.
    pub first: u32,
    pub count: u32,
}

/// A norm of the residual, to which `x` is added first if it is given.
#[derive(Clone, Copy)]
pub struct RmsNorm<'a> {
    pub x: Option<Slice<'a>>,
    pub residual: Slice<'a>,
    /// The destination of the sum. It may be the residual.
    pub sum: Slice<'a>,
    pub weight: Slice<'a>,
    pub out: Slice<'a>,
    pub rows: u32,
    pub width: u32,
    pub epsilon: f32,
}

/// The rows that a product reads.
#[derive(Clone, Copy)]
pub enum ProductRows<'a> {
    /// The `out` of a norm that is computed first.
    Norm(RmsNorm<'a>),
    /// Rows that are normed already.
    Normed {
        /// `[rows, inputs]`.
        x: Slice<'a>,
        rows: u32,
    },
}

impl<'a> ProductRows<'a> {
    /// Returns the normed rows.
    pub fn x(&self) -> Slice<'a> {
        match self {
            ProductRows::Norm(norm) => norm.out,
            ProductRows::Normed { x, .. } => *x,
        }
    }

    /// Returns the number of rows.
    pub fn count(&self) -> u32 {
        match self {
            ProductRows::Norm(norm) => norm.rows,
            ProductRows::Normed { rows, .. } => *rows,
        }
    }
}

/// The keys and values of a layer, each `[pages, PAGE_POSITIONS, kv_heads, head_size]`.
#[derive(Clone, Copy)]
pub struct Pages<'a> {
    pub keys: Slice<'a>,
    pub values: Slice<'a>,
    /// f32 `[pages, kv_heads, 2, PAGE_POSITIONS]`, if keys and values are in FP8.
    pub scales: Option<Slice<'a>>,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_size: u32,
}

/// Bias, norms and rotation of a step's rows, and the write of keys and values into the pages.
#[derive(Clone, Copy)]
pub struct Qkv<'a> {
    pub qkv: Slice<'a>,
    pub bias: Option<Slice<'a>>,
    pub q_norm: Option<Slice<'a>>,
    pub k_norm: Option<Slice<'a>>,
    /// u32 `[rows]`.
    pub positions: Slice<'a>,
    /// u64 `[rows]`.
    pub slots: Slice<'a>,
    /// f32 `[head_size / 2]`.
    pub frequencies: Slice<'a>,
    pub rows: u32,
    pub pairing: Pairing,
    pub epsilon: f32,
}

/// Attention of sequences with few rows, whose contexts are divided into splits.
#[derive(Clone, Copy)]
pub struct Decode<'a> {
    pub q: Slice<'a>,
    /// u32 `[sequences, table_stride]`.
    pub page_tables: Slice<'a>,
    pub splits: Slice<'a>,
    /// The rows that read shared splits.
    pub shared_rows: Slice<'a>,
    /// f32 `[state_count, heads, head_size]`, then `[state_count, heads, 2]`.
    pub states: Slice<'a>,
    /// u32: zeros for each tile of rows with several splits, and each block of a split.
    pub arrivals: Slice<'a>,
    pub out: Slice<'a>,
    pub rows: u32,
    pub sequences: u32,
    pub split_count: u32,
    pub state_count: u32,
    pub table_stride: u32,
    /// Number of positions that a row sees, including its own. 0 means all positions up to its own.
    pub window: u32,
    pub scale: f32,
}

/// Attention of sequences with many rows.
#[derive(Clone, Copy)]
pub struct Prefill<'a> {
    /// The queries of the whole step.
    pub q: Slice<'a>,
    pub out: Slice<'a>,
    /// u32 `[sequences, table_stride]`.
    pub page_tables: Slice<'a>,
    pub tiles: Slice<'a>,
    pub tile_count: u32,
    pub table_stride: u32,
    pub window: u32,
    pub scale: f32,
    /// The splits of the contexts, if contexts are split.
    pub splits: Option<Splits<'a>>,
}

/// The division of contexts into splits of fixed length, with which every row is summed in the same order.
#[derive(Clone, Copy)]
pub struct Splits<'a> {
    /// Number of keys per split.
    pub keys: u32,
    /// f32 `[states, heads, head_size + 2]`.
    pub states: Slice<'a>,
    pub joins: Slice<'a>,
    pub join_count: u32,
}

/// The parts of a sum over all ranks, and the words through which the ranks wait for each other, as one rank sees them.
#[derive(Clone, Copy)]
pub struct Meeting<'a> {
    /// One slice per rank, as for `signals`.
    pub input: &'a [Slice<'a>],
    pub signals: &'a [Slice<'a>],
    /// u32 that names a rank which did not arrive, and a word of the host's memory that gets the same.
    pub failure: Slice<'a>,
    pub report: &'a HostBuffer,
    pub max_polls: u64,
    /// Maximum number of blocks. It must be the same on all ranks.
    pub most_blocks: u32,
    pub rank: usize,
}

/// One rank's part of a sum over all ranks.
#[derive(Clone, Copy)]
pub struct AllReduce<'a> {
    pub meeting: Meeting<'a>,
    /// One slice per rank.
    pub shares: &'a [Slice<'a>],
    pub out: Slice<'a>,
    pub values: usize,
}

/// The choice of one token for each row of logits.
#[derive(Clone, Copy)]
pub struct Sample<'a> {
    /// f32 `[.., logits_stride]`. Each row starts with the vocabulary.
    pub logits: Slice<'a>,
    pub rows: Slice<'a>,
    pub adjustments: Slice<'a>,
    pub masks: Slice<'a>,
    pub drawn: Slice<'a>,
    pub adjusted: Slice<'a>,
    /// One or more states of [`STATE_BYTES`](crate::cuda::sample::STATE_BYTES), zeros before the first draw. Groups of as many
    /// rows take them in turn.
    pub states: Slice<'a>,
    pub tokens: Slice<'a>,
    pub row_count: u32,
    /// The greatest of the rows' choices.
    pub choice: Choice,
    pub vocabulary: u32,
    pub logits_stride: u32,
}

impl Pages<'_> {
    /// Returns the format of the keys and values.
    pub fn format(&self) -> PageFormat {
        if self.scales.is_some() { PageFormat::Fp8 } else { PageFormat::Activations }
    }
}

impl Matrix<'_> {
    /// Returns the size in bytes of the weights.
    pub fn bytes(&self) -> Result<usize, KernelError> {
        const OP: &str = "matmul";
        let (outputs, inputs) = (self.outputs as usize, self.inputs as usize);
        match self.weights {
            Weights::Plain => product(OP, "the matrix", &[outputs, inputs, ACTIVATION_BYTES]),
            Weights::Tiles(dtype) => {
                let partial = KernelError::PartialBlock { op: OP, dtype, values: inputs };
                Tiles::read_by(OP, dtype)?.matrix_bytes(outputs, inputs).ok_or(partial)
            }
        }
    }
}
