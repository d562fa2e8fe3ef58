//! A backend whose kernels run on the CPU, for tests of code that drives a device. Its memory is host memory, and a thread
//! executes its queue asynchronously and in order, as a device does.
//!
//! Invariant: it guarantees no more than a real device. Recordings and queued copies keep no buffer alive, and a failure
//! is reported only when the queue is waited for.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use skep_cuda_host::Order;

use super::architecture::Architecture;
use super::backend::{Backend, CopyKind, Loaded, Memory, TensorMap};
#[cfg(test)]
use super::compile::{Compiler, Module};
#[cfg(test)]
use super::loading;
use super::{Address, Launch};
use crate::{Fault, KernelError};

/// The properties of an emulated device.
#[derive(Clone, Copy, Debug)]
pub struct Emulation {
    pub memory_bytes: u64,
    pub multiprocessors: u32,
    /// Device memory that each launch of a recording takes.
    pub recorded_launch_bytes: u64,
}

impl Default for Emulation {
    fn default() -> Self {
        Emulation { memory_bytes: 1 << 30, multiprocessors: 4, recorded_launch_bytes: 1 << 10 }
    }
}

pub(super) struct EmulatedStream {
    emulation: Emulation,
    /// The size of each allocation by address.
    allocated: Mutex<BTreeMap<u64, usize>>,
    recording: Mutex<Option<Vec<Job>>>,
    /// Number of launches in all recordings that exist.
    recorded_launches: AtomicU64,
    failure: Arc<Mutex<Option<KernelError>>>,
    /// The outcome of loading modules, if it loads any. Its own kernels do not come from there.
    loaded: Option<Result<Loaded, KernelError>>,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone)]
enum Job {
    Launch { launch: Launch, params: Arc<[u64]>, bytes: usize },
    Clear { address: u64, bytes: usize },
    Copy { to: u64, from: u64, bytes: usize },
    Record { event: Arc<Event>, number: u64 },
    Wait { event: Arc<Event>, number: u64 },
    Done(Sender<()>),
}

/// An event, which counts how often it was recorded and how many of the recordings the queue has reached.
#[derive(Default)]
struct Event {
    times: bool,
    state: Mutex<EventState>,
    reached: Condvar,
}

#[derive(Default)]
struct EventState {
    recorded: u64,
    reached: u64,
    at: Option<Instant>,
}

impl Event {
    fn wait(&self) {
        let number = lock(&self.state).recorded;
        self.wait_until(number);
    }

