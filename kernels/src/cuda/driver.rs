//! The backend for NVIDIA's driver: a device's primary context, one stream, and the kernels loaded into the context.
//!
//! Weights can be copied while the kernels are still being compiled. Invariant: on whichever thread a call runs, the
//! context is made current before any driver function that needs it.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::thread::JoinHandle;

use cudarc::driver::{result, sys};

use super::architecture::Architecture;
use super::backend::{Backend, CopyKind, Loaded, Memory, TensorMap};
use super::compile::{Compiler, Module};
use super::cubin;
use super::loading::{self, Sourced};
use super::queue::Queue;
use super::{Address, Kernel, Launch};
use crate::KernelError;

pub(super) struct DriverStream {
    code: OnceLock<Result<Code, KernelError>>,
    /// The thread that compiles the kernels, until they are loaded.
    compiling: Mutex<Option<Compiling>>,
    /// Compiles modules that the driver rejects.
    compiler: Arc<Compiler>,
    architecture: Architecture,
    name: String,
    multiprocessors: u32,
    /// Declared last, so that it is dropped after everything that lives in its context.
    queue: Queue,
}

type Compiling = JoinHandle<Result<Vec<Sourced>, KernelError>>;

/// The modules loaded into the context, and their kernels.
#[derive(Default)]
struct Code {
    named: HashMap<String, Function>,
    /// The functions of the kernels that were launched, so that each name is made and looked up once.
    launched: RwLock<HashMap<Kernel, Function>>,
    modules: Vec<sys::CUmodule>,
    loaded: Loaded,
}

#[derive(Clone, Copy)]
struct Function {
    handle: sys::CUfunction,
    most_shared_bytes: u32,
}

// SAFETY: the driver's functions may be called by any thread, and the handles do not change once they are created.
unsafe impl Send for DriverStream {}
// SAFETY: as above.
unsafe impl Sync for DriverStream {}

impl DriverStream {
    /// Opens a device, and finds or compiles its modules on another thread.
    pub(super) fn open(
        ordinal: usize,
        name: String,
        compiler: Arc<Compiler>,
        architecture: Architecture,
    ) -> Result<Self, KernelError> {
        let on_thread = compiler.clone();
        let compiling = std::thread::Builder::new()
            .name("skep-kernel-compiler".to_owned())
            .spawn(move || loading::modules(&on_thread, architecture))
            .map_err(|error| KernelError::Thread { reason: error.to_string() })?;
        let queue = Queue::new(ordinal)?;
        let multiprocessors =
            queue.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let compiling = Mutex::new(Some(compiling));
        let code = OnceLock::new();
        Ok(DriverStream { code, compiling, compiler, architecture, name, multiprocessors, queue })
    }

    /// Returns the kernels, and waits until they are compiled and loaded.
    fn code(&self) -> Result<&Code, KernelError> {
        self.code.get_or_init(|| self.load_all()).as_ref().map_err(Clone::clone)
    }

    /// Returns the kernel of a launch. Fails if its blocks take more shared memory than they can.
    fn kernel(&self, launch: &Launch) -> Result<sys::CUfunction, KernelError> {
        let Launch { kernel, shared_bytes, .. } = launch;
        let Function { handle, most_shared_bytes } = self.code()?.function(*kernel)?;
        let limit = || format!("at most {most_shared_bytes} for {kernel} on {}", self.name);
        let what = "the shared memory of a block";
        super::require(*shared_bytes <= most_shared_bytes, "launch", what, *shared_bytes, limit)?;
        Ok(handle)
    }

    fn load_all(&self) -> Result<Code, KernelError> {
        let compiling = self.compiling.lock().unwrap_or_else(PoisonError::into_inner).take();
        let ended =
            || KernelError::Thread { reason: "the thread that compiles kernels has terminated".to_owned() };
        // A queue for copies has no such thread.
        let modules = compiling.ok_or_else(ended)?.join().map_err(|_| ended())??;
        let mut code = Code::default();
        let loaded =
            loading::load(&self.compiler, self.architecture, &modules, |module| self.load(module, &mut code));
        match loaded {
            Ok(loaded) => Ok(Code { loaded, ..code }),
            Err(error) => {
                unload(&mut code.modules);
                Err(error)
            }
        }
    }

