//! A device with all kernels loaded: memory, copies, launches, events and recordings, in the order of one queue.
//!
//! Invariant: whatever goes to or from a device lies within a buffer that is as long as it has to be, and a buffer is given back
//! only when nothing in the queue uses it. `operation` launches kernels on this ground; launching anything else is unsafe.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::architecture::Architecture;
use super::backend::{Backend, Way};
pub use super::backend::{Loaded, Memory};
use super::compile::{Compiler, Module};
use super::driver::DriverStream;
#[cfg(any(test, feature = "emulated"))]
pub use super::emulated::Emulation;
use super::source::SOURCES;
use super::{Address, Launch};
use crate::{KernelError, gpu};

/// Cheap to clone; all clones share the queue.
#[derive(Clone)]
pub struct Device {
    backend: Arc<dyn Backend>,
}

/// Memory of a device.
pub struct DeviceBuffer {
    address: u64,
    bytes: usize,
    device: Device,
}

/// Memory of the host that a device copies from and to while it computes.
pub struct HostBuffer {
    at: *mut u8,
    bytes: usize,
    device: Device,
}

// SAFETY: nobody else has its memory.
unsafe impl Send for HostBuffer {}

/// A part of a buffer.
#[derive(Clone, Copy)]
pub struct Slice<'a> {
    address: u64,
    bytes: usize,
    buffer: PhantomData<&'a DeviceBuffer>,
}

/// A place in a queue.
pub struct Event {
    handle: u64,
    device: Device,
}

/// Launches that are done again with one call. It keeps the buffers alive that it was given: those that the launches use.
pub struct Recording {
    handle: u64,
    device: Device,
    _buffers: Vec<Arc<DeviceBuffer>>,
}

impl Device {
    /// Opens the n-th device of this machine. Its kernels are compiled meanwhile, on several threads at once, unless the
    /// compiler's cache has them.
    pub fn open(ordinal: usize, compiler: &Arc<Compiler>) -> Result<Self, KernelError> {
        let devices = gpu::probe().map_err(|reason| KernelError::NoDevice { reason })?;
        let count = devices.len();
        let Some(info) = devices.get(ordinal) else {
            let reason = format!("device {ordinal} was asked for, and there are {count}");
            return Err(KernelError::NoDevice { reason });
        };
        let (major, minor) = info.compute_capability;
        let architecture = Architecture::of_device(major, minor)?;
        compiler.check(architecture)?;
        let compiler = compiler.clone();
        let compiling = std::thread::Builder::new()
            .name("skep-kernel-compiler".to_owned())
            .spawn(move || modules(&compiler, architecture))
            .map_err(|error| KernelError::Thread { reason: error.to_string() })?;
        let name = format!("cuda:{ordinal} ({})", info.name);
        Ok(Device { backend: Arc::new(DriverStream::open(ordinal, name, compiling)?) })
    }

    /// One whose kernels run on the processor, for tests.
    #[cfg(any(test, feature = "emulated"))]
    pub fn emulated(emulation: Emulation) -> Self {
        let stream = super::emulated::EmulatedStream::new(emulation);
        Device { backend: Arc::new(stream) }
    }

    /// For people.
    pub fn name(&self) -> String {
        self.backend.name()
    }

    /// Waits until all kernels are loaded, which launches do by themselves: from here on they take no more memory.
    pub fn ready(&self) -> Result<Loaded, KernelError> {
        self.backend.ready()
    }

    pub fn multiprocessors(&self) -> u32 {
        self.backend.multiprocessors()
    }

    pub fn memory(&self) -> Result<Memory, KernelError> {
        self.backend.memory()
    }

    /// Zeros on the device.
    pub fn zeroed(&self, bytes: usize) -> Result<DeviceBuffer, KernelError> {
        let buffer = self.uninitialised(bytes)?;
        // SAFETY: as many bytes as were allocated.
        unsafe { self.backend.clear(buffer.address, bytes.max(1)) }?;
        Ok(buffer)
    }

    /// Makes a slice zeros.
    pub fn clear(&self, slice: Slice<'_>) -> Result<(), KernelError> {
        // SAFETY: as many bytes as the slice has.
        unsafe { self.backend.clear(slice.address, slice.bytes) }
    }

