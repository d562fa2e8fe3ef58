//! Bindings to NVML, the library of the NVIDIA driver that reads a GPU's sensors and counters.
//!
//! Invariant: the library is optional, and so is each figure: a device that lacks one reports `None` for it. A call takes
//! up to some milliseconds, so no thread that computes makes one. NVML ignores `CUDA_VISIBLE_DEVICES`.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use libloading::Library;

use super::library;
use crate::KernelError;

/// Names under which the library is searched for.
const SEARCH_PATHS: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];
/// The oldest driver with all functions that are used here.
const OLDEST: &str = "a driver for CUDA 12.0 (version 525)";

const TEMPERATURE_GPU: c_uint = 0;
const ERRORS_UNCORRECTED: c_uint = 1;
/// Errors since the driver was loaded.
const ERRORS_VOLATILE: c_uint = 0;

type Handle = *mut c_void;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

library::functions! {
    init: "nvmlInit_v2" () -> c_int,
    shutdown: "nvmlShutdown" () -> c_int,
    error_string: "nvmlErrorString" (c_int) -> *const c_char,
    device_by_pci: "nvmlDeviceGetHandleByPciBusId_v2" (*const c_char, *mut Handle) -> c_int,
    temperature: "nvmlDeviceGetTemperature" (Handle, c_uint, *mut c_uint) -> c_int,
    power: "nvmlDeviceGetPowerUsage" (Handle, *mut c_uint) -> c_int,
    memory: "nvmlDeviceGetMemoryInfo" (Handle, *mut MemoryInfo) -> c_int,
    utilization: "nvmlDeviceGetUtilizationRates" (Handle, *mut Utilization) -> c_int,
    ecc_errors: "nvmlDeviceGetTotalEccErrors" (Handle, c_uint, c_uint, *mut u64) -> c_int,
}

/// The loaded library.
pub struct Nvml {
    functions: Functions,
    /// Keeps the functions loaded.
    _library: Library,
}

/// The readings of a device's sensors and counters. Instances of one card have the figures of the card.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeviceFigures {
    pub temperature_c: Option<f64>,
    pub power_w: Option<f64>,
    pub memory_used_bytes: Option<u64>,
    pub memory_total_bytes: Option<u64>,
    /// The share of the last sampling period, up to a second, in which a kernel ran: 0 to 1.
    pub utilization: Option<f64>,
    /// Uncorrected memory errors since the driver was loaded.
    pub uncorrected_ecc_errors: Option<u64>,
}

impl Nvml {
    /// Opens and initializes the library that the system finds.
    pub fn open() -> Result<Self, KernelError> {
        let (library, path) =
            library::open(None, &SEARCH_PATHS).map_err(|tried| KernelError::NoNvml { tried })?;
        let lacking = |symbol| KernelError::LibraryFunction {
            library: path.display().to_string(),
            symbol,
            oldest: OLDEST,
        };
        // SAFETY: these are the types of NVML's functions, and the library is kept.
        let functions = unsafe { Functions::find(&library, lacking) }?;
        // SAFETY: the function has no arguments.
        let status = unsafe { (functions.init)() };
        // Without this, dropping a library that did not initialize would undo the initialization of another one.
        if status != 0 {
            return Err(failed(&functions, "nvmlInit", status));
        }
        Ok(Nvml { functions, _library: library })
    }

    /// Reads the figures of the device with this address on the PCI bus.
    pub fn figures(&self, pci_bus_id: &str) -> Result<DeviceFigures, KernelError> {
        let Functions { device_by_pci, temperature, power, memory, utilization, ecc_errors, .. } =
            self.functions;
        let address = CString::new(pci_bus_id).unwrap_or_default();
        let mut device = std::ptr::null_mut();
        // SAFETY: the text ends with a zero byte, and the call writes one handle.
        let found = unsafe { device_by_pci(address.as_ptr(), &mut device) };
        self.check("nvmlDeviceGetHandleByPciBusId", found)?;
        // SAFETY, for all: the library returned the device, and the call writes one value of this type.
        let temperature_c = unsafe { read(|out| temperature(device, TEMPERATURE_GPU, out)) };
        // SAFETY: as above.
        let power_mw = unsafe { read(|out| power(device, out)) };
        // SAFETY: as above.
        let memory: Option<MemoryInfo> = unsafe { read(|out| memory(device, out)) };
        // SAFETY: as above.
        let utilization: Option<Utilization> = unsafe { read(|out| utilization(device, out)) };
        // SAFETY: as above.
        let errors = unsafe { read(|out| ecc_errors(device, ERRORS_UNCORRECTED, ERRORS_VOLATILE, out)) };
        Ok(DeviceFigures {
            temperature_c: temperature_c.map(f64::from),
            power_w: power_mw.map(|milliwatts| f64::from(milliwatts) / 1e3),
            memory_used_bytes: memory.map(|memory| memory.used),
            memory_total_bytes: memory.map(|memory| memory.total),
            utilization: utilization.map(|busy| f64::from(busy.gpu) / 100.0),
            uncorrected_ecc_errors: errors,
        })
    }

    fn check(&self, call: &'static str, status: c_int) -> Result<(), KernelError> {
        if status == 0 { Ok(()) } else { Err(failed(&self.functions, call, status)) }
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: the library counts initializations, and this one is undone once.
        unsafe { (self.functions.shutdown)() };
    }
}

/// Returns what a call wrote, or `None` if the device does not have the figure.
///
/// # Safety
/// The call writes a whole value of this type if it returns 0.
unsafe fn read<T: Default>(call: impl FnOnce(*mut T) -> c_int) -> Option<T> {
    let mut value = T::default();
    (call(&mut value) == 0).then_some(value)
}

fn failed(functions: &Functions, call: &'static str, status: c_int) -> KernelError {
    // SAFETY: the library returns a static text for every number, or null.
    let text = unsafe {
        let text = (functions.error_string)(status);
        if text.is_null() { None } else { Some(CStr::from_ptr(text).to_string_lossy().into_owned()) }
    };
    let reason = text.unwrap_or_else(|| format!("error {status}"));
    KernelError::Nvml { call, reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu;

    #[test]
    fn figures_are_plausible_where_there_is_a_device() {
        let nvml = match Nvml::open() {
            Ok(nvml) => nvml,
            Err(error) => return assert!(error.to_string().starts_with("NVML"), "{error}"),
        };
        assert!(nvml.figures("0000:FF:1F.7").is_err(), "no device is there");
        let Ok(devices) = gpu::probe() else { return };
        for device in devices {
            let figures = nvml.figures(&device.pci_bus_id.expect("an address")).unwrap();
            println!("{}: {figures:?}", device.name);
            assert!(figures.temperature_c.is_none_or(|found| (1.0..150.0).contains(&found)), "{figures:?}");
            assert!(figures.power_w.is_none_or(|found| (1.0..3000.0).contains(&found)), "{figures:?}");
            assert!(figures.utilization.is_none_or(|found| (0.0..=1.0).contains(&found)), "{figures:?}");
            assert!(figures.memory_used_bytes <= figures.memory_total_bytes, "{figures:?}");
        }
    }
}
