//! What the operations of a step are called with: slices of a device's memory, their shapes, and what is done with them.
//!
//! Invariant: nothing is checked here, because every operation checks all that it gets.

use crate::KernelError;
use crate::cuda::blas::Blas;
use crate::cuda::device::Slice;
use crate::cuda::embedding::Table;
use crate::cuda::matmul::{Sums, Weights};
use crate::cuda::qkv::Pairing;
use crate::error::product;

/// Bytes of an activation.
pub const ACTIVATION_BYTES: usize = 2;

/// A matrix on a device, `[outputs, inputs]`.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub weights: Weights,
    pub data: Slice<'a>,
    /// Of formats that keep theirs apart.
    pub scales: Option<Slice<'a>>,
    /// `[outputs]`, of activations.
    pub bias: Option<Slice<'a>>,
    pub outputs: u32,
    pub inputs: u32,
    /// FP8: rows and columns of weights that share a scale.
    pub scale_rows: u32,
    pub scale_columns: u32,
}

/// Rows to multiply with a matrix, and where the products go.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    /// `[rows, inputs]`
    pub x: Slice<'a>,
    pub rows: u32,
    /// `[rows, y_stride]`: of each row the outputs first.
    pub y: Slice<'a>,
    pub y_stride: u32,
    pub sums: Sums,
}

/// Which kernels a product may go through.
#[derive(Clone, Copy)]
pub enum Products<'a> {
    /// The fastest for so many rows: cuBLASLt, if it is given, where weights are dense and rows are many.
    Fastest(Option<&'a Blas>),
    /// Those that add up a row's product in the same order, however many rows there are.
    OneOrder,
}

/// Rows of a table of vectors, which may be those of some tokens only: others get zeros.
#[derive(Clone, Copy)]
pub struct Embedding<'a> {
    /// u32 `[rows]`
    pub tokens: Slice<'a>,
    pub table: Slice<'a>,
    pub format: Table,
    pub out: Slice<'a>,
    pub rows: u32,
    pub width: u32,
    /// Of the table.
    pub first: u32,
    pub count: u32,
}

/// Adds rows to the residual, if there are some, and normalises the sums.
#[derive(Clone, Copy)]
pub struct RmsNorm<'a> {
    pub x: Option<Slice<'a>>,
    pub residual: Slice<'a>,
    pub weight: Slice<'a>,
    pub out: Slice<'a>,
    pub rows: u32,
    pub width: u32,
    pub epsilon: f32,
}

/// The keys and values of a layer: `[pages, page_size, kv_heads, head_size]` each.
#[derive(Clone, Copy)]
pub struct Pages<'a> {
    pub keys: Slice<'a>,
    pub values: Slice<'a>,
    pub page_size: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_size: u32,
}

/// Bias, norms, rotation, and the write into the pages.
#[derive(Clone, Copy)]
pub struct Qkv<'a> {
    pub qkv: Slice<'a>,
    pub bias: Option<Slice<'a>>,
    pub q_norm: Option<Slice<'a>>,
    pub k_norm: Option<Slice<'a>>,
    /// u32 `[rows]`
    pub positions: Slice<'a>,
    /// u64 `[rows]`
    pub slots: Slice<'a>,
    /// f32 `[head_size / 2]`
    pub frequencies: Slice<'a>,
    pub rows: u32,
    pub pairing: Pairing,
    pub epsilon: f32,
}

/// Attention of rows that are the only ones of their sequences.
#[derive(Clone, Copy)]
pub struct Decode<'a> {
    pub q: Slice<'a>,
    /// u32 `[rows, table_stride]`
    pub page_tables: Slice<'a>,
    pub pieces: Slice<'a>,
    /// u32 `[rows + 1]`
    pub first_place: Slice<'a>,
    pub states: Slice<'a>,
    pub out: Slice<'a>,
    pub rows: u32,
    pub piece_count: u32,
    pub table_stride: u32,
    pub scale: f32,
}

/// Attention of rows of which a sequence has several.
#[derive(Clone, Copy)]
pub struct Prefill<'a> {
    /// Of the whole step.
    pub q: Slice<'a>,
    pub out: Slice<'a>,
    /// u32 `[sequences, table_stride]`
    pub page_tables: Slice<'a>,
    pub tiles: Slice<'a>,
    pub tile_count: u32,
    pub table_stride: u32,
    pub window: u32,
    pub scale: f32,
    /// Of contexts, if those have some.
    pub splits: Option<Splits<'a>>,
}

/// How contexts are divided where every row adds them up in one order.
#[derive(Clone, Copy)]
pub struct Splits<'a> {
    /// Of each.
    pub keys: u32,
    /// f32 `[places, heads, head_size + 2]`
    pub states: Slice<'a>,
    pub joins: Slice<'a>,
    pub join_count: u32,
}

/// What a rank sums with the others.
#[derive(Clone, Copy)]
pub struct AllReduce<'a> {
    /// One of each rank, as are the next two.
    pub input: &'a [Slice<'a>],
    pub shares: &'a [Slice<'a>],
    pub signals: &'a [Slice<'a>],
    pub out: Slice<'a>,
    pub failure: Slice<'a>,
    pub values: usize,
    pub patience: u64,
    /// The same on all ranks.
    pub most_blocks: u32,
    pub rank: usize,
}

/// Draws tokens.
#[derive(Clone, Copy)]
pub struct Sample<'a> {
    /// f32 `[.., vocabulary]`
    pub logits: Slice<'a>,
    pub rows: Slice<'a>,
    pub adjustments: Slice<'a>,
    pub masks: Slice<'a>,
    pub drawn: Slice<'a>,
    pub adjusted: Slice<'a>,
    pub tokens: Slice<'a>,
    pub row_count: u32,
    pub vocabulary: u32,
}

impl Matrix<'_> {
    /// Bytes of the weights and of their scales.
    pub fn bytes(&self) -> Result<[usize; 2], KernelError> {
        let (outputs, inputs) = (self.outputs as usize, self.inputs as usize);
        let values = || product("matmul", "the matrix", &[outputs, inputs]);
        Ok(match self.weights {
            Weights::Plain => [product("matmul", "the matrix", &[outputs, inputs, ACTIVATION_BYTES])?, 0],
            Weights::Blocks(dtype) => {
                let row = dtype.row_bytes(inputs).ok_or(KernelError::PartialBlock {
                    op: "matmul",
                    dtype,
                    values: inputs,
                })?;
                [product("matmul", "the matrix", &[outputs, row])?, 0]
            }
            Weights::Int4 => [values()? / 2, values()? / 32 * 2],
            Weights::Fp8 => {
                let columns = self.inputs.div_ceil(self.scale_columns.max(1));
                let rows = self.outputs.div_ceil(self.scale_rows.max(1));
                [values()?, rows as usize * columns as usize * 4]
            }
        })
    }
}
