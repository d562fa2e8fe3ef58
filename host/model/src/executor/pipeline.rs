//! Divides a model's layers into stages, and the rows of a step into micro-batches that keep the stages busy.
//!
//! Invariant: stages are consecutive and never empty, and the slowest stage is as fast as possible. The
//! micro-batches, in order, make up the step row for row, so a sequence's rows reach every stage in order.

use std::ops::Range;

use crate::batch::{Batch, BatchSequence, LogitsWanted};
use crate::models::cost::{Cost, ModelCost};

/// Number of rows in the step that the stages are balanced for, each with logits: several sequences that decode
/// together.
const BALANCED_ROWS: f64 = 16.0;
/// Maximum number of micro-batches per stage. With this many, a stage is idle for at most a fifth of the step.
const MICRO_BATCHES_PER_STAGE: usize = 4;

/// Divides the layers so that the slowest of `stages` stages takes as little time as possible.
pub(super) fn stages(cost: &ModelCost, stages: usize) -> Vec<Range<usize>> {
    let layers = cost.layers.len();
    let mut seconds: Vec<f64> = cost.layers.iter().map(|layer| layer.of_rows(BALANCED_ROWS)).collect();
    if let Some(first) = seconds.first_mut() {
        *first += cost.entry.of_rows(BALANCED_ROWS);
    }
    if let Some(last) = seconds.last_mut() {
        *last += cost.exit.of_rows(BALANCED_ROWS);
    }
    let sums: Vec<f64> = std::iter::once(0.0)
        .chain(seconds.iter().scan(0.0, |sum, layer| {
            *sum += layer;
            Some(*sum)
        }))
        .collect();
    // `slowest[end]` is the time of the slowest stage in the best division of the layers before `end` into the stages
    // so far. `starts` says where the last stage of that division starts.
    let mut slowest: Vec<f64> = sums.clone();
    let mut starts: Vec<Vec<usize>> = vec![vec![0; layers + 1]];
    for stage in 1..stages {
        let mut next = vec![f64::INFINITY; layers + 1];
        let mut start = vec![0; layers + 1];
        for end in stage + 1..=layers {
            for middle in stage..end {
                let candidate = slowest[middle].max(sums[end] - sums[middle]);
                if candidate < next[end] {
                    (next[end], start[end]) = (candidate, middle);
                }
            }
        }
        slowest = next;
        starts.push(start);
    }
    let mut end = layers;
    let mut ranges: Vec<Range<usize>> = starts
        .iter()
        .rev()
        .map(|start| {
            let range = start[end]..end;
            end = range.start;
            range
        })
        .collect();
    ranges.reverse();
    ranges
}

/// Returns the number of micro-batches that makes a step of `rows` rows fastest. Each micro-batch costs every stage a
/// pass over its weights. Fewer micro-batches leave stages idle longer while the pipeline fills and drains.
pub(super) fn micro_batches(cost: &Cost, stages: usize, rows: usize) -> usize {
    let step_s = |count: usize| {
        let passes = (count + stages - 1) as f64;
        passes * cost.of_rows(rows as f64 / count as f64)
    };
    let most = rows.clamp(1, stages * MICRO_BATCHES_PER_STAGE);
    (1..=most).min_by(|a, b| step_s(*a).total_cmp(&step_s(*b))).unwrap_or(1)
}

/// Splits a step into `count` micro-batches whose numbers of rows are as equal as possible.
pub(super) fn split(batch: &Batch, count: usize) -> Vec<Batch> {
    let rows = batch.token_count();
    let count = count.clamp(1, rows.max(1));
    let mut micro_batches = vec![Batch::default(); count];
    let mut first = 0;
    for sequence in &batch.sequences {
        let mut taken = 0;
        while taken < sequence.tokens.len() {
            // Micro-batch `p` starts at row `rows * p / count`. This is the last one that starts at or before the
            // row.
            let micro_batch = ((first + taken + 1) * count - 1) / rows;
            let end = rows * (micro_batch + 1) / count - first;
            let part = taken..end.min(sequence.tokens.len());
            // The requested logits are those of the last rows of a sequence.
            let wanted_from = sequence.tokens.len() - sequence.logit_rows();
            let wanted = part.end.saturating_sub(part.start.max(wanted_from));
            taken = part.end;
            micro_batches[micro_batch].sequences.push(BatchSequence {
                start: sequence.start + part.start,
                tokens: sequence.tokens[part].to_vec(),
                pages: sequence.pages.clone(),
                logits: if wanted == 0 { LogitsWanted::None } else { LogitsWanted::Tail(wanted) },
            });
        }
        first += sequence.tokens.len();
    }
    micro_batches
}

#[cfg(test)]
#[path = "pipeline_tests.rs"]
mod tests;
