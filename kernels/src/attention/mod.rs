//! Causal attention over paged keys and values, for prefill chunks and decodes in one call.
//!
//! Invariant: a query attends to the positions up to its own, limited by its window. Pages hold 16 tokens, and the query
//! heads of one KV head share each read. The output of a query has the same bits regardless of the number of queries,
//! sequences and threads and of where a chunk begins: positions are processed in blocks that are aligned to absolute
//! positions and merged in order, as described in [`crate::cpu::attention`]. A long range is divided into tasks at block
//! boundaries, and sequences with common pages read them together; the state of each block is then kept, and the thread
//! that finishes the last task of some rows merges the states of their blocks.

mod limits;
mod plan;
mod sharing;
#[cfg(test)]
mod tests;

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::cpu::attention::{AttendRows, BLOCK, QueryRow, Scales};
use crate::cpu::dispatch;
use crate::cpu::kv::{KvBf16, KvF16, KvF32, KvI8};
use crate::cpu::rows::dispatch_rows;
use crate::cpu::softmax_state::{BlockState, FinishRows, MergeStates, State};
use crate::error::{expect_len, product};
use crate::kv::{KvFormat, KvLayer, PAGE_TOKENS};
use crate::pool::SharedSlice;
use crate::{Isa, KernelError, WorkerPool};
pub use limits::AttentionLimits;
use plan::{Group, Part, PlanShape};
pub use sharing::AttentionBatch;

/// Number of pages in a block of positions.
const BLOCK_PAGES: usize = BLOCK / PAGE_TOKENS;

/// Consecutive query tokens of one sequence.
#[derive(Clone, Debug)]
pub struct AttentionSequence {
    /// Row of the first token in `query` and `out`.
    pub row: usize,
    pub tokens: usize,
    /// Position of the first token.
    pub start: usize,
    /// Pages that cover positions `0..start + tokens`.
    pub pages: Vec<u32>,
}

impl AttentionSequence {
    /// Checks that its rows are below `rows` and that existing pages cover its positions.
    pub(crate) fn check(&self, op: &'static str, rows: usize, page_count: usize) -> Result<(), KernelError> {
        let out_of_range = |what, index, count| Err(KernelError::OutOfRange { op, what, index, count });
        if self.row.checked_add(self.tokens).is_none_or(|end| end > rows) {
            return out_of_range("row", self.row, rows);
        }
        let positions = self.start.saturating_add(self.tokens);
        let covered = self.pages.len().saturating_mul(PAGE_TOKENS);
        if positions > covered {
            return out_of_range("position", positions, covered);
        }
        match self.pages.iter().find(|page| **page as usize >= page_count) {
            Some(page) => out_of_range("page", *page as usize, page_count),
            None => Ok(()),
        }
    }
}

/// Shapes and settings of a call to [`attention`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionParams<'a> {
    pub heads: usize,
    /// Distance between rows of `query` in values. The first `heads * head_size` values of a row are the query heads.
    pub query_stride: usize,
    pub scale: f32,
    /// If set, position `p` attends only to positions in `(p - window, p]`.
    pub window: Option<usize>,
    /// Either empty or, for each head, the score of a position without a value that every query sees.
    pub sinks: &'a [f32],
}

/// Computes attention and writes `[rows][heads * head_size]` to `out`. The keys and values of all tokens must already be
/// in `kv`.
pub fn attention(
    pool: &WorkerPool,
    isa: Isa,
    params: AttentionParams<'_>,
    kv: &KvLayer,
    query: &[f32],
    batch: &AttentionBatch,
    out: &mut [f32],
) -> Result<(), KernelError> {
    check(isa, &params, kv, query, batch.sequences(), out)?;
    let (heads, size) = (params.heads, kv.head_size());
    let strides = Strides {
        heads,
        kv_heads: kv.kv_heads(),
        query: [params.query_stride, size],
        output: [heads * size, size],
        value_stride: kv.value_stride,
        value_size: size,
    };
    let call = Call { isa, params: &params, kv, query };
    run_plan(pool, isa, &strides, params.window, params.sinks, batch, out, |part, task, state, stride| {
        // SAFETY: `check` ensured that the query and the pages cover the task, and its state belongs to it alone.
        unsafe { call.attend(part, task, state, stride) }
    });
    Ok(())
}

