//! Loads a checkpoint's tensors into the forms that layers compute with, either whole or the part of one rank.
//!
//! Invariant: every shape is checked against the configuration before anything is packed, and an error names the
//! tensor. Besides the packed weights, memory holds the file pages of only one tensor, or a copy of its part.

mod conversion;
mod expansion;
mod experts;
mod read_ahead;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use skep_kernels::buffer::Arena;
use skep_kernels::matmul::PackedMatrix;
use skep_kernels::{DType, WorkerPool, dequantize};

use crate::checkpoint::{Checkpoint, Tensor};
use crate::error::ModelError;
use crate::layers::linear::Linear;
use crate::shard::{Shard, ShardPlan};
pub use conversion::WeightConversion;
use conversion::{bf16_holds, converted};
pub(crate) use read_ahead::{ReadAhead, Reads};

/// Loads weights and counts the bytes that they take.
pub(crate) struct WeightLoader<'a> {
    target: Target<'a>,
    checkpoint: &'a Checkpoint,
    shard: Shard,
    /// Whether quantized weights become F32.
    exact: bool,
    conversion: WeightConversion,
    /// If true, matrices in F16 are packed as BF16 where that changes no value.
    narrows_f16: bool,
    bytes: u64,
    /// Is called with the number of bytes after each weight.
    watch: Option<&'a dyn Fn(u64)>,
    reads: Option<ReadWatch<'a>>,
}

/// Is called before a weight is read, with its name and the ranges of its outermost dimension that are read. Without ranges, all of
/// the weight is.
pub(crate) type ReadWatch<'a> = &'a dyn Fn(&str, &[Range<usize>]);

/// The destination of weights.
enum Target<'a> {
    /// The threads of the pool share the packing.
    Memory { pool: &'a WorkerPool, arena: Arena },
    /// Weights are described and not read, for plans.
    Plan,
}

/// One of several projections of the same input.
pub(crate) struct Projection<'a> {
    /// The last component of the tensor's name.
    pub(crate) name: &'a str,
    /// Number of outputs of the whole weight.
    pub(crate) rows: usize,
    pub(crate) plan: &'a ShardPlan,
}

/// Whether a projection has a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bias {
    Present,
    Absent,
}

impl Bias {
    pub(crate) fn when(present: bool) -> Self {
        if present { Bias::Present } else { Bias::Absent }
    }
}

impl<'a> WeightLoader<'a> {
    /// Creates a loader for the part of the weights that `shard` holds. The threads of `pool` share the packing.
    pub(crate) fn new(pool: &'a WorkerPool, checkpoint: &'a Checkpoint, shard: Shard) -> Self {
        let target = Target::Memory { pool, arena: Arena::default() };
        WeightLoader {
            target,
            checkpoint,
            shard,
            exact: false,
            conversion: WeightConversion::Keep,
            narrows_f16: false,
            bytes: 0,
            watch: None,
            reads: None,
        }
    }

    /// Creates a loader that only describes weights and counts their bytes. What it loads can be measured, not run.
    pub(crate) fn for_plan(checkpoint: &'a Checkpoint, shard: Shard) -> Self {
        let target = Target::Plan;
        WeightLoader {
            target,
            checkpoint,
            shard,
            exact: false,
            conversion: WeightConversion::Keep,
            narrows_f16: false,
            bytes: 0,
            watch: None,
            reads: None,
        }
    }

    /// Gives matrices another format than that of the files: that of a conversion or, if `exact` is true, F32 where activations would
    /// be rounded beside them.
    pub(crate) fn with_format(self, exact: bool, conversion: WeightConversion) -> Self {
        WeightLoader { exact, conversion, ..self }
    }

    /// Packs matrices in F16 as BF16 if that changes no value, for processors that multiply BF16 and not F16. Files in F16 are often
    /// made of weights in BF16. Plans need not know, because both formats take the same memory.
    pub(crate) fn narrowing_f16(self, narrows_f16: bool) -> Self {
        WeightLoader { narrows_f16, ..self }
    }

    /// Calls `watch` with the number of bytes after each weight.
    pub(crate) fn watched_by(self, watch: &'a dyn Fn(u64)) -> Self {
        WeightLoader { watch: Some(watch), ..self }
    }

    /// Calls `reads` before each weight is read. A plan calls it in the same order as the load.
    pub(crate) fn noting_reads(self, reads: ReadWatch<'a>) -> Self {
        WeightLoader { reads: Some(reads), ..self }
    }

    /// Notes that some ranges of a weight are read next.
    pub(super) fn begin(&self, name: &str, ranges: &[Range<usize>]) {
        if let Some(reads) = self.reads {
            reads(name, ranges);
        }
    }

