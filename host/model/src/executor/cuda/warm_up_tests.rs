//! Tests that executors prepare steps of every size before the first request.

use std::cell::RefCell;

use super::super::step::{DecodeShape, bucket};
use super::*;

/// Returns an executor that has tried a few steps, and its device.
fn fresh(recorded_launch_bytes: u64) -> (CudaExecutor, Device) {
    let device = match ON_A_DEVICE.get() {
        true => Device::open(0, &compiler()).unwrap(),
        false => Device::emulated(Emulation { recorded_launch_bytes, ..emulation(64 << 20, 3) }),
    };
    let (checkpoint, shared) = (open("llama-gqa"), device.clone());
    let opened = Box::new(move |_| Ok(shared.clone()));
    let model = CudaModel::new(&checkpoint, cuda_options(), Ordinals::FIRST, 1, opened).unwrap();
    (model.without_warm_up().executor(0).unwrap(), device)
}

#[test]
pub(super) fn every_shape_is_prepared_before_the_first_request() {
    let (mut executor, device) = fresh(1 << 10);
    let watched = RefCell::new(Vec::new());
    let free = executor.free_bytes().unwrap();
    executor.warm_up(&free, &|done, all| watched.borrow_mut().push((done, all))).unwrap();
    let watched = watched.into_inner();
    let all = watched.len();
    assert!(watched.iter().enumerate().all(|(index, seen)| *seen == (index + 1, all)), "{watched:?}");
    // All contexts of this model have page tables of one length.
    let shapes: Vec<_> = [1, 2, 4, 8].map(|rows| DecodeShape { rows, stride: 64 }).to_vec();
    assert!(shapes.iter().all(|shape| executor.recordings.made.contains_key(shape)));
    assert_eq!(executor.recordings.made.len(), shapes.len());
    // Prompts of 64 to 2,048 rows, and the shapes.
    assert_eq!(all, 6 + shapes.len());

    let free = device.memory().unwrap().free;
    assert!(error_in_chunks(&mut executor, "llama-gqa", 50) < BOUND);
    for count in 1..=6 {
        let row = |row: u32| sequence(&[5], 0, 4 * row, LogitsWanted::Last);
        executor.forward(&Batch { sequences: (0..count).map(row).collect() }).unwrap();
        executor.finish().unwrap();
        assert!(executor.recordings.made.keys().any(|shape| shape.rows == bucket(count as usize)));
    }
    assert_eq!(executor.recordings.made.len(), shapes.len(), "steps are not recorded while serving");
    if !ON_A_DEVICE.get() {
        let memory = device.memory().unwrap();
        assert_eq!(memory.free, free, "serving takes no memory");
        let MemoryPlan { weight_bytes, activation_bytes, graph_bytes, kv_bytes } = *executor.plan();
        let planned = weight_bytes + activation_bytes + graph_bytes + kv_bytes;
        assert!(memory.total - memory.free <= planned, "{memory:?}, {}", executor.plan());
    }
}

#[test]
fn recordings_beyond_the_reserved_memory_are_left_out_and_counted() {
    // A recording has a few dozen launches, and 2 MiB are reserved.
    let (mut executor, device) = fresh(64 << 10);
    let before = device.memory().unwrap().free;
    let free = executor.free_bytes().unwrap();
    executor.warm_up(&free, &|_, _| ()).unwrap();
    let recorded = executor.recordings.made.len();
    assert!((1..4).contains(&recorded), "{recorded} shapes");
    assert!(executor.plan().graph_bytes >= before - device.memory().unwrap().free);
    assert!(error_in_chunks(&mut executor, "llama-gqa", 23) < BOUND);
    let row = |row: u32| sequence(&[5], 0, 4 * row, LogitsWanted::Last);
    let batch = Batch { sequences: (0..6).map(row).collect() };
    for _ in 0..2 {
        executor.forward(&batch).unwrap();
    }
    assert_eq!(executor.recordings.made.len(), recorded, "the memory stays with others");
}