    fn wait_until(&self, number: u64) {
        let mut state = lock(&self.state);
        while state.reached < number {
            state = self.reached.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl EmulatedStream {
    pub(super) fn new(emulation: Emulation) -> Self {
        Self::with(emulation, Arc::default())
    }

    /// Creates a queue of the device that has this failure.
    fn with(emulation: Emulation, failure: Arc<Mutex<Option<KernelError>>>) -> Self {
        let (jobs, queue) = channel();
        let failed = failure.clone();
        let work = move || {
            for job in queue {
                // Like a real device, it executes nothing more after a failure, but still wakes threads that wait.
                let broken = lock(&failed).is_some();
                if let Err(error) = run(job, broken) {
                    lock(&failed).get_or_insert(error);
                }
            }
        };
        let thread = std::thread::Builder::new().name("skep-emulated-device".to_owned()).spawn(work);
        EmulatedStream {
            emulation,
            allocated: Mutex::default(),
            recording: Mutex::default(),
            recorded_launches: AtomicU64::new(0),
            failure,
            loaded: None,
            jobs: Some(jobs),
            thread: Some(thread.expect("tests can start threads")),
        }
    }

    /// Loads modules as a driver does, which rejects those that are not complete.
    #[cfg(test)]
    pub(super) fn with_modules(mut self, compiler: &Compiler, architecture: Architecture) -> Self {
        let loaded = loading::modules(compiler, architecture)
            .and_then(|modules| loading::load(compiler, architecture, &modules, check_module));
        self.loaded = Some(loaded);
        self
    }

    fn put(&self, job: Job) -> Result<(), KernelError> {
        if let Some(recorded) = lock(&self.recording).as_mut() {
            recorded.push(job);
            return Ok(());
        }
        self.send(job)
    }

    fn send(&self, job: Job) -> Result<(), KernelError> {
        let ended = || KernelError::Driver {
            call: "launch",
            reason: "the device's thread has terminated".to_owned(),
        };
        self.jobs.as_ref().ok_or_else(ended)?.send(job).map_err(|_| ended())
    }
}

/// Checks that a module is a file for NVIDIA's devices whose tables lie within it.
#[cfg(test)]
fn check_module(module: &Module) -> Result<(), KernelError> {
    const CUDA: u64 = 190;
    let number = |at: usize, bytes: usize| -> u64 {
        let field = module.cubin.get(at..at + bytes).unwrap_or_default();
        field.iter().rev().fold(0, |number, byte| (number << 8) | u64::from(*byte))
    };
    // For each table: the offsets in the header of its start, of the size of an entry, and of the number of entries.
    let is_within = [[0x20, 0x36, 0x38], [0x28, 0x3a, 0x3c]].map(|[start, size, count]| {
        number(start, 8).saturating_add(number(size, 2) * number(count, 2)) <= module.cubin.len() as u64
    });
    match module.cubin.starts_with(b"\x7fELF\x02\x01") && number(18, 2) == CUDA && is_within == [true; 2] {
        true => Ok(()),
        false => Err(KernelError::Driver {
            call: "cuModuleLoadData",
            reason: "this is not a complete module".to_owned(),
        }),
    }
}

fn run(job: Job, broken: bool) -> Result<(), KernelError> {
    match job {
        Job::Launch { .. } | Job::Clear { .. } | Job::Copy { .. } if broken => {}
        Job::Launch { launch, params, bytes } => {
            let Launch { kernel, grid, block, shared_bytes } = launch;
            let launch = skep_cuda_host::Launch { grid, block, shared_bytes, order: Order::BACKWARD };
            // SAFETY: the caller that queued the launch guarantees the parameters.
            unsafe { skep_cuda_host::launch_at(&kernel.to_string(), &launch, params.as_ptr().cast(), bytes) }
                .map_err(|reason| KernelError::Driver { call: "launch", reason })?;
        }
        // SAFETY: the caller that queued the job guarantees the addresses.
        Job::Clear { address, bytes } => unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) },
        // SAFETY: as above.
        Job::Copy { to, from, bytes } => unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) },
        Job::Record { event, number } => {
            let mut state = lock(&event.state);
            state.reached = number;
            state.at = event.times.then(Instant::now);
            event.reached.notify_all();
        }
        Job::Wait { event, number } => {
            event.wait_until(number);
        }
        // The waiting thread may be gone.
        Job::Done(done) => drop(done.send(())),
    }
    Ok(())
}

impl Backend for EmulatedStream {
    fn ready(&self) -> Result<Loaded, KernelError> {
        self.loaded.clone().unwrap_or(Ok(Loaded::default()))
    }

    fn name(&self) -> String {
        "emulated".to_owned()
    }

    fn architecture(&self) -> Option<Architecture> {
        None
    }

    fn multiprocessors(&self) -> u32 {
        self.emulation.multiprocessors
    }

    fn blocks_per_multiprocessor(&self, launch: &Launch) -> Result<u32, KernelError> {
        Ok(super::blocks_of_multiprocessor(launch.block.iter().product(), launch.shared_bytes))
    }

