//! The executor of this machine's CPU: one worker pool and one pool of KV pages over weights that others may share.
//!
//! Invariant: a batch is checked in full before anything is computed; memory is planned before it is allocated.

use std::sync::Arc;

use skep_kernels::kv::{KvFormat, KvLayer};
use skep_kernels::matmul::Activations;
use skep_kernels::pool::MAX_THREADS;
use skep_kernels::{Isa, WorkerPool};

use super::{Executor, ExecutorLimits, ExecutorOptions, KvDtype};
use crate::batch::{Batch, PAGE_TOKENS};
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::layers::compute::Compute;
use crate::memory_plan::MemoryPlan;
use crate::models::transformer::{Rooms, Transformer};
use crate::sampling::{LogitRow, RowOutput, draw};
use crate::weights::WeightLoader;

/// The packed weights of a model. They never change; executors share them.
#[derive(Clone)]
pub struct ModelWeights {
    model: Arc<Transformer>,
    config: ModelConfig,
    bytes: u64,
}

pub struct CpuExecutor {
    model: Arc<Transformer>,
    rooms: Rooms,
    compute: Compute,
    kv: Vec<KvLayer>,
    logits: Vec<f32>,
    /// Rows of the last step that succeeded.
    logit_rows: usize,
    limits: ExecutorLimits,
    plan: MemoryPlan,
}

impl ModelWeights {
    /// Packs the weights for executors with these options. The checkpoint's pages are released on the way.
    pub fn load(checkpoint: &Checkpoint, options: &ExecutorOptions) -> Result<Self, ModelError> {
        let config = checkpoint.config().clone();
        // Packing takes long, so what cannot be met is refused first.
        limits(&config, options)?;
        let (_, threads) = compute(options)?;
        let pool = WorkerPool::new(threads)?;
        let mut weights = WeightLoader::new(&pool, checkpoint);
        let model = Arc::new(Transformer::load(&config, &mut weights)?);
        Ok(ModelWeights { model, config, bytes: weights.bytes() })
    }
}

impl CpuExecutor {
    /// An executor with weights of its own.
    pub fn load(checkpoint: &Checkpoint, options: ExecutorOptions) -> Result<Self, ModelError> {
        Self::new(&ModelWeights::load(checkpoint, &options)?, options)
    }

    /// Allocates the KV pool and starts the threads of an executor that shares `weights`.
    pub fn new(weights: &ModelWeights, options: ExecutorOptions) -> Result<Self, ModelError> {
        let config = &weights.config;
        let limits = limits(config, &options)?;
        let (isa, threads) = compute(&options)?;
        let format = match options.kv {
            KvDtype::F32 => KvFormat::F32,
            KvDtype::F16 => KvFormat::F16,
        };
        let layer_bytes =
            KvLayer::byte_len(format, limits.page_count, config.kv_head_count, config.head_size)
                .ok_or_else(|| option("kv_tokens", format!("{} is too many", options.kv_tokens)))?;
        let plan = MemoryPlan {
            weight_bytes: weights.bytes,
            activation_bytes: activation_bytes(config, &limits),
            kv_bytes: (layer_bytes as u64).saturating_mul(config.layer_count as u64),
        };
        let kv = (0..config.layer_count)
            .map(|_| KvLayer::new(format, limits.page_count, config.kv_head_count, config.head_size))
            .collect::<Result<_, _>>()?;
        Ok(CpuExecutor {
            model: weights.model.clone(),
            rooms: Rooms::default(),
            compute: Compute { pool: WorkerPool::new(threads)?, isa, activations: Activations::default() },
            kv,
            logits: Vec::new(),
            logit_rows: 0,
            limits,
            plan,
        })
    }
}

impl Executor for CpuExecutor {
    fn limits(&self) -> &ExecutorLimits {
        &self.limits
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), ModelError> {
        self.logit_rows = 0;
        check(batch, &self.limits)?;
        let rows = batch.logit_rows();
        let length = rows * self.limits.vocabulary_size;
        if self.logits.len() < length {
            self.logits.resize(length, 0.0);
        }
        if batch.token_count() > 0 {
            let CpuExecutor { model, rooms, compute, kv, logits, .. } = self;
            model.forward(compute, rooms, kv, batch, &mut logits[..length])?;
        }
        self.logit_rows = rows;
        Ok(())
    }

    fn logits(&self, row: usize) -> Result<&[f32], ModelError> {
        if row >= self.logit_rows {
            return Err(batch_error(format!("logit row {row} of a step with {} rows", self.logit_rows)));
        }
        let width = self.limits.vocabulary_size;
        Ok(&self.logits[row * width..][..width])
    }

