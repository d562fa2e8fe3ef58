//! The packed weights of a model on the CPU, divided among ranks, and the executors that share them.
//!
//! Invariant: weights never change once loaded. Each weight is in memory only once, however many replicas use it.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use skep_kernels::matmul::Activations;
use skep_kernels::turns::{TurnGroup, Turns};
use skep_kernels::{Isa, WorkerPool};

use super::limits::limits;
use super::sharded::ShardedExecutor;
use super::threads::{share_of, tier_and_threads};
use super::{CpuExecutor, Executor, ExecutorOptions, option, pipeline};
use crate::checkpoint::Checkpoint;
use crate::communicator::Local;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::layers::compute::Compute;
use crate::models::cost::Cost;
use crate::models::transformer::Transformer;
use crate::shard::{self, Shard};
use crate::weights::{ReadAhead, Reads, WeightLoader};

/// Maximum number of ranks of one model.
const MAX_RANKS: usize = 64;

/// Is called while weights are loaded, with the number of bytes that are there and with the number of all.
pub type LoadWatch<'a> = &'a dyn Fn(u64, u64);

/// The loaded weights of a model. They are cheap to clone.
#[derive(Clone)]
pub struct ModelWeights {
    pub(super) config: ModelConfig,
    pub(super) bytes: u64,
    pub(super) tensor_parallel: usize,
    pub(super) stages: usize,
    /// Ordered by stage, and within a stage by the part of its weights.
    pub(super) parts: Vec<Arc<Transformer>>,
    /// Cost of a whole step, if there are several stages.
    pub(super) cost: Option<Cost>,
    /// The executors that share these weights compute beside each other, and take turns with those of other weights.
    pub(super) turns: Option<TurnGroup>,
}

impl ModelWeights {
    /// Packs the weights for the ranks that the options request, and releases the checkpoint's pages along the way.
    pub fn load(checkpoint: &Checkpoint, options: &ExecutorOptions) -> Result<Self, ModelError> {
        Self::load_watched(checkpoint, options, &|_, _| ())
    }

    /// Packs the weights like [`ModelWeights::load`], and calls `watch` after each weight with the number of bytes that are
    /// packed and with the number of all.
    pub fn load_watched(
        checkpoint: &Checkpoint,
        options: &ExecutorOptions,
        watch: LoadWatch<'_>,
    ) -> Result<Self, ModelError> {
        let config = checkpoint.config().clone();
        // Packing takes long, so options that cannot be satisfied are rejected first.
        limits(&config, options)?;
        options.kv.format()?;
        let (isa, threads) = tier_and_threads(options)?;
        check_ranks(checkpoint, options)?;
        let (ranks, stages) = (options.tensor_parallel, options.pipeline_parallel);
        let shard = |rank| Shard { rank, ranks };
        let mut total = 0;
        let mut reads = Vec::with_capacity(ranks);
        for rank in 0..ranks {
            let of_rank = RefCell::new(Reads::default());
            let note = |name: &str, ranges: &[Range<usize>]| {
                of_rank.borrow_mut().add(checkpoint.file_parts(name, ranges));
            };
            let mut described = WeightLoader::for_plan(checkpoint, shard(rank))
                .with_format(options.exact_weights, options.weights)
                .noting_reads(&note);
            Transformer::load(&config, &mut described)?;
            total += described.bytes();
            reads.push(of_rank.into_inner());
        }
        let pool = WorkerPool::new(threads)?;
        let mut bytes = 0;
        let mut models = Vec::with_capacity(ranks);
        for (rank, reads) in reads.into_iter().enumerate() {
            let before = bytes;
            let packed = move |of_rank: u64| watch(before + of_rank, total);
            let ahead = ReadAhead::new(checkpoint, reads);
            let begin = |_: &str, _: &[Range<usize>]| ahead.begin();
            let mut weights = WeightLoader::new(&pool, checkpoint, shard(rank))
                .with_format(options.exact_weights, options.weights)
                .narrowing_f16(isa == Isa::Avx512Bf16 && !options.exact_weights)
                .watched_by(&packed)
                .noting_reads(&begin);
            models.push(ahead.beside(|| Transformer::load(&config, &mut weights))?);
            bytes += weights.bytes();
        }
        drop(pool);
        let turns = options.take_turns.then(|| Turns::of_process().group());
        let (parts, cost) = (Vec::new(), None);
        let mut loaded = ModelWeights { config, bytes, tensor_parallel: ranks, stages, parts, cost, turns };
        if stages == 1 {
            loaded.parts = models.into_iter().map(Arc::new).collect();
        } else {
            loaded.divide_layers(models, options)?;
        }
        Ok(loaded)
    }

    /// Creates an executor with a separate KV pool, buffers and threads. It runs on as many ranks as the weights
    /// were loaded for.
    pub fn executor(&self, options: ExecutorOptions) -> Result<Box<dyn Executor>, ModelError> {
        if self.parts.len() == 1 {
            return Ok(Box::new(CpuExecutor::new(self, options)?));
        }
        let (ranks, stages, deadline) = (self.tensor_parallel, self.stages, options.rank_deadline);
        Ok(Box::new(ShardedExecutor::new(self, options, move || Local::connect(ranks, stages, deadline))?))
    }