    /// A buffer on the device with a copy of these bytes.
    pub fn copied(&self, bytes: &[u8]) -> Result<DeviceBuffer, KernelError> {
        let mut buffer = self.uninitialised(bytes.len())?;
        buffer.write(bytes)?;
        Ok(buffer)
    }

    /// A buffer whose every byte is written before it is read.
    pub fn uninitialised(&self, bytes: usize) -> Result<DeviceBuffer, KernelError> {
        // The driver gives no address for nothing.
        let address = self.backend.allocate(bytes.max(1))?;
        Ok(DeviceBuffer { address, bytes, device: self.clone() })
    }

    pub fn host_buffer(&self, bytes: usize) -> Result<HostBuffer, KernelError> {
        let at = self.backend.allocate_host(bytes.max(1))?;
        // SAFETY: as many bytes as were allocated; nobody else has them yet.
        unsafe { at.write_bytes(0, bytes) };
        Ok(HostBuffer { at, bytes, device: self.clone() })
    }

    /// Fills a slice with bytes of a buffer of the host, from the given one on. They have to stay as they are until the
    /// queue has done it, which an event tells.
    pub fn upload(&self, from: &HostBuffer, at: usize, to: Slice<'_>) -> Result<(), KernelError> {
        within("copy to the device", at, to.bytes, from.bytes)?;
        // SAFETY: both are long enough.
        unsafe { self.backend.copy(Way::Up, to.address, from.at.add(at) as u64, to.bytes) }
    }

    /// Puts a slice into a buffer of the host. It is there when the queue was waited for.
    pub fn download(&self, from: Slice<'_>, to: &mut HostBuffer, at: usize) -> Result<(), KernelError> {
        within("copy from the device", at, from.bytes, to.bytes)?;
        // SAFETY: both are long enough.
        unsafe { self.backend.copy(Way::Down, to.at.add(at) as u64, from.address, from.bytes) }
    }

    /// The bytes of a slice, as they are when all that was put into the queue before is done.
    pub fn read(&self, from: Slice<'_>, bytes: &mut [u8]) -> Result<(), KernelError> {
        crate::error::expect_len("copy from the device", "length", from.bytes, bytes.len())?;
        // SAFETY: as many bytes as the slice has; they are waited for while they are borrowed.
        unsafe { self.backend.copy(Way::Down, bytes.as_mut_ptr() as u64, from.address, from.bytes) }?;
        self.synchronize()
    }

    /// Copies between slices of this device, or from another one that it reaches.
    pub fn copy(&self, from: Slice<'_>, to: Slice<'_>) -> Result<(), KernelError> {
        crate::error::expect_len("copy on the device", "length", to.bytes, from.bytes)?;
        // SAFETY: both are long enough.
        unsafe { self.backend.copy(Way::Across, to.address, from.address, from.bytes) }
    }

    /// Puts a kernel behind everything that was put into the queue before.
    ///
    /// # Safety
    /// `params` is the kernel's own struct, and its addresses are valid on the device for what the kernel reads and writes,
    /// until the queue has been waited for.
    pub unsafe fn launch<P: Copy>(&self, launch: &Launch, params: &P) -> Result<(), KernelError> {
        if launch.grid.contains(&0) {
            // Nothing to do, which the driver takes for an error.
            return Ok(());
        }
        // SAFETY: the parameters are borrowed as long as the call takes; the caller vouches for the rest.
        unsafe { self.backend.launch(launch, std::ptr::from_ref(params).cast(), size_of::<P>()) }
    }

    /// Waits until everything in the queue is done; what failed there is reported now.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        self.backend.synchronize()
    }

    pub fn event(&self) -> Result<Event, KernelError> {
        Ok(Event { handle: self.backend.event()?, device: self.clone() })
    }

    /// Lets this queue wait until another one is where the event was recorded last.
    pub fn wait(&self, event: &Event) -> Result<(), KernelError> {
        // SAFETY: the event is alive.
        unsafe { self.backend.wait(event.handle) }
    }

    /// Remembers what `work` puts into the queue instead of doing it.
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

    /// Lets kernels of this device use the memory of another.
    pub fn reach(&self, other: &Device) -> Result<(), KernelError> {
        self.backend.reach(&*other.backend)
    }

    /// The driver's stream behind the queue, for its own libraries; their context is this thread's until the next call.
    pub fn stream(&self) -> Option<cudarc::driver::sys::CUstream> {
        self.backend.stream()
    }
}