    fn memory(&self) -> Result<Memory, KernelError> {
        self.fault().map_or(Ok(()), Err)?;
        let Emulation { memory_bytes: total, recorded_launch_bytes, .. } = self.emulation;
        let allocated = lock(&self.allocated).values().sum::<usize>() as u64;
        let recorded = self.recorded_launches.load(Ordering::Relaxed) * recorded_launch_bytes;
        Ok(Memory { free: total.saturating_sub(allocated + recorded), total })
    }

    fn allocate(&self, bytes: usize) -> Result<u64, KernelError> {
        let free = usize::try_from(self.memory()?.free).unwrap_or(usize::MAX);
        if bytes > free {
            return Err(KernelError::DeviceMemory { bytes, free });
        }
        let at = allocate(bytes)? as u64;
        // No code may rely on the initial contents, so they are filled with 0xff.
        // SAFETY: allocated above.
        unsafe { std::ptr::write_bytes(at as *mut u8, 0xff, bytes) };
        lock(&self.allocated).insert(at, bytes);
        Ok(at)
    }

    unsafe fn free(&self, address: u64) {
        // Like the driver, this waits for work that still uses the memory.
        let _ = self.synchronize();
        if let Some(bytes) = lock(&self.allocated).remove(&address) {
            // SAFETY: allocated above with this size.
            unsafe { dealloc(address as *mut u8, layout(bytes)) };
        }
    }

    fn allocate_host(&self, bytes: usize) -> Result<*mut u8, KernelError> {
        allocate(bytes)
    }

