//! Compares random weights on devices with the CPU executor: every format of weights, windows, and vocabularies.

use skep_kernels::DType;

use super::*;
use crate::config::ModelConfig;

/// Maximum error where the CPU rounds as well.
const FORMAT_BOUND: f32 = 4e-2;

#[test]
pub(super) fn weights_of_every_format_give_the_logits_of_the_cpu() {
    let mut config = ModelConfig::shape("tiny").unwrap();
    config.qk_norm = true;
    for dtype in DType::ALL.into_iter().filter(|dtype| *dtype != DType::F16) {
        check_beside_processor(config.clone(), dtype, cuda_options());
    }
}

#[test]
pub(super) fn stages_apply_the_windows_of_their_layers() {
    for windows in [vec![None, Some(4)], vec![Some(4), None]] {
        let config = ModelConfig { windows, ..ModelConfig::shape("tiny").unwrap() };
        let options = ExecutorOptions { pipeline_parallel: 2, ..cuda_options() };
        check_beside_processor(config, DType::BF16, options);
    }
}

#[test]
pub(super) fn a_vocabulary_that_no_ranks_share_evenly_gives_the_logits_of_the_cpu() {
    for (vocabulary_size, tensor_parallel) in [(1003, 1), (1003, 2), (1001, 4)] {
        let config = ModelConfig { vocabulary_size, ..ModelConfig::shape("tiny").unwrap() };
        let options = ExecutorOptions { tensor_parallel, ..cuda_options() };
        check_beside_processor(config, DType::BF16, options);
    }
}

/// Checks that random weights of this shape give the logits of the CPU, for a prompt and for a token after it.
fn check_beside_processor(config: ModelConfig, dtype: DType, options: ExecutorOptions) {
    let checkpoint = Checkpoint::synthetic(config, dtype).unwrap();
    let mut cuda = model(&checkpoint, options.clone(), "0", 1).unwrap().executor(0).unwrap();
    // The portable tier does not round to eight bits before multiplying, unlike the fast tiers.
    let (kv, isa) = (KvDtype::F32, Some(Isa::Portable));
    let processor_options = ExecutorOptions { tensor_parallel: 1, pipeline_parallel: 1, ..options };
    let mut cpu = CpuExecutor::load(&checkpoint, ExecutorOptions { kv, isa, ..processor_options }).unwrap();
    for (start, tokens) in [(0, &[7, 300, 11, 999, 5, 64, 2, 8, 1, 77, 31][..]), (11, &[12])] {
        let batch = Batch { sequences: vec![sequence(tokens, start, 9, LogitsWanted::Last)] };
        cuda.forward(&batch).unwrap();
        cpu.forward(&batch).unwrap();
        let error = relative_error(cuda.logits(0).unwrap(), cpu.logits(0).unwrap());
        assert!(error < FORMAT_BOUND, "{dtype} at {start}: {error}");
    }
}
