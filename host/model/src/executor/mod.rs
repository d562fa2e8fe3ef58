//! The seam between what runs next and how a step is computed.
//!
//! Invariant: an executor is driven by one thread; a step that fails leaves it usable, or able to say at once why it is
//! not. It knows no requests.

mod cpu;
mod cuda;
mod device;
#[cfg(test)]
mod fixture;
mod limits;
mod model_weights;
mod pipeline;
mod placed;
mod rank;
#[cfg(test)]
mod same_bits;
mod sharded;
mod step_logits;
mod threads;

use std::time::Duration;

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use skep_kernels::Isa;
use skep_kernels::cuda::Activation;
use skep_kernels::cuda::compile::Compiler;

use crate::batch::Batch;
use crate::error::ModelError;
pub use crate::memory_plan::MemoryPlan;
use crate::sampling::{LogitRow, RowOutput};
pub use cpu::CpuExecutor;
pub use device::{DeviceChoice, Ordinals};
pub use model_weights::ModelWeights;
pub use placed::PlacedExecutor;
use step_logits::StepLogits;
pub use threads::physical_cores;
use threads::share_of;

/// Computes steps of one model.
pub trait Executor: Send {
    fn limits(&self) -> &ExecutorLimits;

    /// Runs one step: writes the KV of every token and keeps the logits that were asked for.
    fn forward(&mut self, batch: &Batch) -> Result<(), ModelError>;

    /// A row of the last step's logits.
    fn logits(&self, row: usize) -> Result<&[f32], ModelError>;

    /// Draws or scores rows of the last step's logits.
    fn sample(&mut self, rows: &[LogitRow<'_>]) -> Result<Vec<RowOutput>, ModelError>;

    /// Whether [`Executor::sample_and_begin`] is worth a guess.
    fn supports_lookahead(&self) -> bool {
        false
    }

    /// As [`Executor::sample`], for a step that decoded one row of each sequence, all of which are drawn in their order. An executor
    /// that [supports lookahead](Executor::supports_lookahead) begins `next` before it waits for the tokens: the step of the drawn tokens, whatever
    /// `next` has in their places. If that is the next step, `forward` finds it under way; if not, it is forgotten.
    fn sample_and_begin(
        &mut self,
        rows: &[LogitRow<'_>],
        _next: &Batch,
    ) -> Result<Vec<RowOutput>, ModelError> {
        self.sample(rows)
    }

    fn plan(&self) -> &MemoryPlan;
}

/// What one step may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutorLimits {
    pub max_batch_tokens: usize,
    /// Of a step that computes prompts well and is not long: more at once gain little.
    pub step_tokens: usize,
    pub max_logit_rows: usize,
    pub max_sequences: usize,
    pub page_count: usize,
    pub context_length: usize,
    pub vocabulary_size: usize,
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDtype {
    F32,
    F16,
    /// Half the bytes of `F16`, with a scale for each head of each token.
    I8,
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            KvDtype::F32 => "f32",
            KvDtype::F16 => "f16",
            KvDtype::I8 => "i8",
        })
    }
}

impl FromStr for KvDtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [KvDtype::F32, KvDtype::F16, KvDtype::I8]
            .into_iter()
            .find(|kv| kv.to_string() == text)
            .ok_or_else(|| format!("unknown format of keys and values {text:?}; one of f16, f32, i8"))
    }
}

/// Where the threads of an executor run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Where the system puts them.
    Free,
    /// Each worker stays on a CPU of its own, among those after the n-th of this process.
    Pinned(usize),
}

/// Tokens that the KV pool on the processor holds, if nobody says how many.
pub const CPU_KV_TOKENS: usize = 32768;

/// Where compiled CUDA kernels are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelFolders {
    /// Those that this machine has compiled.
    pub cache: Option<&'static Path>,
    /// Those that came with the binary.
    pub shipped: Option<&'static Path>,
}

impl KernelFolders {
    /// What takes kernels out of them, and compiles those that are in none.
    pub fn compiler(&self) -> Arc<Compiler> {
        let owned = |folder: Option<&Path>| folder.map(Path::to_owned);
        Arc::new(Compiler::when_needed(None, owned(self.cache)).with_shipped(owned(self.shipped)))
    }
}

/// How to load a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutorOptions {
    pub device: DeviceChoice,
    pub kernels: KernelFolders,
    /// Of all ranks together, each of which has one at least. `None`: one per physical core.
    pub threads: Option<usize>,
    /// `None`: the fastest that the machine supports.
    pub isa: Option<Isa>,
    /// Where threads run. A model that is loaded for several executors gives each its own CPUs.
    pub placement: Placement,
    pub kv: KvDtype,
    /// On a CUDA device. `None`: as the weights are, or bf16.
    pub activations: Option<Activation>,
    /// Tokens that the KV pool holds, rounded up to whole pages. `None`: what the device has left, or
    /// [`CPU_KV_TOKENS`] on the processor.
    pub kv_tokens: Option<usize>,
    pub max_batch_tokens: usize,
    pub max_logit_rows: usize,
    pub max_sequences: usize,
    /// Ranks that share each weight.
    pub tensor_parallel: usize,
    /// Groups of ranks that share out the layers.
    pub pipeline_parallel: usize,
    /// How long ranks wait for each other while none makes any progress: longer than a layer takes for a full step.
    pub rank_deadline: Duration,
    /// On CUDA devices, only kernels that compute a row in one order, and no cuBLASLt: a row's logits have the same bits whatever
    /// else is in its step, however its prompt was cut into steps, and whatever came from the cache. They are those of one file,
    /// architecture, format of activations and count of ranks. The processor needs not be told.
    pub deterministic: bool,
}

impl Default for ExecutorOptions {
    fn default() -> Self {
        ExecutorOptions {
            device: DeviceChoice::Cpu,
            kernels: KernelFolders::default(),
            threads: None,
            isa: None,
            placement: Placement::Free,
            kv: KvDtype::F16,
            activations: None,
            kv_tokens: None,
            max_batch_tokens: 512,
            max_logit_rows: 64,
            max_sequences: 64,
            tensor_parallel: 1,
            pipeline_parallel: 1,
            rank_deadline: Duration::from_secs(10),
            deterministic: false,
        }
    }
}

fn option(name: &str, problem: String) -> ModelError {
    ModelError::Option { option: name.to_owned(), problem }
}
