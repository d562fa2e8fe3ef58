//! The interface between the scheduler, which decides what runs next, and the code that computes a step.
//!
//! Invariant: one thread drives an executor. After a failed step, the executor is usable, or it reports immediately
//! why it is not. Executors know nothing of requests.

mod cpu;
pub(crate) mod cuda;
mod device;
pub(crate) mod estimate;
#[cfg(test)]
mod fixture;
mod limits;
mod memory_fraction;
mod model_weights;
#[cfg(test)]
mod not_numbers_tests;
mod page_form;
mod pages_ahead;
mod pipeline;
mod placed;
mod rank;
#[cfg(test)]
mod same_bits;
mod sharded;
mod step_logits;
mod threads;
mod windows;

use std::time::Duration;

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use skep_kernels::Isa;
use skep_kernels::cuda::Activation;
use skep_kernels::cuda::compile::Compiler;

use crate::batch::{Batch, PageId, WindowChange, WindowLimits};
use crate::error::ModelError;
use crate::expert_load::ExpertLoad;
pub use crate::memory_plan::{MemoryPlan, RankMemory};
use crate::rank_times::RankTimes;
use crate::sampling::{LogitRow, RowOutput};
pub use crate::weights::WeightConversion;
pub use cpu::CpuExecutor;
#[cfg(feature = "emulated")]
pub use cuda::emulated_executor;
pub use device::{DeviceChoice, Ordinals};
pub use memory_fraction::MemoryFraction;
pub use model_weights::{LoadWatch, ModelWeights};
pub use page_form::PageForm;
pub use placed::PlacedExecutor;
use step_logits::StepLogits;
pub use threads::physical_cores;
pub(crate) use threads::share_of;

/// An executor computes the steps of one model.
pub trait Executor: Send {
    fn limits(&self) -> &ExecutorLimits;

    /// Runs one step: writes the KV of every token and keeps the requested logits.
    fn forward(&mut self, batch: &Batch) -> Result<(), ModelError>;

    /// Returns a row of the last step's logits.
    fn logits(&self, row: usize) -> Result<&[f32], ModelError>;

