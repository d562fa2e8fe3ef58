//! Compares divided models with the same models on one rank, and tests ranks that fail in the middle of a step.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::super::fixture::{MODELS, exact, expected, folder, load, options, relative_error, sequence};
use super::super::rank::attention_bytes;
use super::super::{CpuExecutor, ExecutorOptions};
use super::*;
use crate::batch::{BatchSequence, LogitsWanted};
use crate::checkpoint::Checkpoint;
use crate::communicator::Local;
use crate::gguf::writer::quantized_llama;
use crate::models::transformer::Transformer;

fn divided(tensor_parallel: usize, pipeline_parallel: usize) -> ExecutorOptions {
    ExecutorOptions { tensor_parallel, pipeline_parallel, ..options(Isa::detect()) }
}

fn weights(name: &str, options: &ExecutorOptions) -> ModelWeights {
    ModelWeights::load(&Checkpoint::open(&folder(name)).unwrap(), options).unwrap()
}

/// Returns all logits of a run with chunked prefills, mixed steps and batched decodes of three sequences.
fn run(executor: &mut dyn Executor, ids: &[u32]) -> Vec<Vec<f32>> {
    let reversed: Vec<u32> = ids.iter().rev().copied().collect();
    let other: Vec<u32> = ids.iter().map(|id| (id * 7 + 3) % 100).collect();
    let mut steps = vec![
        vec![
            sequence(&ids[..40], 0, 9, LogitsWanted::None),
            sequence(&reversed[..23], 0, 19, LogitsWanted::All),
        ],
        vec![
            sequence(&other[..33], 0, 29, LogitsWanted::Last),
            sequence(&ids[40..41], 40, 9, LogitsWanted::Last),
            sequence(&reversed[23..50], 23, 19, LogitsWanted::All),
        ],
    ];
    steps.extend((0..5).map(|step| {
        vec![
            sequence(&ids[41 + step..][..1], 41 + step, 9, LogitsWanted::Last),
            sequence(&reversed[50 + step..][..1], 50 + step, 19, LogitsWanted::Last),
            sequence(&other[33 + step..][..1], 33 + step, 29, LogitsWanted::Last),
        ]
    }));
    let mut rows = Vec::new();
    for sequences in steps {
        let batch = Batch { sequences };
        executor.forward(&batch).unwrap();
        rows.extend((0..batch.logit_rows()).map(|row| executor.logits(row).unwrap().to_vec()));
    }
    rows
}

fn largest_error(found: &[Vec<f32>], exact: &[Vec<f32>]) -> f32 {
    assert_eq!(found.len(), exact.len());
    found.iter().zip(exact).map(|(found, exact)| relative_error(found, exact)).fold(0.0, f32::max)
}

#[test]
fn every_division_of_every_model_gives_the_logits_of_one_rank() {
    for name in MODELS {
        let (ids, _) = expected(name);
        let whole = run(&mut load(name, exact(Isa::detect())).unwrap(), &ids);
        // Four ranks are more than the two KV heads, so each head is held twice.
        for (tensor, stages) in [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (2, 3), (4, 2)] {
            let options = ExecutorOptions { exact_weights: true, ..divided(tensor, stages) };
            let mut weights = weights(name, &options);
            // The costs lead to the maximum number of micro-batches, and to one.
            for cost in [Cost { fixed_s: 0.0, per_row_s: 1.0 }, Cost { fixed_s: 1.0, per_row_s: 0.0 }] {
                weights.cost = weights.cost.map(|_| cost);
                let mut executor = weights.executor(options.clone()).unwrap();
                let error = largest_error(&run(executor.as_mut(), &ids), &whole);
                assert!(error < 1e-4, "{name}, {tensor} × {stages}: {error}");
            }
        }
    }
}

#[test]
fn a_quantized_model_is_split_between_its_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    // The feed-forward width is three blocks, for two ranks.
    std::fs::write(&path, quantized_llama(96).build()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let ids: Vec<u32> = (0..97).map(|at| at * 5 % 256).collect();
    let mut context = options(Isa::detect());
    context.kv_tokens = Some(1024);
    let whole = run(&mut CpuExecutor::load(&checkpoint, context.clone()).unwrap(), &ids);
    for (tensor_parallel, pipeline_parallel) in [(2, 1), (1, 2), (2, 2)] {
        let options = ExecutorOptions { tensor_parallel, pipeline_parallel, ..context.clone() };
        let weights = ModelWeights::load(&checkpoint, &options).unwrap();
        let error = largest_error(&run(weights.executor(options).unwrap().as_mut(), &ids), &whole);
        assert!(error < 1e-4, "{tensor_parallel} × {pipeline_parallel}: {error}");
    }
}

