//! Computes out = input × weightsᵀ for packed weights of any format, over one or more matrices that share the input.
//!
//! Invariant: each output depends only on its row of weights and its token, and its sums have one fixed order. Quantized
//! integers are multiplied with activations rounded to 8 bits per block of 32; float weights, those of 8 bits included, with
//! unrounded activations, except that [`Isa::Avx512Bf16`] multiplies weights in BF16 with activations rounded to BF16, and
//! rounds weights in F16 and their activations to 14 bits per block of 32.

use std::marker::PhantomData;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use crate::cpu::bf16_tiles::{Bf16Range, PairGroup};
use crate::cpu::elementwise::Add;
use crate::cpu::float_tiles::{self, FloatRange};
#[cfg(target_arch = "x86_64")]
use crate::cpu::half_tiles::{HalfRange, IntegerGroup};
use crate::cpu::integer_tiles::TileRange;
use crate::cpu::quantize::{GroupView, PAIRS, QuantizeGroup, RoundBlocks, RoundRow};
use crate::cpu::tile_format::{TILE_ROWS, with_tile_format};
use crate::cpu::{dispatch, group_tokens};
use crate::error::{expect_len, product};
pub use crate::matrix::PackedMatrix;
use crate::pool::{SharedSlice, by_rows};
use crate::{DType, Isa, KernelError, WorkerPool};

/// Number of tokens per task, chosen so that their activations stay in the L2 cache.
const TASK_TOKENS: usize = 128;
/// Tasks per thread and pass. More tasks balance better; fewer cost less.
const TASKS_PER_THREAD: usize = 4;

/// Scratch memory for quantized and rounded activations, reused between calls.
#[derive(Default)]
pub struct Activations {
    /// Activations rounded to BF16, in pairs.
    pairs: Vec<u32>,
    /// Activations rounded to 14 bits in pairs, and the scales of their blocks.
    integers: Vec<u32>,
    integer_scales: Vec<f32>,
    bytes: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<f32>,
    low_sums: Vec<f32>,
    totals: Vec<i32>,
    low_totals: Vec<i32>,
}

impl Activations {
    /// Returns the size in bytes of the scratch memory for `tokens` rows of `columns` values.
    pub fn byte_len(tokens: usize, columns: usize) -> usize {
        let quantized = columns.saturating_add(columns / 32 * 20);
        let integers = columns.div_ceil(2 * PAIRS).saturating_mul(4 * (PAIRS + 1));
        tokens.saturating_mul(quantized.saturating_add(4 * columns.div_ceil(2)).saturating_add(integers))
    }

    /// Returns the size in bytes of the memory that is allocated.
    pub fn allocated_bytes(&self) -> usize {
        let floats = self.scales.capacity() + self.sums.capacity() + self.low_sums.capacity();
        let integers = self.totals.capacity() + self.low_totals.capacity();
        let rounded = self.pairs.capacity() + self.integers.capacity() + self.integer_scales.capacity();
        self.bytes.capacity() + 4 * (floats + integers + rounded)
    }

    /// Rounds the input to BF16.
    fn round(&mut self, pool: &WorkerPool, isa: Isa, input: &[f32], groups: &[Group], columns: usize) {
        let row_pairs = columns.div_ceil(2);
        resize(&mut self.pairs, end_of(groups) * row_pairs);
        let pairs = SharedSlice::new(&mut self.pairs);
        for_each_group(pool, groups, columns, |first, count| {
            for token in 0..count {
                let row = &input[(first + token) * columns..][..columns];
                // SAFETY: each group writes a disjoint part of the array, which was sized above.
                unsafe {
                    let pairs = pairs.as_mut_ptr().add(first * row_pairs);
                    dispatch(isa, RoundRow { row, group: count, token, pairs });
                }
            }
        });
    }

    /// Rounds the input to 14 bits per block.
    fn round_blocks(&mut self, pool: &WorkerPool, isa: Isa, input: &[f32], groups: &[Group], columns: usize) {
        let (blocks, tokens) = (columns.div_ceil(2 * PAIRS), end_of(groups));
        resize(&mut self.integers, tokens * blocks * PAIRS);
        resize(&mut self.integer_scales, tokens * blocks);
        let pairs = SharedSlice::new(&mut self.integers);
        let scales = SharedSlice::new(&mut self.integer_scales);
        for_each_group(pool, groups, columns, |first, count| {
            for token in 0..count {
                let row = &input[(first + token) * columns..][..columns];
                // SAFETY: each group writes a disjoint part of the arrays, which were sized above.
                unsafe {
                    let pairs = pairs.as_mut_ptr().add(first * blocks * PAIRS);
                    let scales = scales.as_mut_ptr().add(first * blocks);
                    dispatch(isa, RoundBlocks { row, group: count, token, pairs, scales });
                }
            }
        });
    }

