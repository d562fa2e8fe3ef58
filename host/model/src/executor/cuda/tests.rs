//! Compares tiny models on emulated devices, whose kernels run on the CPU, with exact logits and with the CPU
//! executor. Where there is a real device, the tests run on it as well.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use skep_kernels::cuda::Activation;
use skep_kernels::cuda::compile::Compiler;
use skep_kernels::cuda::device::{Device, Emulation};
use skep_kernels::gpu;

use super::*;
use crate::batch::{LogitsWanted, PAGE_TOKENS};
use crate::checkpoint::Checkpoint;
use crate::executor::fixture::{expected, folder, options, relative_error, sequence};
use crate::executor::{CpuExecutor, ExecutorOptions, KvDtype, Ordinals};
use crate::sampling::{SampleRow, Sampling, ScoreRow};

#[path = "adjustment_tests.rs"]
mod adjustments;
#[path = "processor_tests.rs"]
mod beside_processor;
#[path = "deterministic_tests.rs"]
mod deterministic;
#[path = "fp8_tests.rs"]
mod fp8;
#[path = "launching_tests.rs"]
mod launching;
#[path = "loading_tests.rs"]
mod loading;
#[path = "partial_step_tests.rs"]
mod partial_step;
#[path = "warm_up_tests.rs"]
mod preparation;
#[path = "quantized_tests.rs"]
mod quantized;
#[path = "real_device_tests.rs"]
mod real_device;
#[path = "seen_tokens_tests.rs"]
mod seen_tokens;
#[path = "shared_prefix_tests.rs"]
mod shared_prefix;
#[path = "sums_tests.rs"]
mod sums_of_ranks;

/// Models whose head size the kernels support.
pub(super) const MODELS: [&str; 4] = ["llama-gqa", "llama-tied-rope3", "qwen2-bias", "mistral-window"];
/// Maximum error of activations with eleven bits, as a fraction of the largest logit.
pub(super) const BOUND: f32 = 1e-2;
/// Maximum error of activations with eight bits.
const BF16_BOUND: f32 = 16e-2;

thread_local! {
    /// Whether the tests on this thread run on a real device rather than on an emulated one.
    static ON_A_DEVICE: Cell<bool> = const { Cell::new(false) };
}

pub(super) fn cuda_options() -> ExecutorOptions {
    ExecutorOptions {
        kv: KvDtype::F16,
        activations: Some(Activation::F16),
        max_batch_tokens: 64,
        max_sequences: 6,
        ..options(Isa::detect())
    }
}

fn model<'a>(
    checkpoint: &'a Checkpoint,
    options: ExecutorOptions,
    devices: &str,
    replicas: usize,
) -> Result<CudaModel<'a>, ModelError> {
    let on_a_device = ON_A_DEVICE.get();
    let open = move |ordinal| match on_a_device {
        true => Ok(Device::open(ordinal, &compiler())?),
        false => Ok(Device::emulated(emulation(64 << 20, 3))),
    };
    let devices = match ON_A_DEVICE.get() {
        true => real_devices(options.tensor_parallel * options.pipeline_parallel),
        false => devices.parse::<Ordinals>().unwrap(),
    };
    Ok(CudaModel::new(checkpoint, options, devices, replicas, Box::new(open))?.without_warm_up())
}

fn emulation(memory_bytes: u64, multiprocessors: u32) -> Emulation {
    Emulation { memory_bytes, multiprocessors, ..Emulation::default() }
}

/// Returns as many of the devices of this machine as the ranks can share evenly.
fn real_devices(ranks: usize) -> Ordinals {
    let there = gpu::probe().map_or(1, |devices| devices.len());
    let count = (1..=ranks.min(there)).rev().find(|count| ranks.is_multiple_of(*count)).unwrap_or(1);
    Ordinals::first(count).expect("at least one device")
}

/// Returns the compiler that all tests share.
fn compiler() -> Arc<Compiler> {
    static COMPILER: OnceLock<Arc<Compiler>> = OnceLock::new();
    let cache = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/test-cubins");
    COMPILER.get_or_init(|| Arc::new(Compiler::when_needed(None, Some(cache)))).clone()
}

pub(super) fn open(name: &str) -> Checkpoint {
    Checkpoint::open(&folder(name)).unwrap()
}

