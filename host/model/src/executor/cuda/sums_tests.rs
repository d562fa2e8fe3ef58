//! Tests of sums over the ranks that are computed together with the norm after them.

use super::*;
use crate::executor::cuda::step::bucket;

/// Memory that each recorded launch takes, which shows how many there are.
const LAUNCH_BYTES: u64 = 1 << 10;

fn ranks(name: &str, options: &ExecutorOptions, tensor_parallel: usize, apart: bool) -> CudaExecutor {
    let checkpoint = open(name);
    let on_a_device = ON_A_DEVICE.get();
    let opened = move |ordinal| match on_a_device {
        true => Ok(Device::open(ordinal, &compiler())?),
        false => {
            Ok(Device::emulated(Emulation { recorded_launch_bytes: LAUNCH_BYTES, ..emulation(64 << 20, 3) }))
        }
    };
    let devices = match ON_A_DEVICE.get() {
        true => real_devices(tensor_parallel),
        false => Ordinals::first(tensor_parallel).unwrap(),
    };
    let options = ExecutorOptions { tensor_parallel, ..options.clone() };
    let model = CudaModel::new(&checkpoint, options, devices, 1, Box::new(opened)).unwrap();
    let mut executor = model.without_warm_up().executor(0).unwrap();
    if apart {
        // Steps that were recorded before have the kernels of the other way.
        executor.recordings.made.clear();
        executor.recordings.launched.clear();
        executor.ranks_mut().for_each(|rank| rank.shape.sums_are_apart = true);
    }
    executor
}

/// Returns the bits of a sequence's logits, computed in steps of these numbers of tokens.
fn bits(executor: &mut CudaExecutor, ids: &[u32], chunks: &[usize]) -> Vec<Vec<u32>> {
    let (mut start, mut all) = (0, Vec::new());
    for chunk in chunks {
        let tokens = &ids[start..(start + chunk).min(ids.len())];
        let rows = sequence(tokens, start, 9, LogitsWanted::All);
        executor.forward(&Batch { sequences: vec![rows] }).unwrap();
        let row = |row| executor.logits(row).unwrap().iter().map(|logit| logit.to_bits()).collect();
        all.extend((0..tokens.len()).map(row));
        start += tokens.len();
    }
    all
}

#[test]
pub(super) fn sums_with_their_norm_give_the_bits_of_separate_kernels() {
    for (name, activation, deterministic) in [
        ("llama-gqa", Activation::F16, false),
        ("qwen2-bias", Activation::Bf16, false),
        ("mistral-window", Activation::Bf16, true),
    ] {
        let options = ExecutorOptions { activations: Some(activation), deterministic, ..cuda_options() };
        let (ids, _) = expected(name);
        // Prompts, extensions of few rows, drafts, and single rows, which are launched, recorded and replayed.
        let chunks = [20, 7, 3, 1, 1, 1, 2, 2, 2, 1, 1];
        for count in [2, 4] {
            let [wanted, found] =
                [true, false].map(|apart| bits(&mut ranks(name, &options, count, apart), &ids, &chunks));
            assert!(found == wanted, "{name} in {activation} on {count} ranks");
        }
    }
}

#[test]
fn a_step_has_one_launch_for_a_sum_and_its_norm() {
    let launches = |deterministic, tensor_parallel, apart| {
        let options = ExecutorOptions { deterministic, ..cuda_options() };
        let mut executor = ranks("llama-gqa", &options, tensor_parallel, apart);
        let row = |row: u32| sequence(&[5], 0, 4 * row, LogitsWanted::Last);
        // No step of this shape was launched at the start.
        let batch = Batch { sequences: (0..4).map(row).collect() };
        let free = [(); 3].map(|()| {
            executor.forward(&batch).unwrap();
            executor.finish().unwrap();
            executor.leader().device.memory().unwrap().free
        });
        assert!(executor.recordings.made.keys().any(|shape| shape.rows == bucket(4)));
        assert_eq!(free[1], free[2], "a step is recorded once");
        (free[0] - free[1]) / LAUNCH_BYTES
    };
    const LAYERS: u64 = 3;
    // The embedding, the head and its norm; in a layer the projections with what is around them, and the attention.
    assert_eq!(launches(false, 1, false), 5 * LAYERS + 3);
    // A sum for the embedding, and two in a layer. The products of these narrow rows norm them, except for the head.
    let with_sums = 7 * LAYERS + 4;
    assert_eq!(launches(false, 2, true), with_sums);
    assert_eq!(launches(false, 2, false), with_sums - 1);
    // Products in a fixed order do not norm their rows.
    let [apart, fused] = [true, false].map(|apart| launches(true, 2, apart));
    assert_eq!(apart - fused, 2 * LAYERS, "{apart} and {fused} launches");
}