    fn quantize(&mut self, pool: &WorkerPool, isa: Isa, input: &[f32], groups: &[Group], columns: usize) {
        let (blocks, tokens) = (columns / 32, end_of(groups));
        resize(&mut self.bytes, tokens * columns);
        for array in [&mut self.scales, &mut self.sums, &mut self.low_sums] {
            resize(array, tokens * blocks);
        }
        for array in [&mut self.totals, &mut self.low_totals] {
            resize(array, tokens * blocks);
        }
        let (bytes, scales) = (SharedSlice::new(&mut self.bytes), SharedSlice::new(&mut self.scales));
        let (sums, low_sums) = (SharedSlice::new(&mut self.sums), SharedSlice::new(&mut self.low_sums));
        let totals = [&mut self.totals, &mut self.low_totals].map(|totals| SharedSlice::new(totals));
        for_each_group(pool, groups, columns, |first, count| {
            // SAFETY: each group writes a disjoint part of the arrays, which were sized above.
            unsafe {
                let kernel = QuantizeGroup {
                    rows: input.as_ptr().add(first * columns),
                    blocks,
                    tokens: count,
                    bytes: bytes.as_mut_ptr().add(first * columns),
                    scales: scales.as_mut_ptr().add(first * blocks),
                    sums: sums.as_mut_ptr().add(first * blocks),
                    low_sums: low_sums.as_mut_ptr().add(first * blocks),
                    totals: totals[0].as_mut_ptr().add(first * blocks),
                    low_totals: totals[1].as_mut_ptr().add(first * blocks),
                };
                dispatch(isa, kernel);
            }
        });
    }

    /// Returns views of the groups that hold the `tokens` tokens from `first`, which must start a group.
    fn groups(&self, isa: Isa, first: usize, tokens: usize, columns: usize) -> Vec<(GroupView, usize)> {
        let blocks = columns / 32;
        let group = group_tokens(isa);
        (first..first + tokens)
            .step_by(group)
            .map(|at| {
                let view = GroupView {
                    bytes: self.bytes[at * columns..].as_ptr(),
                    scales: self.scales[at * blocks..].as_ptr(),
                    sums: self.sums[at * blocks..].as_ptr(),
                    low_sums: self.low_sums[at * blocks..].as_ptr(),
                    totals: self.totals[at * blocks..].as_ptr(),
                    low_totals: self.low_totals[at * blocks..].as_ptr(),
                };
                (view, group.min(first + tokens - at))
            })
            .collect()
    }
}

#[cfg(target_arch = "x86_64")]
impl Activations {
    /// Returns the groups of the rounded `tokens` tokens from `first`, which must start a group.
    fn pair_groups(&self, isa: Isa, first: usize, tokens: usize, columns: usize) -> Vec<PairGroup> {
        let group = group_tokens(isa);
        let pairs = |at: usize| self.pairs[at * columns.div_ceil(2)..].as_ptr();
        (first..first + tokens)
            .step_by(group)
            .map(|at| PairGroup { pairs: pairs(at), tokens: group.min(first + tokens - at) })
            .collect()
    }

    /// Returns the groups of integers of the `tokens` tokens from `first`, which must start a group.
    fn integer_groups(&self, isa: Isa, first: usize, tokens: usize, columns: usize) -> Vec<IntegerGroup> {
        let (group, blocks) = (group_tokens(isa), columns.div_ceil(2 * PAIRS));
        (first..first + tokens)
            .step_by(group)
            .map(|at| IntegerGroup {
                pairs: self.integers[at * blocks * PAIRS..].as_ptr(),
                scales: self.integer_scales[at * blocks..].as_ptr(),
                tokens: group.min(first + tokens - at),
            })
            .collect()
    }
}

/// Makes an array at least this long.
fn resize<T: Clone + Default>(array: &mut Vec<T>, length: usize) {
    if array.len() < length {
        // The memory plan counts exactly the values in use, so no spare capacity may be reserved.
        array.reserve_exact(length - array.len());
        array.resize(length, T::default());
    }
}

/// Tokens whose activations are stored side by side, so that a kernel processes them at once.
#[derive(Clone, Copy)]
pub(crate) struct Group {
    pub(crate) first: usize,
    pub(crate) tokens: usize,
}

/// Cuts the tokens of a range into groups.
pub(crate) fn groups_of(isa: Isa, tokens: Range<usize>) -> impl Iterator<Item = Group> {
    let group = group_tokens(isa);
    tokens.clone().step_by(group).map(move |first| Group { first, tokens: group.min(tokens.end - first) })
}

fn end_of(groups: &[Group]) -> usize {
    groups.last().map_or(0, |group| group.first + group.tokens)
}