    /// Draws or scores rows of the last step's logits.
    fn sample(&mut self, rows: &[LogitRow<'_>]) -> Result<Vec<RowOutput>, ModelError>;

    /// Returns whether [`Executor::sample_and_begin`] can start a predicted next step.
    fn supports_lookahead(&self) -> bool {
        false
    }

    /// Draws like [`Executor::sample`]. If [`Executor::supports_lookahead`] returns true, the executor may start the step
    /// `next` before it waits for the tokens, with the drawn tokens in their places. If the next call of `forward` is for
    /// this step, it finds the step in progress. Otherwise the step is discarded; the pages that it writes are written
    /// before those of any later call.
    fn sample_and_begin(
        &mut self,
        rows: &[LogitRow<'_>],
        _next: &StepAhead,
    ) -> Result<DrawnAhead, ModelError> {
        Ok(DrawnAhead { outputs: self.sample(rows)?, has_begun: false })
    }

    fn plan(&self) -> &MemoryPlan;

    /// Returns the memory of each rank in the order of their numbers, if the model is divided among several. Buffers that the
    /// ranks share are only in [`Executor::plan`].
    fn ranks(&self) -> &[RankMemory] {
        &[]
    }

    /// Returns the error after which the executor computes nothing more and has to be replaced, if there was one. It takes
    /// microseconds.
    fn fault(&self) -> Option<ModelError> {
        None
    }

    /// Returns the counters of the tokens of each expert, if the model has experts and the executor counts them.
    fn expert_load(&self) -> Option<Arc<ExpertLoad>> {
        None
    }

    /// Returns the times of the ranks, if the model is divided among several and the executor measures them.
    fn rank_times(&self) -> Option<Arc<RankTimes>> {
        None
    }

    /// Returns the pages of layers with a window, if they have fewer than other layers. Such layers keep what a step writes to a
    /// page until the page is released, and no step may see a page that was released.
    fn windows(&self) -> Option<WindowLimits> {
        None
    }

    /// Changes what pages keep for layers with a window, before the next step.
    fn change_windows(&mut self, _changes: &[WindowChange]) -> Result<(), ModelError> {
        Ok(())
    }

    /// Returns the form in which pages leave this executor, or `None` if they cannot leave it.
    fn page_form(&self) -> Option<&PageForm> {
        None
    }

    /// Copies whole computed pages, one after the other, to `out`.
    fn read_pages(&mut self, _pages: &[PageId], _out: &mut [u8]) -> Result<(), ModelError> {
        Err(page_form::unsupported())
    }

    /// Replaces pages with bytes that [`Executor::read_pages`] of an executor with the same form copied, for the same
    /// tokens at the same positions.
    fn write_pages(&mut self, _pages: &[PageId], _bytes: &[u8]) -> Result<(), ModelError> {
        Err(page_form::unsupported())
    }
}

/// Starts an executor on the same devices, with the same limits, in the place of one that has failed.
pub type Restart = Arc<dyn Fn() -> Result<Box<dyn Executor>, ModelError> + Send + Sync>;

/// A step that can start before all of its tokens are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepAhead {
    /// The first `drawn.len()` sequences have one token each, which is a placeholder. The tokens of the others are known.
    pub batch: Batch,
    /// The indices of the requested rows whose tokens these sequences continue with.
    pub drawn: Vec<usize>,
}

/// The result of [`Executor::sample_and_begin`].
#[derive(Clone, Debug, PartialEq)]
pub struct DrawnAhead {
    /// The outputs of the requested rows in their order.
    pub outputs: Vec<RowOutput>,
    /// Whether the next step has been started.
    pub has_begun: bool,
}

impl StepAhead {
    /// Puts tokens in their places. `tokens` are those of all requested rows.
    pub fn fill_in(&mut self, tokens: &[u32]) {
        for (sequence, row) in self.batch.sequences.iter_mut().zip(&self.drawn) {
            sequence.tokens[0] = tokens[*row];
        }
    }
}

/// The limits of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutorLimits {
    pub max_batch_tokens: usize,
    /// Number of tokens in a step that computes prompts efficiently and does not take long. Larger steps gain little.
    pub step_tokens: usize,
    pub max_logit_rows: usize,
    pub max_sequences: usize,
    pub page_count: usize,
    pub context_length: usize,
    pub vocabulary_size: usize,
}

/// The format in which keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDtype {
    F32,
    F16,
    /// Takes half the bytes of `F16`, with a scale for each head of each token. Only the CPU stores it.
    I8,
    /// FP8 (E4M3). Takes as many bytes as `I8`, with a scale for each head of each token. Only CUDA devices store it.
    Fp8,
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            KvDtype::F32 => "f32",
            KvDtype::F16 => "f16",
            KvDtype::I8 => "i8",
            KvDtype::Fp8 => "fp8",
        })
    }
}

impl FromStr for KvDtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = [KvDtype::F32, KvDtype::F16, KvDtype::I8, KvDtype::Fp8];
        all.into_iter().find(|kv| kv.to_string() == text).ok_or_else(|| {
            format!("unknown format of keys and values {text:?}; expected one of f16, f32, i8, fp8")
        })
    }
}

/// The CPUs that the threads of an executor run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuAffinity {
    /// The operating system chooses the CPUs.
    Unpinned,
    /// Each worker is pinned to a separate CPU, chosen from those after the first n CPUs of this process.
    Pinned(usize),
}

/// Default number of tokens in the KV pool on the CPU.
pub const CPU_KV_TOKENS: usize = 32768;

/// The folders that hold compiled CUDA kernels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelFolders {
    /// Kernels that were compiled on this machine.
    pub cache: Option<Arc<Path>>,
    /// Kernels that came with the binary.
    pub shipped: Option<Arc<Path>>,
}

