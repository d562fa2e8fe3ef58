//! Flags for how a model is computed, shared by all commands that load a model to serve it or to measure it.

use skep_kernels::Isa;
use skep_model::{Activation, CpuAffinity, ExecutorOptions, KvDtype, MemoryFraction};

use crate::device_flag::DeviceFlag;

/// The flags for how a model is computed, which override the settings.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ComputeFlags {
    #[command(flatten)]
    pub device: DeviceFlag,
    /// Instruction set: portable, avx2, avx512 or avx512-bf16 [default: the best that the CPU has]
    #[arg(long, value_name = "ISA")]
    pub isa: Option<Isa>,
    /// Format of keys and values: f16, f32 (CPU), or i8 (CPU) and fp8 (CUDA), half the memory of f16 [default: f16]
    #[arg(long, value_name = "FORMAT")]
    pub kv: Option<KvDtype>,
    /// Fraction of a CUDA device's memory that each model may take, from 0.1 to 1 [default: what is free]
    #[arg(long, value_name = "FRACTION")]
    pub gpu_memory: Option<MemoryFraction>,
    /// Format of activations on a CUDA device: bf16 or f16 [default: that of the weights, or bf16]
    #[arg(long, value_name = "FORMAT")]
    pub activations: Option<Activation>,
    /// Pin each worker thread to a CPU of its own
    #[arg(long)]
    pub pin: bool,
}

impl ComputeFlags {
    /// Applies the flags that were given to `options`.
    pub fn apply(&self, options: &mut ExecutorOptions) {
        self.device.apply(options);
        options.isa = self.isa.or(options.isa);
        options.activations = self.activations.or(options.activations);
        options.kv = self.kv.unwrap_or(options.kv);
        options.gpu_memory = self.gpu_memory.or(options.gpu_memory);
        if self.pin {
            options.affinity = CpuAffinity::Pinned(0);
        }
    }
}
