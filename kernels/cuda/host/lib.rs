//! Runs the CUDA kernels on the CPU, for tests: the same `.cu` files, compiled as C++, with the threads of a block as fibers.
//!
//! Tests can check the results of kernels here without a device. Asynchronous copies arrive either at once or only when they
//! are waited for. Concurrent access of several blocks of a launch to the same memory is not covered, because blocks run one
//! after the other.

use std::ffi::{CStr, CString, c_char, c_void};

/// The launch configuration of a kernel, with the layout of `skep_host::Launch` in `block.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub order: Order,
}

/// The order in which the threads of a block run between two points where they wait, and the time when their asynchronous
/// copies arrive. A kernel whose result depends on it lacks a barrier or a wait.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order(u32);

impl Order {
    /// Threads run in order of their indices; copies arrive at once.
    pub const FORWARD: Order = Order(0);
    /// Threads run in reverse order; copies arrive when they are waited for.
    pub const BACKWARD: Order = Order(1);

    /// Returns an order in which threads run at random, newly drawn after every barrier; copies arrive when they are waited for.
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

/// Runs a kernel to completion, or returns the reason why that is not possible.
///
/// # Safety
/// `params` is the kernel's parameter struct, and its pointers are valid for everything that the kernel reads and writes.
pub unsafe fn launch<P: Copy>(name: &str, launch: &Launch, params: &P) -> Result<(), String> {
    // SAFETY: the caller guarantees the parameters, and the length is that of their type.
    unsafe { launch_at(name, launch, std::ptr::from_ref(params).cast(), size_of::<P>()) }
}

/// Does the same as [`launch()`], with a parameter struct of `bytes` bytes at `params`.
///
/// # Safety
/// The conditions of [`launch()`] hold, and `params` is aligned like the struct.
pub unsafe fn launch_at(
    name: &str,
    launch: &Launch,
    params: *const c_void,
    bytes: usize,
) -> Result<(), String> {
    let name = CString::new(name).map_err(|error| error.to_string())?;
    // SAFETY: the name is null-terminated, the launch is a plain struct with the same layout on both sides, and the caller
    // guarantees the parameters, whose size is checked by the callee.
    let problem = unsafe { skep_host_launch(name.as_ptr(), launch, params, bytes) };
    if problem.is_null() {
        return Ok(());
    }
    // SAFETY: the string is valid until this thread launches again.
    let problem = unsafe { CStr::from_ptr(problem) };
    Err(format!("{}: {}", name.to_string_lossy(), problem.to_string_lossy()))
}

/// Returns the names of all kernels.
pub fn kernels() -> Vec<String> {
    // SAFETY: the string lives as long as the process.
    let names = unsafe { CStr::from_ptr(skep_host_kernels()) };
    names.to_string_lossy().lines().map(str::to_owned).collect()
}