    unsafe fn free_host(&self, at: *mut u8, bytes: usize) {
        // SAFETY: allocated above with this size.
        unsafe { dealloc(at, layout(bytes)) };
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<(), KernelError> {
        self.put(Job::Clear { address, bytes })
    }

    unsafe fn copy(&self, kind: CopyKind, to: u64, from: u64, bytes: usize) -> Result<(), KernelError> {
        if kind != CopyKind::DeviceToDevice && lock(&self.recording).is_some() {
            let reason = "copies between host and device cannot be recorded".to_owned();
            return Err(KernelError::Driver { call: "copy", reason });
        }
        self.put(Job::Copy { to, from, bytes })
    }

    unsafe fn copy_from_peer(
        &self,
        _peer: &dyn Backend,
        to: u64,
        from: u64,
        bytes: usize,
    ) -> Result<(), KernelError> {
        self.put(Job::Copy { to, from, bytes })
    }

    unsafe fn launch(&self, launch: &Launch, params: *const u8, bytes: usize) -> Result<(), KernelError> {
        let mut copy = vec![0u64; bytes.div_ceil(8)];
        // SAFETY: the caller guarantees the bytes, and there is room for them.
        unsafe { std::ptr::copy_nonoverlapping(params, copy.as_mut_ptr().cast(), bytes) };
        self.put(Job::Launch { launch: *launch, params: copy.into(), bytes })
    }

    fn tensor_map(&self, _: Address, _: [u64; 4], _: [u32; 4]) -> Result<TensorMap, KernelError> {
        let reason = "an emulated device has no tensor maps".to_owned();
        Err(KernelError::Driver { call: "tensor map", reason })
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        let (done, wait) = channel();
        self.send(Job::Done(done))?;
        if wait.recv().is_err() {
            let reason = "the device's thread has terminated".to_owned();
            return Err(KernelError::Driver { call: "synchronize", reason });
        }
        lock(&self.failure).clone().map_or(Ok(()), Err)
    }

    fn fault(&self) -> Option<KernelError> {
        let spoils = |error: &KernelError| error.fault().is_some_and(Fault::spoils_context);
        lock(&self.failure).clone().filter(spoils)
    }

    fn fail(&self, error: KernelError) {
        *lock(&self.failure) = Some(error);
    }

    fn event(&self, times: bool) -> Result<u64, KernelError> {
        Ok(Arc::into_raw(Arc::new(Event { times, ..Event::default() })) as u64)
    }

    unsafe fn free_event(&self, event: u64) {
        // SAFETY: created above, and freed once.
        drop(unsafe { Arc::from_raw(event as *const Event) });
    }

    unsafe fn record(&self, event: u64) -> Result<(), KernelError> {
        // SAFETY: created above, and not freed.
        let event = unsafe { borrowed(event) };
        let number = {
            let mut state = lock(&event.state);
            state.recorded += 1;
            state.recorded
        };
        self.put(Job::Record { event, number })
    }

    unsafe fn wait(&self, event: u64) -> Result<(), KernelError> {
        // SAFETY: created above, and not freed.
        let event = unsafe { borrowed(event) };
        let number = lock(&event.state).recorded;
        self.put(Job::Wait { event, number })
    }

    unsafe fn wait_for_event(&self, event: u64) -> Result<(), KernelError> {
        // SAFETY: created above, and not freed.
        unsafe { borrowed(event) }.wait();
        lock(&self.failure).clone().map_or(Ok(()), Err)
    }

    unsafe fn elapsed_ms(&self, from: u64, to: u64) -> Result<f32, KernelError> {
        // SAFETY: created above, and not freed.
        let times = [from, to].map(|event| lock(&unsafe { borrowed(event) }.state).at);
        match times {
            [Some(from), Some(to)] => Ok(to.duration_since(from).as_secs_f32() * 1e3),
            _ => Err(KernelError::Driver {
                call: "elapsed",
                reason: "the queue has not reached both events, or one has no time".to_owned(),
            }),
        }
    }

    fn begin_recording(&self) -> Result<(), KernelError> {
        *lock(&self.recording) = Some(Vec::new());
        Ok(())
    }

    fn end_recording(&self) -> Result<u64, KernelError> {
        let recorded = lock(&self.recording).take().unwrap_or_default();
        self.recorded_launches.fetch_add(recorded.len() as u64, Ordering::Relaxed);
        Ok(Box::into_raw(Box::new(recorded)) as u64)
    }

    unsafe fn free_recording(&self, recording: u64) {
        // SAFETY: created above, and freed once.
        let recorded = unsafe { Box::from_raw(recording as *mut Vec<Job>) };
        self.recorded_launches.fetch_sub(recorded.len() as u64, Ordering::Relaxed);
    }

    unsafe fn replay(&self, recording: u64) -> Result<(), KernelError> {
        // SAFETY: created above, and not freed.
        let recorded = unsafe { &*(recording as *const Vec<Job>) };
        recorded.iter().try_for_each(|job| self.send(job.clone()))
    }

    fn enable_peer_access(&self, _other: &dyn Backend) -> Result<(), KernelError> {
        Ok(())
    }

    fn ordinal(&self) -> Option<usize> {
        None
    }

    fn copy_queue(&self) -> Result<Arc<dyn Backend>, KernelError> {
        Ok(Arc::new(Self::with(self.emulation, self.failure.clone())))
    }

    fn address_space(&self) -> u64 {
        // The failure is the same object as long as the device exists, and every device has its own.
        Arc::as_ptr(&self.failure) as u64
    }

    fn stream(&self) -> Option<cudarc::driver::sys::CUstream> {
        None
    }
}

impl Drop for EmulatedStream {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns a new reference to the event behind a handle.
///
/// # Safety
/// The event was not freed.
unsafe fn borrowed(event: u64) -> Arc<Event> {
    let event = event as *const Event;
    // SAFETY: guaranteed by the caller; the reference count is raised for the returned reference.
    unsafe {
        Arc::increment_strong_count(event);
        Arc::from_raw(event)
    }
}

fn allocate(bytes: usize) -> Result<*mut u8, KernelError> {
    // SAFETY: the layout has at least one byte.
    let at = unsafe { alloc_zeroed(layout(bytes)) };
    if at.is_null() { Err(KernelError::OutOfMemory { bytes }) } else { Ok(at) }
}

/// Returns the layout of an allocation, with the alignment of device memory.
fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), 256).expect("the size is small enough to allocate")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
