//! The operations that a device provides to the rest of this crate. There are two backends: NVIDIA's driver, and for tests
//! an emulation on the CPU.
//!
//! Invariant: everything except memory management is asynchronous. It is put into one queue and executed in order, and
//! failures are reported by the next call that waits for the queue. Event and recording handles are valid only in the
//! backend that created them.

use std::sync::Arc;

use super::architecture::Architecture;
use super::{Address, Launch};
use crate::KernelError;

/// The memory of a device in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub free: u64,
    pub total: u64,
}

/// The number of a device's modules by origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    pub shipped: usize,
    pub cached: usize,
    pub compiled: usize,
    /// Shipped or cached modules that the driver rejected. They are compiled, and counted there as well.
    pub rejected: usize,
}

/// The driver's description of a tensor in device memory, with which kernels copy boxes of it to shared memory.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct TensorMap(pub [u64; 16]);

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyKind {
    HostToDevice,
    DeviceToHost,
    /// Within the device.
    DeviceToDevice,
}

/// A device with one queue.
///
/// # Safety
/// For all unsafe functions: addresses are valid for the given number of bytes until the queue has been waited for, and
/// handles were returned by a backend of this kind and not freed.
pub(super) trait Backend: Send + Sync {
    /// Waits until all kernels are loaded. Launches wait on their own.
    fn ready(&self) -> Result<Loaded, KernelError>;
    /// Returns a name for display.
    fn name(&self) -> String;
    /// Returns the architecture that kernels run on, or `None` if they run on the CPU.
    fn architecture(&self) -> Option<Architecture>;
    fn multiprocessors(&self) -> u32;
    /// Returns the number of blocks of a kernel that a multiprocessor runs at once.
    fn blocks_per_multiprocessor(&self, launch: &Launch) -> Result<u32, KernelError>;
    fn memory(&self) -> Result<Memory, KernelError>;
    fn allocate(&self, bytes: usize) -> Result<u64, KernelError>;
    unsafe fn free(&self, address: u64);
    /// Allocates host memory that asynchronous copies and kernels of any device can use, at the same address.
    fn allocate_host(&self, bytes: usize) -> Result<*mut u8, KernelError>;
    unsafe fn free_host(&self, at: *mut u8, bytes: usize);
    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<(), KernelError>;
    unsafe fn copy(&self, kind: CopyKind, to: u64, from: u64, bytes: usize) -> Result<(), KernelError>;
    /// Queues a copy from the memory of another device, whose backend is of this kind, to this device.
    unsafe fn copy_from_peer(
        &self,
        peer: &dyn Backend,
        to: u64,
        from: u64,
        bytes: usize,
    ) -> Result<(), KernelError>;
    /// Queues a launch with the kernel's parameter struct, which is copied before this returns.
    unsafe fn launch(&self, launch: &Launch, params: *const u8, bytes: usize) -> Result<(), KernelError>;
    /// Describes a packed tensor of 16-bit values, whose sizes and box start with the innermost dimension. Rows of the box have
    /// 128 bytes, which copies swizzle. Emulated devices have no such copies.
    fn tensor_map(&self, at: Address, sizes: [u64; 4], of_box: [u32; 4]) -> Result<TensorMap, KernelError>;
    fn synchronize(&self) -> Result<(), KernelError>;
    /// Returns the fault after which nothing works on the device before it is opened again, if there was one. It does not
    /// wait.
    fn fault(&self) -> Option<KernelError>;
    /// Lets all work from now on fail with this error, on an emulated device.
    #[cfg(any(test, feature = "emulated"))]
    fn fail(&self, _error: KernelError) {}

    /// Creates an event. Only one that `times` has milliseconds.
    fn event(&self, times: bool) -> Result<u64, KernelError>;
    unsafe fn free_event(&self, event: u64);
    /// Records the event at the current end of the queue.
    unsafe fn record(&self, event: u64) -> Result<(), KernelError>;
    /// Makes this queue wait until another queue reaches the point where the event was last recorded.
    unsafe fn wait(&self, event: u64) -> Result<(), KernelError>;
    /// Blocks until everything that was queued before the event is done.
    unsafe fn wait_for_event(&self, event: u64) -> Result<(), KernelError>;
    /// Returns the milliseconds between two recorded events with times that the queue has passed.
    unsafe fn elapsed_ms(&self, from: u64, to: u64) -> Result<f32, KernelError>;

    /// Starts to record launches and copies on the device instead of executing them.
    fn begin_recording(&self) -> Result<(), KernelError>;
    /// Stops recording. It must be called even if the recorded work returned an error.
    fn end_recording(&self) -> Result<u64, KernelError>;
    unsafe fn free_recording(&self, recording: u64);
    unsafe fn replay(&self, recording: u64) -> Result<(), KernelError>;

    /// Allows kernels of this device to access the memory of another device.
    fn enable_peer_access(&self, other: &dyn Backend) -> Result<(), KernelError>;
    /// Returns the device's number in the driver, or `None` for an emulated device.
    fn ordinal(&self) -> Option<usize>;
    /// Opens another queue of the device. It copies and waits for events, and launches no kernels.
    fn copy_queue(&self) -> Result<Arc<dyn Backend>, KernelError>;
    /// Identifies the memory that its addresses refer to. Two backends of one device have the same.
    fn address_space(&self) -> u64;
    fn stream(&self) -> Option<cudarc::driver::sys::CUstream>;
}
