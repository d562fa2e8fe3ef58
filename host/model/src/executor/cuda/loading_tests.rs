//! Tests of how weights reach a device, how much of it a model takes, and what follows when it fails.

use std::sync::atomic::AtomicU64;

use skep_kernels::{DType, Fault, KernelError};

use super::super::estimate::{device_options, layout_of_rank};
use super::super::staging::pieces;
use super::super::weights::{Copying, DeviceWeights, STAGE_BYTES};
use super::super::{Restarted, SharedWeights};
use super::*;
use crate::config::ModelConfig;
use crate::executor::MemoryFraction;
use crate::shard::ShardPlan;

/// Returns the bytes of a rank's weights on a device, and how many of them were counted while they were copied.
fn copied(
    checkpoint: &Checkpoint,
    options: &ExecutorOptions,
    rank: usize,
    [threads, stage_bytes]: [usize; 2],
) -> (Vec<u8>, u64) {
    let layout = layout_of_rank(checkpoint, options, 0, rank).unwrap();
    let device = Device::emulated(emulation(64 << 20, 3));
    let done = AtomicU64::new(0);
    let copying = Copying { threads, stage_bytes, done: &done };
    let weights = DeviceWeights::load(&device, checkpoint, layout, copying).unwrap();
    let mut bytes = vec![0; weights.buffer.bytes()];
    weights.buffer.read(&mut bytes).unwrap();
    (bytes, done.into_inner())
}

#[test]
fn weights_are_the_same_however_they_are_cut_and_by_however_many_threads() {
    for dtype in [DType::BF16, DType::F32, DType::Q8_0, DType::Q5_1] {
        let checkpoint = Checkpoint::synthetic(ModelConfig::shape("tiny").unwrap(), dtype).unwrap();
        for (tensor_parallel, rank) in [(1, 0), (2, 1)] {
            let options = device_options(ExecutorOptions { tensor_parallel, ..cuda_options() });
            let (expected, done) = copied(&checkpoint, &options, rank, [1, STAGE_BYTES]);
            assert!(expected.iter().any(|byte| *byte != 0));
            assert!(done as usize > expected.len() / 10 * 9 && done as usize <= expected.len(), "{done}");
            for cut in [[1, 1], [5, 700], [3, 4096]] {
                let found = copied(&checkpoint, &options, rank, cut);
                assert!(found == (expected.clone(), done), "{dtype} of {tensor_parallel} ranks in {cut:?}");
            }
        }
    }
}

#[test]
fn a_load_asks_for_the_rows_that_it_copies_in_order() {
    let checkpoint = open("llama-gqa");
    for rank in 0..2 {
        let options = device_options(ExecutorOptions { tensor_parallel: 2, ..cuda_options() });
        let layout = layout_of_rank(&checkpoint, &options, 0, rank).unwrap();
        let (pieces, _) = pieces(&checkpoint, &layout.loads, layout.activation, 4096).unwrap();
        assert!(pieces.len() > layout.loads.len(), "large tensors have several pieces");
        assert!(pieces.is_sorted_by_key(|piece| piece.load));
        for (index, load) in layout.loads.iter().enumerate() {
            let rows = pieces.iter().filter(|piece| piece.load == index);
            let asked: Vec<usize> = rows.flat_map(|piece| piece.reads(load)).flatten().collect();
            let wanted: Vec<usize> = match (&load.plan, load.shape.len()) {
                // A vector is asked for as a whole.
                (_, 1) => Vec::new(),
                (ShardPlan::Rows(ranges), _) => ranges.iter().cloned().flatten().collect(),
                (ShardPlan::Replicated | ShardPlan::Columns(_), _) => (0..load.shape[0]).collect(),
            };
            assert_eq!(asked, wanted, "{} of rank {rank}", load.name);
        }
    }
}

