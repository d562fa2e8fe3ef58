//! The flag that says where a model runs, of every command that loads one to use it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::Result;
use clap::builder::{PossibleValue, TypedValueParser};
use clap::error::Error;
use clap::{Arg, Command};
use skep_kernels::gpu;
use skep_model::{DeviceChoice, KernelFolders};

use crate::places;

#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct DeviceFlag {
    /// Where the model runs: auto, cpu, cuda, or cuda:0,1 for some devices [default: auto]
    #[arg(long, value_name = "DEVICE", value_parser = DeviceParser, hide_possible_values = true)]
    pub device: Option<DeviceChoice>,
}

impl DeviceFlag {
    /// What was given, over what is there.
    pub fn over(self, other: DeviceChoice) -> DeviceChoice {
        self.device.unwrap_or(other)
    }
}

/// Where compiled kernels are looked for and kept. The folders stay the same as long as the process runs.
pub fn kernel_folders() -> Result<KernelFolders> {
    static FOLDERS: OnceLock<KernelFolders> = OnceLock::new();
    if let Some(folders) = FOLDERS.get() {
        return Ok(*folders);
    }
    let kept = |folder: PathBuf| -> &'static Path { Box::leak(folder.into_boxed_path()) };
    let shipped = places::shipped_cubins()?.map(kept);
    // Without a place for a cache, kernels are compiled at every start.
    let cache = places::cubin_cache().ok().map(kept);
    Ok(*FOLDERS.get_or_init(|| KernelFolders { cache, shipped }))
}

/// Reads a device, and tells shells what to complete.
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
            ("auto", "CUDA devices if there are some that can run the model, else the processor"),
            ("cpu", "the processor"),
            ("cuda", "the first CUDA device; cuda:0,1 are the first two"),
        ];
        Some(Box::new(values.into_iter().map(|(name, help)| PossibleValue::new(name).help(help))))
    }
}

/// Says in the log why a model is on the processor, though it might have been elsewhere. Want of a GPU is no news.
pub fn report_fallback(model: &str, reason: Option<&str>) {
    let Some(reason) = reason else { return };
    let devices = gpu::probe().unwrap_or_default();
    match devices.is_empty() {
        true => tracing::debug!(model, reason, "the model runs on the processor"),
        false => tracing::warn!(model, reason, "the model runs on the processor, though there is a GPU"),
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
    fn a_device_is_taken_and_any_other_is_told_with_those_that_there_are() {
        let read = |value: &str| Wrapper::try_parse_from(["up", "--device", value]);
        let given = read("cuda:0,1").expect("devices").flag.over(DeviceChoice::Cpu);
        assert_eq!(given.to_string(), "cuda:0,1");
        assert_eq!(DeviceFlag::default().over(DeviceChoice::Cpu), DeviceChoice::Cpu);
        for (value, expected) in [
            ("gpu", "'--device <DEVICE>': unknown device \"gpu\"; one of auto, cpu, cuda, cuda:0,1"),
            ("cuda:0,0", "'--device <DEVICE>': device 0 is named twice"),
        ] {
            let error = read(value).err().expect(value).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn shells_complete_the_devices() {
        let mut script = Vec::new();
        clap_complete::generate(clap_complete::Shell::Bash, &mut Wrapper::command(), "skep", &mut script);
        let script = String::from_utf8(script).expect("text");
        assert!(script.contains("auto cpu cuda"), "{script}");
    }
}