/// Calls `convert` with the first token of each group of rows of `columns` values and the number of its tokens. The threads share
/// many values; few are not worth a barrier.
fn for_each_group(
    pool: &WorkerPool,
    groups: &[Group],
    columns: usize,
    convert: impl Fn(usize, usize) + Sync,
) {
    let convert = |index: usize| convert(groups[index].first, groups[index].tokens);
    if groups.len() <= 2 {
        return (0..groups.len()).for_each(convert);
    }
    let tokens = groups.iter().map(|group| group.tokens).max().unwrap_or(0);
    by_rows(pool, groups.len(), tokens.saturating_mul(columns), convert);
}

impl Activations {
    /// Converts the rows of the input as the matrices need them.
    pub(crate) fn convert<'a>(
        &mut self,
        pool: &WorkerPool,
        isa: Isa,
        mut matrices: impl Iterator<Item = &'a PackedMatrix> + Clone,
        input: &[f32],
        groups: &[Group],
        columns: usize,
    ) {
        if matrices.clone().any(|matrix| matrix.dtype.rounds_activations()) {
            self.quantize(pool, isa, input, groups, columns);
        }
        if isa != Isa::Avx512Bf16 {
            return;
        }
        if matrices.clone().any(|matrix| matrix.dtype == DType::BF16) {
            self.round(pool, isa, input, groups, columns);
        }
        if matrices.any(|matrix| matrix.dtype == DType::F16) {
            self.round_blocks(pool, isa, input, groups, columns);
        }
    }
}

/// Matrices that are multiplied with the same input.
#[derive(Clone, Copy)]
pub struct Projection<'a> {
    pub matrices: &'a [&'a PackedMatrix],
    /// Either empty or one value per row of all matrices.
    pub bias: &'a [f32],
}

/// Multiplies `input` (`[tokens][columns]`) with every matrix and adds the bias. `out` is `[tokens][sum of rows]`, with
/// the outputs of the matrices side by side.
pub fn matmul(
    pool: &WorkerPool,
    isa: Isa,
    projection: Projection<'_>,
    input: &[f32],
    tokens: usize,
    out: &mut [f32],
    scratch: &mut Activations,
) -> Result<(), KernelError> {
    const OP: &str = "matmul";
    let Projection { matrices, bias } = projection;
    let Some(first) = matrices.first() else { return expect_len(OP, "the output length", 0, out.len()) };
    let columns = first.columns;
    for matrix in matrices {
        expect_len(OP, "the column count", columns, matrix.columns)?;
        matrix.expect_weights(OP)?;
    }
    let stride = matrices.iter().map(|matrix| matrix.rows).sum::<usize>();
    expect_len(OP, "the input length", product(OP, "the input", &[tokens, columns])?, input.len())?;
    expect_len(OP, "the output length", product(OP, "the output", &[tokens, stride])?, out.len())?;
    if !bias.is_empty() {
        expect_len(OP, "the length of the bias", stride, bias.len())?;
    }
    if tokens == 0 || stride == 0 {
        return Ok(());
    }
    let groups: Vec<Group> = groups_of(isa, 0..tokens).collect();
    scratch.convert(pool, isa, matrices.iter().copied(), input, &groups, columns);
    let tasks = plan(pool.threads(), projection, tokens, stride);
    let out = SharedSlice::new(out);
    let scratch = &*scratch;
    pool.run(tasks.len(), |index| tasks[index].run(isa, input, &out, stride, scratch));
    Ok(())
}

/// A range of tiles of one matrix times a range of tokens.
#[derive(Clone, Copy)]
pub(crate) struct Task<'a> {
    pub(crate) matrix: &'a PackedMatrix,
    pub(crate) first_tile: usize,
    pub(crate) tiles: usize,
    pub(crate) first_token: usize,
    pub(crate) tokens: usize,
    /// Offset of the first token's output of the matrix's first row.
    pub(crate) out: usize,
    /// Either empty or one value per row of the matrix.
    pub(crate) bias: &'a [f32],
}

impl<'a> Task<'a> {
    /// Cuts the product of a matrix and a range of tokens into tasks of at most `tiles` tiles.
    pub(crate) fn cut(self, tiles: usize, stride: usize) -> impl Iterator<Item = Task<'a>> {
        let all = self.matrix.tiles();
        (0..self.tokens).step_by(TASK_TOKENS).flat_map(move |token| {
            (0..all).step_by(tiles).map(move |first_tile| Task {
                first_tile,
                tiles: tiles.min(all - first_tile),
                first_token: self.first_token + token,
                tokens: TASK_TOKENS.min(self.tokens - token),
                out: self.out + token * stride,
                ..self
            })
        })
    }

    fn first_row(&self) -> usize {
        self.first_tile * TILE_ROWS
    }

    fn rows(&self) -> usize {
        (self.tiles * TILE_ROWS).min(self.matrix.rows - self.first_row())
    }

    /// Computes the outputs, and adds the bias while they are still in the cache. The caller has checked the lengths,
    /// and no other task writes the same rows of the same tokens.
    pub(crate) fn run(
        &self,
        isa: Isa,
        input: &[f32],
        out: &SharedSlice<f32>,
        stride: usize,
        scratch: &Activations,
    ) {
        run_task(self, isa, input, out, stride, scratch);
        if self.bias.is_empty() {
            return;
        }
        let (first_row, rows) = (self.first_row(), self.rows());
        for token in 0..self.tokens {
            // SAFETY: no other task writes the same rows of the same tokens; the slices have equal lengths.
            unsafe {
                let to = out.part(self.out + token * stride + first_row, rows);
                dispatch(isa, Add { to, from: &self.bias[first_row..][..rows] });
            }
        }
    }
}