#[test]
fn devices_are_opened_at_the_same_time() {
    let checkpoint = open("llama-gqa");
    let both = std::sync::Barrier::new(2);
    let opened = Box::new(|_| {
        // No device is open before both are about to be.
        both.wait();
        Ok(Device::emulated(emulation(64 << 20, 3)))
    });
    let options = ExecutorOptions { tensor_parallel: 2, ..cuda_options() };
    let model = CudaModel::new(&checkpoint, options, "0,1".parse().unwrap(), 1, opened).unwrap();
    let mut executor = model.without_warm_up().executor(0).unwrap();
    assert!(error_in_chunks(&mut executor, "llama-gqa", 64) < BOUND);
}

/// Starts replicas on one device, of which others have some bytes, and returns the memory that they take together.
fn taken(fraction: Option<f64>, others: usize, replicas: usize) -> MemoryPlan {
    let checkpoint = open("llama-gqa");
    let gpu_memory = fraction.map(|fraction| MemoryFraction::new(fraction).unwrap());
    let options = ExecutorOptions { kv_tokens: None, gpu_memory, ..cuda_options() };
    let device = Device::emulated(emulation(64 << 20, 3));
    let _others = device.zeroed(others).unwrap();
    let opened = Box::new(|_| Ok(device.clone()));
    let model = CudaModel::new(&checkpoint, options, Ordinals::FIRST, replicas, opened).unwrap();
    let mut model = model.without_warm_up();
    let executors: Vec<CudaExecutor> =
        (0..replicas).map(|replica| model.executor(replica).unwrap()).collect();
    MemoryPlan::of_replicas(executors.iter().map(|executor| ("cuda:0", executor.plan())))
}

#[test]
fn a_model_takes_no_more_than_its_fraction_of_a_device_and_than_what_is_free() {
    const TOTAL: u64 = 64 << 20;
    let all = taken(None, 0, 1).total_bytes();
    assert!(all <= TOTAL && all > TOTAL / 10 * 9, "{all}");
    for (fraction, replicas) in [(0.5, 1), (0.75, 2)] {
        let allowed = MemoryFraction::new(fraction).unwrap().of(TOTAL);
        let found = taken(Some(fraction), 0, replicas).total_bytes();
        assert!(found <= allowed && found > allowed / 10 * 9, "{found} of {allowed}, {replicas} replicas");
    }
    let beside = taken(Some(0.9), 24 << 20, 1).total_bytes();
    assert!(beside <= 40 << 20 && beside > 36 << 20, "{beside}");
}

#[test]
fn weights_that_do_not_fit_into_the_fraction_are_refused_with_the_numbers_before_they_are_copied() {
    let checkpoint = open("llama-gqa");
    let gpu_memory = Some(MemoryFraction::new(0.1).unwrap());
    let options = ExecutorOptions { kv_tokens: None, gpu_memory, ..cuda_options() };
    let weights = layout_of_rank(&checkpoint, &options, 0, 0).unwrap().bytes as u64;
    let device = Device::emulated(emulation(weights * 9, 3));
    let opened = Box::new(|_| Ok(device.clone()));
    let mut model = CudaModel::new(&checkpoint, options, Ordinals::FIRST, 1, opened).unwrap();
    let error = model.executor(0).err().expect("the weights are too large").to_string();
    assert!(
        error.starts_with("gpu_memory: 0.1 of the ") && error.contains("the weights alone take"),
        "{error}"
    );
    assert_eq!(device.memory().unwrap().free, weights * 9);
}

#[test]
fn room_that_the_fraction_bounds_is_refused_with_the_fraction() {
    let checkpoint = open("llama-gqa");
    let gpu_memory = Some(MemoryFraction::new(0.5).unwrap());
    let options = ExecutorOptions { kv_tokens: Some(1 << 24), gpu_memory, ..cuda_options() };
    let refused = model(&checkpoint, options, "0", 1).and_then(|mut model| model.executor(0));
    let error = refused.err().expect("too many tokens").to_string();
    assert!(
        error.contains("do not fit") && error.contains("gpu_memory = 0.5 allows this model 32.0 MiB"),
        "{error}"
    );
}

