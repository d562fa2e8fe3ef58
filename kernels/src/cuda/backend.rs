//! What a device does for the rest of this crate. Two do it: NVIDIA's driver, and for tests the processor.
//!
//! Invariant: everything but memory is put into one queue and done in its order, later than the call returns; what fails there
//! is reported by whoever waits for the queue. Events and recordings are handles of their own backend.

use super::Launch;
use crate::KernelError;

/// Bytes of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub free: u64,
    pub total: u64,
}

/// Where the modules of a device came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    pub shipped: usize,
    pub cached: usize,
    pub compiled: usize,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// From the host to the device.
    Up,
    /// From the device to the host.
    Down,
    /// On the device, or from another one of the same kind.
    Across,
}

/// # Safety
/// Of all unsafe functions: addresses are valid for so many bytes until the queue has been waited for, and handles were given
/// by a backend of this kind and not given back.
pub(super) trait Backend: Send + Sync {
    /// Waits until all kernels are loaded; launches wait by themselves.
    fn ready(&self) -> Result<Loaded, KernelError>;
    /// For people.
    fn name(&self) -> String;
    fn multiprocessors(&self) -> u32;
    fn memory(&self) -> Result<Memory, KernelError>;
    fn allocate(&self, bytes: usize) -> Result<u64, KernelError>;
    unsafe fn free(&self, address: u64);
    /// Memory of the host that copies can be made from and to while it computes.
    fn allocate_host(&self, bytes: usize) -> Result<*mut u8, KernelError>;
    unsafe fn free_host(&self, at: *mut u8, bytes: usize);
    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<(), KernelError>;
    unsafe fn copy(&self, way: Way, to: u64, from: u64, bytes: usize) -> Result<(), KernelError>;
    /// With a kernel's struct, which is copied before this returns.
    unsafe fn launch(&self, launch: &Launch, params: *const u8, bytes: usize) -> Result<(), KernelError>;
    fn synchronize(&self) -> Result<(), KernelError>;

    fn event(&self) -> Result<u64, KernelError>;
    unsafe fn free_event(&self, event: u64);
    /// Marks this place of the queue.
    unsafe fn record(&self, event: u64) -> Result<(), KernelError>;
    /// Lets this queue wait for what was recorded in another one before.
    unsafe fn wait(&self, event: u64) -> Result<(), KernelError>;
    /// Until what was put into the queue before the event is done.
    unsafe fn wait_for_event(&self, event: u64) -> Result<(), KernelError>;
    /// Milliseconds between two recorded events that have both passed.
    unsafe fn elapsed_ms(&self, from: u64, to: u64) -> Result<f32, KernelError>;

    /// Launches and copies on the device are remembered from here on rather than done.
    fn begin_recording(&self) -> Result<(), KernelError>;
    /// Even if what was recorded has failed.
    fn end_recording(&self) -> Result<u64, KernelError>;
    unsafe fn free_recording(&self, recording: u64);
    unsafe fn replay(&self, recording: u64) -> Result<(), KernelError>;

    /// Lets kernels of this device use the memory of another one.
    fn reach(&self, other: &dyn Backend) -> Result<(), KernelError>;
    /// The device's number, unless it is none that the driver knows.
    fn ordinal(&self) -> Option<usize>;
    fn stream(&self) -> Option<cudarc::driver::sys::CUstream>;
}