#[test]
fn tokens_of_experts_are_counted_once_however_a_model_is_divided() {
    // The first layer of the second model has no experts.
    for (name, first_layer) in [("qwen3-moe", 0), ("deepseek-v3", 1)] {
        let (ids, _) = expected(name);
        let mut whole = load(name, options(Isa::detect())).unwrap();
        run(&mut whole, &ids);
        let config = Checkpoint::open(&folder(name)).unwrap().config().clone();
        let used = config.style.experts.as_ref().unwrap().used;
        let counted = whole.expert_load().unwrap().layers();
        let layers: Vec<usize> = counted.iter().map(|load| load.layer).collect();
        assert_eq!(layers, (first_layer..config.layer_count).collect::<Vec<_>>(), "{name}");
        // The steps of `run` have 139 tokens.
        for load in &counted {
            assert_eq!(load.tokens.iter().sum::<u64>(), 139 * used as u64, "{name}: {load:?}");
            assert!(load.peak_ratio() >= Some(1.0), "{name}: {load:?}");
        }
        for (tensor, stages) in [(2, 1), (1, 2), (2, 3)] {
            let options = divided(tensor, stages);
            let mut executor = weights(name, &options).executor(options).unwrap();
            run(executor.as_mut(), &ids);
            let load = executor.expert_load().unwrap().layers();
            assert_eq!(load, counted, "{name}, {tensor} × {stages}");
        }
    }
    let dense = load("llama-gqa", options(Isa::detect())).unwrap();
    assert!(dense.expert_load().is_none() && dense.rank_times().is_none());
}

#[test]
fn the_time_of_each_rank_is_measured() {
    let (ids, _) = expected("llama-gqa");
    for (tensor, stages) in [(2, 1), (1, 2), (2, 2)] {
        let options = divided(tensor, stages);
        let mut executor = weights("llama-gqa", &options).executor(options).unwrap();
        let before = Instant::now();
        run(executor.as_mut(), &ids);
        let took = before.elapsed();
        let times = executor.rank_times().unwrap().of_ranks();
        assert_eq!(times.len(), tensor * stages);
        for time in &times {
            // There are seven steps in `run`.
            assert!(time.steps == 7 && time.computing > Duration::ZERO, "{tensor} × {stages}: {times:?}");
            assert!(time.computing + time.waiting <= took, "{tensor} × {stages}: {times:?} in {took:?}");
        }
        // Whoever comes first to a sum, or has nothing to receive yet, waits.
        assert!(times.iter().any(|time| time.waiting > Duration::ZERO), "{tensor} × {stages}: {times:?}");
    }
}

#[test]
fn the_plan_is_the_sum_over_the_ranks() {
    for name in ["llama-gqa", "llama-tied-rope3"] {
        let whole = *load(name, options(Isa::detect())).unwrap().plan();
        for (tensor, stages) in [(2, 1), (4, 1), (1, 3), (2, 3)] {
            let options = divided(tensor, stages);
            let executor = weights(name, &options).executor(options).unwrap();
            let plan = *executor.plan();
            let ranks = executor.ranks();
            let places: Vec<_> = ranks.iter().map(|rank| (rank.stage, rank.shard)).collect();
            let all = (0..stages).flat_map(|stage| (0..tensor).map(move |shard| (stage, shard)));
            assert_eq!(places, all.collect::<Vec<_>>());
            let of_ranks = ranks.iter().fold(MemoryPlan::default(), |sum, rank| sum.plus(&rank.memory));
            assert_eq!(
                (of_ranks.weight_bytes, of_ranks.kv_bytes),
                (plan.weight_bytes, plan.kv_bytes),
                "{name}, {tensor} × {stages}: {ranks:?}"
            );
            assert!(of_ranks.activation_bytes < plan.activation_bytes, "what ranks share is nobody's");
            assert!(ranks.iter().all(|rank| rank.memory.weight_bytes > 0 && rank.device == "cpu"));
            // There are 3 layers with rows of width 64 in f32. Each rank has the norms. Gate and up are padded to
            // whole tiles of 16 rows. Four ranks hold each of the two KV heads of size 16 twice.
            let norms = (tensor - 1) * (2 * 3 + 1) * 64 * 4;
            let tiles = 3 * 2 * ((176 / tensor).next_multiple_of(16) * tensor - 176) * 64 * 4;
            let keys_and_values = if tensor == 4 { 3 * 2 * (2 * 16) * 64 * 4 } else { 0 };
            assert_eq!(plan.weight_bytes, whole.weight_bytes + (norms + tiles + keys_and_values) as u64);
            assert_eq!(plan.kv_bytes, whole.kv_bytes * if tensor == 4 { 2 } else { 1 });
            assert!(plan.activation_bytes > whole.activation_bytes, "{plan}");
        }
    }
}

