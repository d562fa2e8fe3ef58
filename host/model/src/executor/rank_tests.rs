//! Compares the memory that steps of tiny models take with the plan.

use super::super::fixture::{MODELS, PACKED, WIDE, folder, options, sequence};
use super::super::limits::limits;
use super::super::{ModelWeights, StepLogits};
use super::*;
use crate::batch::{BatchSequence, LogitsWanted, PAGE_TOKENS};
use crate::checkpoint::Checkpoint;
use crate::communicator::Solo;

const TOKENS: usize = 48;
const SEQUENCES: usize = 6;
/// Number of positions that the sequences fill. They are several blocks of attention.
const POSITIONS: usize = 480;

impl<C> Rank<C> {
    /// Returns the bytes that the buffers of the largest step so far take, and those of them that attention keeps.
    fn allocated_bytes(&self) -> [u64; 2] {
        let attention = self.compute.pool.scratch_bytes();
        let rows = 4 * self.workspace.capacity() + self.compute.activations.allocated_bytes();
        [rows + attention, attention].map(|bytes| bytes as u64)
    }
}

/// Returns steps that compute a prompt in chunks of all sizes, continue it alone, continue several sequences that begin with
/// it, and compute as many tokens as a step may have behind it.
fn steps() -> Vec<Batch> {
    let token = |position: usize| (position * 7 % 60) as u32;
    let last_page = (POSITIONS / PAGE_TOKENS) as u32 - 1;
    let rows = |from: usize, to: usize| {
        let tokens: Vec<u32> = (from..to).map(token).collect();
        sequence(&tokens, from, last_page, LogitsWanted::Last)
    };
    let mut steps = Vec::new();
    let (mut at, mut size) = (0, 1);
    while at < POSITIONS - TOKENS {
        let end = (POSITIONS - TOKENS).min(at + size);
        steps.push(vec![rows(at, end)]);
        (at, size) = (end, (2 * size + 1).min(TOKENS));
    }
    steps.push(vec![rows(at, at + 1)]);
    steps.push(vec![rows(at, at + 3)]);
    // They differ in the last page, which is their own.
    let begins_alike = |own: u32| {
        let mut continued: BatchSequence = rows(at, at + 1);
        *continued.pages.last_mut().expect("a page") = PageId(last_page + 1 + own);
        continued
    };
    steps.push((0..SEQUENCES as u32).map(begins_alike).collect());
    steps.push(vec![rows(at, at + TOKENS)]);
    steps.into_iter().map(|sequences| Batch { sequences }).collect()
}

#[test]
fn no_step_takes_more_memory_than_the_plan() {
    let mut kept = 0;
    for name in MODELS.into_iter().chain([PACKED, WIDE]) {
        for (threads, kv) in [(1, KvDtype::F32), (2, KvDtype::F16), (3, KvDtype::I8)] {
            let options = ExecutorOptions {
                threads: Some(threads),
                kv,
                kv_tokens: Some(POSITIONS + SEQUENCES * PAGE_TOKENS),
                max_batch_tokens: TOKENS,
                max_sequences: SEQUENCES,
                max_logit_rows: SEQUENCES,
                ..options(Isa::detect())
            };
            let checkpoint = Checkpoint::open(&folder(name)).unwrap();
            let weights = ModelWeights::load(&checkpoint, &options).unwrap();
            let limits = limits(&weights.config, &options).unwrap();
            let page_count = limits.page_count;
            let rank = RankOptions {
                isa: Isa::detect(),
                threads,
                affinity: options.affinity,
                kv,
                page_count,
                windows: None,
            };
            let mut rank = Rank::<Solo>::new(weights.parts[0].clone(), rank, Links::SOLO).unwrap();
            let plan = memory_plan(&weights.parts[0], threads, &limits, &options).unwrap();
            let mut logits = StepLogits::new(limits.vocabulary_size);
            for batch in steps() {
                rank.step(&batch, Some(logits.buffer(batch.logit_rows()))).unwrap();
                let [all, attention] = rank.allocated_bytes();
                assert!(all <= plan.activation_bytes, "{name}, {threads} threads: {all} of {plan}");
                kept = kept.max(attention);
            }
        }
    }
    assert!(kept > 0, "no step divided a long range");
}

#[test]
fn the_lists_of_plans_count_for_each_kind_of_layer() {
    for (name, kinds) in [("llama-gqa", 1), ("deepseek-v3", 1), ("gemma3", 2), ("gpt-oss", 2)] {
        let options = options(Isa::detect());
        let weights = ModelWeights::load(&Checkpoint::open(&folder(name)).unwrap(), &options).unwrap();
        let (model, limits) = (&weights.parts[0], limits(&weights.config, &options).unwrap());
        let largest = |plans| {
            let layers = model.attention_shapes();
            layers.map(|shape| attention_bytes_of(shape, plans, 2, &limits)).max().unwrap()
        };
        assert!(largest(1) < largest(2), "{name}");
        assert_eq!(attention_bytes(model, 2, &limits), largest(kinds), "{name}");
    }
}