/// The shape of a call: its heads, and where their rows begin.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Strides {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// Distances between the queries of two rows and of two heads, in values.
    pub(crate) query: [usize; 2],
    /// Distances between the outputs of two rows and of two heads, in values.
    pub(crate) output: [usize; 2],
    /// Number of values of a head, with and without padding.
    pub(crate) value_stride: usize,
    pub(crate) value_size: usize,
}

/// Query rows, and the pages that they read.
pub(crate) struct TaskRows<'a> {
    pub(crate) rows: &'a [QueryRow],
    pub(crate) kv_head: usize,
    pub(crate) pages: &'a [u32],
}

/// Divides the work of checked sequences among the threads. `attend` computes the given positions for some rows, into
/// one state, or into a state for each block if the given distance between them is not 0.
#[allow(clippy::too_many_arguments)] // The operands of `attention`.
pub(crate) fn run_plan(
    pool: &WorkerPool,
    isa: Isa,
    strides: &Strides,
    window: Option<usize>,
    sinks: &[f32],
    batch: &AttentionBatch,
    out: &mut [f32],
    attend: impl Fn(&TaskRows<'_>, Range<usize>, State, usize) + Sync,
) {
    let shape = PlanShape { threads: pool.threads(), strides: *strides, window };
    let plan = batch.take_plan(&shape);
    let (value_stride, value_size) = (strides.value_stride, strides.value_size);
    // Tasks clear the states of their blocks before they use them.
    let mut scratch = pool.scratch(plan.state_len);
    let (out, states) = (SharedSlice::new(out), SharedSlice::new(&mut scratch[..plan.state_len]));
    let finish = |group: &Group, state| {
        let kernel = FinishRows { rows: &group.rows, state, sinks, value_size, out: &out };
        // SAFETY: the state was computed for the rows, and no two groups share a row.
        unsafe { dispatch(isa, kernel) };
    };
    pool.run(plan.tasks.len(), |index| {
        let task = &plan.tasks[index];
        let part = &plan.parts[task.part];
        let pages = &batch.sequences()[part.sequence].pages;
        let rows = TaskRows { rows: &part.rows, kv_head: part.kv_head, pages };
        let mut buffer = [const { MaybeUninit::<f32>::uninit() }; State::MAX_LEN];
        let whole = State::new(buffer.as_mut_ptr().cast(), value_stride);
        // SAFETY: the caller checked that the query, the pages and the output cover the task. No two groups share a row,
        // and each block's state belongs to one task until the last task of a group is done.
        unsafe {
            let Some(kept) = part.states else {
                attend(&rows, task.from..task.to, whole, 0);
                return finish(&plan.groups[part.groups[0]], whole);
            };
            let stride = State::len(part.rows.len(), value_stride);
            let first = kept + (task.from / BLOCK - part.from / BLOCK) * stride;
            let state = State::new(states.as_mut_ptr().add(first), value_stride);
            attend(&rows, task.from..task.to, state, stride);
            for group in part.groups.iter().map(|group| &plan.groups[*group]) {
                // The thread that finishes last sees what the others wrote.
                if group.unfinished.fetch_sub(1, Ordering::AcqRel) == 1 {
                    let blocks = blocks_of(group, &plan.parts, &states, value_stride);
                    dispatch(isa, MergeStates { blocks, rows: group.rows.len(), into: whole });
                    finish(group, whole);
                }
            }
        }
    });
    drop(scratch);
    batch.keep_plan(shape, plan);
}

/// Returns the states of all blocks of a group, in order. They are as long as the plan says.
fn blocks_of(
    group: &Group,
    parts: &[Part],
    states: &SharedSlice<f32>,
    value_stride: usize,
) -> impl Iterator<Item = BlockState> {
    group.parts.iter().flat_map(move |(part, first_row)| {
        let part = &parts[*part];
        let stride = State::len(part.rows.len(), value_stride);
        let first = states.as_mut_ptr().wrapping_add(part.states.unwrap_or_default());
        (0..part.blocks().len()).map(move |block| {
            let state = State::new(first.wrapping_add(block * stride), value_stride);
            BlockState { state, first_row: *first_row }
        })
    })
}

/// The arguments that all tasks share.
struct Call<'a> {
    isa: Isa,
    params: &'a AttentionParams<'a>,
    kv: &'a KvLayer,
    query: &'a [f32],
}

