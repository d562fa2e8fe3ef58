//! Flags for the device that a model runs on and for determinism, shared by all commands that load a model to
//! use it.

use std::sync::Arc;

use anyhow::Result;
use clap::builder::{PossibleValue, TypedValueParser};
use clap::error::Error;
use clap::{Arg, Command};
use skep_kernels::gpu;
use skep_model::{DeviceChoice, ExecutorOptions, KernelFolders};

use crate::paths;

/// The flags for the device and for determinism, which override the settings.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct DeviceFlag {
    /// Device that the model runs on: auto, cpu, cuda, or cuda:0,1 for some devices [default: auto]
    #[arg(long, value_name = "DEVICE", value_parser = DeviceParser, hide_possible_values = true)]
    pub device: Option<DeviceChoice>,
    /// Give a sequence the same logits, bit for bit, whatever is computed beside it. On the CPU this always
    /// holds; on CUDA devices it uses only kernels with one order of sums, without cuBLASLt, and is slower
    /// [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub deterministic: Option<bool>,
}

impl DeviceFlag {
    /// Applies the flags that were given to `options`.
    pub fn apply(self, options: &mut ExecutorOptions) {
        options.device = self.device.unwrap_or(options.device);
        options.deterministic = self.deterministic.unwrap_or(options.deterministic);
    }
}

/// Returns the folders of compiled kernels: shipped ones, and a cache.
pub fn kernel_folders() -> Result<KernelFolders> {
    let shipped = paths::shipped_cubins()?.map(Arc::from);
    // If there is no folder for a cache, kernels are compiled at every start.
    let cache = paths::cubin_cache().ok().map(Arc::from);
    Ok(KernelFolders { cache, shipped })
}

/// Parses a device, and lists the values that shells complete.
#[derive(Debug, Clone, Copy)]
pub struct DeviceParser;

impl TypedValueParser for DeviceParser {
    type Value = DeviceChoice;

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &std::ffi::OsStr,
    ) -> std::result::Result<DeviceChoice, Error> {
        (|text: &str| text.parse::<DeviceChoice>()).parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let values = [
            ("auto", "CUDA devices if some of them can run the model, else the CPU"),
            ("cpu", "the CPU"),
            ("cuda", "the first CUDA device; cuda:0,1 are the first two"),
        ];
        Some(Box::new(values.into_iter().map(|(name, help)| PossibleValue::new(name).help(help))))
    }
}

/// Logs why a model runs on the CPU although another device was possible. If there is no GPU, it logs at
/// debug level.
pub fn report_fallback(model: &str, reason: Option<&str>) {
    let Some(reason) = reason else { return };
    let devices = gpu::probe().unwrap_or_default();
    match devices.is_empty() {
        true => tracing::debug!(model, reason, "the model runs on the CPU"),
        false => tracing::warn!(model, reason, "the model runs on the CPU, although there is a GPU"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory as _, Parser as _};

    #[derive(clap::Parser)]
    struct Wrapper {
        #[command(flatten)]
        flag: DeviceFlag,
    }

    #[test]
    fn a_known_device_is_accepted_and_an_error_lists_the_known_ones() {
        let read = |value: &str| Wrapper::try_parse_from(["up", "--device", value]);
        let over_cpu = |flag: DeviceFlag| {
            let mut options = ExecutorOptions { device: DeviceChoice::Cpu, ..ExecutorOptions::default() };
            flag.apply(&mut options);
            options.device.to_string()
        };
        assert_eq!(over_cpu(read("cuda:0,1").expect("devices").flag), "cuda:0,1");
        assert_eq!(over_cpu(DeviceFlag::default()), "cpu");
        for (value, expected) in [
            ("gpu", "'--device <DEVICE>': unknown device \"gpu\"; expected one of auto, cpu, cuda, cuda:0,1"),
            ("cuda:0,0", "'--device <DEVICE>': device 0 is named twice"),
        ] {
            let error = read(value).err().expect(value).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn determinism_can_be_turned_on_and_off_and_the_help_names_its_cost() {
        let over = |deterministic: bool, flags: &[&str]| {
            let words = ["up"].into_iter().chain(flags.iter().copied());
            let flag = Wrapper::try_parse_from(words).map_err(|error| error.to_string())?.flag;
            let mut options = ExecutorOptions { deterministic, ..ExecutorOptions::default() };
            flag.apply(&mut options);
            Ok::<bool, String>(options.deterministic)
        };
        for (before, flags, expected) in [
            (false, [].as_slice(), false),
            (true, &[], true),
            (false, &["--deterministic"], true),
            (false, &["--deterministic", "--device", "cpu"], true),
            (true, &["--deterministic=false"], false),
        ] {
            assert_eq!(over(before, flags), Ok(expected), "{flags:?} over {before}");
        }
        for (flag, expected) in [("--deterministic=yes", "true, false"), ("--determinist", "--deterministic")]
        {
            let error = over(false, &[flag]).expect_err(flag);
            assert!(error.contains(expected), "{error}");
        }
        let help = Wrapper::command().render_help().to_string();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(help.contains("On the CPU this always holds") && help.contains("is slower"), "{help}");
    }

    #[test]
    fn shells_complete_the_devices() {
        let mut script = Vec::new();
        clap_complete::generate(clap_complete::Shell::Bash, &mut Wrapper::command(), "skep", &mut script);
        let script = String::from_utf8(script).expect("text");
        assert!(script.contains("auto cpu cuda"), "{script}");
    }
}