impl DeviceBuffer {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn address(&self) -> Address {
        Address(self.address)
    }

    pub fn slice(&self) -> Slice<'_> {
        Slice { address: self.address, bytes: self.bytes, buffer: PhantomData }
    }

    /// Replaces the whole.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), KernelError> {
        crate::error::expect_len("copy to the device", "length", self.bytes, bytes.len())?;
        // SAFETY: as many bytes as the buffer has; they are waited for while they are borrowed.
        unsafe { self.device.backend.copy(Way::Up, self.address, bytes.as_ptr() as u64, self.bytes) }?;
        self.device.synchronize()
    }

    /// The whole, as it is when all that was put into the queue before is done.
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), KernelError> {
        self.device.read(self.slice(), bytes)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated there, and given back once.
        unsafe { self.device.backend.free(self.address) };
    }
}

impl HostBuffer {
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: as many bytes as were allocated and written.
        unsafe { std::slice::from_raw_parts(self.at, self.bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has them.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.bytes) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // A copy from it may be under way. What failed is reported by whoever waits next.
        let _ = self.device.synchronize();
        // SAFETY: allocated there with these bytes, and given back once.
        unsafe { self.device.backend.free_host(self.at, self.bytes.max(1)) };
    }
}

impl<'a> Slice<'a> {
    pub fn bytes(self) -> usize {
        self.bytes
    }

    pub fn address(self) -> Address {
        Address(self.address)
    }

    /// Some of its bytes.
    pub fn part(self, range: Range<usize>) -> Result<Slice<'a>, KernelError> {
        within("part of a buffer", range.start, range.len(), self.bytes)?;
        Ok(Slice { address: self.address + range.start as u64, bytes: range.len(), buffer: PhantomData })
    }
}

impl Event {
    /// Marks what was put into the queue of the event's device so far.
    pub fn record(&self) -> Result<(), KernelError> {
        // SAFETY: the event is alive.
        unsafe { self.device.backend.record(self.handle) }
    }

    /// Waits until what was recorded is done; at once if nothing was.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        // SAFETY: the event is alive.
        unsafe { self.device.backend.wait_for_event(self.handle) }
    }

    /// Until another event of the same device, which was recorded later; both have passed.
    pub fn milliseconds_until(&self, later: &Event) -> Result<f32, KernelError> {
        // SAFETY: both are alive.
        unsafe { self.device.backend.elapsed_ms(self.handle, later.handle) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made there, and given back once.
        unsafe { self.device.backend.free_event(self.handle) };
    }
}

impl Recording {
    /// Puts what was recorded into the queue.
    pub fn replay(&self) -> Result<(), KernelError> {
        // SAFETY: the recording is alive, and so are its buffers.
        unsafe { self.device.backend.replay(self.handle) }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // SAFETY: made there, and given back once.
        unsafe { self.device.backend.free_recording(self.handle) };
    }
}

/// That a part lies within a whole.
fn within(op: &'static str, start: usize, length: usize, whole: usize) -> Result<(), KernelError> {
    match start.checked_add(length) {
        Some(end) if end <= whole => Ok(()),
        end => {
            let index = end.unwrap_or(usize::MAX);
            Err(KernelError::OutOfRange { op, what: "byte", index, count: whole })
        }
    }
}

