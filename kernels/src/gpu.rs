//! What accelerators this machine has, asked of the driver at run time.
//!
//! Invariant: a machine without a driver gets a reason, never a panic; the library is probed before it is used.

use cudarc::driver::{result, sys};

/// One device as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInfo {
    pub name: String,
    pub memory_bytes: u64,
    pub compute_capability: (u32, u32),
}

/// The devices of this machine, or why there are none.
pub fn probe() -> Result<Vec<GpuInfo>, String> {
    // SAFETY: only tries to open the driver library.
    if !unsafe { sys::is_culib_present() } {
        return Err("no NVIDIA driver: the CUDA driver library is not installed".to_owned());
    }
    result::init().map_err(|error| format!("the NVIDIA driver did not start: {error}"))?;
    let count =
        result::device::get_count().map_err(|error| format!("the driver lists no devices: {error}"))?;
    (0..count)
        .map(|ordinal| describe(ordinal).map_err(|error| format!("device {ordinal}: {error}")))
        .collect()
}

/// The CUDA version that the driver knows, such as 12 or 13.
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
    // SAFETY: `device` was given by the driver just now.
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
