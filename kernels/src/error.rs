//! The errors that operations return.

use crate::cuda_types::{Architecture, NvrtcVersion, ProductLayout};
use crate::fault::Fault;
use crate::{DType, Isa};

/// An operation was given a shape, size or format that it cannot handle, or the machine lacks something that it needs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    #[error("{op}: {what} must be {expected}, but it is {found}")]
    Shape { op: &'static str, what: &'static str, expected: usize, found: usize },
    #[error("{op}: {what} {index} is out of range; the limit is {count}")]
    OutOfRange { op: &'static str, what: &'static str, index: usize, count: usize },
    #[error("{op}: {what} {index} is written twice in one call")]
    Conflict { op: &'static str, what: &'static str, index: usize },
    #[error("{op}: a row of {values} values is not a whole number of {dtype} blocks of {}", dtype.block_len())]
    PartialBlock { op: &'static str, dtype: DType, values: usize },
    #[error("{op}: {what} is too large to address")]
    TooLarge { op: &'static str, what: &'static str },
    #[error("{op}: {what} is {found}; supported: {supported}")]
    Unsupported { op: &'static str, what: &'static str, found: u64, supported: String },
    #[error(
        "{op}: the buffer is in the memory of another device, {other}, and not of {device}; use that device's queue, or copy \
         the buffer here"
    )]
    OtherDevice { op: &'static str, device: String, other: String },
    #[error("{op}: pages of BF16 pairs need the tier {}, but it is {isa}", Isa::Avx512Bf16)]
    Tier { op: &'static str, isa: Isa },
    #[error("{op}: the device has no kernel for {found}; it has kernels for {supported}")]
    Format { op: &'static str, found: DType, supported: &'static str },
    #[error("out of memory: {bytes} bytes could not be allocated")]
    OutOfMemory { bytes: usize },
    #[error("a thread cannot be pinned to CPU {cpu}: {reason}; leave threads unpinned")]
    Pinning { cpu: usize, reason: String },
    #[error(
        "NVRTC, which compiles the CUDA kernels, was not found (tried {tried}); install the CUDA toolkit, or the Python package \
         nvidia-cuda-nvrtc with its `lib` folder in LD_LIBRARY_PATH"
    )]
    NoNvrtc { tried: String },
    #[error("{library} lacks the function {symbol}; install {oldest} or newer")]
    LibraryFunction { library: String, symbol: &'static str, oldest: &'static str },
    #[error("NVRTC {version} does not compile for {architecture}; install NVRTC {oldest} or newer")]
    OldNvrtc { version: NvrtcVersion, architecture: Architecture, oldest: &'static str },
    #[error("NVRTC: {call} failed: {reason}")]
    Nvrtc { call: &'static str, reason: String },
    #[error("{source_name} does not compile for {architecture}:\n{log}")]
    Compilation { source_name: &'static str, architecture: Architecture, log: String },
    #[error(
        "cuBLASLt, which multiplies dense weights, was not found (tried {tried}); Skep's own tensor-core kernel is used \
         instead. To use cuBLASLt, install the CUDA toolkit, or the Python package nvidia-cublas with its `lib` folder in \
         LD_LIBRARY_PATH"
    )]
    NoCublas { tried: String },
    #[error("cuBLASLt: {call} failed: {reason}")]
    Cublas { call: &'static str, reason: String },
    #[error("cuBLASLt has no algorithm for {layout}: {reason}")]
    NoAlgorithm { layout: ProductLayout, reason: String },
    #[error(
        "the driver rejects the {found} kernels of {source_name} ({reason}), and they cannot be compiled on this machine \
         instead: {then}"
    )]
    Rejected { source_name: &'static str, found: &'static str, reason: String, then: String },
    #[error("compiled kernels cannot be written to {folder}: {reason}; choose a writable folder")]
    Shipping { folder: String, reason: String },
    #[error("there are no kernels for compute capability {major}.{minor}; kernels exist for {supported}")]
    Architecture { major: u32, minor: u32, supported: &'static str },
    #[error("no CUDA device: {reason}")]
    NoDevice { reason: String },
    #[error(
        "device {device} cannot access the memory of device {peer}, which ranks that share a layer require; distribute whole \
         layers over the devices instead, or choose other devices"
    )]
    NoPeer { device: usize, peer: usize },
    #[error(
        "{bytes} bytes of device memory are needed, but {free} are free; use a smaller model or format, or more devices"
    )]
    DeviceMemory { bytes: usize, free: usize },
    #[error("the device has no kernel named {kernel}")]
    NoKernel { kernel: String },
    /// A call failed, and later ones may succeed.
    #[error("CUDA driver: {call} failed: {reason}")]
    Driver { call: &'static str, reason: String },
    /// A call failed for a reason that stays.
    #[error("CUDA driver: {call} failed: {reason}; {fault}")]
    DeviceFault { fault: Fault, call: &'static str, reason: String },
    #[error(
        "this process has to be restarted before it can use cuda:{device} again, because of this error: {reason}"
    )]
    SpoiledContext { device: usize, reason: String },
    #[error(
        "NVML, which reads the figures of GPUs, was not found (tried {tried}); it comes with the NVIDIA driver"
    )]
    NoNvml { tried: String },
    #[error("NVML: {call} failed: {reason}")]
    Nvml { call: &'static str, reason: String },
    #[error("could not start a worker thread: {reason}")]
    Thread { reason: String },
}

impl KernelError {
    /// Returns what the error leaves behind on the device, or `None` if the next call may succeed.
    pub fn fault(&self) -> Option<Fault> {
        match self {
            KernelError::DeviceFault { fault, .. } => Some(*fault),
            KernelError::SpoiledContext { .. } => Some(Fault::Context),
            KernelError::DeviceMemory { .. } => Some(Fault::Memory),
            _ => None,
        }
    }
}

/// Checks that a length matches the shapes.
pub(crate) fn expect_len(
    op: &'static str,
    what: &'static str,
    expected: usize,
    found: usize,
) -> Result<(), KernelError> {
    if expected == found { Ok(()) } else { Err(KernelError::Shape { op, what, expected, found }) }
}

/// Multiplies sizes, or returns an error that names what is too large.
pub(crate) fn product(op: &'static str, what: &'static str, sizes: &[usize]) -> Result<usize, KernelError> {
    sizes
        .iter()
        .try_fold(1usize, |total, size| total.checked_mul(*size))
        .ok_or(KernelError::TooLarge { op, what })
}
