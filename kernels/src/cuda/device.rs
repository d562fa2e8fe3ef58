//! A device with all kernels loaded: memory, and copies, launches, events and recordings in the order of one queue.
//!
//! Invariant: every copy is checked to lie within its buffers, and a buffer is freed only when nothing in the queue uses
//! it. The launches of `operation` rely on this; launching anything else is unsafe.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::architecture::Architecture;
use super::backend::{Backend, CopyKind};
pub use super::backend::{Loaded, Memory, TensorMap};
use super::compile::Compiler;
use super::driver::DriverStream;
#[cfg(any(test, feature = "emulated"))]
pub use super::emulated::Emulation;
use super::{Address, Launch};
use crate::{KernelError, gpu};

/// A device with one queue. It is cheap to clone, and all clones share the queue.
#[derive(Clone)]
pub struct Device {
    backend: Arc<dyn Backend>,
}

/// A buffer in device memory.
pub struct DeviceBuffer {
    address: u64,
    bytes: usize,
    device: Device,
}

/// A buffer in host memory that asynchronous copies and kernels can use.
pub struct HostBuffer {
    at: *mut u8,
    bytes: usize,
    device: Device,
}

// SAFETY: the buffer is the only owner of its memory.
unsafe impl Send for HostBuffer {}
// SAFETY: shared references read bytes, and read and write words that kernels write as well as atomic values.
unsafe impl Sync for HostBuffer {}

/// A part of a device buffer.
#[derive(Clone, Copy)]
pub struct Slice<'a> {
    address: u64,
    bytes: usize,
    /// The device that has the memory.
    device: &'a Device,
}

/// A marker in a device's queue.
pub struct Event {
    handle: u64,
    device: Device,
}

/// Recorded launches that can be replayed with one call. It keeps the buffers alive that the launches use.
pub struct Recording {
    handle: u64,
    device: Device,
    _buffers: Vec<Arc<DeviceBuffer>>,
}

impl Device {
    /// Opens the device with this number. Its kernels are compiled in the background, on several threads at once, unless
    /// `compiler` finds them already compiled.
    pub fn open(ordinal: usize, compiler: &Arc<Compiler>) -> Result<Self, KernelError> {
        let devices = gpu::probe().map_err(|reason| KernelError::NoDevice { reason })?;
        let count = devices.len();
        let Some(info) = devices.get(ordinal) else {
            let hidden = gpu::visibility(count).map(|text| format!("; {text}")).unwrap_or_default();
            let reason = format!("device {ordinal} was requested, but there are {count}{hidden}");
            return Err(KernelError::NoDevice { reason });
        };
        let (major, minor) = info.compute_capability;
        let architecture = Architecture::of_device(major, minor)?;
        compiler.check(architecture)?;
        let name = format!("cuda:{ordinal} ({})", info.name);
        let stream = DriverStream::open(ordinal, name, compiler.clone(), architecture)?;
        Ok(Device { backend: Arc::new(stream) })
    }

    /// Creates a device whose kernels run on the CPU, for tests.
    #[cfg(any(test, feature = "emulated"))]
    pub fn emulated(emulation: Emulation) -> Self {
        let stream = super::emulated::EmulatedStream::new(emulation);
        Device { backend: Arc::new(stream) }
    }

    /// Creates an emulated device that loads modules for an architecture, as a driver does, before it is ready.
    #[cfg(test)]
    pub(super) fn emulated_with(
        emulation: Emulation,
        compiler: &Arc<Compiler>,
        architecture: Architecture,
    ) -> Self {
        let stream = super::emulated::EmulatedStream::new(emulation).with_modules(compiler, architecture);
        Device { backend: Arc::new(stream) }
    }

    /// Returns a name for display.
    pub fn name(&self) -> String {
        self.backend.name()
    }

    /// Waits until all kernels are loaded. Launches wait on their own; after this call, kernels take no more device memory.
    pub fn ready(&self) -> Result<Loaded, KernelError> {
        self.backend.ready()
    }

    /// Opens another queue of this device, which copies while kernels of the first one run. It launches no kernels.
    pub fn copy_queue(&self) -> Result<Device, KernelError> {
        Ok(Device { backend: self.backend.copy_queue()? })
    }

    /// Returns the architecture that kernels were compiled for, or `None` if they run on the CPU.
    pub fn architecture(&self) -> Option<Architecture> {
        self.backend.architecture()
    }

