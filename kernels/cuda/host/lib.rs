//! The CUDA kernels on the processor, for tests: the same `.cu` files, compiled as C++, with the threads of a block as fibers.
//!
//! What a kernel computes is proven here without a device. Asynchronous copies arrive at once or only when they are waited for.
//! Not proven is what only a device has: memory that several blocks of a launch share at the same time.

use std::ffi::{CStr, CString, c_char, c_void};

/// How a kernel is launched; as `skep_host::Launch` in `block.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub order: Order,
}

/// In which order the threads of a block run, between what makes them wait, and when their asynchronous copies arrive. A kernel
/// whose result depends on it lacks a barrier, or a wait.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order(u32);

impl Order {
    /// As they are numbered; copies arrive at once.
    pub const FORWARD: Order = Order(0);
    /// The other way round; copies arrive when they are waited for.
    pub const BACKWARD: Order = Order(1);

    /// Another one at every barrier; copies arrive when they are waited for.
    pub fn shuffled(seed: u32) -> Self {
        Order(seed.max(2))
    }
}

unsafe extern "C" {
    fn skep_host_launch(
        name: *const c_char,
        launch: *const Launch,
        params: *const c_void,
        params_bytes: usize,
    ) -> *const c_char;
    fn skep_host_kernels() -> *const c_char;
}

/// Runs a kernel to its end. The error says why it could not be.
///
/// # Safety
/// `params` is the kernel's own struct, and its pointers are valid for what the kernel reads and writes.
pub unsafe fn launch<P: Copy>(name: &str, launch: &Launch, params: &P) -> Result<(), String> {
    // SAFETY: the caller vouches for the parameters, which are as long as their type.
    unsafe { launch_at(name, launch, std::ptr::from_ref(params).cast(), size_of::<P>()) }
}

/// The same, with a kernel's struct of so many bytes at this place.
///
/// # Safety
/// As above; the place is aligned as the struct is.
pub unsafe fn launch_at(
    name: &str,
    launch: &Launch,
    params: *const c_void,
    bytes: usize,
) -> Result<(), String> {
    let name = CString::new(name).map_err(|error| error.to_string())?;
    // SAFETY: the name ends with a zero, the launch is a plain struct of the same layout, and the caller vouches for the
    // parameters; their size is compared on the other side.
    let problem = unsafe { skep_host_launch(name.as_ptr(), launch, params, bytes) };
    if problem.is_null() {
        return Ok(());
    }
    // SAFETY: a string that is valid until this thread launches again.
    let problem = unsafe { CStr::from_ptr(problem) };
    Err(format!("{}: {}", name.to_string_lossy(), problem.to_string_lossy()))
}

/// The names of all kernels.
pub fn kernels() -> Vec<String> {
    // SAFETY: a string that lives as long as the process.
    let names = unsafe { CStr::from_ptr(skep_host_kernels()) };
    names.to_string_lossy().lines().map(str::to_owned).collect()
}