#[test]
fn the_largest_step_stays_within_the_plan() {
    for (tensor, stages) in [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)] {
        let options = ExecutorOptions { max_batch_tokens: 96, max_logit_rows: 96, ..divided(tensor, stages) };
        let weights = weights("qwen3-qknorm", &options);
        let (_, links) = Local::connect(tensor, stages, options.rank_deadline);
        let limits = limits(&weights.config, &options).unwrap();
        let rank_options = RankOptions {
            isa: Isa::detect(),
            threads: 1,
            affinity: options.affinity,
            kv: options.kv,
            page_count: limits.page_count,
            windows: None,
        };
        let batch = decode(&(0..96).collect::<Vec<u32>>());
        let batch = Batch {
            sequences: vec![BatchSequence { logits: LogitsWanted::All, ..batch.sequences[0].clone() }],
        };
        let leader = weights.parts.len() - tensor;
        std::thread::scope(|scope| {
            let start = |(number, (model, links)): (usize, (&Arc<Transformer>, Links<Local>))| {
                let (batch, model, options) = (&batch, model.clone(), &options);
                scope.spawn(move || {
                    let mut rank = Rank::new(model.clone(), rank_options, links).unwrap();
                    let mut logits = vec![0.0; 96 * 320];
                    rank.step(batch, (number == leader).then_some(&mut logits[..])).unwrap();
                    let plan = memory_plan(&model, 1, &limits, options).unwrap();
                    let used = 4 * rank.workspace.capacity() as u64;
                    assert!(used <= plan.activation_bytes, "rank {number} uses {used}, planned {plan}");
                    let of_rows = plan.activation_bytes - attention_bytes(&model, 1, &limits);
                    assert!(2 * used > of_rows, "rank {number} uses only {used} of {of_rows}");
                    rank
                })
            };
            let threads: Vec<_> = weights.parts.iter().zip(links).enumerate().map(start).collect();
            // No rank terminates before all are done.
            let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            drop(ended);
        });
    }
}

#[test]
fn replicas_of_a_divided_model_share_its_weights() {
    let (ids, _) = expected("qwen2-bias");
    let whole = run(&mut load("qwen2-bias", options(Isa::detect())).unwrap(), &ids);
    let options = divided(2, 2);
    let weights = weights("qwen2-bias", &options);
    let mut replicas: Vec<_> = (0..2).map(|_| weights.executor(options.clone()).unwrap()).collect();
    for part in &weights.parts {
        assert_eq!(Arc::strong_count(part), 3, "the loaded weights and each replica hold one reference");
    }
    for replica in &mut replicas {
        assert!(largest_error(&run(replica.as_mut(), &ids), &whole) < 1e-4);
    }
    let other = ExecutorOptions { tensor_parallel: 1, ..options };
    let error = weights.executor(other).err().unwrap().to_string();
    assert!(error.starts_with("tensor_parallel: is 1, but the weights were loaded for 2"), "{error}");
}

/// The action of a rank in place of its next collective.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Misdeed {
    Panic,
    /// Returns an error.
    Fail,
    /// Reduces fewer values than the other ranks.
    Disagree,
    /// Omits a call that the other ranks make.
    Skip,
    /// Does nothing until it is released.
    Stall,
}

/// State that the communicators of all ranks share with the test.
struct Plot {
    misdeed: Misdeed,
    rank: usize,
    armed: AtomicBool,
    /// Number of calls that the rank makes until it misbehaves.
    calls: AtomicUsize,
    release: Mutex<Receiver<()>>,
}

struct Faulty {
    inner: Local,
    number: usize,
    plot: Arc<Plot>,
}

impl Faulty {
    fn acts(&self) -> Option<Misdeed> {
        let Plot { misdeed, rank, armed, calls, .. } = &*self.plot;
        let due =
            self.number == *rank && armed.load(Ordering::SeqCst) && calls.fetch_sub(1, Ordering::SeqCst) == 1;
        if due {
            armed.store(false, Ordering::SeqCst);
        }
        due.then_some(*misdeed)
    }
}