    /// Returns whether kernels may use the features that only Hopper has.
    pub(super) fn is_hopper(&self) -> bool {
        self.backend.architecture() == Some(Architecture::Sm90a)
    }

    /// Returns the number of streaming multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.backend.multiprocessors()
    }

    /// Returns the number of blocks of a kernel that the device runs at once, after all kernels are loaded.
    pub(super) fn blocks_at_once(&self, launch: &Launch) -> Result<u32, KernelError> {
        Ok(self.backend.blocks_per_multiprocessor(launch)?.saturating_mul(self.multiprocessors()))
    }

    /// Returns the free and the total memory of the device in bytes, which other processes share.
    pub fn memory(&self) -> Result<Memory, KernelError> {
        self.backend.memory()
    }

    /// Allocates a buffer of zeros on the device.
    pub fn zeroed(&self, bytes: usize) -> Result<DeviceBuffer, KernelError> {
        let buffer = self.uninitialized(bytes)?;
        // SAFETY: the length is the allocated length.
        unsafe { self.backend.clear(buffer.address, bytes.max(1)) }?;
        Ok(buffer)
    }

    /// Fills a slice of this device with zeros.
    pub fn clear(&self, slice: Slice<'_>) -> Result<(), KernelError> {
        self.has("clear on the device", slice)?;
        // SAFETY: the length is that of the slice.
        unsafe { self.backend.clear(slice.address, slice.bytes) }
    }

    /// Allocates a buffer on the device with a copy of these bytes.
    pub fn copied(&self, bytes: &[u8]) -> Result<DeviceBuffer, KernelError> {
        let mut buffer = self.uninitialized(bytes.len())?;
        buffer.write(bytes)?;
        Ok(buffer)
    }

    /// Allocates a buffer without initializing it. The caller must write every byte before it is read.
    pub fn uninitialized(&self, bytes: usize) -> Result<DeviceBuffer, KernelError> {
        // The driver returns no address for an allocation of zero bytes.
        let address = self.backend.allocate(bytes.max(1))?;
        Ok(DeviceBuffer { address, bytes, device: self.clone() })
    }

    /// Allocates a buffer of zeros in host memory.
    pub fn host_buffer(&self, bytes: usize) -> Result<HostBuffer, KernelError> {
        let at = self.backend.allocate_host(bytes.max(1))?;
        // SAFETY: the length is the allocated length, and nothing else refers to the memory yet.
        unsafe { at.write_bytes(0, bytes) };
        Ok(HostBuffer { at, bytes, device: self.clone() })
    }

    /// Queues a copy from a host buffer, starting at byte `at`, to a slice of this device. The bytes must not change until the
    /// copy is done, which an event can report.
    pub fn upload(&self, from: &HostBuffer, at: usize, to: Slice<'_>) -> Result<(), KernelError> {
        within("copy to the device", at, to.bytes, from.bytes)?;
        self.has("copy to the device", to)?;
        // SAFETY: both are long enough.
        unsafe { self.backend.copy(CopyKind::HostToDevice, to.address, from.at.add(at) as u64, to.bytes) }
    }

    /// Queues a copy from a slice of this device to a host buffer, starting at byte `at`. The bytes have arrived once the queue
    /// has been waited for.
    pub fn download(&self, from: Slice<'_>, to: &mut HostBuffer, at: usize) -> Result<(), KernelError> {
        within("copy from the device", at, from.bytes, to.bytes)?;
        self.has("copy from the device", from)?;
        // SAFETY: both are long enough.
        unsafe { self.backend.copy(CopyKind::DeviceToHost, to.at.add(at) as u64, from.address, from.bytes) }
    }

    /// Reads the bytes of a slice of this device after all previously queued work is done.
    pub fn read(&self, from: Slice<'_>, bytes: &mut [u8]) -> Result<(), KernelError> {
        crate::error::expect_len("copy from the device", "length", from.bytes, bytes.len())?;
        self.has("copy from the device", from)?;
        // SAFETY: the length is that of the slice, and the copy is waited for while `bytes` is borrowed.
        unsafe {
            self.backend.copy(CopyKind::DeviceToHost, bytes.as_mut_ptr() as u64, from.address, from.bytes)
        }?;
        self.synchronize()
    }

    /// Queues a copy from a slice of any device to a slice of this device. It is faster if this device can access the memory
    /// of the other one.
    pub fn copy(&self, from: Slice<'_>, to: Slice<'_>) -> Result<(), KernelError> {
        const OP: &str = "copy on the device";
        crate::error::expect_len(OP, "length", to.bytes, from.bytes)?;
        self.has(OP, to)?;
        let (peer, bytes) = (&*from.device.backend, from.bytes);
        // SAFETY: both are long enough, and each address is in the memory of its device.
        unsafe {
            match self.owns(from) {
                true => self.backend.copy(CopyKind::DeviceToDevice, to.address, from.address, bytes),
                false => self.backend.copy_from_peer(peer, to.address, from.address, bytes),
            }
        }
    }

    /// Returns whether both are queues of one device.
    pub fn shares_memory_with(&self, other: &Device) -> bool {
        self.backend.address_space() == other.backend.address_space()
    }

    fn owns(&self, slice: Slice<'_>) -> bool {
        self.shares_memory_with(slice.device)
    }

    /// Checks that a slice is in the memory of this device.
    fn has(&self, op: &'static str, slice: Slice<'_>) -> Result<(), KernelError> {
        if self.owns(slice) {
            return Ok(());
        }
        Err(KernelError::OtherDevice { op, device: self.name(), other: slice.device.name() })
    }

    /// Queues a kernel.
    ///
    /// # Safety
    /// `params` is the kernel's parameter struct, and its addresses are valid on the device for everything that the kernel
    /// reads and writes until the queue has been waited for.
    pub unsafe fn launch<P: Copy>(&self, launch: &Launch, params: &P) -> Result<(), KernelError> {
        if launch.grid.contains(&0) {
            // The driver rejects empty grids.
            return Ok(());
        }
        // SAFETY: the parameters are borrowed for the duration of the call; the caller guarantees the rest.
        unsafe { self.backend.launch(launch, std::ptr::from_ref(params).cast(), size_of::<P>()) }
    }

    /// Describes a packed tensor of 16-bit values for kernels that copy boxes of it, on devices that have such copies. The sizes
    /// of the tensor and of a box start with the innermost dimension, of which a box has 64 values.
    pub(super) fn tensor_map(
        &self,
        at: Address,
        sizes: [u64; 4],
        of_box: [u32; 4],
    ) -> Result<TensorMap, KernelError> {
        self.backend.tensor_map(at, sizes, of_box)
    }

    /// Waits until everything in the queue is done, and reports failures of queued work.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        self.backend.synchronize()
    }

    /// Returns the fault after which nothing works on the device before it is opened again, if there was one. It does not wait
    /// for the queue.
    pub fn fault(&self) -> Option<KernelError> {
        self.backend.fault()
    }

    /// Lets an emulated device fail: from now on it computes nothing and reports this error.
    #[cfg(any(test, feature = "emulated"))]
    pub fn fail(&self, error: KernelError) {
        self.backend.fail(error);
    }

    /// Creates an event, which has no time.
    pub fn event(&self) -> Result<Event, KernelError> {
        Ok(Event { handle: self.backend.event(false)?, device: self.clone() })
    }

    /// Creates an event for [`Event::milliseconds_until`].
    pub fn timed_event(&self) -> Result<Event, KernelError> {
        Ok(Event { handle: self.backend.event(true)?, device: self.clone() })
    }

    /// Makes this queue wait until another queue reaches the point where the event was last recorded.
    pub fn wait(&self, event: &Event) -> Result<(), KernelError> {
        // SAFETY: the event is alive.
        unsafe { self.backend.wait(event.handle) }
    }

    /// Records what `work` queues instead of executing it. `buffers` are kept alive by the recording.
    pub fn record<E: From<KernelError>>(
        &self,
        buffers: Vec<Arc<DeviceBuffer>>,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Recording, E> {
        self.backend.begin_recording()?;
        let worked = work();
        let recorded = self.backend.end_recording();
        let recording = Recording { handle: recorded?, device: self.clone(), _buffers: buffers };
        worked.map(|()| recording)
    }

    /// Allows kernels of this device to access the memory of another device.
    pub fn enable_peer_access(&self, other: &Device) -> Result<(), KernelError> {
        self.backend.enable_peer_access(&*other.backend)
    }

    /// Returns the driver's stream behind the queue, for NVIDIA's libraries. The device's context is current on this thread
    /// until the next call.
    pub fn stream(&self) -> Option<cudarc::driver::sys::CUstream> {
        self.backend.stream()
    }
}