    fn load(&self, module: &Module, code: &mut Code) -> Result<(), KernelError> {
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MOST_SHARED;
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES as SHARED;
        self.queue.bind()?;
        let in_a_block = self
            .queue
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        // SAFETY: the data is a complete cubin, which contains its own length.
        let handle = unsafe { result::module::load_data(module.cubin.as_ptr().cast()) }
            .map_err(|error| self.queue.failed("cuModuleLoadData", error))?;
        code.modules.push(handle);
        let names = cubin::kernels(&module.cubin).unwrap_or_default();
        for name in names {
            let symbol = CString::new(name.as_str()).expect("names in an ELF file contain no zero byte");
            // SAFETY: the module was loaded above, and the function is in it.
            let (function, most_shared_bytes) = unsafe {
                let function = result::module::get_function(handle, symbol)
                    .map_err(|error| self.queue.failed("cuModuleGetFunction", error))?;
                let fixed = result::function::get_function_attribute(function, SHARED)
                    .map_err(|error| self.queue.failed("cuFuncGetAttribute", error))?;
                let most = in_a_block.saturating_sub(u32::try_from(fixed).unwrap_or(u32::MAX));
                result::function::set_function_attribute(function, MOST_SHARED, most as i32)
                    .map_err(|error| self.queue.failed("cuFuncSetAttribute", error))?;
                (function, most)
            };
            code.named.insert(name, Function { handle: function, most_shared_bytes });
        }
        Ok(())
    }
}

impl Code {
    fn function(&self, kernel: Kernel) -> Result<Function, KernelError> {
        if let Some(known) = self.launched.read().unwrap_or_else(PoisonError::into_inner).get(&kernel) {
            return Ok(*known);
        }
        let name = kernel.to_string();
        let Some(found) = self.named.get(&name).copied() else {
            return Err(KernelError::NoKernel { kernel: name });
        };
        self.launched.write().unwrap_or_else(PoisonError::into_inner).insert(kernel, found);
        Ok(found)
    }
}

