//! Tests of the guarantees of `deterministic`, on emulated devices. For one file, activation format and number of
//! ranks, a row's logits have the same bits whatever else is in its step, however its prompt was split, and whatever
//! was computed before.
//!
//! The sequence under test spans several tiles of keys. It is computed in one step first, and every other way to
//! compute it must give the same bits at each position.

use super::super::start::opens_blas;
use super::*;
use crate::batch::{PAGE_TOKENS, PageId};

/// More than two tiles of keys, and not a whole number of pages.
const LENGTH: usize = 150;
/// The first pages of the three sequences of a test. The pages of a sequence count down from there.
const FIRST_PAGES: [u32; 3] = [9, 19, 29];

fn deterministic(activation: Activation, tensor_parallel: usize) -> ExecutorOptions {
    ExecutorOptions {
        activations: Some(activation),
        tensor_parallel,
        max_logit_rows: 256,
        deterministic: true,
        ..cuda_options()
    }
}

fn token(sequence: usize, position: usize) -> u32 {
    ((position * position * 7 + position * 13 + sequence * 101 + 5) % 320) as u32
}

/// Returns the tokens `start..start + count` of one of the sequences.
fn part(sequence: usize, start: usize, count: usize, logits: LogitsWanted) -> BatchSequence {
    let tokens: Vec<u32> = (start..start + count).map(|position| token(sequence, position)).collect();
    super::sequence(&tokens, start, FIRST_PAGES[sequence], logits)
}

fn bits(executor: &CudaExecutor, row: usize) -> Vec<u32> {
    executor.logits(row).unwrap().iter().map(|logit| logit.to_bits()).collect()
}

/// Returns the logits at every position, computed in one step without other sequences.
fn whole(executor: &mut CudaExecutor) -> Vec<Vec<u32>> {
    executor.forward(&Batch { sequences: vec![part(0, 0, LENGTH, LogitsWanted::All)] }).unwrap();
    (0..LENGTH).map(|row| bits(executor, row)).collect()
}

struct Random(u64);

