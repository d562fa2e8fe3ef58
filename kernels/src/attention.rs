//! Causal attention over paged keys and values, for prefill chunks and decodes in one call.
//!
//! Invariant: a query sees the positions up to its own, back to its window; pages of 16 tokens; the query heads of one
//! KV head share each read. The output of a query has the same bits however many queries, sequences and threads there
//! are and wherever a chunk begins: positions are taken in blocks that are aligned to absolute positions and merged in
//! their order, as [`crate::cpu::attention`] says. A long range is divided into tasks at the ends of blocks; then each
//! block's state is kept, and whoever ends the last task of the rows merges them.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::cpu::attention::{AttendRows, BLOCK, MAX_ROWS, MergeStates, QueryRow, State};
use crate::cpu::dispatch;
use crate::cpu::kv::{KvF16, KvF32, KvI8};
use crate::error::{expect_len, product};
use crate::kv::{KvFormat, KvLayer, PAGE_TOKENS};
use crate::pool::SharedSlice;
use crate::{Isa, KernelError, WorkerPool};

/// Ranges are divided until so many tasks share the work evenly.
const TASKS_PER_THREAD: usize = 6;

/// Consecutive query tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSequence<'a> {
    /// Row of the first token in `query` and `out`.
    pub row: usize,
    pub tokens: usize,
    /// Position of the first token.
    pub start: usize,
    /// Cover positions `0..start + tokens`.
    pub pages: &'a [u32],
}

impl AttentionSequence<'_> {
    /// Whether its rows are among `rows`, and its positions in pages that there are.
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

/// Shapes and settings of a call.
#[derive(Clone, Copy, Debug)]
pub struct AttentionParams {
    pub heads: usize,
    /// Values between rows of `query`; its first `heads * head_size` are the heads.
    pub query_stride: usize,
    pub scale: f32,
    /// Position p sees (p - window, p].
    pub window: Option<usize>,
}

/// Writes `[rows][heads * head_size]` to `out`. The keys and values of all tokens are in `kv` already.
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
        // SAFETY: `check` saw that the query, the pages and the output cover the task. The rows of a group are its own, and
        // each block's state is one task's until the last task of the group is done.
        unsafe {
            let Some(kept) = group.states else {
                let mut room = [const { MaybeUninit::<f32>::uninit() }; State::MAX_LEN];
                let state = State::new(room.as_mut_ptr().cast(), kv.value_stride);
                call.attend(group, task, state, 0);
                return group.finish(kv.head_size(), &state, &out);
            };
            let stride = State::len(group.rows.len(), kv.value_stride);
            let state = |position: usize| {
                let block = position / BLOCK - group.from / BLOCK;
                State::new(states.as_mut_ptr().add(kept + block * stride), kv.value_stride)
            };
            call.attend(group, task, state(task.from), stride);
            // Whoever is last sees what the others wrote.
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

/// What is computed by whom. It decides about time alone.
struct Plan<'a> {
    groups: Vec<Group<'a>>,
    tasks: Vec<Task>,
    /// Floats of all states that are kept.
    state_len: usize,
}

/// Up to `MAX_ROWS` query rows of one KV head, and the positions that they see.
struct Group<'a> {
    rows: Vec<QueryRow>,
    kv_head: usize,
    pages: &'a [u32],
    from: usize,
    to: usize,
    /// Where the states of its blocks are, if several tasks share it.
    states: Option<usize>,
    unfinished: AtomicUsize,
}

/// A range of a group's positions, cut at the ends of blocks.
struct Task {
    group: usize,
    from: usize,
    to: usize,
}

impl Group<'_> {
    fn blocks(&self) -> usize {
        self.to.div_ceil(BLOCK) - self.from / BLOCK
    }

    /// Divides by the sums of weights.
    ///
    /// # Safety
    /// The state was computed for the group, and nobody else writes its rows of `out`.
    unsafe fn finish(&self, head_size: usize, state: &State, out: &SharedSlice<f32>) {
        for (r, row) in self.rows.iter().enumerate() {
            // SAFETY: the caller's promise.
            let ((values, total), out) = unsafe { (state.row(r), out.part(row.output, head_size)) };
            let factor = 1.0 / total;
            for (out, value) in out.iter_mut().zip(values) {
                // Positions that weigh nothing may turn a zero's sign; added to zero, either is zero.
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
        // Prefill and many decodes have groups enough; those of a lone decode are divided.
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

/// What all tasks share.
struct Call<'a> {
    isa: Isa,
    params: &'a AttentionParams,
    kv: &'a KvLayer,
    query: &'a [f32],
}

impl Call<'_> {
    /// Computes a task's blocks: all in one state, or each in one of its own.
    ///
    /// # Safety
    /// The task is one of a plan for checked sequences; the states that it writes are its own.
    unsafe fn attend(&self, group: &Group<'_>, task: &Task, state: State, state_stride: usize) {
        let kv = self.kv;
        let key_head = kv.head_size() * PAGE_TOKENS;
        let value_head = kv.value_stride * PAGE_TOKENS;
        let (key_scales, value_scales) = kv.scales(group.kv_head * PAGE_TOKENS);
        macro_rules! attend {
            ($format:ty, $element:ty) => {{
                // SAFETY: the head is inside the pool's first page.
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
                    key_scales,
                    value_scales,
                    scale_page: kv.kv_heads() * PAGE_TOKENS,
                    pages: group.pages,
                    from: task.from,
                    to: task.to,
                    state,
                    state_stride,
                    format: PhantomData,
                };
                // SAFETY: the caller's promise.
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
        return Err(KernelError::Shape { op: OP, what: "the head count in multiples", expected, found });
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