/// Returns the number of tiles per task that keeps all threads busy with this number of tiles.
pub(crate) fn tiles_per_task(threads: usize, tiles: usize) -> usize {
    match tiles.div_ceil(threads * TASKS_PER_THREAD) {
        0 | 1 => 1,
        // Kernels for many tokens take two tiles at a time.
        several => several.next_multiple_of(2),
    }
}

fn plan<'a>(threads: usize, projection: Projection<'a>, tokens: usize, stride: usize) -> Vec<Task<'a>> {
    let Projection { matrices, bias } = projection;
    let tiles = tiles_per_task(threads, matrices.iter().map(|matrix| matrix.tiles()).sum());
    let mut tasks = Vec::new();
    for first_token in (0..tokens).step_by(TASK_TOKENS) {
        let mut column = 0;
        for matrix in matrices {
            let whole = Task {
                matrix,
                first_tile: 0,
                tiles: 0,
                first_token,
                tokens: TASK_TOKENS.min(tokens - first_token),
                out: first_token * stride + column,
                bias: if bias.is_empty() { bias } else { &bias[column..][..matrix.rows] },
            };
            tasks.extend(whole.cut(tiles, stride));
            column += matrix.rows;
        }
    }
    tasks
}

fn run_task(
    task: &Task<'_>,
    isa: Isa,
    input: &[f32],
    out: &SharedSlice<f32>,
    stride: usize,
    scratch: &Activations,
) {
    let matrix = task.matrix;
    let (first_row, rows) = (task.first_row(), task.rows());
    // SAFETY: `matmul` checked the lengths: tiles, inputs and outputs of the task exist, and no other task writes
    // the same rows of the same tokens.
    unsafe {
        let tiles = matrix.bytes.as_ptr().add(task.first_tile * matrix.tile_bytes);
        let out = out.as_mut_ptr().add(task.out + first_row);
        macro_rules! floats {
            ($format:ty) => {{
                let kernel = FloatRange::<$format> {
                    tiles,
                    columns: matrix.columns,
                    rows,
                    input: input.as_ptr().add(task.first_token * matrix.columns),
                    tokens: task.tokens,
                    out,
                    stride,
                    format: PhantomData,
                };
                dispatch(isa, kernel)
            }};
        }
        macro_rules! integers {
            ($format:ty) => {{
                let kernel = TileRange::<$format> {
                    tiles,
                    tile_bytes: matrix.tile_bytes,
                    blocks: matrix.columns / 32,
                    rows,
                    groups: &scratch.groups(isa, task.first_token, task.tokens, matrix.columns),
                    out,
                    stride,
                    format: PhantomData,
                };
                dispatch(isa, kernel)
            }};
        }
        match matrix.dtype {
            DType::F32 => floats!(float_tiles::F32),
            #[cfg(target_arch = "x86_64")]
            DType::F16 if isa == Isa::Avx512Bf16 && isa.supported() => HalfRange {
                tiles,
                tile_bytes: matrix.tile_bytes,
                columns: matrix.columns,
                rows,
                groups: &scratch.integer_groups(isa, task.first_token, task.tokens, matrix.columns),
                out,
                stride,
            }
            .run(),
            DType::F16 => floats!(float_tiles::F16),
            DType::F8E4M3 => floats!(float_tiles::F8),
            #[cfg(target_arch = "x86_64")]
            DType::BF16 if isa == Isa::Avx512Bf16 && isa.supported() => Bf16Range {
                tiles,
                tile_bytes: matrix.tile_bytes,
                columns: matrix.columns,
                rows,
                groups: &scratch.pair_groups(isa, task.first_token, task.tokens, matrix.columns),
                out,
                stride,
            }
            .run(),
            DType::BF16 => floats!(float_tiles::BF16),
            quantized => with_tile_format!(quantized, integers),
        }
    }
}

#[cfg(test)]
#[path = "matmul_tests.rs"]
mod tests;
#[cfg(test)]
pub(crate) use tests::random_weights;
