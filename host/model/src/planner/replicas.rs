//! The memory that the replicas of a model take where they are to run, for a host that plans several models together.

use std::num::NonZeroUsize;

use super::devices::ASSUMED_MULTIPROCESSORS;
use super::layouts::largest_rank;
use crate::batch::PAGE_TOKENS;
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::executor::cuda::estimate::device_options;
use crate::executor::estimate::cpu_plan;
use crate::executor::{CPU_KV_TOKENS, ExecutorOptions};
use crate::memory_plan::{MemoryPlan, RankPlan};

/// Returns the memory that all replicas take together on the CPU.
pub fn memory_on_cpu(
    checkpoint: &Checkpoint,
    options: &ExecutorOptions,
    replicas: NonZeroUsize,
) -> Result<MemoryPlan, ModelError> {
    let tokens = options.kv_tokens.unwrap_or(CPU_KV_TOKENS);
    let replica = with_pages(&cpu_plan(checkpoint, options)?, tokens);
    Ok(MemoryPlan::of_replicas(std::iter::repeat_n(("cpu", &replica), replicas.get())))
}

/// Returns the memory that the replicas take on each of `devices` CUDA devices with `memory_bytes` each. A model whose
/// KV cache may take what is left is planned with as many tokens as on the CPU, or with its context if that is longer.
pub fn memory_on_device(
    checkpoint: &Checkpoint,
    options: &ExecutorOptions,
    replicas: NonZeroUsize,
    devices: NonZeroUsize,
    memory_bytes: u64,
) -> Result<MemoryPlan, ModelError> {
    let options = device_options(options.clone());
    let tokens = options.kv_tokens.unwrap_or(CPU_KV_TOKENS.max(checkpoint.config().context_length));
    let mut largest = MemoryPlan::default();
    for stage in 0..options.pipeline_parallel {
        let rank = largest_rank(checkpoint, &options, stage, memory_bytes, ASSUMED_MULTIPROCESSORS)?;
        let rank = with_pages(&rank, tokens);
        if rank.total_bytes() > largest.total_bytes() {
            largest = rank;
        }
    }
    let ranks = options.tensor_parallel * options.pipeline_parallel;
    // Replicas on the same device share their weights.
    let weights = (ranks / devices).max(1) as u64;
    let users = (ranks * replicas.get()).div_ceil(devices.get()) as u64;
    Ok(MemoryPlan {
        weight_bytes: largest.weight_bytes.saturating_mul(weights),
        activation_bytes: largest.activation_bytes.saturating_mul(users),
        graph_bytes: largest.graph_bytes.saturating_mul(users),
        kv_bytes: largest.kv_bytes.saturating_mul(users),
    })
}

fn with_pages(plan: &RankPlan, tokens: usize) -> MemoryPlan {
    let pages = (tokens.div_ceil(PAGE_TOKENS) as u64).saturating_add(plan.spare_pages);
    MemoryPlan { kv_bytes: pages.saturating_mul(plan.page_bytes), ..plan.memory }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::executor::PlacedExecutor;

    fn checkpoint() -> Checkpoint {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny/llama-gqa");
        Checkpoint::open(&path).unwrap()
    }

    #[test]
    fn replicas_on_the_cpu_take_what_was_planned() {
        let (checkpoint, three) = (checkpoint(), NonZeroUsize::new(3).unwrap());
        for kv_tokens in [None, Some(40)] {
            let options = ExecutorOptions { kv_tokens, ..ExecutorOptions::default() };
            let placed = PlacedExecutor::replicas(&checkpoint, options.clone(), three).unwrap();
            let taken = MemoryPlan::of_replicas(placed.iter().map(|placed| ("cpu", placed.executor.plan())));
            assert_eq!(memory_on_cpu(&checkpoint, &options, three).unwrap(), taken);
        }
    }

    #[test]
    fn devices_divide_ranks_and_share_the_weights_of_replicas() {
        let checkpoint = checkpoint();
        let plan = |tensor_parallel, replicas, devices| {
            let options =
                ExecutorOptions { tensor_parallel, kv_tokens: Some(64), ..ExecutorOptions::default() };
            let count = |count| NonZeroUsize::new(count).unwrap();
            memory_on_device(&checkpoint, &options, count(replicas), count(devices), 8 << 30).unwrap()
        };
        let one = plan(1, 1, 1);
        assert!(one.weight_bytes > 0 && one.kv_bytes > 0 && one.graph_bytes > 0);
        assert_eq!(plan(1, 2, 2), one);
        let both = plan(1, 2, 1);
        assert_eq!((both.weight_bytes, both.kv_bytes), (one.weight_bytes, 2 * one.kv_bytes));
        assert!(plan(2, 1, 2).weight_bytes < one.weight_bytes);
    }
}
