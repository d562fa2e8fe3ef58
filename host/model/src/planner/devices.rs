//! The devices that a plan is for, and how they are written: `8xH100`, `NAME:GiB`, `cpu:64`.
//!
//! Invariant: counts and sizes are bounded when they are read.

use std::fmt;
use std::str::FromStr;

use crate::error::ModelError;

/// Maximum number of devices of one model.
const MAX_COUNT: usize = 256;
const MAX_GIB: f64 = (1 << 20) as f64;

/// Devices of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Devices {
    pub count: usize,
    pub device: PlannedDevice,
}

/// A device as the planner knows it.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedDevice {
    pub name: String,
    /// Memory in all. Ranks on the CPU share it.
    pub memory_bytes: u64,
    pub kind: DeviceKind,
}

/// The properties of a device that plans depend on, besides its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The processor, whose memory all ranks share.
    Cpu,
    /// A CUDA device, whose number of streaming multiprocessors determines the size of workspaces.
    Cuda { multiprocessors: u32 },
}

/// A device that is known by name. The memory is the total that CUDA reports for it (`cuMemGetInfo`, which PyTorch
/// prints as "total capacity" when an allocation fails), rounded down: error correction and the driver take the rest of
/// the nominal size. The multiprocessors are those in NVIDIA's data sheets.
struct KnownDevice {
    name: &'static str,
    memory_gib: f64,
    multiprocessors: u32,
}

const KNOWN: [KnownDevice; 11] = [
    KnownDevice { name: "B200", memory_gib: 178.35, multiprocessors: 148 },
    KnownDevice { name: "H200", memory_gib: 139.80, multiprocessors: 132 },
    KnownDevice { name: "H100", memory_gib: 79.10, multiprocessors: 132 },
    KnownDevice { name: "A100", memory_gib: 79.14, multiprocessors: 108 },
    KnownDevice { name: "A100-80", memory_gib: 79.14, multiprocessors: 108 },
    KnownDevice { name: "A100-40", memory_gib: 39.39, multiprocessors: 108 },
    KnownDevice { name: "L40S", memory_gib: 44.39, multiprocessors: 142 },
    KnownDevice { name: "L4", memory_gib: 21.96, multiprocessors: 58 },
    KnownDevice { name: "A10G", memory_gib: 21.98, multiprocessors: 80 },
    KnownDevice { name: "RTX4090", memory_gib: 23.52, multiprocessors: 128 },
    KnownDevice { name: "RTX5090", memory_gib: 31.36, multiprocessors: 170 },
];
/// Multiprocessors of a device that is not known by name. They decide only the size of small buffers.
pub(super) const ASSUMED_MULTIPROCESSORS: u32 = 132;

impl Devices {
    /// Returns one processor with this much memory.
    pub fn cpu(memory_bytes: u64) -> Self {
        let device = PlannedDevice { name: "cpu".to_owned(), memory_bytes, kind: DeviceKind::Cpu };
        Devices { count: 1, device }
    }

    /// Returns the names of the known devices.
    pub fn known() -> Vec<&'static str> {
        KNOWN.iter().map(|known| known.name).collect()
    }
}

impl FromStr for Devices {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self, ModelError> {
        let wrong = |problem: String| {
            let known = Devices::known().join(", ");
            let problem = format!(
                "\"{text}\": {problem}; write COUNTxNAME, NAME:GiB or COUNTxNAME:GiB, with one of {known}, or any name \
                 with its memory, such as 8xH100 or 2xmine:48"
            );
            ModelError::Option { option: "devices".to_owned(), problem }
        };
        let (count, rest) = match text.split_once(['x', '×']) {
            Some((count, rest)) if !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit()) => {
                (count.parse().unwrap_or(usize::MAX), rest)
            }
            _ => (1, text),
        };
        if count == 0 || count > MAX_COUNT {
            return Err(wrong(format!("the count is not between 1 and {MAX_COUNT}")));
        }
        let (name, gib) = match rest.split_once(':') {
            Some((name, gib)) => {
                let size = gib.trim_end_matches("GiB").trim().parse::<f64>().ok();
                let size = size.filter(|size| (0.01..=MAX_GIB).contains(size));
                let size = size.ok_or_else(|| wrong(format!("\"{gib}\" is not a number of GiB")))?;
                (name, Some(size))
            }
            None => (rest, None),
        };
        if name.is_empty() || name.len() > 64 {
            return Err(wrong("the name is empty or too long".to_owned()));
        }
        let plain = |name: &str| name.replace([' ', '_'], "").to_uppercase();
        let known = KNOWN.iter().find(|known| plain(known.name) == plain(name));
        let memory_gib = gib.or(known.map(|known| known.memory_gib));
        let memory_gib = memory_gib.ok_or_else(|| wrong(format!("the memory of \"{name}\" is not known")))?;
        let kind = match name.eq_ignore_ascii_case("cpu") {
            true => DeviceKind::Cpu,
            false => DeviceKind::Cuda {
                multiprocessors: known.map_or(ASSUMED_MULTIPROCESSORS, |known| known.multiprocessors),
            },
        };
        let memory_bytes = (memory_gib * f64::from(1 << 30)) as u64;
        Ok(Devices { count, device: PlannedDevice { name: name.to_owned(), memory_bytes, kind } })
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlannedDevice { name, memory_bytes, kind } = &self.device;
        let gib = *memory_bytes as f64 / f64::from(1 << 30);
        match (self.count, kind) {
            (1, _) => write!(f, "{name} with {gib:.1} GiB"),
            (count, DeviceKind::Cpu) => write!(f, "{count} ranks on {name} with {gib:.1} GiB in all"),
            (count, DeviceKind::Cuda { .. }) => write!(f, "{count} × {name} with {gib:.1} GiB each"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_by_count_name_and_memory() {
        let read = |text: &str| text.parse::<Devices>().unwrap();
        assert_eq!(read("8xH100").to_string(), "8 × H100 with 79.1 GiB each");
        assert_eq!(read("rtx 4090").device.memory_bytes, (23.52 * 1024.0 * 1024.0 * 1024.0) as u64);
        assert_eq!(read("2xmine:48").to_string(), "2 × mine with 48.0 GiB each");
        assert_eq!(read("H200:100").device.kind, DeviceKind::Cuda { multiprocessors: 132 });
        assert_eq!(read("cpu:64").device.kind, DeviceKind::Cpu);
        assert_eq!(read("2xcpu:64GiB").to_string(), "2 ranks on cpu with 64.0 GiB in all");
        // The first letter of a name is not a separator.
        assert_eq!(read("xpu:8").count, 1);
        for (bad, problem) in [
            ("8xH9000", "the memory of \"H9000\" is not known"),
            ("0xH100", "between 1 and 256"),
            ("99999999999999999999xH100", "between 1 and 256"),
            ("mine:-4", "\"-4\" is not a number of GiB"),
            ("mine:inf", "\"inf\" is not a number of GiB"),
            (":4", "the name is empty"),
            ("", "the name is empty"),
            ("cpu", "the memory of \"cpu\" is not known"),
        ] {
            let error = bad.parse::<Devices>().unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains("COUNTxNAME"), "{error}");
        }
    }
}