impl Communicator for Faulty {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), ModelError> {
        match self.acts() {
            None => self.inner.all_reduce(values),
            Some(Misdeed::Panic) => panic!("on purpose"),
            Some(Misdeed::Fail) => Err(ModelError::Batch { problem: "on purpose".into() }),
            Some(Misdeed::Disagree) => self.inner.all_reduce(&mut values[1..]),
            Some(Misdeed::Skip) => Ok(()),
            Some(Misdeed::Stall) => {
                self.plot.release.lock().unwrap().recv().unwrap();
                self.inner.all_reduce(values)
            }
        }
    }

    fn all_gather(
        &mut self,
        part: &[f32],
        total: usize,
        see: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        self.inner.all_gather(part, total, see)
    }

    fn send(&mut self, to: usize, values: &[f32]) -> Result<(), ModelError> {
        self.inner.send(to, values)
    }

    fn receive(&mut self, from: usize, values: &mut [f32]) -> Result<(), ModelError> {
        self.inner.receive(from, values)
    }
}

/// Returns a model on 2 × 2 ranks, one of which misbehaves once in the step after it is armed.
fn plotted(misdeed: Misdeed, rank: usize) -> (ShardedExecutor<Faulty>, Arc<Plot>, Sender<()>) {
    let (let_go, release) = channel();
    let plot = Arc::new(Plot {
        misdeed,
        rank,
        armed: AtomicBool::new(false),
        calls: AtomicUsize::new(2),
        release: Mutex::new(release),
    });
    let deadline = match misdeed {
        Misdeed::Stall | Misdeed::Skip => Duration::from_millis(500),
        // Only a failing test waits this long.
        _ => Duration::from_secs(60),
    };
    let shared = plot.clone();
    let connect = move || {
        let (world, links) = Local::connect(2, 2, deadline);
        let wrap = |(number, links): (usize, Links<Local>)| Links {
            tensor: Faulty { inner: links.tensor, number, plot: shared.clone() },
            pipeline: Faulty { inner: links.pipeline, number, plot: shared.clone() },
        };
        (world, links.into_iter().enumerate().map(wrap).collect())
    };
    let options = divided(2, 2);
    let executor = ShardedExecutor::new(&weights("llama-gqa", &options), options, connect).unwrap();
    (executor, plot, let_go)
}

fn decode(ids: &[u32]) -> Batch {
    Batch { sequences: vec![sequence(ids, 0, 9, LogitsWanted::Last)] }
}

#[test]
fn a_failed_rank_fails_the_step_and_the_next_step_is_correct() {
    let (ids, exact) = expected("llama-gqa");
    let exact = &exact[exact.len() - exact.len() / ids.len()..];
    for misdeed in [Misdeed::Panic, Misdeed::Fail, Misdeed::Disagree, Misdeed::Skip] {
        // The leader is rank 2.
        for rank in 0..4 {
            let (mut executor, plot, _) = plotted(misdeed, rank);
            executor.forward(&decode(&ids)).unwrap();
            plot.armed.store(true, Ordering::SeqCst);
            let error = executor.forward(&decode(&ids)).unwrap_err();
            assert!(matches!(error, ModelError::Rank { .. }), "{misdeed:?} of {rank}: {error}");
            assert!(executor.logits(0).is_err(), "a failed step must not have logits");
            if matches!(misdeed, Misdeed::Panic | Misdeed::Fail) {
                assert!(error.to_string().contains("on purpose"), "{error}");
                assert!(error.to_string().starts_with(&format!("rank {rank} failed")), "{error}");
            }
            executor.forward(&decode(&ids)).unwrap();
            assert!(relative_error(executor.logits(0).unwrap(), exact) < 1e-3, "{misdeed:?} of {rank}");
        }
    }
}

#[test]
fn a_stalled_rank_is_an_error_until_it_returns() {
    let (ids, exact) = expected("llama-gqa");
    let exact = &exact[exact.len() - exact.len() / ids.len()..];
    for rank in [0, 1, 3] {
        let (mut executor, plot, let_go) = plotted(Misdeed::Stall, rank);
        plot.armed.store(true, Ordering::SeqCst);
        for _ in 0..3 {
            let error = executor.forward(&decode(&ids)).unwrap_err();
            let ModelError::Rank { rank: found, fault: RankFault::TimedOut { .. } } = error else {
                panic!("{error}")
            };
            assert_eq!(found, rank);
        }
        let_go.send(()).unwrap();
        while executor.forward(&decode(&ids)).is_err() {
            std::thread::yield_now();
        }
        assert!(relative_error(executor.logits(0).unwrap(), exact) < 1e-3);
    }
}

#[test]
fn dropping_an_executor_does_not_wait_for_a_stuck_rank() {
    let (ids, _) = expected("llama-gqa");
    let (mut executor, plot, let_go) = plotted(Misdeed::Stall, 0);
    plot.armed.store(true, Ordering::SeqCst);
    executor.forward(&decode(&ids)).unwrap_err();
    drop(executor);
    let_go.send(()).unwrap();
}