    pub(crate) fn shard(&self) -> Shard {
        self.shard
    }

    /// Returns the size of everything loaded so far, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of consecutive values in a row of the matrix that must stay together.
    pub(crate) fn block_len(&self, name: &str) -> Result<usize, ModelError> {
        Ok(self.checkpoint.tensor(name)?.dtype.block_len())
    }

    /// Loads some rows of the `[rows, columns]` matrix that has one vector per token.
    pub(crate) fn table(
        &mut self,
        name: &str,
        shape: [usize; 2],
        rows: Range<usize>,
    ) -> Result<Arc<PackedMatrix>, ModelError> {
        self.matrix(name, shape, &ShardPlan::Rows(vec![rows])).map(Arc::new)
    }

    /// Loads projections of one input, side by side, from the tensors `PREFIX.NAME.weight`.
    pub(crate) fn linear(
        &mut self,
        prefix: &str,
        projections: &[Projection<'_>],
        columns: usize,
        bias: Bias,
    ) -> Result<Linear, ModelError> {
        let mut matrices = Vec::with_capacity(projections.len());
        let mut biases = Vec::new();
        for Projection { name, rows, plan } in projections {
            matrices.push(self.matrix(&format!("{prefix}.{name}.weight"), [*rows, columns], plan)?);
            if bias == Bias::Present {
                biases.extend(self.vector(&format!("{prefix}.{name}.bias"), *rows, plan)?);
            }
        }
        Ok(Linear::new(matrices, biases))
    }

    /// Loads a vector of `rows` values as `f32`, or the part that belongs to the planned part of its weight.
    pub(crate) fn vector(
        &mut self,
        name: &str,
        rows: usize,
        plan: &ShardPlan,
    ) -> Result<Vec<f32>, ModelError> {
        let mut values = self.values(name, &[rows])?;
        match plan {
            ShardPlan::Replicated => {}
            ShardPlan::Rows(ranges) => {
                values = ranges.iter().flat_map(|range| &values[range.clone()]).copied().collect();
            }
            // The ranks' results are added up, so only the first rank adds the bias.
            ShardPlan::Columns(_) if self.shard.rank == 0 => {}
            ShardPlan::Columns(_) => values = Vec::new(),
        }
        self.bytes += (values.len() * 4) as u64;
        Ok(values)
    }

    fn matrix(
        &mut self,
        name: &str,
        [rows, columns]: [usize; 2],
        plan: &ShardPlan,
    ) -> Result<PackedMatrix, ModelError> {
        let tensor = self.tensor(name, &[rows, columns])?;
        let (own_rows, own_columns) = plan.area([rows, columns]);
        self.begin(name, &own_rows);
        let shape = [plan.rows(rows), own_columns.len()];
        let matrix = match self.target {
            Target::Plan => self.packed(name, tensor.dtype, shape, || Ok(Cow::Borrowed(&[])))?,
            Target::Memory { pool, .. } => match tensor.part(pool, &own_rows, &own_columns)? {
                Some((dtype, data)) => self.packed(name, dtype, shape, || Ok(Cow::Owned(data)))?,
                None => {
                    let (dtype, content) = tensor.content()?;
                    let (data, _) = part(&tensor.with_content(dtype, &content), columns, plan)?;
                    self.packed(name, dtype, shape, || Ok(data))?
                }
            },
        };
        self.checkpoint.release(name);
        Ok(matrix)
    }

    /// Packs a matrix of the values that `data` returns, or describes it.
    pub(super) fn packed<'d>(
        &mut self,
        name: &str,
        dtype: DType,
        [rows, columns]: [usize; 2],
        data: impl FnOnce() -> Result<Cow<'d, [u8]>, ModelError>,
    ) -> Result<PackedMatrix, ModelError> {
        // One of the instruction tiers rounds activations beside F16.
        let form = match self.exact && (dtype.rounds_activations() || dtype == DType::F16) {
            true => DType::F32,
            false => self.conversion.format_of(dtype, columns),
        };
        self.packed_as(name, [dtype, form], [rows, columns], data)
    }

