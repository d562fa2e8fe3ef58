//! Causal attention over paged keys and values, for prefill chunks and decodes in one call.
//!
//! Invariant: a query attends to the positions up to its own, limited by its window. Pages hold 16 tokens, and the query
//! heads of one KV head share each read. The output of a query has the same bits regardless of the number of queries,
//! sequences and threads and of where a chunk begins: positions are processed in blocks that are aligned to absolute
//! positions and merged in order, as described in [`crate::cpu::attention`]. A long range is divided into tasks at block
//! boundaries; the state of each block is then kept, and the thread that finishes the last task of the rows merges them.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::cpu::attention::{AttendRows, BLOCK, MAX_ROWS, MergeStates, QueryRow, Scales, State};
use crate::cpu::dispatch;
use crate::cpu::kv::{KvF16, KvF32, KvI8};
use crate::error::{expect_len, product};
use crate::kv::{KvFormat, KvLayer, PAGE_TOKENS};
use crate::pool::SharedSlice;
use crate::{Isa, KernelError, WorkerPool};

/// Number of tasks per thread into which long ranges are divided to balance the load.
const TASKS_PER_THREAD: usize = 6;

/// Consecutive query tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSequence<'a> {
    /// Row of the first token in `query` and `out`.
    pub row: usize,
    pub tokens: usize,
    /// Position of the first token.
    pub start: usize,
    /// Pages that cover positions `0..start + tokens`.
    pub pages: &'a [u32],
}

impl AttentionSequence<'_> {
    /// Checks that its rows are below `rows` and that existing pages cover its positions.
    pub(crate) fn check(&self, op: &'static str, rows: usize, kv: &KvLayer) -> Result<(), KernelError> {
        let out_of_range = |what, index, count| Err(KernelError::OutOfRange { op, what, index, count });
        if self.row.checked_add(self.tokens).is_none_or(|end| end > rows) {
            return out_of_range("row", self.row, rows);
        }
        let positions = self.start.saturating_add(self.tokens);
        let covered = self.pages.len().saturating_mul(PAGE_TOKENS);
        if positions > covered {
            return out_of_range("position", positions, covered);
        }
        self.pages.iter().try_for_each(|page| kv.check_page(op, *page))
    }
}

/// Shapes and settings of a call to [`attention`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionParams {
    pub heads: usize,
    /// Distance between rows of `query` in values. The first `heads * head_size` values of a row are the query heads.
    pub query_stride: usize,
    pub scale: f32,
    /// If set, position `p` attends only to positions in `(p - window, p]`.
    pub window: Option<usize>,
}

/// Computes attention and writes `[rows][heads * head_size]` to `out`. The keys and values of all tokens must already be
/// in `kv`.
pub fn attention(
    pool: &WorkerPool,
    isa: Isa,
    params: AttentionParams,
    kv: &KvLayer,
    query: &[f32],
    sequences: &[AttentionSequence<'_>],
    out: &mut [f32],
) -> Result<(), KernelError> {
    check(&params, kv, query, sequences, out)?;
    let plan = Plan::new(pool.threads(), &params, kv, sequences);
    let mut states = vec![0.0; plan.state_len];
    let (out, states) = (SharedSlice::new(out), SharedSlice::new(&mut states));
    let call = Call { isa, params: &params, kv, query };
    pool.run(plan.tasks.len(), |index| {
        let task = &plan.tasks[index];
        let group = &plan.groups[task.group];
        // SAFETY: `check` ensured that the query, the pages and the output cover the task. No two groups share a row, and
        // each block's state belongs to one task until the last task of the group is done.
        unsafe {
            let Some(kept) = group.states else {
                let mut buffer = [const { MaybeUninit::<f32>::uninit() }; State::MAX_LEN];
                let state = State::new(buffer.as_mut_ptr().cast(), kv.value_stride);
                call.attend(group, task, state, 0);
                return group.finish(kv.head_size(), &state, &out);
            };
            let stride = State::len(group.rows.len(), kv.value_stride);
            let state = |position: usize| {
                let block = position / BLOCK - group.from / BLOCK;
                State::new(states.as_mut_ptr().add(kept + block * stride), kv.value_stride)
            };
            call.attend(group, task, state(task.from), stride);
            // The thread that finishes last sees what the others wrote.
            if group.unfinished.fetch_sub(1, Ordering::AcqRel) == 1 {
                let first = state(group.from);
                let (count, rows) = (group.blocks(), group.rows.len());
                dispatch(isa, MergeStates { first, stride, count, rows });
                group.finish(kv.head_size(), &first, &out);
            }
        }
    });
    Ok(())
}

/// The division of the work into tasks. It affects only speed, never the result.
struct Plan<'a> {
    groups: Vec<Group<'a>>,
    tasks: Vec<Task>,
    /// Number of floats in all states that are kept.
    state_len: usize,
}

/// Up to `MAX_ROWS` query rows of one KV head, and the positions that they attend to.
struct Group<'a> {
    rows: Vec<QueryRow>,
    kv_head: usize,
    pages: &'a [u32],
    from: usize,
    to: usize,
    /// Offset of the states of its blocks, if several tasks share the group.
    states: Option<usize>,
    unfinished: AtomicUsize,
}

/// A range of a group's positions, cut at block boundaries.
struct Task {
    group: usize,
    from: usize,
    to: usize,
}

