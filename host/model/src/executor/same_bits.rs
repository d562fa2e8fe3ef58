//! Tests that logits have the same bits, whatever threads, stages, neighbors, chunks and drafts there are.
//!
//! A sequence is computed token by token, alone, on one thread. Then executors of several sizes compute it in other
//! pages of a pool that other sequences write to, in random chunks followed by drafts, among random neighbors.

use skep_kernels::{DType, Isa};

use super::fixture::{MODELS, PACKED, folder, options, supported};
use super::{Executor, ExecutorOptions, KvDtype, ModelWeights};
use crate::batch::{Batch, BatchSequence, LogitsWanted, PAGE_TOKENS, PageId};
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;

/// Length of the sequence under test, which spans several blocks of attention.
const LENGTH: usize = 290;
/// Number of pages of each sequence, and number of sequences in a pool.
const PAGES: usize = LENGTH / PAGE_TOKENS + 2;
const SEQUENCES: usize = 4;
const KV: [KvDtype; 3] = [KvDtype::F32, KvDtype::F16, KvDtype::I8];
const THREADS: [usize; 4] = [1, 2, 3, 4];

/// The SplitMix64 generator, with a seed that is printed so that a failed test shows it.
struct Random(u64);

impl Random {
    fn fresh() -> Self {
        let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
        println!("seed {nanos}");
        Random(nanos as u64)
    }

    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % count as u64) as usize
    }

    /// Returns a number between 1 and one of the bounds.
    fn count(&mut self, bounds: [usize; 4]) -> usize {
        let bound = bounds[self.below(4)];
        1 + self.below(bound)
    }

    fn tokens(&mut self, count: usize, vocabulary: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(vocabulary) as u32).collect()
    }

    /// Returns pages for every sequence, in random order.
    fn pages(&mut self) -> Vec<Vec<PageId>> {
        let mut all: Vec<PageId> = (0..(SEQUENCES * PAGES) as u32).map(PageId).collect();
        for at in (1..all.len()).rev() {
            all.swap(at, self.below(at + 1));
        }
        all.chunks(PAGES).map(<[PageId]>::to_vec).collect()
    }
}

/// The division of the sequence into steps.
#[derive(Clone, Copy, Debug)]
enum Chunks {
    Whole,
    Random,
    Single,
}