/// One for each source.
fn modules(compiler: &Compiler, architecture: Architecture) -> Result<Vec<Module>, KernelError> {
    std::thread::scope(|scope| {
        let compile = |source| scope.spawn(move || compiler.module_once(source, architecture));
        let running: Vec<_> = SOURCES.iter().copied().map(compile).collect();
        running.into_iter().map(|thread| thread.join().expect("compiling does not panic")).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::on_device;

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        let error = Device::open(1000, &Arc::new(on_device::compiler()))
            .err()
            .expect("nobody has so many")
            .to_string();
        assert!(error.contains("1000") || error.contains("driver"), "{error}");
    }

    /// With an emulated device, and a real one where there is one.
    fn with_devices(check: impl Fn(&Device)) {
        check(&Device::emulated(Emulation::default()));
        on_device::with(check);
    }

    #[test]
    fn what_is_written_to_a_device_is_read_from_it_and_bad_launches_are_errors() {
        with_devices(|device| {
            let mut buffer = device.zeroed(1000).unwrap();
            let mut bytes = vec![7; 1000];
            buffer.read(&mut bytes).unwrap();
            assert_eq!(bytes, vec![0; 1000]);
            let written: Vec<u8> = (0..1000).map(|i| i as u8).collect();
            buffer.write(&written).unwrap();
            buffer.read(&mut bytes).unwrap();
            assert_eq!(bytes, written);
            assert!(buffer.write(&written[1..]).is_err());
            let free = device.memory().unwrap().free as usize;
            assert!(matches!(device.zeroed(free + (1 << 30)), Err(KernelError::DeviceMemory { .. })));
            assert_eq!(device.zeroed(0).unwrap().bytes(), 0);
            assert!(buffer.slice().part(900..1001).is_err());
        });
    }

    #[test]
    fn a_launch_that_a_device_cannot_do_is_an_error() {
        on_device::with(|device| {
            let launch = Launch::new("no_such_kernel".to_owned(), [1, 1, 1], 32);
            // SAFETY: neither is launched.
            let unknown = unsafe { device.launch(&launch, &0u64) };
            assert!(matches!(unknown, Err(KernelError::NoKernel { .. })));
            let launch = Launch { shared_bytes: 1 << 30, kernel: "embedding".to_owned(), ..launch };
            let too_much = unsafe { device.launch(&launch, &0u64) };
            assert!(too_much.unwrap_err().to_string().contains("shared memory"));
        });
        let device = Device::emulated(Emulation::default());
        let launch = Launch::new("no_such_kernel".to_owned(), [1, 1, 1], 32);
        // SAFETY: it is not launched.
        unsafe { device.launch(&launch, &0u64) }.expect("what fails there is told later");
        assert!(device.synchronize().unwrap_err().to_string().contains("no kernel of this name"));
    }

    #[test]
    fn copies_events_and_recordings_keep_their_order() {
        with_devices(|device| {
            let mut host = device.host_buffer(8).unwrap();
            let buffers = [0, 1, 2].map(|_| Arc::new(device.zeroed(8).unwrap()));
            let copy = || device.copy(buffers[0].slice(), buffers[1].slice());
            let recording = device.record(buffers.to_vec(), copy).unwrap();
            let begun = device.event().unwrap();
            begun.record().unwrap();
            for value in [3, 4] {
                device.synchronize().unwrap();
                host.bytes_mut().fill(value);
                device.upload(&host, 0, buffers[0].slice()).unwrap();
                recording.replay().unwrap();
            }
            let event = device.event().unwrap();
            event.record().unwrap();
            device.wait(&event).unwrap();
            let half = |buffer: usize, range| buffers[buffer].slice().part(range).unwrap();
            device.copy(half(1, 0..4), half(2, 4..8)).unwrap();
            device.download(buffers[2].slice(), &mut host, 0).unwrap();
            device.synchronize().unwrap();
            assert_eq!(host.bytes(), [0, 0, 0, 0, 4, 4, 4, 4]);
            assert!(begun.milliseconds_until(&event).unwrap() >= 0.0);
            assert!(device.copy(buffers[0].slice(), half(1, 0..4)).is_err());
            assert!(device.upload(&host, 4, buffers[0].slice()).is_err());
        });
    }

    #[test]
    fn one_device_waits_for_another() {
        let [first, second] = [0, 1].map(|_| Device::emulated(Emulation::default()));
        let mut host = first.host_buffer(4).unwrap();
        host.bytes_mut().fill(9);
        let (from, to) = (first.zeroed(4).unwrap(), second.zeroed(4).unwrap());
        second.reach(&first).unwrap();
        let event = first.event().unwrap();
        first.upload(&host, 0, from.slice()).unwrap();
        event.record().unwrap();
        second.wait(&event).unwrap();
        second.copy(from.slice(), to.slice()).unwrap();
        let mut bytes = [0; 4];
        to.read(&mut bytes).unwrap();
        assert_eq!(bytes, [9; 4]);
    }
}
