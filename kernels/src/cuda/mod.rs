//! The host side of the CUDA kernels: the parameters of each kernel, and its launch configuration for given shapes.
//!
//! Each operation has one file with the same name as its `.cu` file. It defines the parameter struct of the kernel and a
//! function that checks shapes and returns the launch. Tests run the kernels on the CPU, in several thread orders, and
//! compare them with a plain reference in higher precision; on machines with a device, the same tests also run there.
//! `compile` turns the sources into modules for a device's architecture, and `device` loads and launches them.

pub mod architecture;
mod backend;
pub mod blas;
pub mod ceilings;
pub mod compile;
pub mod contexts;
mod cubin;
pub mod cubin_cache;
pub mod cublas_lt;
pub mod device;
mod driver;
#[cfg(any(test, feature = "emulated"))]
mod emulated;
mod kernel;
mod kv_pages;
mod library;
mod loading;
pub mod nvml;
pub mod nvrtc;
pub mod operation;
mod plan_cache;
mod queue;
pub mod rates;
pub mod shipped;
pub mod source;
pub mod timing;
pub mod usage;

pub mod all_reduce;
pub mod all_reduce_norm;
pub mod attention_decode;
pub mod attention_hopper;
pub mod attention_prefill;
pub mod embedding;
pub mod expand;
pub mod gemm;
pub mod gemv;
pub mod gemv_fused;
pub mod matmul;
pub mod products;
pub mod qkv;
pub mod rms_norm;
pub mod sample;
pub mod swiglu;
pub mod tiles;

#[cfg(test)]
mod allocations;
#[cfg(test)]
mod compile_tests;
#[cfg(test)]
mod host;
#[cfg(test)]
mod on_device;

use std::fmt;
use std::str::FromStr;

pub use kernel::{Family, Kernel};
pub use kv_pages::{PageAddresses, PageFormat};

use crate::{KernelError, device_constants::device_constant};

/// Number of threads per warp.
const WARP: u32 = device_constant!("device.cuh", "WARP");

/// Number of positions per page of keys and values.
pub const PAGE_POSITIONS: u32 = device_constant!("device.cuh", "PAGE_POSITIONS");

/// Attention processes half as many query heads or keys at a time if heads have more values than this.
const WIDE_HEAD: u32 = device_constant!("device.cuh", "WIDE_HEAD");

/// An address on the device. 0 means that there is none.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(pub u64);

impl Address {
    /// The address for a parameter that a kernel does not use.
    pub const NONE: Address = Address(0);
}

/// The number format of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    Bf16,
    F16,
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.suffix())
    }
}

impl FromStr for Activation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Activation::Bf16, Activation::F16]
            .into_iter()
            .find(|activation| activation.to_string() == text)
            .ok_or_else(|| format!("unknown activation format {text:?}; expected bf16 or f16"))
    }
}

impl Activation {
    /// Returns the suffix of kernel names for this format.
    fn suffix(self) -> &'static str {
        match self {
            Activation::Bf16 => "bf16",
            Activation::F16 => "f16",
        }
    }
}

/// A kernel and its launch configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub kernel: Kernel,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
}

impl Launch {
    fn new(kernel: Kernel, grid: [u32; 3], threads: u32) -> Self {
        Launch { kernel, grid, block: [threads, 1, 1], shared_bytes: 0 }
    }
}

/// Returns the number of blocks with this many threads and bytes of shared memory that the largest multiprocessors run at
/// once, if registers do not limit them.
fn blocks_of_multiprocessor(threads: u32, shared_bytes: u32) -> u32 {
    const THREADS: u32 = 2048;
    const SHARED_BYTES: u32 = 228 << 10;
    // Each block takes a KiB beside its own memory.
    (SHARED_BYTES / (shared_bytes + (1 << 10))).min(THREADS / threads.max(1))
}

fn multiple_of_8(op: &'static str, what: &'static str, found: u32) -> Result<(), KernelError> {
    let supported = || "a multiple of 8".to_owned();
    require(found > 0 && found.is_multiple_of(8), op, what, found, supported)
}

fn at_most(op: &'static str, what: &'static str, found: u32, limit: u32) -> Result<(), KernelError> {
    require(found <= limit, op, what, found, || format!("at most {limit}"))
}

fn require(
    holds: bool,
    op: &'static str,
    what: &'static str,
    found: u32,
    supported: impl FnOnce() -> String,
) -> Result<(), KernelError> {
    if holds {
        return Ok(());
    }
    Err(KernelError::Unsupported { op, what, found: found.into(), supported: supported() })
}

/// Converts a number of blocks to the first dimension of a grid.
fn blocks(op: &'static str, count: u64) -> Result<u32, KernelError> {
    let most = i32::MAX.unsigned_abs();
    u32::try_from(count).ok().filter(|count| *count <= most).ok_or_else(|| KernelError::Unsupported {
        op,
        what: "the number of blocks",
        found: count,
        supported: format!("at most {most}"),
    })
}