impl KernelFolders {
    /// Returns a compiler that takes kernels from these folders, and compiles those that are in neither.
    pub fn compiler(&self) -> Arc<Compiler> {
        let owned = |folder: &Option<Arc<Path>>| folder.as_deref().map(Path::to_owned);
        Arc::new(Compiler::when_needed(None, owned(&self.cache)).with_shipped(owned(&self.shipped)))
    }
}

/// The options for loading a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecutorOptions {
    pub device: DeviceChoice,
    pub kernels: KernelFolders,
    /// Number of threads of all ranks together; each rank has at least one. `None` means one per physical core.
    pub threads: Option<usize>,
    /// `None` means the fastest instruction set that the machine supports.
    pub isa: Option<Isa>,
    /// CPU affinity of the threads. A model that is loaded for several executors gives each executor separate CPUs.
    pub affinity: CpuAffinity,
    pub kv: KvDtype,
    /// If true, quantized weights and weights in F16 are expanded to F32 when they are loaded on the CPU, and activations are not
    /// rounded. It is for verification; a step reads up to eight times the bytes.
    pub exact_weights: bool,
    /// Format that matrices are converted to when they are loaded on the CPU.
    pub weights: WeightConversion,
    /// Format of the activations on a CUDA device. `None` means the format of the weights, or else bf16.
    pub activations: Option<Activation>,
    /// Number of tokens in the KV pool, rounded up to whole pages. `None` means the memory that is left on the
    /// device, or [`CPU_KV_TOKENS`] on the CPU.
    pub kv_tokens: Option<usize>,
    /// Number of tokens for which layers with a window keep keys and values on the CPU, over all sequences. `None` means as many
    /// as other layers. Pages that keep less than other pages cannot leave the executor.
    pub window_tokens: Option<usize>,
    pub max_batch_tokens: usize,
    pub max_logit_rows: usize,
    pub max_sequences: usize,
    /// Number of ranks that share each weight.
    pub tensor_parallel: usize,
    /// Number of groups of ranks that the layers are divided among.
    pub pipeline_parallel: usize,
    /// Time that ranks wait for each other without any progress. It must be longer than a layer takes in a full step.
    pub rank_deadline: Duration,
    /// Whether CUDA devices use only kernels that compute a row in one fixed order, and no cuBLASLt. The logits of a
    /// row then have the same bits whatever else is in its step, however its prompt was split into steps, and
    /// whatever came from the cache. The bits are specific to one model file, architecture, activation format and
    /// number of ranks. The CPU behaves this way without the option.
    pub deterministic: bool,
    /// Whether the model takes turns on the CPUs with the other models of this process. Without turns, models that compute
    /// at the same time wait at each barrier for threads that the operating system gave to the other.
    pub take_turns: bool,
    /// Memory of each CUDA device that is left to other models, in bytes.
    pub reserved_bytes: u64,
    /// The fraction of each CUDA device's memory that weights, buffers, recordings and pages of this model may take. `None`
    /// means all that is free.
    pub gpu_memory: Option<MemoryFraction>,
}

impl Default for ExecutorOptions {
    fn default() -> Self {
        ExecutorOptions {
            device: DeviceChoice::Cpu,
            kernels: KernelFolders::default(),
            threads: None,
            isa: None,
            affinity: CpuAffinity::Unpinned,
            kv: KvDtype::F16,
            exact_weights: false,
            weights: WeightConversion::Keep,
            activations: None,
            kv_tokens: None,
            window_tokens: None,
            max_batch_tokens: 512,
            max_logit_rows: 64,
            max_sequences: 64,
            tensor_parallel: 1,
            pipeline_parallel: 1,
            rank_deadline: Duration::from_secs(10),
            deterministic: false,
            take_turns: true,
            reserved_bytes: 0,
            gpu_memory: None,
        }
    }
}

fn option(name: &str, problem: String) -> ModelError {
    ModelError::Option { option: name.to_owned(), problem }
}
