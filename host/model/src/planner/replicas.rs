//! The memory that the replicas of a model take where they are to run, for a host that plans several models together.

use std::num::NonZeroUsize;

use super::devices::ASSUMED_MULTIPROCESSORS;
use super::layouts::largest_rank;
use crate::batch::PAGE_TOKENS;
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::executor::cuda::estimate::device_options;
use crate::executor::estimate::cpu_plan;
use crate::executor::{CPU_KV_TOKENS, ExecutorOptions, physical_cores, share_of};
use crate::memory_plan::{MemoryPlan, RankPlan};

/// The smallest KV cache on the CPU where no number of tokens is set.
pub const LEAST_CPU_KV_TOKENS: usize = 4096;

/// Returns the memory that all replicas take together on the CPU.
pub fn memory_on_cpu(
    checkpoint: &Checkpoint,
    options: &ExecutorOptions,
    replicas: NonZeroUsize,
) -> Result<MemoryPlan, ModelError> {
    let tokens = options.kv_tokens.unwrap_or(CPU_KV_TOKENS);
    Ok(together(&plans_on_cpu(checkpoint, options, replicas)?, tokens))
}

/// Returns the number of tokens that each replica's KV cache holds on the CPU where no number is set: as many as a whole
/// context of the model needs and no fewer than [`CPU_KV_TOKENS`], as far as `memory_bytes` hold them beside the weights.
/// More than [`CPU_KV_TOKENS`] take at most half of that memory, and the number is never below [`LEAST_CPU_KV_TOKENS`].
pub fn default_tokens_on_cpu(
    checkpoint: &Checkpoint,
    options: &ExecutorOptions,
    replicas: NonZeroUsize,
    context: Option<usize>,
    memory_bytes: u64,
) -> Result<usize, ModelError> {
    let plans = plans_on_cpu(checkpoint, options, replicas)?;
    let without_pages = together(&plans, 0).total_bytes();
    // Replicas differ in their buffers, and not in their pages.
    let replica = plans.first().copied().unwrap_or_default();
    let within = |bytes: u64| replica.pages(bytes / replicas.get() as u64).saturating_mul(PAGE_TOKENS as u64);
    let free = memory_bytes.saturating_sub(without_pages);
    let context = checkpoint.config().context_length.min(context.unwrap_or(usize::MAX));
    let wanted = CPU_KV_TOKENS.max(context) as u64;
    let tokens = within(free).min(CPU_KV_TOKENS as u64).max(within(free / 2)).min(wanted);
    Ok((tokens as usize).max(LEAST_CPU_KV_TOKENS))
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

/// Returns the plan of each replica on the CPU. They divide the threads, whose buffers are planned.
fn plans_on_cpu(
    checkpoint: &Checkpoint,
    options: &ExecutorOptions,
    replicas: NonZeroUsize,
) -> Result<Vec<RankPlan>, ModelError> {
    let all = options.threads.unwrap_or_else(physical_cores);
    let mut plans: Vec<(usize, RankPlan)> = Vec::with_capacity(replicas.get());
    for replica in 0..replicas.get() {
        let threads = share_of(all, replica, replicas.get());
        let plan = match plans.last() {
            Some((planned, plan)) if *planned == threads => *plan,
            _ => cpu_plan(checkpoint, &ExecutorOptions { threads: Some(threads), ..options.clone() })?,
        };
        plans.push((threads, plan));
    }
    Ok(plans.into_iter().map(|(_, plan)| plan).collect())
}

/// Returns the memory of replicas on the CPU that each have room for this number of tokens.
fn together(plans: &[RankPlan], tokens: usize) -> MemoryPlan {
    let plans: Vec<MemoryPlan> = plans.iter().map(|plan| with_pages(plan, tokens)).collect();
    MemoryPlan::of_replicas(plans.iter().map(|plan| ("cpu", plan)))
}

fn with_pages(plan: &RankPlan, tokens: usize) -> MemoryPlan {
    let pages = (tokens.div_ceil(PAGE_TOKENS) as u64).saturating_add(plan.spare_pages);
    let released = plan.windowed.map_or(0, |(bytes, kept)| pages.saturating_sub(kept).saturating_mul(bytes));
    let kv_bytes = pages.saturating_mul(plan.page_bytes).saturating_sub(released);
    MemoryPlan { kv_bytes, ..plan.memory }
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
    fn the_default_cache_on_the_cpu_holds_a_context_as_far_as_the_memory_does() {
        // A long context, in which a token takes 20 bytes in each of 2 layers.
        let mut long = checkpoint();
        long.set_context_length(262_144);
        let (options, count) = (ExecutorOptions::default(), NonZeroUsize::new(2).unwrap());
        let tokens = |checkpoint: &Checkpoint, context, bytes| {
            default_tokens_on_cpu(checkpoint, &options, count, context, bytes).unwrap()
        };
        let bytes = |tokens| {
            let options = ExecutorOptions { kv_tokens: Some(tokens), ..options.clone() };
            memory_on_cpu(&long, &options, count).unwrap().total_bytes()
        };
        let (most, usual) = (bytes(262_144), bytes(CPU_KV_TOKENS));
        assert_eq!(tokens(&long, None, 2 * most), 262_144, "there is room for a whole context");
        assert_eq!(tokens(&long, Some(100_000), 2 * most), 100_000, "a shorter context is set");
        assert_eq!(tokens(&long, Some(100), 2 * most), CPU_KV_TOKENS, "short sequences share it");
        assert_eq!(tokens(&checkpoint(), None, 2 * most), CPU_KV_TOKENS);
        let half = tokens(&long, None, most);
        assert!((130_000..=131_072).contains(&half), "{half} tokens take more than half of the memory");
        assert_eq!(tokens(&long, None, usual), CPU_KV_TOKENS, "all of the memory, but no more");
        let less = tokens(&long, None, bytes(20_000));
        assert!(less <= 20_000 && less > 19_900 && bytes(less) <= bytes(20_000), "{less}");
        assert_eq!(tokens(&long, None, 0), LEAST_CPU_KV_TOKENS, "the plan then says what is missing");
    }

    #[test]
    fn the_default_cache_has_more_tokens_where_windows_give_back_pages() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny/gemma3");
        let mut long = Checkpoint::open(&path).unwrap();
        long.set_context_length(262_144);
        let all = ExecutorOptions::default();
        let few = ExecutorOptions { window_tokens: Some(8192), ..all.clone() };
        let one = NonZeroUsize::MIN;
        let memory = |options: &ExecutorOptions, tokens| {
            let options = ExecutorOptions { kv_tokens: Some(tokens), ..options.clone() };
            memory_on_cpu(&long, &options, one).unwrap().total_bytes()
        };
        let empty = memory(&all, 0);
        let bytes = empty + 2 * (memory(&all, CPU_KV_TOKENS) - empty);
        let tokens =
            |options: &ExecutorOptions| default_tokens_on_cpu(&long, options, one, None, bytes).unwrap();
        assert_eq!(tokens(&all), CPU_KV_TOKENS);
        // Five of six layers have windows, and what they give back is room for the sixth.
        let found = tokens(&few);
        assert_eq!(found, 8192 + 6 * (CPU_KV_TOKENS - 8192));
        assert_eq!(memory(&few, found), memory(&all, CPU_KV_TOKENS));
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
