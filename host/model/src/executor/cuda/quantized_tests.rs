//! Tests of quantized weights on emulated devices, which are compared with the CPU executor.

use skep_kernels::DType;
use skep_kernels::cuda::matmul::Weights;

use super::*;
use crate::config::ModelConfig;

/// More rows than those that quantized weights are multiplied with as they are.
const TOKENS: usize = 70;

fn checkpoint(dtype: DType) -> Checkpoint {
    Checkpoint::synthetic(ModelConfig::shape("tiny").unwrap(), dtype).unwrap()
}

fn logits(executor: &mut impl Executor, chunk: usize) -> Vec<Vec<f32>> {
    let tokens: Vec<u32> = (0..TOKENS).map(|position| (position * position * 7 + 5) as u32 % 1024).collect();
    let mut logits = Vec::new();
    for (index, tokens) in tokens.chunks(chunk).enumerate() {
        let rows = sequence(tokens, index * chunk, 9, LogitsWanted::All);
        executor.forward(&Batch { sequences: vec![rows] }).unwrap();
        logits.extend((0..tokens.len()).map(|row| executor.logits(row).unwrap().to_vec()));
    }
    logits
}

#[test]
pub(super) fn quantized_weights_give_the_logits_of_the_cpu() {
    for dtype in [DType::Q4_0, DType::Q8_0] {
        let checkpoint = checkpoint(dtype);
        let on_cpu = ExecutorOptions { exact_weights: true, max_batch_tokens: 128, ..options(Isa::detect()) };
        let exact = logits(&mut CpuExecutor::load(&checkpoint, on_cpu).unwrap(), TOKENS);
        for (tensor_parallel, devices, chunk) in [(1, "0", TOKENS), (1, "0", 33), (2, "0,1", TOKENS)] {
            let options = ExecutorOptions {
                max_batch_tokens: 128,
                max_logit_rows: 128,
                tensor_parallel,
                ..cuda_options()
            };
            let mut executor = model(&checkpoint, options, devices, 1).unwrap().executor(0).unwrap();
            let layer = &executor.leader().weights.layout.layers[0];
            assert!(layer.qkv.iter().chain([&layer.down]).all(|of| of.weights == Weights::Tiles(dtype)));
            for (row, (found, exact)) in logits(&mut executor, chunk).iter().zip(&exact).enumerate() {
                let error = relative_error(found, exact);
                assert!(error < BOUND, "{dtype}, {tensor_parallel} ranks, row {row}: {error}");
            }
        }
    }
}