pub(super) fn load(name: &str, options: ExecutorOptions, devices: &str) -> CudaExecutor {
    model(&open(name), options, devices, 1).unwrap().executor(0).unwrap()
}

/// Returns the error of a sequence's logits when it is split into steps of `chunk` tokens.
fn error_in_chunks(executor: &mut CudaExecutor, name: &str, chunk: usize) -> f32 {
    let (ids, exact) = expected(name);
    let width = exact.len() / ids.len();
    let mut worst = 0f32;
    for (index, tokens) in ids.chunks(chunk).enumerate() {
        let start = index * chunk;
        let rows = sequence(tokens, start, 9, LogitsWanted::All);
        executor.forward(&Batch { sequences: vec![rows] }).unwrap();
        for row in 0..tokens.len() {
            let exact = &exact[(start + row) * width..][..width];
            worst = worst.max(relative_error(executor.logits(row).unwrap(), exact));
        }
    }
    worst
}

#[test]
fn every_architecture_and_chunking_gives_the_exact_logits_up_to_rounding() {
    for name in MODELS {
        let mut executor = load(name, cuda_options(), "0");
        for chunk in [64, 23, 3, 1] {
            let error = error_in_chunks(&mut executor, name, chunk);
            assert!(error < BOUND, "{name}, chunks of {chunk}: {error}");
        }
        assert!(!executor.recordings.made.is_empty(), "single tokens must be replayed");
        let options = ExecutorOptions { activations: None, ..cuda_options() };
        let error = error_in_chunks(&mut load(name, options, "0"), name, 23);
        assert!(error < BF16_BOUND, "{name} in bf16: {error}");
    }
}

#[test]
fn ranks_that_share_layers_and_stages_give_the_same_logits() {
    for (tensor_parallel, pipeline_parallel, devices) in [(2, 1, "0,1"), (1, 3, "0"), (2, 2, "0,1,2,3")] {
        let is_last = tensor_parallel * pipeline_parallel == 4;
        for name in ["llama-gqa", "qwen2-bias"].into_iter().take(if is_last { 1 } else { 2 }) {
            let options = ExecutorOptions { tensor_parallel, pipeline_parallel, ..cuda_options() };
            let mut executor = load(name, options, devices);
            for chunk in [64, 1] {
                let error = error_in_chunks(&mut executor, name, chunk);
                assert!(
                    error < BOUND,
                    "{name} on {tensor_parallel} × {pipeline_parallel}, chunks of {chunk}: {error}"
                );
            }
        }
    }
}

#[test]
fn a_sequence_gets_the_same_logits_in_any_batch() {
    let name = "mistral-window";
    let (ids, exact) = expected(name);
    let width = exact.len() / ids.len();
    let mut executor = load(name, cuda_options(), "0");
    let reversed: Vec<u32> = ids.iter().rev().copied().collect();
    executor.forward(&Batch { sequences: vec![sequence(&ids[..50], 0, 9, LogitsWanted::None)] }).unwrap();
    let close = |executor: &CudaExecutor, row: usize, token: usize| {
        let error = relative_error(executor.logits(row).unwrap(), &exact[token * width..][..width]);
        assert!(error < BOUND, "token {token}: {error}");
    };
    // A decode between two prefills, one of which requests no logits.
    let mixed = vec![
        sequence(&reversed[..33], 0, 19, LogitsWanted::Last),
        sequence(&ids[50..51], 50, 9, LogitsWanted::Last),
        sequence(&reversed[..20], 0, 29, LogitsWanted::None),
    ];
    executor.forward(&Batch { sequences: mixed }).unwrap();
    close(&executor, 1, 50);
    // Only decodes, more than a power of two of them.
    let decodes = vec![
        sequence(&reversed[33..34], 33, 19, LogitsWanted::Last),
        sequence(&reversed[20..21], 20, 29, LogitsWanted::Last),
        sequence(&ids[51..52], 51, 9, LogitsWanted::Last),
    ];
    executor.forward(&Batch { sequences: decodes }).unwrap();
    close(&executor, 2, 51);
    let rest = vec![sequence(&ids[52..], 52, 9, LogitsWanted::All)];
    executor.forward(&Batch { sequences: rest }).unwrap();
    (52..ids.len()).for_each(|token| close(&executor, token - 52, token));
}