    /// Packs a matrix of the first format in the second one.
    fn packed_as<'d>(
        &mut self,
        name: &str,
        [dtype, mut form]: [DType; 2],
        [rows, columns]: [usize; 2],
        data: impl FnOnce() -> Result<Cow<'d, [u8]>, ModelError>,
    ) -> Result<PackedMatrix, ModelError> {
        let matrix = match &mut self.target {
            Target::Memory { pool, arena } => {
                let mut data = data()?;
                if self.narrows_f16 && [dtype, form] == [DType::F16; 2] && bf16_holds(pool, &data) {
                    form = DType::BF16;
                }
                if form != dtype {
                    data = Cow::Owned(converted(pool, name, [dtype, form], [rows, columns], &data)?);
                }
                PackedMatrix::pack(pool, arena, form, rows, columns, &data)
            }
            Target::Plan => PackedMatrix::described(form, rows, columns),
        };
        let matrix = matrix.map_err(|error| ModelError::tensor(name, error.to_string()))?;
        let bytes = PackedMatrix::packed_len(form, rows, columns)
            .ok_or_else(|| ModelError::tensor(name, "its size overflows"))?;
        self.bytes += bytes as u64;
        if let Some(watch) = self.watch {
            watch(self.bytes);
        }
        Ok(matrix)
    }

    /// Returns the values of a small tensor, or zeros for a plan.
    pub(super) fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name, shape)?;
        self.begin(name, &[]);
        let mut values = vec![0.0; shape.iter().product()];
        if let Target::Memory { .. } = self.target {
            let (dtype, content) = tensor.content()?;
            dequantize(dtype, &content, &mut values)
                .map_err(|error| ModelError::tensor(name, error.to_string()))?;
        }
        Ok(values)
    }

    /// Returns one row of a tensor of values, or zeros for a plan.
    pub(super) fn row(
        &self,
        name: &str,
        [rows, columns]: [usize; 2],
        row: usize,
    ) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name, &[rows, columns])?;
        let mut values = vec![0.0; columns];
        if let Target::Memory { .. } = self.target {
            let wrong = |problem: String| ModelError::tensor(name, problem);
            let length = tensor.dtype.row_bytes(columns).unwrap_or(0);
            let bytes = tensor.data.get(row * length..(row + 1) * length);
            let bytes = bytes.ok_or_else(|| wrong(format!("has no row {row}")))?;
            dequantize(tensor.dtype, bytes, &mut values).map_err(|error| wrong(error.to_string()))?;
        }
        Ok(values)
    }

    /// Loads the whole of a matrix as `f32`, for products that must not be rounded.
    pub(crate) fn exact_matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<PackedMatrix, ModelError> {
        let values = self.values(name, &shape)?;
        let data = || Ok(Cow::Owned(bytes_of(&values)));
        self.packed_as(name, [DType::F32, DType::F32], shape, data)
    }

    /// Counts the bytes of vectors that were not loaded by [`WeightLoader::vector`].
    pub(super) fn count_values(&mut self, values: usize) {
        self.bytes += 4 * values as u64;
    }

    pub(super) fn is_plan(&self) -> bool {
        matches!(self.target, Target::Plan)
    }

    pub(super) fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    pub(super) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'a>, ModelError> {
        let tensor = self.checkpoint.tensor(name)?;
        if tensor.shape != shape {
            let found = tensor.shape;
            return Err(ModelError::tensor(
                name,
                format!("its shape is {found:?}, but the configuration requires {shape:?}"),
            ));
        }
        Ok(tensor)
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns the bytes of the planned part of a matrix, and its number of columns.
pub(crate) fn part<'a>(
    tensor: &Tensor<'a>,
    columns: usize,
    plan: &ShardPlan,
) -> Result<(Cow<'a, [u8]>, usize), ModelError> {
    let bytes_of = |columns: usize| {
        tensor.dtype.row_bytes(columns).ok_or_else(|| {
            ModelError::tensor(
                tensor.name,
                format!(
                    "{columns} columns are not a whole number of {} blocks of {}",
                    tensor.dtype,
                    tensor.dtype.block_len()
                ),
            )
        })
    };
    let row_bytes = bytes_of(columns)?;
    let rows = |range: &Range<usize>| &tensor.data[range.start * row_bytes..range.end * row_bytes];
    Ok(match plan {
        ShardPlan::Replicated => (Cow::Borrowed(tensor.data), columns),
        ShardPlan::Rows(ranges) => match &ranges[..] {
            [range] => (Cow::Borrowed(rows(range)), columns),
            _ => (Cow::Owned(ranges.iter().map(rows).collect::<Vec<_>>().concat()), columns),
        },
        ShardPlan::Columns(range) if range.len() == columns => (Cow::Borrowed(tensor.data), columns),
        ShardPlan::Columns(range) => {
            let bytes = bytes_of(range.start)?..bytes_of(range.end)?;
            let parts: Vec<&[u8]> =
                tensor.data.chunks_exact(row_bytes).map(|row| &row[bytes.clone()]).collect();
            (Cow::Owned(parts.concat()), range.len())
        }
    })
}
