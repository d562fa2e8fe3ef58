//! Flags that say how a model is computed, of every command that loads one to serve or to measure.

use skep_kernels::Isa;
use skep_model::{Activation, ExecutorOptions, KvDtype, Placement};

use crate::device_flag::DeviceFlag;

#[derive(Debug, Clone, Default, clap::Args)]
pub struct ComputeFlags {
    #[command(flatten)]
    pub device: DeviceFlag,
    /// Instructions to use: portable, avx2 or avx512 [default: the best there are]
    #[arg(long, value_name = "ISA")]
    pub isa: Option<Isa>,
    /// How keys and values are kept: f16, f32, or i8 in half the memory of f16 [default: f16]
    #[arg(long, value_name = "FORMAT")]
    pub kv: Option<KvDtype>,
    /// How a CUDA device keeps what is between the weights: bf16 or f16 [default: as the weights, or bf16]
    #[arg(long, value_name = "FORMAT")]
    pub activations: Option<Activation>,
    /// Keep each worker thread on a CPU of its own
    #[arg(long)]
    pub pin: bool,
}

impl ComputeFlags {
    /// Puts the flags that were given over `options`.
    pub fn apply(&self, options: &mut ExecutorOptions) {
        self.device.apply(options);
        options.isa = self.isa.or(options.isa);
        options.activations = self.activations.or(options.activations);
        options.kv = self.kv.unwrap_or(options.kv);
        if self.pin {
            options.placement = Placement::Pinned(0);
        }
    }
}