#[test]
fn tokens_are_drawn_as_on_the_cpu() {
    let (ids, _) = expected("llama-gqa");
    let mut executor = load("llama-gqa", cuda_options(), "0");
    let batch = Batch { sequences: vec![sequence(&ids[..20], 0, 9, LogitsWanted::Tail(4))] };
    executor.forward(&batch).unwrap();
    let samplings = [
        Sampling { temperature: 0.0, ..Sampling::default() },
        Sampling { temperature: 0.8, top_k: 20, top_p: 0.9, ..Sampling::default() },
        Sampling { min_p: 0.1, frequency_penalty: 1.0, presence_penalty: 0.5, ..Sampling::default() },
        Sampling { repetition_penalty: 1.8, logit_bias: vec![(3, 4.0), (5, -100.0)], ..Sampling::default() },
    ];
    let mask: Vec<u32> = (0..10).map(|word| 0x5555_1234 << (word % 3)).collect();
    for step in 0..8 {
        let rows: Vec<LogitRow<'_>> = samplings
            .iter()
            .enumerate()
            .map(|(row, sampling)| {
                LogitRow::Sample(SampleRow {
                    row,
                    sampling,
                    seed: 11,
                    step,
                    mask: (row % 2 == 1).then_some(&mask[..]),
                    banned: &[4, 8],
                    prompt: &ids[..10],
                    output: &ids[10..20],
                    seen: None,
                    occurrences: None,
                    top_logprobs: None,
                })
            })
            .collect();
        let drawn = executor.sample(&rows).unwrap();
        for (row, drawn) in rows.iter().zip(drawn) {
            let expected = draw(Isa::detect(), executor.logits(row.row()).unwrap(), row).unwrap();
            assert_eq!(drawn, expected, "{row:?}");
        }
    }
    let score = LogitRow::Score(ScoreRow { row: 2, target: 7, top: 3 });
    let scored = executor.sample(std::slice::from_ref(&score)).unwrap();
    let expected = draw(Isa::detect(), executor.logits(2).unwrap(), &score).unwrap();
    assert_eq!(scored, [expected]);
    let greedy = &samplings[0];
    let none = SampleRow { mask: Some(&[]), ..SampleRow::plain(0, greedy) };
    let error = executor.sample(&[LogitRow::Sample(none)]).unwrap_err().to_string();
    assert!(error.contains("leave no token"), "{error}");
    assert!(
        executor.sample(&[LogitRow::Sample(SampleRow { row: 4, ..SampleRow::plain(0, greedy) })]).is_err()
    );
}

#[test]
fn greedy_tokens_match_the_cpu() {
    for name in MODELS {
        let checkpoint = open(name);
        let mut cuda = model(&checkpoint, cuda_options(), "0", 1).unwrap().executor(0).unwrap();
        let cpu_options = ExecutorOptions { kv: KvDtype::F32, ..cuda_options() };
        let mut cpu = CpuExecutor::load(&checkpoint, cpu_options).unwrap();
        let (ids, _) = expected(name);
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        let mut next = ids[..8].to_vec();
        let mut start = 0;
        for _ in 0..12 {
            let batch = Batch { sequences: vec![sequence(&next, start, 9, LogitsWanted::Last)] };
            start += next.len();
            cuda.forward(&batch).unwrap();
            cpu.forward(&batch).unwrap();
            let row = LogitRow::Sample(SampleRow::plain(0, &greedy));
            let found = cuda.sample(std::slice::from_ref(&row)).unwrap()[0].token;
            let logits = cpu.logits(0).unwrap();
            let largest = logits.iter().fold(f32::MIN, |a, b| a.max(*b));
            let scale = logits.iter().fold(0f32, |a, b| a.max(b.abs()));
            // The token may differ only if the two are equal after rounding.
            assert!(largest - logits[found as usize] < BOUND * scale, "{name} at {start}");
            next = vec![cpu.sample(&[row]).unwrap()[0].token];
        }
    }
}