impl Group<'_> {
    fn blocks(&self) -> usize {
        self.to.div_ceil(BLOCK) - self.from / BLOCK
    }

    /// Divides the values by the sums of the weights and writes them to `out`.
    ///
    /// # Safety
    /// The state was computed for the group, and no other thread writes its rows of `out`.
    unsafe fn finish(&self, head_size: usize, state: &State, out: &SharedSlice<f32>) {
        for (r, row) in self.rows.iter().enumerate() {
            // SAFETY: guaranteed by the caller.
            let ((values, total), out) = unsafe { (state.row(r), out.part(row.output, head_size)) };
            let factor = 1.0 / total;
            for (out, value) in out.iter_mut().zip(values) {
                // Positions with weight zero may flip the sign of a zero; adding 0.0 gives +0.0 for either sign.
                *out = value * factor + 0.0;
            }
        }
    }
}

impl<'a> Plan<'a> {
    fn new(
        threads: usize,
        params: &AttentionParams,
        kv: &KvLayer,
        sequences: &[AttentionSequence<'a>],
    ) -> Self {
        let mut groups = groups(params, kv, sequences);
        // Prefill and large decode batches have enough groups; the groups of a single decode are divided.
        let positions: usize = groups.iter().map(|group| group.to - group.from).sum();
        let share = match threads {
            0 | 1 => usize::MAX,
            _ => positions.div_ceil(threads * TASKS_PER_THREAD).max(BLOCK),
        };
        let mut plan = Plan { groups: Vec::new(), tasks: Vec::with_capacity(groups.len()), state_len: 0 };
        for (index, group) in groups.iter_mut().enumerate() {
            let parts = (group.to - group.from).div_ceil(share).min(group.blocks());
            let step = group.blocks().div_ceil(parts);
            let first = plan.tasks.len();
            let start = group.from / BLOCK;
            plan.tasks.extend((0..group.blocks()).step_by(step).map(|block| Task {
                group: index,
                from: group.from.max((start + block) * BLOCK),
                to: group.to.min((start + block + step) * BLOCK),
            }));
            let tasks = plan.tasks.len() - first;
            group.unfinished = AtomicUsize::new(tasks);
            if tasks > 1 {
                group.states = Some(plan.state_len);
                plan.state_len += group.blocks() * State::len(group.rows.len(), kv.value_stride);
            }
        }
        plan.groups = groups;
        plan
    }
}

fn groups<'a>(params: &AttentionParams, kv: &KvLayer, sequences: &[AttentionSequence<'a>]) -> Vec<Group<'a>> {
    let share = params.heads / kv.kv_heads();
    let mut groups = Vec::new();
    for sequence in sequences {
        for kv_head in 0..kv.kv_heads() {
            let count = sequence.tokens * share;
            for first in (0..count).step_by(MAX_ROWS) {
                let describe = |row: usize| {
                    let (token, head) = (row / share, kv_head * share + row % share);
                    let end = sequence.start + token + 1;
                    let offset = (sequence.row + token) * params.query_stride + head * kv.head_size();
                    let output = ((sequence.row + token) * params.heads + head) * kv.head_size();
                    let first = params.window.map_or(0, |window| end.saturating_sub(window));
                    QueryRow { offset, output, first, end }
                };
                let rows: Vec<QueryRow> = (first..count.min(first + MAX_ROWS)).map(describe).collect();
                let low = rows.iter().map(|row| row.first).min().unwrap_or(0);
                groups.push(Group {
                    from: low / PAGE_TOKENS * PAGE_TOKENS,
                    to: rows.iter().map(|row| row.end).max().unwrap_or(0),
                    rows,
                    kv_head,
                    pages: sequence.pages,
                    states: None,
                    unfinished: AtomicUsize::new(0),
                });
            }
        }
    }
    groups
}

/// The arguments that all tasks share.
struct Call<'a> {
    isa: Isa,
    params: &'a AttentionParams,
    kv: &'a KvLayer,
    query: &'a [f32],
}

impl Call<'_> {
    /// Computes a task's blocks, either all into one state or each into its own.
    ///
    /// # Safety
    /// The task belongs to a plan for checked sequences, and no other task writes its states.
    unsafe fn attend(&self, group: &Group<'_>, task: &Task, state: State, state_stride: usize) {
        let kv = self.kv;
        let key_head = kv.head_size() * PAGE_TOKENS;
        let value_head = kv.value_stride * PAGE_TOKENS;
        let (keys, values) = kv.scales(group.kv_head * PAGE_TOKENS);
        let scales = Scales { keys, values, page: kv.kv_heads() * PAGE_TOKENS };
        macro_rules! attend {
            ($format:ty, $element:ty) => {{
                // SAFETY: the head is inside the first page of the KV pool.
                let (keys, values) = unsafe {
                    (
                        kv.keys.as_ptr().cast::<$element>().add(group.kv_head * key_head),
                        kv.values.as_ptr().cast::<$element>().add(group.kv_head * value_head),
                    )
                };
                let kernel = AttendRows::<$format> {
                    rows: &group.rows,
                    query: self.query.as_ptr(),
                    scale: self.params.scale,
                    head_size: kv.head_size(),
                    keys,
                    key_page: kv.kv_heads() * key_head,
                    values,
                    value_page: kv.kv_heads() * value_head,
                    scales,
                    pages: group.pages,
                    from: task.from,
                    to: task.to,
                    state,
                    state_stride,
                    format: PhantomData,
                };
                // SAFETY: guaranteed by the caller.
                unsafe { dispatch(self.isa, kernel) }
            }};
        }
        match kv.format {
            KvFormat::F32 => attend!(KvF32, f32),
            KvFormat::F16 => attend!(KvF16, u16),
            KvFormat::I8 => attend!(KvI8, i8),
        }
    }
}

fn check(
    params: &AttentionParams,
    kv: &KvLayer,
    query: &[f32],
    sequences: &[AttentionSequence<'_>],
    out: &[f32],
) -> Result<(), KernelError> {
    const OP: &str = "attention";
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
    sequences.iter().try_for_each(|sequence| sequence.check(OP, rows, kv))
}

#[cfg(test)]
#[path = "attention_tests.rs"]
mod tests;