/// Returns the options of an executor.
fn with(isa: Isa, kv: KvDtype, threads: usize) -> ExecutorOptions {
    ExecutorOptions {
        kv,
        threads: Some(threads),
        kv_tokens: Some(SEQUENCES * PAGES * PAGE_TOKENS),
        max_batch_tokens: 1024,
        max_logit_rows: 1024,
        ..options(isa)
    }
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Returns the logits of every token, computed one token at a time.
fn alone(executor: &mut dyn Executor, tokens: &[u32]) -> Vec<Vec<u32>> {
    let pages: Vec<PageId> = (0..PAGES as u32).map(PageId).collect();
    let step = |(start, token): (usize, &u32)| {
        let sequence =
            BatchSequence { tokens: vec![*token], start, pages: pages.clone(), logits: LogitsWanted::Last };
        executor.forward(&Batch { sequences: vec![sequence] }).unwrap();
        bits(executor.logits(0).unwrap())
    };
    tokens.iter().enumerate().map(step).collect()
}

/// Computes the sequence among others and compares the logits of every token.
fn check(
    what: &str,
    executor: &mut dyn Executor,
    random: &mut Random,
    chunks: Chunks,
    tokens: &[u32],
    alone: &[Vec<u32>],
) {
    let vocabulary = executor.limits().vocabulary_size;
    let pages = random.pages();
    // The position of each neighbor. The first entry belongs to the sequence itself and is not used.
    let mut starts = [0; SEQUENCES];
    let mut done = 0;
    while done < tokens.len() {
        let left = tokens.len() - done;
        let taken = match chunks {
            Chunks::Whole => left,
            Chunks::Random => random.count([2, 7, 40, 200]).min(left),
            Chunks::Single => 1,
        };
        let drafts = random.below(4);
        let mut rows = tokens[done..done + taken].to_vec();
        rows.extend(random.tokens(drafts, vocabulary));
        let own =
            BatchSequence { tokens: rows, start: done, pages: pages[0].clone(), logits: LogitsWanted::All };
        let mut sequences = Vec::new();
        for (start, pages) in starts.iter_mut().zip(&pages).skip(1) {
            if random.below(3) == 0 {
                continue;
            }
            let count = random.count([1, 3, 30, 90]);
            if *start + count > LENGTH {
                *start = 0;
            }
            let tokens = random.tokens(count, vocabulary);
            let logits = if count < 20 { LogitsWanted::All } else { LogitsWanted::Last };
            sequences.push(BatchSequence { tokens, start: *start, pages: pages.clone(), logits });
            *start += count;
        }
        let at = random.below(sequences.len() + 1);
        let first: usize = sequences[..at].iter().map(BatchSequence::logit_rows).sum();
        sequences.insert(at, own);
        executor.forward(&Batch { sequences }).unwrap();
        for (row, at) in (done..done + taken).enumerate() {
            let found = bits(executor.logits(first + row).unwrap());
            assert!(found == alone[at], "{what}, {chunks:?}: token {at}, {taken} rows and {drafts} drafts");
        }
        done += taken;
    }
}

const ALL_CHUNKS: [Chunks; 3] = [Chunks::Whole, Chunks::Random, Chunks::Single];

#[test]
fn logits_do_not_depend_on_threads_neighbors_chunks_or_drafts() {
    let mut random = Random::fresh();
    for (number, name) in MODELS.into_iter().chain([PACKED]).enumerate() {
        let checkpoint = Checkpoint::open(&folder(name)).unwrap();
        let weights = ModelWeights::load(&checkpoint, &with(Isa::detect(), KvDtype::F32, 2)).unwrap();
        let tokens = random.tokens(LENGTH, checkpoint.config().vocabulary_size);
        for isa in supported() {
            for (format, kv) in KV.into_iter().enumerate() {
                let alone = alone(&mut *weights.executor(with(isa, kv, 1)).unwrap(), &tokens);
                for threads in THREADS {
                    let mut executor = weights.executor(with(isa, kv, threads)).unwrap();
                    // Steps of single tokens among neighbors are most of the work, so each model and format takes them on
                    // one number of threads, and all models together take them on every number with every format.
                    let takes_single = THREADS[(number + format) % THREADS.len()] == threads;
                    let all = match isa == Isa::detect() {
                        true if takes_single => &ALL_CHUNKS[..],
                        true => &ALL_CHUNKS[..2],
                        // The slower tiers differ only in their instructions.
                        false => &ALL_CHUNKS[1..2],
                    };
                    for chunks in all {
                        let what = format!("{name} {isa} {kv}, {threads} threads");
                        check(&what, &mut *executor, &mut random, *chunks, &tokens, &alone);
                    }
                }
            }
        }
    }
}

#[test]
fn logits_do_not_depend_on_pipeline_stages() {
    let mut random = Random::fresh();
    for name in MODELS {
        let checkpoint = Checkpoint::open(&folder(name)).unwrap();
        let tokens = random.tokens(LENGTH, checkpoint.config().vocabulary_size);
        let one = with(Isa::detect(), KvDtype::F16, 1);
        let alone =
            alone(&mut *ModelWeights::load(&checkpoint, &one).unwrap().executor(one).unwrap(), &tokens);
        for pipeline_parallel in [2, 3] {
            let options = ExecutorOptions { pipeline_parallel, ..with(Isa::detect(), KvDtype::F16, 4) };
            let weights = ModelWeights::load(&checkpoint, &options).unwrap();
            let mut executor = weights.executor(options).unwrap();
            for chunks in [Chunks::Whole, Chunks::Random] {
                let what = format!("{name}, {pipeline_parallel} stages");
                check(&what, &mut *executor, &mut random, chunks, &tokens, &alone);
            }
        }
    }
}

/// Ranks that share weights add their parts in the order of the ranks. The bits differ from those of one rank, but
/// are always the same.
#[test]
fn logits_of_each_number_of_ranks_are_reproducible() {
    let mut random = Random::fresh();
    for name in MODELS {
        let checkpoint = Checkpoint::open(&folder(name)).unwrap();
        // Ranks meet twice per layer, which takes long if there are more ranks than cores. Two blocks of attention
        // are enough.
        let tokens = random.tokens(LENGTH / 2, checkpoint.config().vocabulary_size);
        let divisions = if name == MODELS[0] { &[2, 4][..] } else { &[2][..] };
        for &tensor_parallel in divisions {
            let options = |threads, pipeline_parallel| ExecutorOptions {
                tensor_parallel,
                pipeline_parallel,
                ..with(Isa::detect(), KvDtype::F16, threads)
            };
            let weights = ModelWeights::load(&checkpoint, &options(1, 1)).unwrap();
            let alone = alone(&mut *weights.executor(options(1, 1)).unwrap(), &tokens);
            for (threads, stages) in [(5, 1), (4, 2)] {
                let weights = ModelWeights::load(&checkpoint, &options(threads, stages)).unwrap();
                let mut executor = weights.executor(options(threads, stages)).unwrap();
                let what = format!("{name}, {tensor_parallel} ranks, {stages} stages, {threads} threads");
                check(&what, &mut *executor, &mut random, Chunks::Random, &tokens, &alone);
            }
        }
    }
}

#[test]
fn logits_of_every_weight_format_do_not_depend_on_the_batch() {
    let mut random = Random::fresh();
    let options = |threads| with(Isa::detect(), KvDtype::F16, threads);
    for dtype in DType::ALL {
        let checkpoint = Checkpoint::synthetic(ModelConfig::shape("tiny").unwrap(), dtype).unwrap();
        let weights = ModelWeights::load(&checkpoint, &options(2)).unwrap();
        let tokens = random.tokens(LENGTH, checkpoint.config().vocabulary_size);
        let alone = alone(&mut *weights.executor(options(1)).unwrap(), &tokens);
        for threads in [1, 3] {
            let mut executor = weights.executor(options(threads)).unwrap();
            for chunks in [Chunks::Whole, Chunks::Random] {
                let what = format!("{dtype}, {threads} threads");
                check(&what, &mut *executor, &mut random, chunks, &tokens, &alone);
            }
        }
    }
}
