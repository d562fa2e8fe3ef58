//! Checks of the GPUs of this machine, and of the libraries that only they need.

use skep_kernels::cuda::{architecture::Architecture, blas, nvrtc::Nvrtc, shipped};
use skep_kernels::gpu::{self, GpuInfo};
use skep_model::{OfDevice, device_figures, lacks_device_figures};

use super::{Check, State, lacking, ok};
use crate::paths;

pub(super) fn accelerator() -> Check {
    let devices = match gpu::probe() {
        Ok(devices) => devices,
        Err(why) => {
            let hint = "not needed; without one, --device auto runs models on the CPU";
            return lacking("GPU", State::Note, format!("none: {why}"), hint);
        }
    };
    let described: Vec<_> = devices.iter().map(described).collect();
    let found: Vec<&str> = described.iter().map(|(text, _)| text.as_str()).collect();
    let visibility = gpu::visibility(devices.len()).map(|text| format!("; {text}")).unwrap_or_default();
    let found = format!("{}{visibility}", found.join(", "));
    match described.iter().any(|(_, usable)| *usable) {
        true => ok("GPU", found),
        false => lacking(
            "GPU",
            State::Note,
            found,
            "there are no kernels for it: --device auto runs models on the CPU, and --device cuda fails",
        ),
    }
}

/// Describes a device for people, and returns whether there are kernels for it.
fn described(device: &GpuInfo) -> (String, bool) {
    let (major, minor) = device.compute_capability;
    let (kernels, usable) = match Architecture::of_device(major, minor) {
        Ok(architecture) => (format!("kernels for {architecture}"), true),
        Err(error) => (error.to_string(), false),
    };
    let gib = device.memory_bytes >> 30;
    (format!("{} ({gib} GiB, compute {major}.{minor}; {kernels})", device.name), usable)
}

/// Checks for NVML, which reads the sensors of GPUs, and shows what they say.
pub(super) fn sensors() -> Check {
    const NAME: &str = "GPU sensors";
    if let Some(why) = lacks_device_figures() {
        let hint = "/metrics has no temperature, power, memory and errors of GPUs without it";
        return lacking(NAME, State::Note, why.to_string(), hint);
    }
    let found: Vec<String> = device_figures().iter().map(sensed).collect();
    match found.is_empty() {
        true => ok(NAME, "no GPU"),
        false => ok(NAME, found.join(", ")),
    }
}

/// Describes what the sensors of a device say, as far as it has them.
fn sensed(OfDevice { ordinal, figures }: &OfDevice) -> String {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let memory = figures.memory_used_bytes.zip(figures.memory_total_bytes);
    let parts = [
        figures.temperature_c.map(|found| format!("{found:.0} °C")),
        figures.power_w.map(|found| format!("{found:.0} W")),
        memory.map(|(used, total)| format!("{:.1} of {:.1} GiB used", gib(used), gib(total))),
        figures.utilization.map(|found| format!("{:.0} % busy", found * 100.0)),
        figures.uncorrected_ecc_errors.map(|found| format!("{found} uncorrected memory errors")),
    ];
    format!("cuda:{ordinal} {}", parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
}

/// Checks for NVRTC, which compiles the kernels for a GPU, unless they were shipped.
pub(super) fn kernel_compiler() -> Check {
    const NAME: &str = "CUDA compiler";
    let shipped = match paths::shipped_cubins() {
        Ok(folder) => folder,
        Err(error) => {
            let found = error.to_string().lines().next().unwrap_or_default().to_owned();
            return lacking(
                NAME,
                State::Missing,
                found,
                "create it with `skep kernels build --out DIR`, or unset it",
            );
        }
    };
    let complete = shipped.as_deref().map(shipped::complete).unwrap_or_default();
    match Nvrtc::open(None) {
        Ok(nvrtc) => ok(NAME, format!("NVRTC {} ({})", nvrtc.version(), nvrtc.path().display())),
        Err(_) if is_enough(&complete, &gpu::probe().unwrap_or_default()) => {
            let names: Vec<_> = complete.iter().map(|architecture| architecture.name()).collect();
            ok(NAME, format!("not found and not needed: kernels were shipped for {}", names.join(", ")))
        }
        Err(why) => lacking(
            NAME,
            State::Note,
            why.to_string(),
            "needed on a machine with a GPU, for --device cuda: it compiles the kernels once, at the first start",
        ),
    }
}

/// Checks for cuBLASLt, which multiplies dense weights on a GPU.
pub(super) fn dense_products() -> Check {
    const NAME: &str = "cuBLASLt";
    match blas::find() {
        Ok((version, path)) => ok(NAME, format!("{version} ({})", path.display())),
        Err(why) => lacking(
            NAME,
            State::Note,
            why.to_string(),
            "useful on a machine with a GPU: prompts are computed faster with dense weights",
        ),
    }
}

/// Returns whether nothing has to be compiled for these devices.
fn is_enough(shipped: &[Architecture], devices: &[GpuInfo]) -> bool {
    let is_shipped = |device: &GpuInfo| {
        let (major, minor) = device.compute_capability;
        Architecture::of_device(major, minor).is_ok_and(|architecture| shipped.contains(&architecture))
    };
    !shipped.is_empty() && devices.iter().all(is_shipped)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(compute_capability: (u32, u32)) -> GpuInfo {
        let name = "NVIDIA Something".to_owned();
        GpuInfo { name, memory_bytes: 80 << 30, compute_capability, pci_bus_id: None }
    }

    #[test]
    fn shipped_kernels_are_enough_if_every_device_has_its_own() {
        let shipped = [Architecture::Sm80, Architecture::Sm90a];
        for (devices, expected) in [
            (vec![], true),
            (vec![device((9, 0))], true),
            (vec![device((9, 0)), device((8, 9))], false),
            (vec![device((7, 0))], false),
        ] {
            assert_eq!(is_enough(&shipped, &devices), expected, "{devices:?}");
        }
        assert!(!is_enough(&[], &[]));
    }

    #[test]
    fn sensors_are_described_as_far_as_a_device_has_them() {
        let figures = skep_model::DeviceFigures {
            temperature_c: Some(41.0),
            memory_used_bytes: Some(5 << 30),
            memory_total_bytes: Some(80 << 30),
            uncorrected_ecc_errors: Some(0),
            ..Default::default()
        };
        let text = sensed(&OfDevice { ordinal: 1, figures });
        assert_eq!(text, "cuda:1 41 °C, 5.0 of 80.0 GiB used, 0 uncorrected memory errors");
    }

    #[test]
    fn a_device_description_says_whether_there_are_kernels() {
        let (text, usable) = described(&device((9, 0)));
        assert!(usable && text.contains("(80 GiB, compute 9.0; kernels for sm_90"), "{text}");
        let (text, usable) = described(&device((7, 0)));
        assert!(!usable && text.contains("compute 7.0"), "{text}");
    }
}