#[test]
fn a_step_started_before_its_tokens_are_known_equals_the_next_step() {
    let (ids, _) = expected("llama-gqa");
    for (tensor_parallel, pipeline_parallel) in [(1, 1), (2, 2)] {
        let options = ExecutorOptions { tensor_parallel, pipeline_parallel, ..cuda_options() };
        let mut plain = load("llama-gqa", options.clone(), "0");
        let mut ahead = load("llama-gqa", options, "0");
        let starts = [8, 5];
        let prompts = starts.map(|start| &ids[..start]);
        let first = |executor: &mut CudaExecutor| {
            let rows = [0, 1].map(|at| sequence(prompts[at], 0, 9 + 10 * at as u32, LogitsWanted::Last));
            executor.forward(&Batch { sequences: rows.to_vec() }).unwrap();
        };
        first(&mut plain);
        first(&mut ahead);
        let sampling = Sampling { temperature: 0.7, ..Sampling::default() };
        let rows = |step: u64| {
            [0, 1].map(|row| {
                LogitRow::Sample(SampleRow { row, seed: row as u64, step, ..SampleRow::plain(0, &sampling) })
            })
        };
        for step in 0..8usize {
            // The second sequence ends midway, so the step that was started for both is discarded.
            let after = |tokens: [u32; 2], count: usize| {
                let rows = (0..count).map(|at| {
                    sequence(&tokens[at..=at], starts[at] + step, 9 + 10 * at as u32, LogitsWanted::Last)
                });
                Batch { sequences: rows.collect() }
            };
            let count = if step < 4 { 2 } else { 1 };
            let asked = &rows(step as u64)[..count];
            let next = StepAhead { batch: after([0, 0], count), drawn: (0..count).collect() };
            let DrawnAhead { outputs: found, has_begun } = ahead.sample_and_begin(asked, &next).unwrap();
            assert_eq!(found, plain.sample(asked).unwrap(), "step {step}");
            assert!(has_begun, "the next step must have been started");
            let tokens = [found[0].token, found.get(1).map_or(0, |found| found.token)];
            let next = after(tokens, if step < 3 { 2 } else { 1 });
            plain.forward(&next).unwrap();
            ahead.forward(&next).unwrap();
            for row in 0..next.sequences.len() {
                let (found, expected) = (ahead.logits(row).unwrap(), plain.logits(row).unwrap());
                assert!(found == expected, "step {step}, row {row}");
            }
        }
    }
}

#[test]
fn a_row_without_a_token_keeps_the_other_rows_after_the_next_step_has_started() {
    let (ids, _) = expected("llama-gqa");
    let mut executor = load("llama-gqa", cuda_options(), "0");
    let decode = |tokens: &[u32], start: usize| {
        let rows = [0, 1].map(|at| sequence(&tokens[at..=at], start, 9 + 10 * at as u32, LogitsWanted::Last));
        Batch { sequences: rows.to_vec() }
    };
    executor.forward(&decode(&ids, 0)).unwrap();
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let good = LogitRow::Sample(SampleRow { row: 1, ..SampleRow::plain(0, &greedy) });
    let expected = executor.sample(std::slice::from_ref(&good)).unwrap();
    let none = LogitRow::Sample(SampleRow { mask: Some(&[]), ..SampleRow::plain(0, &greedy) });
    let next = StepAhead { batch: decode(&[0, 0], 1), drawn: vec![0, 1] };
    let error = executor.sample_and_begin(&[none, good.clone()], &next).unwrap_err();
    assert!(error.to_string().contains("leave no token"), "{error}");
    assert_eq!(executor.sample(&[good]).unwrap(), expected);
}

#[test]
fn a_stalled_rank_fails_the_step_and_the_next_step_succeeds() {
    let name = "llama-gqa";
    let mut executor = load(name, ExecutorOptions { tensor_parallel: 2, ..cuda_options() }, "0");
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let (ids, exact) = expected(name);
    let max_polls = |executor: &mut CudaExecutor, us: u64| {
        executor.ranks_mut().for_each(|rank| rank.shape.rank_deadline_us = us);
    };
    let usual = executor.leader().shape.rank_deadline_us;
    let batch = |tokens: usize| Batch { sequences: vec![sequence(&ids[..tokens], 0, 9, LogitsWanted::Last)] };
    // No rank waits at all, so the first to arrive is alone.
    max_polls(&mut executor, 0);
    executor.forward(&batch(20)).unwrap();
    let error = executor.sample(&[LogitRow::Sample(SampleRow::plain(0, &greedy))]).unwrap_err();
    assert!(matches!(error, ModelError::Rank { fault: RankFault::TimedOut { .. }, .. }), "{error}");
    max_polls(&mut executor, usual);
    executor.forward(&batch(21)).unwrap();
    executor.sample(&[LogitRow::Sample(SampleRow::plain(0, &greedy))]).unwrap();
    let width = exact.len() / ids.len();
    let error = relative_error(executor.logits(0).unwrap(), &exact[20 * width..][..width]);
    assert!(error < BOUND, "{error}");
}

