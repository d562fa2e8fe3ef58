//! Finds the GPUs of this machine by asking the NVIDIA driver at run time.
//!
//! Invariant: on a machine without a driver, or with one that lacks functions, the result is a reason and never a panic; the
//! library and all functions that this crate calls are probed before they are used.

use std::ffi::CStr;

use cudarc::driver::{result, sys};
use libloading::Library;

/// The functions of the driver that this crate calls. cudarc looks up each when it is called first, and panics without it.
const DRIVER_FUNCTIONS: [&str; 51] = [
    "cuCtxEnablePeerAccess",
    "cuCtxSetCurrent",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxReset_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuInit",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyPeerAsync",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
];

/// A device as described by the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInfo {
    pub name: String,
    pub memory_bytes: u64,
    pub compute_capability: (u32, u32),
    /// The address on the PCI bus, such as `0000:4F:00.0`, if the driver tells it. Instances of one card share it.
    pub pci_bus_id: Option<String>,
}

/// The variable that tells the driver which devices a process sees, in which order.
const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// Returns the devices of this machine, or the reason why there are none.
pub fn probe() -> Result<Vec<GpuInfo>, String> {
    if cfg!(all(target_env = "musl", target_feature = "crt-static")) {
        let reason = "a static build of skep cannot load the NVIDIA driver; use the build for glibc";
        return Err(reason.to_owned());
    }
    // SAFETY: only tries to open the driver library.
    if !unsafe { sys::is_culib_present() } {
        return Err("no NVIDIA driver: the CUDA driver library is not installed".to_owned());
    }
    // SAFETY: the library was found above.
    check_functions(unsafe { sys::culib() })?;
    let hidden = || visibility(0).map(|text| format!("; {text}")).unwrap_or_default();
    // The driver says that there are no devices if the variable hides all of them.
    result::init()
        .map_err(|error| format!("the NVIDIA driver did not initialize: {:?}{}", error.0, hidden()))?;
    let count = result::device::get_count()
        .map_err(|error| format!("the driver cannot list devices: {:?}{}", error.0, hidden()))?;
    if count == 0 {
        return Err(format!("the driver lists no devices{}", hidden()));
    }
    (0..count)
        .map(|ordinal| describe(ordinal).map_err(|error| format!("device {ordinal}: {error}")))
        .collect()
}

/// Says what `CUDA_VISIBLE_DEVICES` does to the devices, of which the driver lists `visible`, if it is set.
pub fn visibility(visible: usize) -> Option<String> {
    let value = std::env::var_os(VISIBLE_DEVICES)?.to_string_lossy().into_owned();
    // The driver's module lists the cards, whatever a process sees of them.
    let cards = std::fs::read_dir("/proc/driver/nvidia/gpus").map(Iterator::count).ok();
    Some(visibility_text(&value, visible, cards))
}

/// Describes what the variable with this value does. `cards` is the number of cards in the machine, if it is known.
fn visibility_text(value: &str, visible: usize, cards: Option<usize>) -> String {
    let there = cards.map(|cards| format!(", and the machine has {cards} GPUs")).unwrap_or_default();
    match visible {
        0 => format!(
            "{VISIBLE_DEVICES}={value:?} leaves no device visible{there}; unset it, or set it to the numbers or UUIDs that \
             `nvidia-smi -L` shows"
        ),
        _ => format!(
            "{VISIBLE_DEVICES}={value:?} leaves {visible} visible{there}; cuda:0 is the first that the variable names"
        ),
    }
}

/// Returns the major version of CUDA that the driver supports, such as 12 or 13.
pub(crate) fn driver_major() -> Option<i32> {
    // SAFETY: only tries to open the driver library, and uses it only if it was found.
    let library = unsafe { sys::is_culib_present().then(|| sys::culib()) }?;
    check_functions(library).ok()?;
    let mut version = 0;
    // SAFETY: writes one number.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().ok()?;
    Some(version / 1000)
}

/// Checks that the driver has all functions that this crate calls.
fn check_functions(driver: &Library) -> Result<(), String> {
    // SAFETY: the address is not used.
    let is_missing = |name: &&&str| unsafe { driver.get::<*const ()>(name.as_bytes()) }.is_err();
    match DRIVER_FUNCTIONS.iter().find(is_missing) {
        None => Ok(()),
        Some(name) => Err(format!(
            "the NVIDIA driver lacks the function {name}; install a driver for CUDA 12.0 or newer (version 525 or newer)"
        )),
    }
}

fn describe(ordinal: i32) -> Result<GpuInfo, result::DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let device = result::device::get(ordinal)?;
    let name = result::device::get_name(device)?;
    // SAFETY: `device` was returned by the driver above.
    let (memory, major, minor) = unsafe {
        (
            result::device::total_mem(device)?,
            result::device::get_attribute(device, MAJOR)?,
            result::device::get_attribute(device, MINOR)?,
        )
    };
    let (memory_bytes, compute_capability) = (memory as u64, (major as u32, minor as u32));
    Ok(GpuInfo { name, memory_bytes, compute_capability, pci_bus_id: pci_bus_id(device) })
}

fn pci_bus_id(device: sys::CUdevice) -> Option<String> {
    let mut text = [0u8; 32];
    // SAFETY: the driver returned the device, and writes at most as many bytes as there are.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as i32, device) }.result().ok()?;
    Some(CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_an_old_driver_names_the_function_and_the_version() {
        // SAFETY: the C library is loaded already. It is on every machine that runs this, and no driver.
        let library = unsafe { Library::new("libc.so.6") }.expect("the C library");
        let error = check_functions(&library).expect_err("not a driver");
        assert!(error.contains("cuCtxEnablePeerAccess") && error.contains("525 or newer"), "{error}");
    }

    #[test]
    fn all_functions_that_are_called_are_checked() {
        let sources = [include_str!("gpu.rs"), include_str!("cuda/driver.rs"), include_str!("cuda/queue.rs")];
        let words = sources
            .iter()
            .flat_map(|source| source.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_'));
        let mut count = 0;
        for word in words.filter(|word| {
            word.starts_with("cu") && word.as_bytes().get(2).is_some_and(u8::is_ascii_uppercase)
        }) {
            // Errors name functions without their versions.
            assert!(DRIVER_FUNCTIONS.iter().any(|name| name.starts_with(word)), "{word} is not in the list");
            count += 1;
        }
        assert!(count > DRIVER_FUNCTIONS.len(), "only {count} names were found");
    }

    #[test]
    fn the_text_about_hidden_devices_says_how_many_there_are_and_how_they_are_numbered() {
        let text = visibility_text("", 0, Some(8));
        assert!(
            text.contains("=\"\" leaves no device visible, and the machine has 8 GPUs; unset it"),
            "{text}"
        );
        let text = visibility_text("MIG-1", 1, Some(8));
        assert!(
            text.contains("=\"MIG-1\" leaves 1 visible, and the machine has 8 GPUs; cuda:0 is"),
            "{text}"
        );
        let text = visibility_text("3,1", 2, None);
        assert!(text.contains("=\"3,1\" leaves 2 visible; cuda:0 is"), "{text}");
    }

    #[test]
    fn probing_gives_devices_or_a_reason() {
        match probe() {
            Ok(devices) => assert!(devices.iter().all(|device| device.memory_bytes > 0)),
            Err(reason) => assert!(!reason.is_empty()),
        }
    }
}