    fn sample(&mut self, rows: &[LogitRow<'_>]) -> Result<Vec<RowOutput>, ModelError> {
        rows.iter().map(|row| draw(self.compute.isa, self.logits(row.row())?, row)).collect()
    }

    fn plan(&self) -> &MemoryPlan {
        &self.plan
    }
}

fn option(name: &str, problem: String) -> ModelError {
    ModelError::Option { option: name.to_owned(), problem }
}

fn batch_error(problem: String) -> ModelError {
    ModelError::Batch { problem }
}

fn limits(config: &ModelConfig, options: &ExecutorOptions) -> Result<ExecutorLimits, ModelError> {
    for (name, value) in [
        ("kv_tokens", options.kv_tokens),
        ("max_batch_tokens", options.max_batch_tokens),
        ("max_logit_rows", options.max_logit_rows),
        ("max_sequences", options.max_sequences),
    ] {
        if value == 0 || value > u32::MAX as usize {
            return Err(option(name, format!("{value} is not between 1 and {}", u32::MAX)));
        }
    }
    for (name, ranks) in
        [("tensor_parallel", options.tensor_parallel), ("pipeline_parallel", options.pipeline_parallel)]
    {
        if ranks != 1 {
            return Err(option(name, format!("{ranks} ranks are not supported by the CPU executor; use 1")));
        }
    }
    Ok(ExecutorLimits {
        max_batch_tokens: options.max_batch_tokens,
        max_logit_rows: options.max_logit_rows,
        max_sequences: options.max_sequences,
        page_count: options.kv_tokens.div_ceil(PAGE_TOKENS),
        context_length: config.context_length,
        vocabulary_size: config.vocabulary_size,
    })
}

/// The instruction tier and the number of threads that the options ask for.
fn compute(options: &ExecutorOptions) -> Result<(Isa, usize), ModelError> {
    let isa = options.isa.unwrap_or_else(Isa::detect);
    if !isa.supported() {
        return Err(option("isa", format!("this machine does not support {isa}")));
    }
    let threads = options.threads.unwrap_or_else(physical_cores);
    if threads == 0 || threads > MAX_THREADS {
        return Err(option("threads", format!("{threads} is not between 1 and {MAX_THREADS}")));
    }
    Ok((isa, threads))
}

/// What the buffers of the largest step take.
fn activation_bytes(config: &ModelConfig, limits: &ExecutorLimits) -> u64 {
    let query = config.head_count.saturating_mul(config.head_size);
    let kv = config.kv_head_count.saturating_mul(config.head_size);
    let widest = config.hidden_size.max(query).max(config.feed_forward_size);
    let row = [
        config.hidden_size.saturating_mul(4),
        query.saturating_mul(2),
        kv.saturating_mul(2),
        config.feed_forward_size.saturating_mul(3),
    ]
    .into_iter()
    .fold(0usize, usize::saturating_add);
    let rows = limits.max_batch_tokens.saturating_mul(row).saturating_mul(4);
    let logits = limits.max_logit_rows.saturating_mul(limits.vocabulary_size).saturating_mul(4);
    let quantised = Activations::byte_len(limits.max_batch_tokens, widest);
    rows.saturating_add(logits).saturating_add(quantised) as u64
}

/// Refuses a batch that does not fit, before any of it is computed.
fn check(batch: &Batch, limits: &ExecutorLimits) -> Result<(), ModelError> {
    for (what, count, limit) in [
        ("tokens", batch.token_count(), limits.max_batch_tokens),
        ("logit rows", batch.logit_rows(), limits.max_logit_rows),
        ("sequences", batch.sequences.len(), limits.max_sequences),
    ] {
        if count > limit {
            return Err(batch_error(format!("{count} {what} in one step; the limit is {limit}")));
        }
    }
    for (index, sequence) in batch.sequences.iter().enumerate() {
        let end = sequence.start.saturating_add(sequence.tokens.len());
        if end > limits.context_length {
            let limit = limits.context_length;
            return Err(batch_error(format!(
                "sequence {index} ends at {end}; the context is {limit} tokens"
            )));
        }
        if end > sequence.pages.len().saturating_mul(PAGE_TOKENS) {
            let pages = sequence.pages.len();
            return Err(batch_error(format!("sequence {index} ends at {end}, beyond its {pages} pages")));
        }
        if let Some(page) = sequence.pages.iter().find(|page| page.0 as usize >= limits.page_count) {
            let count = limits.page_count;
            return Err(batch_error(format!("sequence {index} uses page {}; there are {count}", page.0)));
        }
        if let Some(token) = sequence.tokens.iter().find(|token| **token as usize >= limits.vocabulary_size) {
            let size = limits.vocabulary_size;
            return Err(batch_error(format!("token {token} of sequence {index}; the vocabulary is {size}")));
        }
    }
    Ok(())
}

/// Cores without their second hardware threads, which do not help arithmetic that saturates a core.
pub fn physical_cores() -> usize {
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    let siblings = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list");
    let per_core = siblings.map_or(1, |list| list.trim().split([',', '-']).count().max(1));
    (available / per_core).clamp(1, MAX_THREADS)
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