#[test]
fn replicas_share_the_weights_of_a_device_and_divide_the_remaining_memory() {
    let checkpoint = open("llama-gqa");
    let options = ExecutorOptions { kv_tokens: None, ..cuda_options() };
    // Both replicas get the same device, as if it were opened twice.
    let device = Device::emulated(emulation(32 << 20, 2));
    let opened = Box::new(|_| Ok(device.clone()));
    let model = CudaModel::new(&checkpoint, options, Ordinals::FIRST, 2, opened).unwrap();
    let mut model = model.without_warm_up();
    let mut executors = [model.executor(0).unwrap(), model.executor(1).unwrap()];
    let buffers = executors.each_ref().map(|executor| executor.leader().weights.buffer.address());
    assert_eq!(buffers[0], buffers[1]);
    let [first, second] = executors.each_ref().map(|executor| executor.plan().kv_bytes);
    assert!(first.abs_diff(second) * 10 < first, "{first} and {second}");
    assert!(first + second > 16 << 20, "most of the memory must become pages: {first}");
    let memory = device.memory().unwrap();
    assert!(memory.free >= memory.total / 200, "some memory must stay free: {memory:?}");
    for executor in &mut executors {
        assert!(error_in_chunks(executor, "llama-gqa", 64) < BOUND);
        let plan = executor.plan();
        assert!(plan.weight_bytes > 0 && plan.activation_bytes > 0 && plan.graph_bytes > 0, "{plan}");
    }
}

#[test]
fn memory_that_others_have_or_get_later_is_left_to_them_and_a_refusal_has_the_numbers() {
    const OTHERS: u64 = 16 << 20;
    let checkpoint = open("llama-gqa");
    let device = Device::emulated(emulation(64 << 20, 3));
    let start = |kv_tokens: Option<usize>, reserved_bytes: u64| {
        let options = ExecutorOptions { kv_tokens, reserved_bytes, ..cuda_options() };
        let shared = device.clone();
        let opened = Box::new(move |_| Ok(shared.clone()));
        let model = CudaModel::new(&checkpoint, options, Ordinals::FIRST, 1, opened).unwrap();
        model.without_warm_up().executor(0)
    };
    let pages = |reserved_bytes: u64| {
        let executor = start(None, reserved_bytes).unwrap();
        let pages = executor.limits().page_count as u64;
        (pages, executor.plan().kv_bytes / (pages + 1))
    };
    let (alone, page_bytes) = pages(0);
    let is_smaller_by_others = |pages: u64| ((alone - pages) * page_bytes).abs_diff(OTHERS) <= page_bytes;
    assert!(is_smaller_by_others(pages(OTHERS).0), "a model that is loaded later gets its memory");
    let other = device.zeroed(OTHERS as usize).unwrap();
    assert!(is_smaller_by_others(pages(0).0), "a model that is loaded keeps its memory");

    // Nearly all of the pages.
    let all = alone as usize * PAGE_TOKENS / 100 * 99;
    let error = start(Some(all), OTHERS).err().expect("it fits only alone").to_string();
    assert!(error.contains(&format!("kv_tokens: {all} tokens do not fit")), "{error}");
    assert!(error.contains("cuda:0 has 64.0 MiB, of which 16."), "{error}");
    assert!(error.contains("16.0 MiB are left to models that are loaded later"), "{error}");
    let error = start(None, 64 << 20).err().expect("nothing is left").to_string();
    assert!(error.contains("device: ") && error.contains("64.0 MiB are left to models"), "{error}");
    drop(other);
    start(Some(all), 0).unwrap();
}