#[test]
fn an_executor_reports_the_fault_of_its_device_and_a_new_one_works() {
    let (checkpoint, device) = (open("llama-gqa"), Device::emulated(emulation(64 << 20, 3)));
    let opened = Box::new(|_| Ok(device.clone()));
    let model = CudaModel::new(&checkpoint, cuda_options(), Ordinals::FIRST, 1, opened).unwrap();
    let mut executor = model.without_warm_up().executor(0).unwrap();
    let batch = Batch { sequences: vec![sequence(&[5, 6, 7], 0, 9, LogitsWanted::Last)] };
    executor.forward(&batch).unwrap();
    executor.logits(0).unwrap();
    assert!(executor.fault().is_none());
    let reason = "CUDA_ERROR_ECC_UNCORRECTABLE".to_owned();
    device.fail(KernelError::DeviceFault { fault: Fault::Context, call: "cuTest", reason });
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let row = LogitRow::Sample(SampleRow::plain(0, &greedy));
    let step = executor.forward(&batch).and_then(|()| executor.sample(&[row]));
    let error = step.expect_err("the device has failed");
    assert!(error.is_fault() && error.to_string().contains("CUDA_ERROR_ECC_UNCORRECTABLE"), "{error}");
    assert!(executor.fault().is_some_and(|fault| fault.is_fault()));
    drop(executor);
    let mut executor = load("llama-gqa", cuda_options(), "0");
    assert!(error_in_chunks(&mut executor, "llama-gqa", 64) < BOUND);
}

#[test]
fn replicas_that_are_started_again_have_their_pages_and_share_their_weights() {
    let checkpoint = Arc::new(open("llama-gqa"));
    let open_all = |devices: [&Device; 2]| {
        let devices = devices.map(Device::clone);
        Box::new(move |ordinal: usize| Ok(devices[ordinal].clone()))
    };
    let fresh = || Device::emulated(emulation(64 << 20, 3));
    let (failed, other) = (fresh(), fresh());
    let options = ExecutorOptions { kv_tokens: None, ..cuda_options() };
    let model =
        CudaModel::new(&checkpoint, options.clone(), "0".parse().unwrap(), 2, open_all([&failed, &other]));
    let mut model = model.unwrap().without_warm_up();
    let executors = [model.executor(0).unwrap(), model.executor(1).unwrap()];
    let limits = executors.each_ref().map(|executor| *executor.limits());
    drop((model, executors));
    let weights = SharedWeights::default();
    let device = fresh();
    let restarted = limits.map(|limits| Restarted {
        checkpoint: checkpoint.clone(),
        options: ExecutorOptions { kv_tokens: Some(limits.page_count * PAGE_TOKENS), ..options.clone() },
        devices: "0".parse().unwrap(),
        weights: weights.clone(),
    });
    let start = |replica: usize, device: &Device| {
        restarted[replica].executor_without_warm_up(open_all([device, &other])).unwrap()
    };
    let mut executors = [start(0, &device), start(1, &device)];
    assert_eq!(executors.each_ref().map(|executor| *executor.limits()), limits);
    let buffers = executors.each_ref().map(|executor| executor.leader().weights.buffer.address());
    assert_eq!(buffers[0], buffers[1]);
    for executor in &mut executors {
        assert!(error_in_chunks(executor, "llama-gqa", 64) < BOUND);
    }
    // Weights on a device that has failed are not used again, though a replica still has them.
    let reason = "CUDA_ERROR_LAUNCH_FAILED".to_owned();
    device.fail(KernelError::DeviceFault { fault: Fault::Context, call: "cuTest", reason });
    let mut executor = start(0, &fresh());
    assert!(error_in_chunks(&mut executor, "llama-gqa", 64) < BOUND);
}
