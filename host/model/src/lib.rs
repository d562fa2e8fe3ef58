//! The model side of inference: model files, tokenizer, chat template, and the forward pass over paged keys and
//! values.
//!
//! Invariant: no file is trusted. Every count, offset and shape is checked before it is used, so a damaged or
//! hostile model produces an error that names the tensor or key. This crate knows batches, not requests.

#![deny(unsafe_code)]

pub mod error;

pub mod chat_template;
pub mod checkpoint;
pub mod config;
mod device_figures;
mod digest;
mod gguf;
mod mapping;
mod output;
mod safetensors_file;
pub mod tokenizer;

pub mod batch;
pub mod communicator;
pub mod executor;
mod expert_load;
mod layers;
pub mod loaded;
pub mod memory_plan;
mod models;
mod occurrences;
pub mod planner;
mod rank_times;
pub mod sampling;
mod seen_tokens;
mod shard;
mod token_set;
mod weights;

pub mod synthesis;
pub mod upcycle;

pub mod verify;

pub use batch::{Batch, BatchSequence, LogitsWanted, PAGE_TOKENS, PageId, WindowChange, WindowLimits};
pub use chat_template::{ChatTemplate, spelled_json};
pub use checkpoint::{Checkpoint, Tensor, reads_vocabulary_file};
pub use config::{Architecture, LayerStyle, ModelConfig, Rope, RopePairing, RopeScaling};
pub use device_figures::{OfDevice, device_figures, lacks_device_figures};
pub use digest::ModelDigest;
pub use error::{ModelError, RankFault};
#[cfg(feature = "emulated")]
pub use executor::emulated_executor;
pub use executor::{
    CPU_KV_TOKENS, CpuAffinity, CpuExecutor, DeviceChoice, DrawnAhead, Executor, ExecutorLimits,
    ExecutorOptions, KernelFolders, KvDtype, MemoryFraction, MemoryPlan, ModelWeights, Ordinals, PageForm,
    PlacedExecutor, RankMemory, Restart, StepAhead, WeightConversion, physical_cores,
};
pub use expert_load::{ExpertLoad, LayerLoad};
pub use gguf::reads_weights;
pub use loaded::LoadedModel;
pub use occurrences::Occurrences;
pub use rank_times::{RankTime, RankTimes};
pub use sampling::{LogitRow, RowOutput, SampleRow, Sampling, ScoreRow};
pub use seen_tokens::SeenTokens;
pub use skep_kernels::cuda::Activation;
pub use skep_kernels::cuda::nvml::DeviceFigures;
pub use skep_kernels::{DType, Fault, Isa, KernelError};
pub use tokenizer::{Before, SectionCache, SpecialTokens, TokenDecoder, Tokenizer, reads_pre_tokenizer};
pub use verify::{Verification, VerifyOptions, verify};
