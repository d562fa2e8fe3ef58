//! The memory that the ranks of a model take on the CPU, computed without loading the weights.
//!
//! Invariant: an executor allocates what these functions return. They read shapes and formats, and no values.

use super::cuda::workspace::Widths;
use super::limits::limits;
use super::rank::{activation_bytes, attention_bytes_of, memory_plan, windowed_page_bytes};
use super::sharded::shared_bytes;
use super::threads::{share_of, tier_and_threads};
use super::{ExecutorLimits, ExecutorOptions, StepLogits, option};
use crate::batch::PAGE_TOKENS;
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::layers::attention::{Attention, AttentionShape};
use crate::layers::mlp::Mlp;
use crate::memory_plan::{MemoryPlan, RankPlan};
use crate::models::transformer::{Transformer, row_widths};
use crate::shard::{self, Shard};
use crate::weights::WeightLoader;

/// Returns the memory that all ranks of a model take together on the CPU, where they share it. The ranks' parts are built
/// as an executor builds them, without reading the weights.
pub(crate) fn cpu_plan(checkpoint: &Checkpoint, options: &ExecutorOptions) -> Result<RankPlan, ModelError> {
    let (ranks, stages) = (options.tensor_parallel, options.pipeline_parallel);
    let config = checkpoint.config();
    let page = ExecutorOptions { kv_tokens: Some(PAGE_TOKENS), ..options.clone() };
    let limits = limits(config, &page)?;
    let (_, threads) = tier_and_threads(options)?;
    let mut plan = MemoryPlan {
        activation_bytes: shared_bytes(config, &limits, ranks, stages),
        ..MemoryPlan::default()
    };
    let (mut page_bytes, mut windowed_bytes) = (0u64, 0u64);
    // An executor chooses the layers of a stage by measured times; here, they are as many in each stage.
    let layers: Vec<_> =
        (0..stages).map(|stage| shard::stage_layers(config.layer_count, stages, stage)).collect();
    for rank in 0..ranks {
        let mut weights = WeightLoader::for_plan(checkpoint, Shard { rank, ranks })
            .with_format(options.exact_weights, options.weights);
        let model = Transformer::load(config, &mut weights)?;
        plan.weight_bytes = plan.weight_bytes.saturating_add(weights.bytes());
        for (number, stage) in model.into_stages(&layers).into_iter().enumerate() {
            let threads = share_of(threads, number * ranks + rank, ranks * stages);
            let memory = memory_plan(&stage, threads, &limits, &page)?;
            plan.activation_bytes = plan.activation_bytes.saturating_add(memory.activation_bytes);
            page_bytes = page_bytes.saturating_add(memory.kv_bytes);
            windowed_bytes = windowed_bytes.saturating_add(windowed_page_bytes(&stage, options)?);
        }
    }
    let windowed_pages = options.window_tokens.map(|tokens| tokens.div_ceil(PAGE_TOKENS) as u64);
    let windowed = windowed_pages.map(|pages| (windowed_bytes, pages));
    Ok(RankPlan { memory: plan, page_bytes, windowed, spare_pages: 0 })
}

/// Returns the limits of the steps that `options` ask for.
pub(crate) fn step_limits(
    context_length: usize,
    vocabulary_size: usize,
    options: &ExecutorOptions,
) -> Result<ExecutorLimits, ModelError> {
    if context_length == 0 || vocabulary_size == 0 {
        return Err(option("context", "is empty".to_owned()));
    }
    Ok(ExecutorLimits {
        max_batch_tokens: options.max_batch_tokens,
        step_tokens: options.max_batch_tokens,
        max_logit_rows: options.max_logit_rows,
        max_sequences: options.max_sequences,
        page_count: 1,
        context_length,
        vocabulary_size,
    })
}

/// Returns the size of the buffers of a rank with this number of threads on the CPU, for rows of these widths and this number of
/// plans of attention. It is for models that have no layout yet.
pub(crate) fn cpu_buffers_of_widths(
    widths: &Widths,
    kv_heads: usize,
    plans: usize,
    threads: usize,
    limits: &ExecutorLimits,
) -> u64 {
    let kinds = [Attention::widths_of(widths.qkv, widths.attended), Mlp::widths_of(2 * widths.gated)];
    let rows = row_widths(widths.hidden, widths.head_size / 2, &kinds);
    let shape = AttentionShape { heads: widths.heads, kv_heads, value_size: widths.head_size, window: None };
    let attention = attention_bytes_of(shape, plans, threads, limits);
    activation_bytes(rows, 0, limits).saturating_add(attention).saturating_add(StepLogits::byte_len(limits))
}

#[cfg(test)]
mod tests {
    use skep_kernels::{DType, Isa};

    use super::*;
    use crate::config::ModelConfig;
    use crate::executor::fixture::{MODELS, PACKED, folder, options};
    use crate::executor::{KvDtype, ModelWeights};

    #[test]
    fn plans_on_the_cpu_are_those_of_the_executors() {
        for name in MODELS.into_iter().chain([PACKED]) {
            let checkpoint = Checkpoint::open(&folder(name)).unwrap();
            for (tensor_parallel, pipeline_parallel, kv) in
                [(1, 1, KvDtype::F32), (2, 1, KvDtype::F16), (1, 2, KvDtype::I8), (2, 2, KvDtype::F16)]
            {
                let options =
                    ExecutorOptions { tensor_parallel, pipeline_parallel, kv, ..options(Isa::detect()) };
                let executor =
                    ModelWeights::load(&checkpoint, &options).unwrap().executor(options.clone()).unwrap();
                let planned = cpu_plan(&checkpoint, &options).unwrap();
                let pages = executor.limits().page_count as u64;
                let kv_bytes = pages * planned.page_bytes;
                assert_eq!(
                    *executor.plan(),
                    MemoryPlan { kv_bytes, ..planned.memory },
                    "{name} in {tensor_parallel} × {pipeline_parallel} ranks"
                );
            }
        }
    }

    #[test]
    fn quantized_weights_are_planned_as_they_are_packed() {
        let config = ModelConfig { qkv_bias: true, ..ModelConfig::shape("tiny").unwrap() };
        for dtype in DType::ALL {
            let checkpoint = Checkpoint::synthetic(config.clone(), dtype).unwrap();
            let options = options(Isa::detect());
            let planned = cpu_plan(&checkpoint, &options).unwrap();
            let weights = ModelWeights::load(&checkpoint, &options).unwrap();
            assert_eq!(planned.memory.weight_bytes, weights.bytes, "{dtype}");
        }
    }
}
