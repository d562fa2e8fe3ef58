//! The readings of the sensors and counters of this machine's GPUs, taken at most once a second.
//!
//! Invariant: reading blocks for milliseconds, so no thread that computes does it. A machine without devices, or without
//! NVML, has no figures.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use skep_kernels::KernelError;
use skep_kernels::cuda::nvml::{DeviceFigures, Nvml};
use skep_kernels::gpu;

/// Time for which figures are kept.
const KEPT: Duration = Duration::from_secs(1);

/// The figures of the device with this number, which is that of `cuda:N`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OfDevice {
    pub ordinal: usize,
    pub figures: DeviceFigures,
}

/// The library and the devices, found once. Devices do not come or go while a process runs.
struct Source {
    nvml: Nvml,
    /// The address of each device, in the order of their numbers.
    devices: Vec<Option<String>>,
}

/// Returns the figures of the devices that this process can use. It blocks while they are read.
pub fn device_figures() -> Vec<OfDevice> {
    static SOURCE: OnceLock<Option<Source>> = OnceLock::new();
    static LAST: Mutex<Option<(Instant, Vec<OfDevice>)>> = Mutex::new(None);
    let Some(source) = SOURCE.get_or_init(|| Source::find().ok()) else { return Vec::new() };
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    match &*last {
        Some((at, figures)) if at.elapsed() < KEPT => figures.clone(),
        _ => {
            let figures = source.read();
            *last = Some((Instant::now(), figures.clone()));
            figures
        }
    }
}

/// Returns the reason that there are no figures although there are devices.
pub fn lacks_device_figures() -> Option<KernelError> {
    match gpu::probe() {
        Ok(_) => Nvml::open().err(),
        Err(_) => None,
    }
}

impl Source {
    fn find() -> Result<Self, KernelError> {
        let devices = gpu::probe().map_err(|reason| KernelError::NoDevice { reason })?;
        let devices = devices.into_iter().map(|device| device.pci_bus_id).collect();
        Ok(Source { nvml: Nvml::open()?, devices })
    }

    /// Reads all devices. One that does not answer is left out.
    fn read(&self) -> Vec<OfDevice> {
        let of_device = |(ordinal, address): (usize, &Option<String>)| {
            let figures = self.nvml.figures(address.as_deref()?).ok()?;
            Some(OfDevice { ordinal, figures })
        };
        self.devices.iter().enumerate().filter_map(of_device).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_that_were_just_read_are_not_read_again() {
        let figures = device_figures();
        assert_eq!(device_figures(), figures);
        let count = gpu::probe().map_or(0, |devices| devices.len());
        assert!(figures.len() <= count, "{figures:?}");
        if count > 0 && lacks_device_figures().is_none() {
            assert_eq!(figures.len(), count);
        }
    }
}
