//! Finds the GPUs of this machine by asking the NVIDIA driver at run time.
//!
//! Invariant: on a machine without a driver, the result is a reason and never a panic; the library is probed before it
//! is used.

use cudarc::driver::{result, sys};

/// A device as described by the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInfo {
    pub name: String,
    pub memory_bytes: u64,
    pub compute_capability: (u32, u32),
}

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
    result::init().map_err(|error| format!("the NVIDIA driver did not initialize: {error}"))?;
    let count =
        result::device::get_count().map_err(|error| format!("the driver cannot list devices: {error}"))?;
    (0..count)
        .map(|ordinal| describe(ordinal).map_err(|error| format!("device {ordinal}: {error}")))
        .collect()
}

/// Returns the major version of CUDA that the driver supports, such as 12 or 13.
pub(crate) fn driver_major() -> Option<i32> {
    // SAFETY: only tries to open the driver library.
    if !unsafe { sys::is_culib_present() } {
        return None;
    }
    let mut version = 0;
    // SAFETY: writes one number.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().ok()?;
    Some(version / 1000)
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
    Ok(GpuInfo { name, memory_bytes: memory as u64, compute_capability: (major as u32, minor as u32) })
}

#[cfg(test)]
mod tests {
    #[test]
    fn probing_gives_devices_or_a_reason() {
        match super::probe() {
            Ok(devices) => assert!(devices.iter().all(|device| device.memory_bytes > 0)),
            Err(reason) => assert!(!reason.is_empty()),
        }
    }
}
