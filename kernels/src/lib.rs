//! The operations of a transformer step on plain buffers: shape checks, dispatch by instruction set, and SIMD code.
//!
//! Invariant: every public operation checks its shapes and returns a [`KernelError`]; nothing here panics on bad input.
//! All SIMD code and nearly all `unsafe` code of the workspace is here. The crate knows nothing about models, files,
//! sequences or requests.

pub mod affinity;
pub mod arithmetic;
pub mod attention;
pub mod bandwidth;
pub mod buffer;
mod cpu;
pub mod cuda;
mod cuda_types;
pub mod dequantize;
mod device_constants;
mod dtype;
mod error;
mod fault;
pub mod gather;
pub mod gpu;
pub mod grouped;
mod isa;
pub mod kv;
pub mod latent;
pub mod matmul;
mod matrix;
pub mod mixture;
pub mod pool;
pub mod qkv;
#[cfg(test)]
mod random;
pub mod residual;
pub mod rms_norm;
pub mod rope;
#[cfg(test)]
mod same_bits;
mod shared_prefix;
pub mod softmax;
pub mod swiglu;
pub mod turns;

pub use dequantize::dequantize;
pub use dtype::DType;
pub use error::KernelError;
pub use fault::Fault;
pub use isa::Isa;
pub use pool::WorkerPool;
