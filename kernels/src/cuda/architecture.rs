//! The GPU architectures that kernels are compiled for, and the choice among them for a device.
//!
//! A device runs code that was compiled for its major version and for a minor version that is not above its own. `sm_90a`
//! runs on 9.0 only and may therefore use features that only this device has.

use crate::KernelError;
pub use crate::cuda_types::Architecture;

impl Architecture {
    /// Returns the newest architecture that a device runs.
    pub fn of_device(major: u32, minor: u32) -> Result<Self, KernelError> {
        match (major, minor) {
            (8, 0..=5) => Ok(Architecture::Sm80),
            (8, 6..=8) => Ok(Architecture::Sm86),
            (8, _) => Ok(Architecture::Sm89),
            (9, 0) => Ok(Architecture::Sm90a),
            (10, _) => Ok(Architecture::Sm100),
            (12, _) => Ok(Architecture::Sm120),
            _ => {
                let supported = "8.0 to 9.0 (A100, L4, H100), 10.x (B200) and 12.x (RTX 50)";
                Err(KernelError::Architecture { major, minor, supported })
            }
        }
    }

    /// Returns the number that NVRTC uses.
    pub(super) fn number(self) -> i32 {
        match self {
            Architecture::Sm80 => 80,
            Architecture::Sm86 => 86,
            Architecture::Sm89 => 89,
            Architecture::Sm90a => 90,
            Architecture::Sm100 => 100,
            Architecture::Sm120 => 120,
        }
    }

    /// Returns whether a kernel may start before the one before it in its queue has ended (programmatic dependent launch).
    pub(super) fn has_early_starts(self) -> bool {
        self >= Architecture::Sm90a
    }

    /// Returns the first version of NVRTC that compiles for it.
    pub(super) fn oldest_nvrtc(self) -> &'static str {
        match self {
            Architecture::Sm80 | Architecture::Sm86 | Architecture::Sm89 | Architecture::Sm90a => "12.0",
            Architecture::Sm100 | Architecture::Sm120 => "12.8",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_gets_the_newest_architecture_that_it_runs() {
        use Architecture::*;
        let cases = [
            ((8, 0), Sm80),
            ((8, 6), Sm86),
            ((8, 7), Sm86),
            ((8, 9), Sm89),
            ((9, 0), Sm90a),
            ((10, 3), Sm100),
            ((12, 1), Sm120),
        ];
        for ((major, minor), expected) in cases {
            assert_eq!(Architecture::of_device(major, minor), Ok(expected));
        }
    }

    #[test]
    fn the_error_for_an_unsupported_device_lists_supported_ones() {
        for (major, minor) in [(7, 5), (9, 1), (11, 0), (13, 0)] {
            let error = Architecture::of_device(major, minor).expect_err("unsupported").to_string();
            assert!(error.contains(&format!("{major}.{minor}")) && error.contains("8.0 to 9.0"), "{error}");
        }
    }
}