impl DeviceBuffer {
    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the address of the first byte, for the parameters of kernels.
    pub fn address(&self) -> Address {
        Address(self.address)
    }

    /// Returns the device that has the memory.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the whole buffer as a slice.
    pub fn slice(&self) -> Slice<'_> {
        Slice { address: self.address, bytes: self.bytes, device: &self.device }
    }

    /// Replaces the contents, which must have the same length.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), KernelError> {
        crate::error::expect_len("copy to the device", "length", self.bytes, bytes.len())?;
        // SAFETY: the length is that of the buffer, and the copy is waited for while `bytes` is borrowed.
        unsafe {
            self.device.backend.copy(CopyKind::HostToDevice, self.address, bytes.as_ptr() as u64, self.bytes)
        }?;
        self.device.synchronize()
    }

    /// Reads the whole buffer after all previously queued work is done.
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), KernelError> {
        self.device.read(self.slice(), bytes)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: the backend allocated the address, and it is freed once.
        unsafe { self.device.backend.free(self.address) };
    }
}

impl HostBuffer {
    /// Returns all bytes. A copy into the buffer is visible once the queue is synchronized.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the length is the allocated and initialized length.
        unsafe { std::slice::from_raw_parts(self.at, self.bytes) }
    }

    /// Returns the address of the first byte, for kernels that write to the buffer. The host sees what they wrote once it has
    /// waited for an event behind them or for the queue.
    pub fn address(&self) -> Address {
        Address(self.at as u64)
    }

    /// Reads a word that kernels write.
    pub fn word(&self, index: usize) -> u32 {
        self.atomic(index).load(Ordering::Acquire)
    }

    /// Writes a word that kernels write as well.
    pub fn set_word(&self, index: usize, value: u32) {
        self.atomic(index).store(value, Ordering::Release);
    }

    fn atomic(&self, index: usize) -> &AtomicU32 {
        assert!(index < self.bytes / 4, "word {index} of a buffer of {} bytes", self.bytes);
        // SAFETY: the word lies within the buffer, which is aligned to more than a word. Kernels write whole words.
        unsafe { AtomicU32::from_ptr(self.at.cast::<u32>().add(index)) }
    }

    /// Returns all bytes for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.bytes) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // A copy from or to the buffer may be in flight. The next call that waits reports failures.
        let _ = self.device.synchronize();
        // SAFETY: the backend allocated the memory with this length, and it is freed once.
        unsafe { self.device.backend.free_host(self.at, self.bytes.max(1)) };
    }
}

