//! A device with all kernels loaded: memory, copies and launches, in the order of one stream.
//!
//! Invariant: it stays on the thread that opened it, to which its context is bound; buffers keep what they were made from alive.
//! What a launch reads and writes is the caller's to know, so launching is unsafe, and nothing else is.

use std::collections::HashMap;
use std::ffi::CString;
use std::rc::Rc;

use cudarc::driver::{result, sys};
use result::DriverError;

use super::architecture::Architecture;
use super::compile::{Compiler, Module, Origin};
use super::source::SOURCES;
use super::{Address, Launch};
use crate::{KernelError, gpu};

pub struct Device {
    kernels: HashMap<String, Kernel>,
    modules: Vec<sys::CUmodule>,
    architecture: Architecture,
    loaded: Loaded,
    /// After what is in its context.
    stream: Rc<Stream>,
}

/// Where the modules of an opened device came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    pub cached: usize,
    pub compiled: usize,
}

/// Memory of a device, given back in the order of its stream.
pub struct DeviceBuffer {
    address: sys::CUdeviceptr,
    bytes: usize,
    stream: Rc<Stream>,
}

#[derive(Clone, Copy)]
struct Kernel {
    function: sys::CUfunction,
    most_shared_bytes: u32,
}

/// A device's primary context, bound to this thread, and the stream that everything is put into.
struct Stream {
    device: sys::CUdevice,
    stream: sys::CUstream,
}

impl Device {
    /// Opens the n-th device of this machine and loads all kernels for it. Sources are compiled on several threads at once,
    /// unless the compiler's cache has them.
    pub fn open(ordinal: usize, compiler: &Compiler) -> Result<Self, KernelError> {
        let devices = gpu::probe().map_err(|reason| KernelError::NoDevice { reason })?;
        let count = devices.len();
        let Some(info) = devices.get(ordinal) else {
            let reason = format!("device {ordinal} was asked for, and there are {count}");
            return Err(KernelError::NoDevice { reason });
        };
        let (major, minor) = info.compute_capability;
        let architecture = Architecture::of_device(major, minor)?;
        let modules = modules(compiler, architecture)?;
        let stream = Rc::new(Stream::new(ordinal)?);
        let origins = modules.iter().filter(|module| module.origin == Origin::Cache).count();
        let loaded = Loaded { cached: origins, compiled: modules.len() - origins };
        let mut device = Device { kernels: HashMap::new(), modules: vec![], architecture, loaded, stream };
        modules.iter().try_for_each(|module| device.load(module))?;
        Ok(device)
    }

    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    pub fn loaded(&self) -> Loaded {
        self.loaded
    }