    /// Rejects options with a different number of ranks than the weights were loaded for.
    pub(super) fn check_ranks(&self, options: &ExecutorOptions) -> Result<(), ModelError> {
        for (name, asked, loaded) in [
            ("tensor_parallel", options.tensor_parallel, self.tensor_parallel),
            ("pipeline_parallel", options.pipeline_parallel, self.stages),
        ] {
            if asked != loaded {
                return Err(option(name, format!("is {asked}, but the weights were loaded for {loaded}")));
            }
        }
        Ok(())
    }

    fn divide_layers(
        &mut self,
        models: Vec<Transformer>,
        options: &ExecutorOptions,
    ) -> Result<(), ModelError> {
        let (isa, threads) = tier_and_threads(options)?;
        let threads = share_of(threads, 0, self.tensor_parallel * self.stages);
        let pool = WorkerPool::new(threads)?;
        // The parts of a weight differ by at most one block, so one rank represents all.
        let cost = models[0].measure(&mut Compute { pool, isa, activations: Activations::default() })?;
        let stages = pipeline::stages(&cost, self.stages);
        tracing::debug!(?stages, "divided the layers by their measured cost");
        self.cost = Some(Cost::sum(cost.layers.iter().chain([&cost.entry, &cost.exit])));
        let mut by_rank: Vec<_> =
            models.into_iter().map(|model| model.into_stages(&stages).into_iter()).collect();
        for _ in 0..self.stages {
            self.parts.extend(by_rank.iter_mut().filter_map(Iterator::next).map(Arc::new));
        }
        Ok(())
    }
}

fn check_ranks(checkpoint: &Checkpoint, options: &ExecutorOptions) -> Result<(), ModelError> {
    let (ranks, stages) = (options.tensor_parallel, options.pipeline_parallel);
    let layers = checkpoint.config().layer_count;
    if stages == 0 || stages > layers {
        let problem =
            format!("{layers} layers cannot be divided into {stages} stages; possible values: 1 to {layers}");
        return Err(option("pipeline_parallel", problem));
    }
    shard::check(checkpoint, ranks)?;
    if ranks * stages > MAX_RANKS {
        return Err(option(
            "tensor_parallel",
            format!("{ranks} × {stages} ranks exceed the limit of {MAX_RANKS}"),
        ));
    }
    if options.rank_deadline.is_zero() {
        return Err(option("rank_deadline", "must be longer than zero".to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{Batch, LogitsWanted};
    use crate::executor::WeightConversion;
    use crate::executor::estimate::cpu_plan;
    use crate::executor::fixture::{expected, folder, options, relative_error, sequence};

    #[test]
    fn a_load_is_watched_from_the_first_weight_to_the_last() {
        for (name, tensor_parallel) in [("llama-gqa", 1), ("llama-gqa", 2), ("deepseek-v3", 2)] {
            let checkpoint = Checkpoint::open(&folder(name)).unwrap();
            let options = ExecutorOptions { tensor_parallel, ..options(Isa::detect()) };
            let seen = RefCell::new(Vec::new());
            let watch = |done, total| seen.borrow_mut().push((done, total));
            let weights = ModelWeights::load_watched(&checkpoint, &options, &watch).unwrap();
            let seen = seen.into_inner();
            assert!(seen.is_sorted() && seen.iter().all(|(_, total)| *total == weights.bytes), "{seen:?}");
            let (first, last) = (seen[0].0, seen[seen.len() - 1].0);
            // Only norms come after the last matrix.
            assert!(first < weights.bytes / 4 && last > weights.bytes / 100 * 99, "{name}: {first} {last}");
        }
    }

    #[test]
    fn converted_weights_take_what_was_planned_and_answer_nearly_the_same() {
        // Rows of these models are short, and activations are rounded beside Q8_0. In a model with experts, rounding changes
        // the choice of some rows, whose logits are then those of other experts.
        for (name, outliers) in [("llama-gqa", 0), ("qwen3-moe", 3), ("kimi-k2-int4", 3)] {
            let checkpoint = Checkpoint::open(&folder(name)).unwrap();
            let (ids, exact) = expected(name);
            let bytes = |weights| {
                let options = ExecutorOptions { weights, ..options(Isa::detect()) };
                let mut executor = CpuExecutor::load(&checkpoint, options.clone()).unwrap();
                let planned = cpu_plan(&checkpoint, &options).unwrap().memory.weight_bytes;
                assert_eq!(executor.plan().weight_bytes, planned, "{name} as {weights}");
                let all = sequence(&ids, 0, 31, LogitsWanted::All);
                executor.forward(&Batch { sequences: vec![all] }).unwrap();
                let found: Vec<f32> =
                    (0..ids.len()).flat_map(|row| executor.logits(row).unwrap().to_vec()).collect();
                let rows = found.chunks(found.len() / ids.len()).zip(exact.chunks(exact.len() / ids.len()));
                let errors: Vec<f32> = rows.map(|(found, exact)| relative_error(found, exact)).collect();
                let far = errors.iter().filter(|error| **error > 0.2).count();
                assert!(far <= ids.len() / 10 * outliers, "{name} as {weights}: {far} rows, {errors:?}");
                planned
            };
            let [kept, q8_0, bf16] =
                [WeightConversion::Keep, WeightConversion::Q8_0, WeightConversion::Bf16].map(bytes);
            match name {
                // Norms stay as they are.
                "llama-gqa" => assert!(q8_0 * 2 < kept && bf16 < kept / 10 * 6, "{kept} {q8_0} {bf16}"),
                _ => assert!(q8_0 < bf16, "{name}: {kept} {q8_0} {bf16}"),
            }
        }
    }
}