impl<'a> Slice<'a> {
    /// Returns the size in bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// Returns the address of the first byte, for the parameters of kernels.
    pub fn address(self) -> Address {
        Address(self.address)
    }

    /// Returns a part of the slice.
    pub fn part(self, range: Range<usize>) -> Result<Slice<'a>, KernelError> {
        within("part of a buffer", range.start, range.len(), self.bytes)?;
        Ok(Slice { address: self.address + range.start as u64, bytes: range.len(), device: self.device })
    }
}

impl Event {
    /// Records the event at the current end of its device's queue.
    pub fn record(&self) -> Result<(), KernelError> {
        // SAFETY: the event is alive.
        unsafe { self.device.backend.record(self.handle) }
    }

    /// Waits until the queue has passed the recorded event. It returns at once if the event was never recorded.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        // SAFETY: the event is alive.
        unsafe { self.device.backend.wait_for_event(self.handle) }
    }

    /// Returns the milliseconds until another event of the same device that was recorded later. Both must be timed events
    /// that the queue has passed.
    pub fn milliseconds_until(&self, later: &Event) -> Result<f32, KernelError> {
        // SAFETY: both events are alive.
        unsafe { self.device.backend.elapsed_ms(self.handle, later.handle) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the backend created the event, and it is freed once.
        unsafe { self.device.backend.free_event(self.handle) };
    }
}

impl Recording {
    /// Queues the recorded work.
    pub fn replay(&self) -> Result<(), KernelError> {
        // SAFETY: the recording is alive, and so are its buffers.
        unsafe { self.device.backend.replay(self.handle) }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // SAFETY: the backend created the recording, and it is freed once.
        unsafe { self.device.backend.free_recording(self.handle) };
    }
}

/// Checks that a part lies within the whole.
fn within(op: &'static str, start: usize, length: usize, whole: usize) -> Result<(), KernelError> {
    match start.checked_add(length) {
        Some(end) if end <= whole => Ok(()),
        end => {
            let index = end.unwrap_or(usize::MAX);
            Err(KernelError::OutOfRange { op, what: "byte", index, count: whole })
        }
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