impl Random {
    fn fresh() -> Self {
        let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
        println!("seed {nanos}");
        Random(nanos as u64)
    }

    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

/// A function that returns the number of tokens of each sequence in the next step.
type Counts<'a> = &'a mut dyn FnMut(usize) -> [usize; 3];

/// Computes the sequence in steps with two others, in any order, and compares each row that the steps return.
fn check_steps(
    executor: &mut CudaExecutor,
    expected: &[Vec<u32>],
    how: &str,
    random: &mut Random,
    counts: Counts<'_>,
) {
    let mut starts = [0; 3];
    while starts[0] < LENGTH {
        let counts = counts(starts[0]);
        let mut order = [0, 1, 2];
        order.swap(0, random.below(3));
        order.swap(1, 1 + random.below(2));
        let (mut sequences, mut first_row, mut rows) = (Vec::new(), 0, 0);
        for sequence in order {
            if starts[sequence] + counts[sequence] > LENGTH && sequence > 0 {
                starts[sequence] = 0;
            }
            let count = counts[sequence].min(LENGTH - starts[sequence]);
            if count == 0 {
                continue;
            }
            if sequence == 0 {
                first_row = rows;
            }
            let logits = if sequence == 0 { LogitsWanted::All } else { LogitsWanted::Last };
            sequences.push(part(sequence, starts[sequence], count, logits));
            rows += sequences[sequences.len() - 1].logit_rows();
        }
        let start = starts[0];
        let count = counts[0].min(LENGTH - start);
        executor.forward(&Batch { sequences }).unwrap();
        for row in 0..count {
            let same = bits(executor, first_row + row) == expected[start + row];
            assert!(same, "{how}: different bits at {}, in a step of {counts:?} at {starts:?}", start + row);
        }
        for (sequence, start) in starts.iter_mut().enumerate() {
            *start += counts[sequence].min(LENGTH - *start);
        }
    }
}

/// Checks a sequence that finds the first sequence's pages in the cache and continues in separate pages.
fn check_cached_prefix(executor: &mut CudaExecutor, expected: &[Vec<u32>]) {
    const CACHED: usize = 5 * PAGE_TOKENS;
    for (start, count) in [(0, 33), (33, 47)] {
        let sequences = vec![part(0, start, count, LogitsWanted::None)];
        executor.forward(&Batch { sequences }).unwrap();
    }
    let mut rest = part(0, CACHED, LENGTH - CACHED, LogitsWanted::All);
    for (page, own) in rest.pages.iter_mut().zip(FIRST_PAGES[2] - 9..).skip(CACHED / PAGE_TOKENS) {
        *page = PageId(own);
    }
    executor.forward(&Batch { sequences: vec![rest] }).unwrap();
    for row in 0..LENGTH - CACHED {
        assert!(
            bits(executor, row) == expected[CACHED + row],
            "cached prefix: different bits at {}",
            CACHED + row
        );
    }
}

fn check_all(executor: &mut CudaExecutor, expected: &[Vec<u32>], random: &mut Random) {
    // Chunks of prompts, decodes and drafts, mixed.
    let mut chunks = Random(random.0);
    let mut any = |_| [1 + chunks.below(40), chunks.below(30), chunks.below(2)];
    check_steps(executor, expected, "in chunks with neighbors", random, &mut any);
    // Most of the sequence at once. The rest is decoded, first alone and then with others, with three draft rows now
    // and then.
    let mut alone = |start| if start == 0 { [LENGTH - 12, 0, 0] } else { [1, 0, 0] };
    check_steps(executor, expected, "token by token", random, &mut alone);
    let mut beside = |start| match start {
        0 => [LENGTH - 20, 70, 3],
        start if start % 5 == 0 => [4, 1, 1],
        _ => [1, 1, 1],
    };
    check_steps(executor, expected, "decoded with neighbors and drafts", random, &mut beside);
    assert!(!executor.recordings.made.is_empty(), "steps that decode must be replayed");
    check_cached_prefix(executor, expected);
}

#[test]
pub(super) fn logits_have_the_same_bits_whatever_shares_the_step_and_however_it_is_split() {
    let mut random = Random::fresh();
    for (name, activation, ranks) in [
        ("llama-gqa", Activation::Bf16, 1),
        ("llama-gqa", Activation::F16, 2),
        ("qwen2-bias", Activation::F16, 1),
        ("mistral-window", Activation::Bf16, 2),
    ] {
        println!("{name} in {activation} on {ranks} ranks");
        let mut executor = load(name, deterministic(activation, ranks), "0");
        let expected = whole(&mut executor);
        check_all(&mut executor, &expected, &mut random);
    }
}

#[test]
pub(super) fn replicas_stages_and_reloads_give_the_same_bits() {
    for ranks in [1, 2] {
        let options = deterministic(Activation::Bf16, ranks);
        let expected = whole(&mut load("llama-gqa", options.clone(), "0"));
        let staged = ExecutorOptions { pipeline_parallel: 3, ..options.clone() };
        assert!(whole(&mut load("llama-gqa", staged, "0")) == expected, "{ranks} ranks in three stages");
        let checkpoint = open("llama-gqa");
        let mut replicas = model(&checkpoint, options, "0", 2).unwrap();
        for replica in 0..2 {
            let mut executor = replicas.executor(replica).unwrap();
            assert!(whole(&mut executor) == expected, "replica {replica} of {ranks} ranks");
        }
    }
}

#[test]
pub(super) fn logits_are_correct_in_a_fixed_order() {
    for ranks in [1, 2] {
        let mut executor = load("llama-gqa", deterministic(Activation::F16, ranks), "0");
        for chunk in [64, 1] {
            let error = error_in_chunks(&mut executor, "llama-gqa", chunk);
            assert!(error < BOUND, "{ranks} ranks, chunks of {chunk}: {error}");
        }
    }
}

/// Without the option, the bits differ where they may. This shows that the tests above would detect a difference.
#[test]
fn without_the_option_a_decoded_row_has_different_bits_than_in_its_prompt() {
    let options = ExecutorOptions { deterministic: false, ..deterministic(Activation::Bf16, 1) };
    let mut executor = load("llama-gqa", options, "0");
    let expected = whole(&mut executor);
    let sequences = vec![part(0, LENGTH - 1, 1, LogitsWanted::Last)];
    executor.forward(&Batch { sequences }).unwrap();
    assert!(bits(&executor, 0) != expected[LENGTH - 1]);
}

#[test]
fn deterministic_executors_do_not_open_the_library_for_dense_weights() {
    let options = ExecutorOptions { activations: None, ..deterministic(Activation::Bf16, 1) };
    let executor = load("llama-gqa", options, "0");
    let layout = &executor.leader().weights.layout;
    assert!(opens_blas(layout, false), "the weights are dense, so the library must multiply them by default");
    assert!(!opens_blas(layout, true));
}