    /// Zeros on the device.
    pub fn zeroed(&self, bytes: usize) -> Result<DeviceBuffer, KernelError> {
        let stream = self.stream.stream;
        // The driver gives no address for nothing.
        let taken = bytes.max(1);
        // SAFETY: the stream is alive; the memory is written before anyone reads it.
        let address = unsafe { result::malloc_async(stream, taken) }.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let free = result::mem_get_info().map_or(0, |(free, _)| free);
                KernelError::DeviceMemory { bytes, free }
            }
            _ => driver("cuMemAllocAsync", error),
        })?;
        let buffer = DeviceBuffer { address, bytes, stream: self.stream.clone() };
        // SAFETY: as many bytes as were allocated, on the same stream.
        unsafe { result::memset_d8_async(address, 0, taken, stream) }
            .map_err(|error| driver("cuMemsetD8Async", error))?;
        Ok(buffer)
    }

    /// Puts a kernel behind everything that was put into the stream before.
    ///
    /// # Safety
    /// `params` is the kernel's own struct, and its addresses are valid on the device for what the kernel reads and writes,
    /// until the stream has been waited for.
    pub unsafe fn launch<P: Copy>(&self, launch: &Launch, params: &P) -> Result<(), KernelError> {
        let Launch { kernel, grid, block, shared_bytes } = launch;
        let Some(Kernel { function, most_shared_bytes }) = self.kernels.get(kernel).copied() else {
            return Err(KernelError::NoKernel { kernel: kernel.clone() });
        };
        let limit = || format!("at most {most_shared_bytes} for {kernel} on {}", self.architecture);
        let what = "the shared memory of a block";
        super::supported(*shared_bytes <= most_shared_bytes, "launch", what, *shared_bytes, limit)?;
        if grid.contains(&0) {
            // Nothing to do, which the driver takes for an error.
            return Ok(());
        }
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast()];
        let size = |of: &[u32; 3]| (of[0], of[1], of[2]);
        // SAFETY: the function's module is loaded as long as the device; the parameters are copied before the call returns, and
        // the caller vouches for what they say.
        unsafe {
            let stream = self.stream.stream;
            result::launch_kernel(function, size(grid), size(block), *shared_bytes, stream, &mut arguments)
        }
        .map_err(|error| driver("cuLaunchKernel", error))
    }

    /// Waits until everything in the stream is done; what failed there is reported now.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        self.stream.synchronize()
    }

    fn load(&mut self, module: &Module) -> Result<(), KernelError> {
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MOST_SHARED;
        let in_a_block = self.stream.most_shared_bytes()?;
        // SAFETY: a whole cubin, which says itself how long it is.
        let handle = unsafe { result::module::load_data(module.cubin.as_ptr().cast()) }
            .map_err(|error| driver("cuModuleLoadData", error))?;
        self.modules.push(handle);
        for usage in &module.kernels {
            let name = CString::new(usage.kernel.as_str()).expect("a name has no zero byte");
            let most_shared_bytes = in_a_block.saturating_sub(usage.shared_bytes);
            // SAFETY: the module was loaded above, and the function is in it.
            let function = unsafe {
                let function = result::module::get_function(handle, name)
                    .map_err(|error| driver("cuModuleGetFunction", error))?;
                result::function::set_function_attribute(function, MOST_SHARED, most_shared_bytes as i32)
                    .map_err(|error| driver("cuFuncSetAttribute", error))?;
                function
            };
            self.kernels.insert(usage.kernel.clone(), Kernel { function, most_shared_bytes });
        }
        Ok(())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // A failure was reported to whoever waited for it; kernels that still run have to end before their code goes.
        let _ = self.stream.synchronize();
        for module in self.modules.drain(..) {
            // SAFETY: loaded once, and nothing of it runs any more.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}

impl DeviceBuffer {
    pub fn address(&self) -> Address {
        Address(self.address)
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Replaces the whole.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), KernelError> {
        crate::error::expect_len("copy to the device", "length", self.bytes, bytes.len())?;
        // SAFETY: as many bytes as the buffer has; they are waited for while they are borrowed.
        unsafe { result::memcpy_htod_async(self.address, bytes, self.stream.stream) }
            .map_err(|error| driver("cuMemcpyHtoDAsync", error))?;
        self.stream.synchronize()
    }

    /// The whole, as it is when all that was put into the stream before is done.
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), KernelError> {
        crate::error::expect_len("copy from the device", "length", self.bytes, bytes.len())?;
        // SAFETY: as above.
        unsafe { result::memcpy_dtoh_async(bytes, self.address, self.stream.stream) }
            .map_err(|error| driver("cuMemcpyDtoHAsync", error))?;
        self.stream.synchronize()
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated on this stream, and given back behind everything that uses it. A stream that failed has no memory
        // to give back.
        let _ = unsafe { result::free_async(self.address, self.stream.stream) };
    }
}

impl Stream {
    fn new(ordinal: usize) -> Result<Self, KernelError> {
        let ordinal = i32::try_from(ordinal).expect("fewer devices than that were listed");
        let device = result::device::get(ordinal).map_err(|error| driver("cuDeviceGet", error))?;
        // SAFETY: the driver gave the device just now.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(|error| driver("cuDevicePrimaryCtxRetain", error))?;
        // From here on it is released with the stream, or without one if there is none.
        let mut made = Stream { device, stream: std::ptr::null_mut() };
        // SAFETY: retained above.
        unsafe { result::ctx::set_current(context) }.map_err(|error| driver("cuCtxSetCurrent", error))?;
        made.stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| driver("cuStreamCreate", error))?;
        made.keep_memory()?;
        Ok(made)
    }

    /// What is given back stays with this process: memory is planned once, and taking it from the system is slow.
    fn keep_memory(&self) -> Result<(), KernelError> {
        let mut bytes = u64::MAX;
        // SAFETY: the device's own pool, and a value of the type that the attribute has.
        unsafe {
            let pool = result::device::get_default_mem_pool(self.device)
                .map_err(|error| driver("cuDeviceGetDefaultMemPool", error))?;
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            result::mem_pool::set_attribute(pool, attribute, std::ptr::from_mut(&mut bytes).cast())
                .map_err(|error| driver("cuMemPoolSetAttribute", error))
        }
    }

    /// That a block may have, if its kernel asks for it.
    fn most_shared_bytes(&self) -> Result<u32, KernelError> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        // SAFETY: a device that the driver gave.
        let bytes = unsafe { result::device::get_attribute(self.device, attribute) }
            .map_err(|error| driver("cuDeviceGetAttribute", error))?;
        Ok(u32::try_from(bytes).unwrap_or(0))
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.stream) }
            .map_err(|error| driver("cuStreamSynchronize", error))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made and retained once. There is nothing to do about a failure.
        unsafe {
            if !self.stream.is_null() {
                let _ = result::stream::destroy(self.stream);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// One for each source.
fn modules(compiler: &Compiler, architecture: Architecture) -> Result<Vec<Module>, KernelError> {
    std::thread::scope(|scope| {
        let compile = |source| scope.spawn(move || compiler.module(source, architecture));
        let running: Vec<_> = SOURCES.iter().copied().map(compile).collect();
        running.into_iter().map(|thread| thread.join().expect("compiling does not panic")).collect()
    })
}

fn driver(call: &'static str, error: DriverError) -> KernelError {
    KernelError::Driver { call, reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::on_device;

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        let error = Device::open(1000, &on_device::compiler()).err().expect("nobody has so many").to_string();
        assert!(error.contains("1000") || error.contains("driver"), "{error}");
    }

    #[test]
    fn what_is_written_to_a_device_is_read_from_it_and_bad_launches_are_errors() {
        on_device::with(|device| {
            let mut buffer = device.zeroed(1000).unwrap();
            let mut bytes = vec![7; 1000];
            buffer.read(&mut bytes).unwrap();
            assert_eq!(bytes, vec![0; 1000]);
            let written: Vec<u8> = (0..1000).map(|i| i as u8).collect();
            buffer.write(&written).unwrap();
            buffer.read(&mut bytes).unwrap();
            assert_eq!(bytes, written);
            assert!(buffer.write(&written[1..]).is_err());
            assert!(matches!(device.zeroed(1 << 50), Err(KernelError::DeviceMemory { .. })));
            assert_eq!(device.zeroed(0).unwrap().bytes(), 0);

            let launch = Launch::new("no_such_kernel".to_owned(), [1, 1, 1], 32);
            // SAFETY: neither is launched.
            let unknown = unsafe { device.launch(&launch, &0u64) };
            assert!(matches!(unknown, Err(KernelError::NoKernel { .. })));
            let launch = Launch { shared_bytes: 1 << 30, kernel: "embedding".to_owned(), ..launch };
            let too_much = unsafe { device.launch(&launch, &0u64) };
            assert!(too_much.unwrap_err().to_string().contains("shared memory"));
        });
    }
}
