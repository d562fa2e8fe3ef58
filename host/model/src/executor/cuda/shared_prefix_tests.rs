//! Checks that sequences with a common prefix give the same tokens whether its pages are read once for all or for each.

use skep_kernels::cuda::attention_decode::Split;

use super::*;
use crate::batch::{BatchSequence, PageId};

/// Number of tokens of the prefix, which are nine whole pages.
const PREFIX: usize = 9 * PAGE_TOKENS;
/// Number of sequences, and of pages that each has after the prefix.
const SEQUENCES: usize = 4;
const OWN_PAGES: usize = 3;

fn token(sequence: usize, position: usize) -> u32 {
    (if position < PREFIX { position * 7 + 3 } else { position * 5 + sequence * 11 }) as u32 % 97
}

/// Returns tokens of a sequence, whose first pages are those of all sequences.
fn part(sequence: usize, start: usize, tokens: Vec<u32>) -> BatchSequence {
    let common = 0..PREFIX / PAGE_TOKENS;
    let own = common.end + sequence * OWN_PAGES..common.end + (sequence + 1) * OWN_PAGES;
    let pages = common.chain(own).take((start + tokens.len()).div_ceil(PAGE_TOKENS));
    let pages = pages.map(|page| PageId(page as u32)).collect();
    let logits = LogitsWanted::Tail(tokens.len());
    BatchSequence { tokens, start, pages, logits }
}

/// Returns whether a step reads some keys for several sequences at once.
fn reads_together(executor: &CudaExecutor, batch: &Batch) -> bool {
    let mut bytes = Vec::new();
    let step = executor.cuts.pack(batch, true, &mut bytes);
    step.plans.iter().any(|plan| {
        let splits = bytes[plan.splits.clone()].chunks(size_of::<Split>());
        splits.into_iter().any(|split| split.ends_with(&1u32.to_le_bytes()))
    })
}

#[test]
pub(super) fn a_common_prefix_gives_the_same_tokens_read_once_or_for_each_sequence() {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    for (ranks, kv) in [(1, KvDtype::F16), (2, KvDtype::F16), (1, KvDtype::Fp8)] {
        let options = ExecutorOptions { tensor_parallel: ranks, kv, ..cuda_options() };
        let mut together = load("llama-gqa", options.clone(), "0");
        let mut apart = load("llama-gqa", options, "0");
        apart.cuts.blocks.shared_rows = 0;
        let prefix = part(0, 0, (0..PREFIX).map(|position| token(0, position)).collect());
        let prefix = Batch { sequences: vec![BatchSequence { logits: LogitsWanted::None, ..prefix }] };
        together.forward(&prefix).unwrap();
        apart.forward(&prefix).unwrap();
        // The second sequence has two rows in the first step, as with a draft.
        let mut starts = [PREFIX; SEQUENCES];
        let mut next: Vec<Vec<u32>> = (0..SEQUENCES)
            .map(|sequence| (0..1 + sequence % 2).map(|row| token(sequence, PREFIX + row)).collect())
            .collect();
        for step in 0..6 {
            let parts = next.iter().enumerate().map(|(at, tokens)| part(at, starts[at], tokens.clone()));
            let batch = Batch { sequences: parts.collect() };
            assert!(reads_together(&together, &batch) && !reads_together(&apart, &batch));
            together.forward(&batch).unwrap();
            apart.forward(&batch).unwrap();
            let mut row = 0;
            for sequence in 0..SEQUENCES {
                starts[sequence] += next[sequence].len();
                row += next[sequence].len();
                let last = LogitRow::Sample(SampleRow::plain(row - 1, &greedy));
                let found = together.sample(std::slice::from_ref(&last)).unwrap()[0].token;
                let expected = apart.sample(std::slice::from_ref(&last)).unwrap()[0].token;
                assert_eq!(found, expected, "step {step}, sequence {sequence}, {ranks} ranks, {kv}");
                let error = relative_error(together.logits(row - 1).unwrap(), apart.logits(row - 1).unwrap());
                assert!(error < BOUND, "step {step}, sequence {sequence}: {error}");
                next[sequence] = vec![found];
            }
        }
    }
}