impl Call<'_> {
    /// Computes a task's blocks, either all into one state or each into its own.
    ///
    /// # Safety
    /// The task belongs to a plan for checked sequences, and no other task writes its states.
    unsafe fn attend(&self, part: &TaskRows<'_>, task: Range<usize>, state: State, state_stride: usize) {
        let kv = self.kv;
        let key_head = kv.head_size() * PAGE_TOKENS;
        let value_head = kv.value_stride * PAGE_TOKENS;
        let (keys, values) = kv.scales(part.kv_head * PAGE_TOKENS);
        let scales = Scales { keys, values, page: kv.kv_heads() * PAGE_TOKENS };
        macro_rules! attend {
            ($format:ty, $element:ty) => {{
                // SAFETY: the head is inside the first page of the KV pool.
                let (keys, values) = unsafe {
                    (
                        kv.keys.as_ptr().cast::<$element>().add(part.kv_head * key_head),
                        kv.values.as_ptr().cast::<$element>().add(part.kv_head * value_head),
                    )
                };
                let kernel = AttendRows::<$format> {
                    rows: part.rows,
                    query: self.query.as_ptr(),
                    scale: self.params.scale,
                    head_size: kv.head_size(),
                    keys,
                    key_page: kv.kv_heads() * key_head,
                    values,
                    value_page: kv.kv_heads() * value_head,
                    scales,
                    pages: part.pages,
                    from: task.start,
                    to: task.end,
                    state,
                    state_stride,
                    format: PhantomData,
                };
                // SAFETY: guaranteed by the caller.
                unsafe { dispatch_rows(self.isa, kernel) }
            }};
        }
        match kv.format {
            KvFormat::F32 => attend!(KvF32, f32),
            KvFormat::F16 => attend!(KvF16, u16),
            KvFormat::Bf16 => attend!(KvBf16, u16),
            KvFormat::I8 => attend!(KvI8, i8),
        }
    }
}

fn check(
    isa: Isa,
    params: &AttentionParams<'_>,
    kv: &KvLayer,
    query: &[f32],
    sequences: &[AttentionSequence],
    out: &[f32],
) -> Result<(), KernelError> {
    const OP: &str = "attention";
    kv.check_tier(OP, isa)?;
    if kv.kv_heads() == 0 || !params.heads.is_multiple_of(kv.kv_heads()) {
        let (expected, found) = (kv.kv_heads(), params.heads);
        return Err(KernelError::Shape {
            op: OP,
            what: "the head count, or one of its divisors,",
            expected,
            found,
        });
    }
    if params.window == Some(0) {
        return Err(KernelError::OutOfRange { op: OP, what: "window", index: 0, count: usize::MAX });
    }
    let width = product(OP, "the heads", &[params.heads, kv.head_size()])?;
    if width > params.query_stride {
        let (index, count) = (width, params.query_stride);
        return Err(KernelError::OutOfRange { op: OP, what: "query column", index, count });
    }
    let rows = out.len() / width.max(1);
    expect_len(OP, "the output length", product(OP, "the output", &[rows, width])?, out.len())?;
    expect_len(OP, "the query length", product(OP, "the query", &[rows, params.query_stride])?, query.len())?;
    if !params.sinks.is_empty() {
        expect_len(OP, "the number of sinks", params.heads, params.sinks.len())?;
    }
    sequences.iter().try_for_each(|sequence| sequence.check(OP, rows, kv.page_count()))
}