impl Backend for DriverStream {
    fn ready(&self) -> Result<Loaded, KernelError> {
        self.code().map(|code| code.loaded)
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn architecture(&self) -> Option<Architecture> {
        Some(self.architecture)
    }

    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    fn blocks_per_multiprocessor(&self, launch: &Launch) -> Result<u32, KernelError> {
        let function = self.kernel(launch)?;
        self.queue.bind()?;
        let threads = launch.block.iter().product::<u32>() as i32;
        let bytes = launch.shared_bytes as usize;
        // SAFETY: the function's module stays loaded as long as `self` lives.
        unsafe { result::occupancy::max_active_block_per_multiprocessor(function, threads, bytes) }
            .map(|blocks| u32::try_from(blocks).unwrap_or(0))
            .map_err(|error| self.queue.failed("cuOccupancyMaxActiveBlocksPerMultiprocessor", error))
    }

    fn memory(&self) -> Result<Memory, KernelError> {
        self.queue.bind()?;
        let (free, total) =
            result::mem_get_info().map_err(|error| self.queue.failed("cuMemGetInfo", error))?;
        Ok(Memory { free: free as u64, total: total as u64 })
    }

    fn allocate(&self, bytes: usize) -> Result<u64, KernelError> {
        self.queue.bind()?;
        // SAFETY: the context is current; the memory is written before it is read.
        unsafe { result::malloc_sync(bytes) }.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let free = result::mem_get_info().map_or(0, |(free, _)| free);
                KernelError::DeviceMemory { bytes, free }
            }
            _ => self.queue.failed("cuMemAlloc", error),
        })
    }

    unsafe fn free(&self, address: u64) {
        // SAFETY: allocated above; the driver waits for work that still uses it. A failed context has no memory to free.
        let _ = self.queue.bind().map(|()| unsafe { result::free_sync(address) });
    }

    fn allocate_host(&self, bytes: usize) -> Result<*mut u8, KernelError> {
        self.queue.bind()?;
        // Portable, because other contexts copy from and to it as well; mapped, because kernels write to it.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current.
        unsafe { result::malloc_host(bytes, flags) }.map(<*mut _>::cast).map_err(|error| match error.0 {
            // This is memory of the host.
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => KernelError::OutOfMemory { bytes },
            _ => self.queue.failed("cuMemHostAlloc", error),
        })
    }

    unsafe fn free_host(&self, at: *mut u8, _bytes: usize) {
        // SAFETY: allocated above.
        let _ = self.queue.bind().map(|()| unsafe { result::free_host(at.cast()) });
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<(), KernelError> {
        self.queue.bind()?;
        // SAFETY: the caller guarantees the address.
        unsafe { result::memset_d8_async(address, 0, bytes, self.queue.stream) }
            .map_err(|error| self.queue.failed("cuMemsetD8Async", error))
    }

    unsafe fn copy(&self, kind: CopyKind, to: u64, from: u64, bytes: usize) -> Result<(), KernelError> {
        self.queue.bind()?;
        let stream = self.queue.stream;
        let call = match kind {
            CopyKind::HostToDevice => "cuMemcpyHtoDAsync",
            CopyKind::DeviceToHost => "cuMemcpyDtoHAsync",
            CopyKind::DeviceToDevice => "cuMemcpyDtoDAsync",
        };
        // SAFETY: the caller guarantees the addresses, which are in the memory of this device or of the host.
        unsafe {
            match kind {
                CopyKind::HostToDevice => sys::cuMemcpyHtoDAsync_v2(to, from as *const _, bytes, stream),
                CopyKind::DeviceToHost => sys::cuMemcpyDtoHAsync_v2(to as *mut _, from, bytes, stream),
                CopyKind::DeviceToDevice => sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream),
            }
            .result()
        }
        .map_err(|error| self.queue.failed(call, error))
    }

    unsafe fn copy_from_peer(
        &self,
        peer: &dyn Backend,
        to: u64,
        from: u64,
        bytes: usize,
    ) -> Result<(), KernelError> {
        self.queue.bind()?;
        let (here, theirs) = (self.queue.context, peer.address_space() as sys::CUcontext);
        // SAFETY: the caller guarantees the addresses. The peer has a backend of this kind, whose context lives as long as its
        // buffer. Without access from one device to the other, the driver copies through the host.
        unsafe { sys::cuMemcpyPeerAsync(to, here, from, theirs, bytes, self.queue.stream) }
            .result()
            .map_err(|error| self.queue.failed("cuMemcpyPeerAsync", error))
    }

    unsafe fn launch(&self, launch: &Launch, params: *const u8, _bytes: usize) -> Result<(), KernelError> {
        let Launch { grid, block, shared_bytes, .. } = launch;
        let function = self.kernel(launch)?;
        self.queue.bind()?;
        let mut arguments = [params.cast_mut().cast()];
        // The kernel starts while the one before it still runs, and waits for it where it needs to.
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: Default::default(),
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: *shared_bytes,
            hStream: self.queue.stream,
            attrs: &raw mut early,
            numAttrs: u32::from(self.architecture.has_early_starts()),
        };
        // SAFETY: the function's module stays loaded as long as `self` lives; the parameters are copied before the call returns,
        // and the caller guarantees their contents.
        unsafe {
            sys::cuLaunchKernelEx(&raw const config, function, arguments.as_mut_ptr(), std::ptr::null_mut())
        }
        .result()
        .map_err(|error| self.queue.failed("cuLaunchKernelEx", error))
    }

    fn tensor_map(&self, at: Address, sizes: [u64; 4], of_box: [u32; 4]) -> Result<TensorMap, KernelError> {
        self.queue.bind()?;
        let mut bytes = 2;
        // The stride of each dimension but the first, which is that of a value; the last of these is the size of the tensor.
        let strides = sizes.map(|size| {
            bytes *= size;
            bytes
        });
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the driver reads as many sizes and steps as the tensor has dimensions, and one stride less. It does not access
        // the tensor.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
                sizes.len() as u32,
                at.0 as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                of_box.as_ptr(),
                [1; 4].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .map_err(|error| self.queue.failed("cuTensorMapEncodeTiled", error))?;
        Ok(TensorMap(map.opaque))
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        self.queue.synchronize()
    }

    fn event(&self, times: bool) -> Result<u64, KernelError> {
        self.queue.bind()?;
        // A queue passes an event sooner if the device does not store the time.
        let flags = match times {
            true => sys::CUevent_flags::CU_EVENT_DEFAULT,
            false => sys::CUevent_flags::CU_EVENT_DISABLE_TIMING,
        };
        result::event::create(flags)
            .map(|event| event as u64)
            .map_err(|error| self.queue.failed("cuEventCreate", error))
    }

    unsafe fn free_event(&self, event: u64) {
        // SAFETY: created above.
        let _ = self.queue.bind().map(|()| unsafe { result::event::destroy(event as sys::CUevent) });
    }

    unsafe fn record(&self, event: u64) -> Result<(), KernelError> {
        self.queue.bind()?;
        // SAFETY: created above; event and stream are alive.
        unsafe { result::event::record(event as sys::CUevent, self.queue.stream) }
            .map_err(|error| self.queue.failed("cuEventRecord", error))
    }

    unsafe fn wait(&self, event: u64) -> Result<(), KernelError> {
        self.queue.bind()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event was created by a device of this kind; event and stream are alive.
        unsafe { result::stream::wait_event(self.queue.stream, event as sys::CUevent, flags) }
            .map_err(|error| self.queue.failed("cuStreamWaitEvent", error))
    }

    unsafe fn wait_for_event(&self, event: u64) -> Result<(), KernelError> {
        self.queue.bind()?;
        // SAFETY: created above, and alive.
        unsafe { result::event::synchronize(event as sys::CUevent) }
            .map_err(|error| self.queue.failed("cuEventSynchronize", error))
    }

    unsafe fn elapsed_ms(&self, from: u64, to: u64) -> Result<f32, KernelError> {
        self.queue.bind()?;
        // SAFETY: created above, and both are alive.
        unsafe { result::event::elapsed(from as sys::CUevent, to as sys::CUevent) }
            .map_err(|error| self.queue.failed("cuEventElapsedTime", error))
    }

    fn begin_recording(&self) -> Result<(), KernelError> {
        self.queue.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        unsafe { result::stream::begin_capture(self.queue.stream, mode) }
            .map_err(|error| self.queue.failed("cuStreamBeginCapture", error))
    }

    fn end_recording(&self) -> Result<u64, KernelError> {
        self.queue.bind()?;
        // SAFETY: the stream is alive; the graph is destroyed once it is instantiated.
        unsafe {
            let graph = result::stream::end_capture(self.queue.stream)
                .map_err(|error| self.queue.failed("cuStreamEndCapture", error))?;
            if graph.is_null() {
                let reason = "the work could not be recorded".to_owned();
                return Err(KernelError::Driver { call: "cuStreamEndCapture", reason });
            }
            let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0))
                .map_err(|error| self.queue.failed("cuGraphInstantiate", error));
            let _ = result::graph::destroy(graph);
            let made = made?;
            // Uploading now means that the first replay needs nothing from the driver that another queue may hold.
            let uploaded = result::graph::upload(made, self.queue.stream);
            if let Err(error) = uploaded {
                let _ = result::graph::exec_destroy(made);
                return Err(self.queue.failed("cuGraphUpload", error));
            }
            Ok(made as u64)
        }
    }

    unsafe fn free_recording(&self, recording: u64) {
        // SAFETY: created above.
        let _ =
            self.queue.bind().map(|()| unsafe { result::graph::exec_destroy(recording as sys::CUgraphExec) });
    }

    unsafe fn replay(&self, recording: u64) -> Result<(), KernelError> {
        self.queue.bind()?;
        // SAFETY: created above; the caller guarantees the memory that the recorded work uses.
        unsafe { result::graph::launch(recording as sys::CUgraphExec, self.queue.stream) }
            .map_err(|error| self.queue.failed("cuGraphLaunch", error))
    }

    fn enable_peer_access(&self, other: &dyn Backend) -> Result<(), KernelError> {
        let Some(ordinal) = other.ordinal().filter(|ordinal| *ordinal != self.queue.ordinal) else {
            return Ok(());
        };
        let theirs = Queue::new(ordinal)?;
        self.queue.bind()?;
        let mut can = 0;
        // SAFETY: the driver returned the devices and the context; the context is retained, and stays retained as long as its
        // own stream exists.
        let enabled = unsafe {
            sys::cuDeviceCanAccessPeer(&mut can, self.queue.device, theirs.device)
                .result()
                .map_err(|error| self.queue.failed("cuDeviceCanAccessPeer", error))?;
            if can == 0 {
                return Err(KernelError::NoPeer { device: self.queue.ordinal, peer: ordinal });
            }
            sys::cuCtxEnablePeerAccess(theirs.context, 0).result()
        };
        match enabled {
            Err(error) if error.0 != sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {
                Err(self.queue.failed("cuCtxEnablePeerAccess", error))
            }
            _ => Ok(()),
        }
    }

    fn fault(&self) -> Option<KernelError> {
        self.queue.fault()
    }

    fn ordinal(&self) -> Option<usize> {
        Some(self.queue.ordinal)
    }

    fn copy_queue(&self) -> Result<Arc<dyn Backend>, KernelError> {
        let Self { architecture, multiprocessors, .. } = *self;
        Ok(Arc::new(DriverStream {
            code: OnceLock::new(),
            compiling: Mutex::default(),
            compiler: self.compiler.clone(),
            architecture,
            name: self.name.clone(),
            multiprocessors,
            queue: Queue::new(self.queue.ordinal)?,
        }))
    }

    fn address_space(&self) -> u64 {
        self.queue.context as u64
    }

    fn stream(&self) -> Option<sys::CUstream> {
        // The caller passes the stream to the driver, so the context has to be current.
        self.queue.bind().ok().map(|()| self.queue.stream)
    }
}

impl Drop for DriverStream {
    fn drop(&mut self) {
        // Failures were reported to the calls that waited. Running kernels have to finish before their code is unloaded.
        let _ = self.queue.synchronize();
        if let Some(Ok(mut code)) = self.code.take() {
            unload(&mut code.modules);
        }
    }
}

/// Unloads modules. Their context must be current, and none of their kernels may still be running.
fn unload(modules: &mut Vec<sys::CUmodule>) {
    for module in modules.drain(..) {
        // SAFETY: loaded once.
        let _ = unsafe { result::module::unload(module) };
    }
}
