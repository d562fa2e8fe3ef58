//! `[engine]` in `skep.toml`: how models run.

use std::num::NonZeroUsize;
use std::time::Duration;

use anyhow::Result;
use serde::Deserialize;
use skep_engine::{Routing, Speculation};
use skep_model::{Activation, CpuAffinity, KvDtype, MemoryFraction, WeightConversion};

use super::{fraction, parsed, set};
use crate::number::number;
use crate::server_options::ServerOptions;

/// The section `[engine]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineConfig {
    /// Engines of the same model in this process; the threads are divided among them.
    #[serde(deserialize_with = "number::<1, 64, _, _>")]
    pub replicas: Option<NonZeroUsize>,
    pub routing: Option<RoutingConfig>,
    /// Maximum number of requests that wait at each replica.
    #[serde(deserialize_with = "number::<1, 1_000_000, _, _>")]
    pub max_queue: Option<usize>,
    /// Maximum number of sequences that run at the same time on each replica.
    #[serde(deserialize_with = "number::<1, 65_536, _, _>")]
    pub max_sequences: Option<usize>,
    /// Token budget of one step.
    #[serde(deserialize_with = "number::<1, 65_536, _, _>")]
    pub step_tokens: Option<usize>,
    /// Maximum time of a step in which prompts are computed beside decodes.
    #[serde(deserialize_with = "number::<1, 3_600_000, _, _>")]
    pub step_target_ms: Option<u64>,
    /// Size of each replica's KV cache in tokens, over all sequences.
    #[serde(deserialize_with = "number::<256, 4_294_967_295, _, _>")]
    pub kv_tokens: Option<usize>,
    /// Tokens for which layers with a window keep keys and values on the CPU, over all sequences.
    #[serde(deserialize_with = "number::<256, 4_294_967_295, _, _>")]
    pub window_tokens: Option<usize>,
    /// Fraction of a CUDA device's memory that each model may take.
    #[serde(deserialize_with = "fraction")]
    pub gpu_memory: Option<MemoryFraction>,
    pub kv: Option<KvConfig>,
    /// Format that weights are converted to when they are loaded on the CPU: q8_0, bf16 or keep.
    #[serde(deserialize_with = "parsed")]
    pub weights: Option<WeightConversion>,
    /// Format of activations on CUDA devices: bf16 or f16.
    #[serde(deserialize_with = "parsed")]
    pub activations: Option<Activation>,
    /// Instruction set to compute with: portable, avx2, avx512 or avx512-bf16.
    pub isa: Option<String>,
    /// Whether each thread of the model's computation is pinned to a CPU of its own.
    pub pin_threads: Option<bool>,
    #[serde(deserialize_with = "number::<1, 604_800, _, _>")]
    pub default_deadline_s: Option<u64>,
    pub speculation: Option<SpeculationConfig>,
    /// Tensor-parallel ranks, which share each layer.
    #[serde(deserialize_with = "number::<1, 64, _, _>")]
    pub tensor_parallel: Option<usize>,
    /// Pipeline-parallel ranks, which divide the layers among them.
    #[serde(deserialize_with = "number::<1, 64, _, _>")]
    pub pipeline_parallel: Option<usize>,
    /// Time that a request waits for its model to be loaded.
    #[serde(deserialize_with = "number::<1, 3_600, _, _>")]
    pub load_wait_s: Option<u64>,
    /// Time that ranks wait while none of them makes progress.
    #[serde(deserialize_with = "number::<1, 86_400, _, _>")]
    pub rank_deadline_s: Option<u64>,
}

/// Distribution of requests over replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RoutingConfig {
    Affinity,
    RoundRobin,
}

/// Format of keys and values in the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvConfig {
    F16,
    F32,
    I8,
    Fp8,
}

/// Speculative decoding, and the source of its drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum SpeculationConfig {
    Auto,
    Off,
    PromptLookup,
}

impl EngineConfig {
    /// Sets the options that the section has.
    pub(super) fn apply(&self, options: &mut ServerOptions) -> Result<()> {
        options.load_wait = self.load_wait_s.map(Duration::from_secs).or(options.load_wait);
        set(&mut options.replicas, &self.replicas);
        set(&mut options.engine.routing, &self.routing.map(Routing::from));
        set(&mut options.engine.max_queue, &self.max_queue);
        set(&mut options.engine.max_sequences, &self.max_sequences);
        options.engine.step_tokens = self.step_tokens.or(options.engine.step_tokens);
        options.engine.step_target =
            self.step_target_ms.map(Duration::from_millis).or(options.engine.step_target);
        options.executor.kv_tokens = self.kv_tokens.or(options.executor.kv_tokens);
        options.executor.window_tokens = self.window_tokens.or(options.executor.window_tokens);
        options.executor.gpu_memory = self.gpu_memory.or(options.executor.gpu_memory);
        set(&mut options.executor.tensor_parallel, &self.tensor_parallel);
        set(&mut options.executor.pipeline_parallel, &self.pipeline_parallel);
        set(&mut options.executor.rank_deadline, &self.rank_deadline_s.map(Duration::from_secs));
        set(&mut options.engine.default_deadline, &self.default_deadline_s.map(Duration::from_secs));
        set(&mut options.engine.speculation, &self.speculation.map(Speculation::from));
        set(&mut options.executor.kv, &self.kv.map(KvDtype::from));
        set(&mut options.executor.weights, &self.weights);
        options.executor.activations = self.activations.or(options.executor.activations);
        if let Some(isa) = &self.isa {
            let isa = isa.parse().map_err(|problem| anyhow::anyhow!("[engine] isa: {problem}"))?;
            options.executor.isa = Some(isa);
        }
        if self.pin_threads == Some(true) {
            options.executor.affinity = CpuAffinity::Pinned(0);
        }
        Ok(())
    }
}

impl From<RoutingConfig> for Routing {
    fn from(routing: RoutingConfig) -> Self {
        match routing {
            RoutingConfig::Affinity => Routing::Affinity,
            RoutingConfig::RoundRobin => Routing::RoundRobin,
        }
    }
}

impl From<KvConfig> for KvDtype {
    fn from(kv: KvConfig) -> Self {
        match kv {
            KvConfig::F16 => KvDtype::F16,
            KvConfig::F32 => KvDtype::F32,
            KvConfig::I8 => KvDtype::I8,
            KvConfig::Fp8 => KvDtype::Fp8,
        }
    }
}

impl From<SpeculationConfig> for Speculation {
    fn from(speculation: SpeculationConfig) -> Self {
        match speculation {
            SpeculationConfig::Auto => Speculation::Auto,
            SpeculationConfig::Off => Speculation::Off,
            SpeculationConfig::PromptLookup => Speculation::prompt_lookup(),
        }
    }
}
