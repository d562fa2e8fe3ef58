//! Runs the kernels of the parity tests on a device as well, where there is one.
//!
//! Tests make their parameters with addresses of the processor's memory. Those that were given out by `host::address` are
//! found among the parameters and replaced by copies on the device; what the kernel wrote is copied back.
//!
//! `SKEP_REQUIRE_GPU=1` makes the absence of a device a failure.

use std::cell::{OnceCell, RefCell};
use std::sync::{Arc, Once};

use super::compile::Compiler;
use super::device::Device;
use super::{Launch, compile_tests};
use crate::{KernelError, gpu};

thread_local! {
    /// Where slices begin, and how many bytes they have; the latest last.
    static SLICES: RefCell<Vec<(u64, usize)>> = const { RefCell::new(Vec::new()) };
    static DEVICE: OnceCell<Option<Device>> = const { OnceCell::new() };
}

pub(super) fn compiler() -> Compiler {
    Compiler::new(compile_tests::nvrtc(), Some(compile_tests::folder().join("cubins")))
}

/// Remembers a slice that parameters may point to. One without values has no address that means anything.
pub(super) fn remember<T>(values: &[T]) {
    if !values.is_empty() {
        SLICES.with_borrow_mut(|slices| slices.push((values.as_ptr() as u64, size_of_val(values))));
    }
}

/// Does it with the device, if there is one.
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
            SAID.call_once(|| eprintln!("skipped on a device, checked on the processor: {error}"));
            None
        }
    }
}

/// Runs a kernel whose parameters hold addresses of this process.
pub(super) fn run<P: Copy>(device: &Device, launch: &Launch, params: &P) {
    // Whole words, so that an address can be looked at wherever it is.
    let mut words = vec![0u64; size_of::<P>().div_ceil(8)];
    // SAFETY: as many bytes as the parameters have; they are plain structs.
    unsafe {
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(params).cast::<u8>(),
            words.as_mut_ptr().cast(),
            size_of::<P>(),
        );
    }
    let mut copies = Vec::new();
    for word in &mut words {
        let Some((at, bytes)) = latest_slice(*word) else { continue };
        // SAFETY: the test keeps the slices of its parameters alive while kernels run, and nobody else has them then.
        let here = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, bytes) };
        let known = copies.iter().position(|(slice, _): &(&mut [u8], _)| slice.as_ptr() as u64 == at);
        let known = known.unwrap_or_else(|| {
            let mut copy = device.zeroed(bytes).unwrap();
            copy.write(here).unwrap();
            copies.push((here, copy));
            copies.len() - 1
        });
        *word = copies[known].1.address().0;
    }
    // SAFETY: the words begin as the parameters do, with addresses of copies that are as long as the slices.
    let launched = unsafe {
        let params = std::ptr::read(words.as_ptr().cast::<P>());
        device.launch(launch, &params)
    };
    launched.unwrap_or_else(|error| panic!("{}: {error}", launch.kernel));
    device.synchronize().unwrap_or_else(|error| panic!("{}: {error}", launch.kernel));
    for (here, copy) in &mut copies {
        copy.read(here).unwrap();
    }
}

fn latest_slice(word: u64) -> Option<(u64, usize)> {
    SLICES.with_borrow(|slices| slices.iter().rev().find(|(at, _)| *at == word).copied())
}