#[test]
fn rejects_what_a_device_cannot_run_or_hold_before_the_first_step() {
    let refused = |name: &str, options, devices: &str, replicas| -> String {
        let checkpoint = open(name);
        let made = model(&checkpoint, options, devices, replicas).and_then(|mut model| model.executor(0));
        made.err().expect("the model must be rejected").to_string()
    };
    let base = cuda_options();
    let error = refused("qwen3-qknorm", base.clone(), "0", 1);
    assert!(error.contains("head_size") && error.contains("24"), "{error}");
    let error = refused("llama-gqa", ExecutorOptions { kv: KvDtype::I8, ..base.clone() }, "0", 1);
    assert!(error.contains("kv") && error.contains("16 bits"), "{error}");
    let error = refused("llama-gqa", ExecutorOptions { kv_tokens: Some(1 << 24), ..base.clone() }, "0", 1);
    assert!(error.contains("kv_tokens") && error.contains("room for"), "{error}");
    let error = refused("llama-gqa", base.clone(), "0,1", 1);
    assert!(error.contains("2 devices") && error.contains("raise replicas"), "{error}");
    let error = refused("llama-gqa", ExecutorOptions { tensor_parallel: 3, ..base.clone() }, "0", 1);
    assert!(error.contains("possible values: 1, 2, 4"), "{error}");
    let error = refused("llama-gqa", ExecutorOptions { pipeline_parallel: 4, ..base.clone() }, "0", 1);
    assert!(error.contains("3 layers"), "{error}");
}

#[test]
fn rejects_batches_that_do_not_fit_and_stays_usable() {
    let mut executor = load("llama-gqa", cuda_options(), "0");
    let good = sequence(&[5, 6, 7], 0, 9, LogitsWanted::Last);
    let mut bad = good.clone();
    bad.pages[0] = crate::batch::PageId(32);
    assert!(executor.forward(&Batch { sequences: vec![bad] }).unwrap_err().to_string().contains("page"));
    assert!(executor.logits(0).is_err());
    executor.forward(&Batch { sequences: vec![good] }).unwrap();
    assert!(executor.logits(0).is_ok() && executor.logits(1).is_err());
    executor.forward(&Batch::default()).unwrap();
    assert!(executor.logits(0).is_err());
}

#[test]
fn weights_keep_the_format_of_their_file_or_become_activations() {
    let options = ExecutorOptions { activations: None, ..cuda_options() };
    let executor = load("llama-gqa", options, "0");
    let layout = &executor.leader().weights.layout;
    assert_eq!(layout.activation, Activation::Bf16);
    // Queries, keys and values are one matrix, and so are gate and up.
    assert!(layout.layers.iter().all(|layer| layer.qkv.len() == 1 && layer.gate_up.len() == 1));
}

#[test]
fn plans_on_devices_are_those_of_the_executors() {
    for name in MODELS {
        let checkpoint = open(name);
        for (tensor_parallel, pipeline_parallel) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
            let options = ExecutorOptions { tensor_parallel, pipeline_parallel, ..cuda_options() };
            // Every rank has an emulated device of its own.
            let devices = ["0", "0,1", "", "0,1,2,3"][tensor_parallel * pipeline_parallel - 1];
            let executor = model(&checkpoint, options.clone(), devices, 1).unwrap().executor(0).unwrap();
            let pages = executor.limits().page_count as u64;
            let mut planned = MemoryPlan::default();
            for stage in 0..pipeline_parallel {
                for rank in 0..tensor_parallel {
                    let options = estimate::device_options(options.clone());
                    let rank =
                        estimate::rank_plan(&checkpoint, &options, [stage, rank], 64 << 20, 3).unwrap();
                    planned.weight_bytes += rank.memory.weight_bytes;
                    planned.activation_bytes += rank.memory.activation_bytes;
                    planned.graph_bytes += rank.memory.graph_bytes;
                    planned.kv_bytes += (pages + rank.spare_pages) * rank.page_bytes;
                }
            }
            assert_eq!(*executor.plan(), planned, "{name} in {tensor_parallel} × {pipeline_parallel} ranks");
            let (kv, count) = (|rank: &RankMemory| rank.memory.kv_bytes, tensor_parallel * pipeline_parallel);
            let of_ranks = (executor.ranks().len(), executor.ranks().iter().map(kv).sum::<u64>());
            assert_eq!(of_ranks, if count > 1 { (count, planned.kv_bytes) } else { (0, 0) });
        }
    }
}
