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

#[cfg(test)]
mod tests {
    use super::*;

    /// The parameters of the kernels in `faults.cpp`.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct FaultParams {
        memory: u64,
        out: u64,
        offset: u32,
    }

    /// Runs a kernel in every order. The results must agree.
    fn run(kernel: &str, threads: u32, offset: u32) -> Result<(), String> {
        let mut memory = [0u128; 4];
        let mut out = [0u32; 128];
        let params = FaultParams { memory: memory.as_mut_ptr() as u64, out: out.as_mut_ptr() as u64, offset };
        let outcomes = [Order::FORWARD, Order::BACKWARD, Order::shuffled(7)].map(|order| {
            let launch = Launch { grid: [1, 1, 1], block: [threads, 1, 1], shared_bytes: 0, order };
            // SAFETY: the offsets of the tests lie within the memory, and there is an output for each thread.
            unsafe { launch_at(kernel, &launch, (&raw const params).cast(), size_of::<FaultParams>()) }
        });
        let [first, rest @ ..] = outcomes;
        assert!(
            rest.iter().all(|outcome| outcome.is_err() == first.is_err()),
            "{kernel} depends on the order"
        );
        first
    }

    #[track_caller]
    fn refused(kernel: &str, threads: u32, offset: u32, reason: &str) {
        let error = run(kernel, threads, offset).expect_err(kernel);
        assert!(error.starts_with(kernel) && error.contains(reason), "{error}");
    }

    #[test]
    fn shuffles_and_barriers_with_threads_that_have_ended_are_errors() {
        refused("fault_ended_lane", 32, 0, "of its warp, which has ended");
        refused("fault_ended_warp", 64, 0, "waits at a barrier");
        refused("fault_partial_warp", 30, 0, "lane 30 of its warp, which does not exist");
        run("fault_partial_warp", 64, 0).expect("whole warps are right");
    }

    #[test]
    fn accesses_to_misaligned_addresses_are_errors() {
        run("fault_misaligned_load", 32, 16).expect("an aligned load is right");
        refused("fault_misaligned_load", 32, 8, "not a multiple of 16 bytes");
        run("fault_misaligned_store", 1, 4).expect("an aligned store is right");
        refused("fault_misaligned_store", 1, 2, "not a multiple of 4 bytes");
        // The machine still works after an error.
        run("fault_misaligned_load", 32, 0).expect("an aligned load is right");
    }

    #[test]
    fn faults_are_not_among_the_kernels_of_devices() {
        assert!(kernels().iter().all(|kernel| !kernel.starts_with("fault_")));
    }
}
