//! Runs the kernels of the parity tests on a device as well, if there is one.
//!
//! Tests build their parameters with addresses of host memory. Addresses that `host::address` returned are found among the
//! parameters and replaced by addresses of copies on the device; after the kernel has run, the copies are read back.
//!
//! `SKEP_REQUIRE_GPU=1` turns the absence of a device into a failure.

use std::cell::{OnceCell, RefCell};
use std::sync::{Arc, Once};

use super::compile::Compiler;
use super::device::{Device, DeviceBuffer};
use super::{Launch, compile_tests};
use crate::{KernelError, gpu};

thread_local! {
    /// The start address and the size of each remembered slice, oldest first.
    static SLICES: RefCell<Vec<(u64, usize)>> = const { RefCell::new(Vec::new()) };
    static DEVICE: OnceCell<Option<Device>> = const { OnceCell::new() };
}

pub(super) fn compiler() -> Compiler {
    Compiler::new(compile_tests::nvrtc(), Some(compile_tests::folder().join("cubins")))
}

/// Remembers a slice that parameters may point to. The address of an empty slice is meaningless, so it is skipped.
pub(super) fn remember<T>(values: &[T]) {
    if !values.is_empty() {
        SLICES.with_borrow_mut(|slices| slices.push((values.as_ptr() as u64, size_of_val(values))));
    }
}

/// Calls `run` with the device, if there is one.
pub(super) fn with(run: impl FnOnce(&Device)) {
    DEVICE.with(|device| {
        if let Some(device) = device.get_or_init(open) {
            run(device);
        }
    });
}

fn open() -> Option<Device> {
    match gpu::probe().map_err(|reason| KernelError::NoDevice { reason }) {
        Ok(_) => Some(Device::open(0, &Arc::new(compiler())).unwrap_or_else(|error| panic!("{error}"))),
        Err(error) => {
            assert!(std::env::var_os("SKEP_REQUIRE_GPU").is_none_or(|value| value != "1"), "{error}");
            static SAID: Once = Once::new();
            SAID.call_once(|| eprintln!("skipped on a device, checked on the CPU: {error}"));
            None
        }
    }
}

/// Runs a kernel whose parameters hold addresses of this process.
pub(super) fn run<P: Copy>(device: &Device, launch: &Launch, params: &P) {
    run_as(device, launch, params, |params| params);
}

/// Runs a kernel with the parameters that `on_device` makes of others, in which addresses of this process have become addresses
/// of the device.
pub(super) fn run_as<P: Copy, Q: Copy>(
    device: &Device,
    launch: &Launch,
    params: &P,
    on_device: impl FnOnce(P) -> Q,
) {
    // Copied as 64-bit words, so that addresses can be found anywhere in the struct.
    let mut words = vec![0u64; size_of::<P>().div_ceil(8)];
    // SAFETY: parameters are plain structs, and `words` has room for all their bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(params).cast::<u8>(),
            words.as_mut_ptr().cast(),
            size_of::<P>(),
        );
    }
    let mut copies: Vec<(&[u8], DeviceBuffer)> = Vec::new();
    for word in &mut words {
        let Some((at, bytes)) = latest_slice(*word) else { continue };
        // SAFETY: the test keeps the slices of its parameters alive while kernels run, and does not use them meanwhile.
        let here = unsafe { std::slice::from_raw_parts(at as *const u8, bytes) };
        let known = copies.iter().position(|(slice, _)| slice.as_ptr() as u64 == at);
        let known = known.unwrap_or_else(|| {
            copies.push((here, device.copied(here).unwrap()));
            copies.len() - 1
        });
        *word = copies[known].1.address().0;
    }
    // SAFETY: the words hold the parameters.
    let params = on_device(unsafe { std::ptr::read_unaligned(words.as_ptr().cast::<P>()) });
    // SAFETY: their addresses are those of copies that are as long as the slices.
    let launched = unsafe { device.launch(launch, &params) };
    launched.unwrap_or_else(|error| panic!("{}: {error}", launch.kernel));
    device.synchronize().unwrap_or_else(|error| panic!("{}: {error}", launch.kernel));
    for (here, copy) in &copies {
        let mut there = vec![0; here.len()];
        copy.read(&mut there).unwrap();
        // Constants of the test may be in memory that nothing can write.
        if *here != there {
            // SAFETY: the kernel writes only what the test lets it write.
            unsafe { std::ptr::copy_nonoverlapping(there.as_ptr(), here.as_ptr().cast_mut(), there.len()) };
        }
    }
}

fn latest_slice(word: u64) -> Option<(u64, usize)> {
    SLICES.with_borrow(|slices| slices.iter().rev().find(|(at, _)| *at == word).copied())
}
