//! Causal attention over paged keys and values, for prefill chunks and decodes in one call.
//!
//! Invariant: a query sees the positions up to its own, back to its window; pages of 16 tokens; the query heads of one
//! KV head share each read. Long decodes are split over ranges of positions and merged, so that all threads work.

use std::marker::PhantomData;
use std::sync::Mutex;

use crate::cpu::attention::{AttendRows, MAX_ROWS, Partial, QueryRow};
use crate::cpu::dispatch;
use crate::cpu::kv::{KvF16, KvF32, KvI8};
use crate::error::{expect_len, product};
use crate::kv::{KvFormat, KvLayer, PAGE_TOKENS};
use crate::pool::SharedSlice;
use crate::{Isa, KernelError, WorkerPool};

/// Positions that are worth a task of their own in a decode.
const SPLIT: usize = 128;
/// Parts are made until so many tasks share the work evenly.
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
    let tasks = plan(pool.threads(), &params, kv, sequences);
    let out = SharedSlice::new(out);
    let waiting: Mutex<Vec<(usize, usize, Box<Partial>)>> = Mutex::new(Vec::new());
    pool.run(tasks.len(), |index| {
        let task = &tasks[index];
        let mut partial = Partial::default();
        // SAFETY: `check` saw that the query, the pages and the output cover the task.
        unsafe { run_task(task, isa, &params, kv, query, &mut partial) };
        if task.split == Split::Whole {
            // SAFETY: the rows of a whole task are its own.
            unsafe { finish(task, kv.head_size(), &partial, &out) };
        } else {
            let mut waiting = waiting.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            waiting.push((task.first_split, index, Box::new(partial)));
        }
    });
    let mut waiting = waiting.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    waiting.sort_by_key(|(first, index, _)| (*first, *index));
    for parts in waiting.chunk_by(|a, b| a.0 == b.0) {
        let task = &tasks[parts[0].0];
        let merged = merge(parts, task.rows.len(), kv.head_size());
        // SAFETY: all tasks are done.
        unsafe { finish(task, kv.head_size(), &merged, &out) };
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Split {
    Whole,
    Part,
}

/// Up to `MAX_ROWS` query rows of one KV head over a range of positions.
struct Task<'a> {
    rows: Vec<QueryRow>,
    /// Where each row's output goes.
    outputs: Vec<usize>,
    kv_head: usize,
    pages: &'a [u32],
    from: usize,
    to: usize,
    split: Split,
    /// The first task of the same rows.
    first_split: usize,
}

fn plan<'a>(
    threads: usize,
    params: &AttentionParams,
    kv: &KvLayer,
    sequences: &[AttentionSequence<'a>],
) -> Vec<Task<'a>> {
    let share = params.heads / kv.kv_heads();
    let mut tasks = Vec::new();
    for sequence in sequences {
        for kv_head in 0..kv.kv_heads() {
            let count = sequence.tokens * share;
            for first in (0..count).step_by(MAX_ROWS) {
                let picked = first..count.min(first + MAX_ROWS);
                let describe = |row: usize| {
                    let (token, head) = (row / share, kv_head * share + row % share);
                    let end = sequence.start + token + 1;
                    let offset = (sequence.row + token) * params.query_stride + head * kv.head_size();
                    let output = ((sequence.row + token) * params.heads + head) * kv.head_size();
                    let first = params.window.map_or(0, |window| end.saturating_sub(window));
                    (QueryRow { offset, first, end }, output)
                };
                let (rows, outputs): (Vec<QueryRow>, Vec<usize>) = picked.map(describe).unzip();
                let low = rows.iter().map(|row| row.first).min().unwrap_or(0) / PAGE_TOKENS * PAGE_TOKENS;
                let high = rows.iter().map(|row| row.end).max().unwrap_or(0);
                // Prefill has tasks enough; a lone decode needs its range split.
                let parts = (threads * TASKS_PER_THREAD).div_ceil(sequence.tokens * kv.kv_heads());
                let parts = if threads > 1 { parts.min((high - low).div_ceil(SPLIT)).max(1) } else { 1 };
                let step = (high - low).div_ceil(parts).next_multiple_of(PAGE_TOKENS).max(PAGE_TOKENS);
                let first_split = tasks.len();
                let split = if high - low > step { Split::Part } else { Split::Whole };
                tasks.extend((low..high).step_by(step).map(|from| Task {
                    rows: rows.clone(),
                    outputs: outputs.clone(),
                    kv_head,
                    pages: sequence.pages,
                    from,
                    to: high.min(from + step),
                    split,
                    first_split,
                }));
            }
        }
    }
    tasks
}

/// # Safety
/// The task is one that `plan` made of checked sequences.
unsafe fn run_task(
    task: &Task<'_>,
    isa: Isa,
    params: &AttentionParams,
    kv: &KvLayer,
    query: &[f32],
    partial: &mut Partial,
) {
    let key_head = kv.head_size() * PAGE_TOKENS;
    let value_head = kv.value_stride * PAGE_TOKENS;
    let (key_scales, value_scales) = kv.scales(task.kv_head * PAGE_TOKENS);
    macro_rules! attend {
        ($format:ty, $element:ty) => {{
            // SAFETY: the head is inside the pool's first page.
            let (keys, values) = unsafe {
                (
                    kv.keys.as_ptr().cast::<$element>().add(task.kv_head * key_head),
                    kv.values.as_ptr().cast::<$element>().add(task.kv_head * value_head),
                )
            };
            let kernel = AttendRows::<$format> {
                rows: &task.rows,
                query: query.as_ptr(),
                scale: params.scale,
                head_size: kv.head_size(),
                value_stride: kv.value_stride,
                keys,
                key_page: kv.kv_heads() * key_head,
                values,
                value_page: kv.kv_heads() * value_head,
                key_scales,
                value_scales,
                scale_page: kv.kv_heads() * PAGE_TOKENS,
                pages: task.pages,
                from: task.from,
                to: task.to,
                partial,
                format: PhantomData,
            };
            // SAFETY: the caller's promise.
            unsafe { dispatch(isa, kernel) }
        }};
    }
    match kv.format {
        KvFormat::F32 => attend!(KvF32, f32),
        KvFormat::F16 => attend!(KvF16, u16),
        KvFormat::I8 => attend!(KvI8, i8),
    }
}

/// Divides by the sum of weights.
///
/// # Safety
/// No other task writes the same rows.
unsafe fn finish(task: &Task<'_>, head_size: usize, partial: &Partial, out: &SharedSlice<f32>) {
    for (r, output) in task.outputs.iter().enumerate() {
        let factor = 1.0 / partial.total[r];
        // SAFETY: the caller's promise.
        let out = unsafe { out.part(*output, head_size) };
        for (out, value) in out.iter_mut().zip(&partial.values[r]) {
            *out = value * factor;
        }
    }
}

/// Joins the softmax states of the same rows over ranges of positions, in the order of the ranges.
fn merge(parts: &[(usize, usize, Box<Partial>)], rows: usize, head_size: usize) -> Partial {
    let mut merged = Partial::default();
    for r in 0..rows {
        let largest = parts.iter().map(|(_, _, part)| part.largest[r]).fold(merged.largest[r], f32::max);
        merged.largest[r] = largest;
        for (_, _, part) in parts {
            let factor = (part.largest[r] - largest).exp();
            merged.total[r] += part.total[r] * factor;
            for (sum, value) in merged.values[r][..head_size].iter_mut().zip(&part.values[r]) {
                *sum += value * factor;
            }
        }
    }
    merged
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
