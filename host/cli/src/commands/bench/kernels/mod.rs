//! `skep bench kernels`: the operations of a step on a CUDA device, one by one, without a model.

mod report;

use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use clap::builder::PossibleValuesParser;
use skep_kernels::KernelError;
use skep_kernels::cuda::blas::Blas;
use skep_kernels::cuda::device::Device;
use skep_kernels::cuda::rates::{Cases, Operation, Peaks, Sizes, Stand};
use skep_model::{DeviceChoice, ModelConfig, Ordinals};

use super::super::out;
use super::{command_line, today};
use crate::device_flag::{DeviceParser, kernel_folders};
use crate::progress::{Progress as _, Terminal};
use report::{Outcome, Report, Row};

/// Measure the CUDA kernels of a step, one by one
///
/// Operations have the sizes of a known model's layer, and random numbers; nothing is downloaded. Each figure is the
/// median of several recordings, in which short work is repeated. Shares are relative to what the device can copy and
/// what cuBLASLt can multiply, measured in the same run.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench kernels
  skep bench kernels --device cuda:1 --shape smollm2-135m
  skep bench kernels --only attention
  skep bench kernels --only Q4_0 --json")]
pub struct Args {
    /// CUDA device to measure, such as cuda or cuda:1 [default: the first one]
    #[arg(long, value_name = "DEVICE", value_parser = DeviceParser, hide_possible_values = true)]
    device: Option<DeviceChoice>,
    /// Known model whose sizes are measured
    #[arg(
        long,
        value_name = "NAME",
        default_value = "llama-3.1-8b",
        value_parser = PossibleValuesParser::new(ModelConfig::SHAPES)
    )]
    shape: String,
    /// Measure only operations whose name or sizes contain this text
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Measures the operations, and prints the results.
pub fn run(args: &Args) -> Result<()> {
    let report = measure(args)?;
    if args.json { out::json(&report) } else { report.for_people() }?;
    match report.failures() {
        0 => Ok(()),
        failures => bail!("{} could not be measured", out::count(failures, "operation")),
    }
}

fn measure(args: &Args) -> Result<Report> {
    let ordinal = ordinal(args.device.unwrap_or(DeviceChoice::Auto))?;
    let config = ModelConfig::shape(&args.shape).context("clap accepts only known shapes")?;
    let (sizes, cases) = (sizes(&config), Cases::whole());
    let operations = chosen(&cases, &sizes, args.only.as_deref())?;
    let step = Terminal.begin("loading kernels", None);
    let device = Device::open(ordinal, &kernel_folders()?.compiler())
        .context("this command needs a CUDA device; `skep bench engine` measures the CPU")?;
    device.ready()?;
    let blas = match Blas::open(&device) {
        Ok(blas) => Some(blas),
        Err(error @ KernelError::NoCublas { .. }) => {
            tracing::warn!(%error, "cannot measure the highest rate of products");
            None
        }
        Err(error) => return Err(error.into()),
    };
    step.finish("");

    let started = Instant::now();
    let step = Terminal.count("measuring operations", operations.len() as u64);
    let mut stand = Stand::new(&device, blas.as_ref(), sizes, &cases)?;
    let peaks = Peaks::of(&device, blas.as_ref(), &sizes)?;
    let mut rows = Vec::new();
    for (done, operation) in (1..).zip(&operations) {
        let outcome = Outcome::new(operation, stand.measure(operation, &peaks));
        rows.push(Row { operation: operation.name(), sizes: operation.shape(&sizes), outcome });
        step.advance_to(done);
    }
    step.finish("");
    Ok(Report {
        date: today(),
        device: device.name(),
        command: command_line(),
        shape: args.shape.clone(),
        layer: sizes.to_string(),
        copy_gb_per_s: peaks.copy_gb_per_s,
        product_tflop_per_s: peaks.product_tflops,
        seconds: started.elapsed().as_secs_f64(),
        rows,
    })
}

/// Returns the number of the device to measure.
fn ordinal(device: DeviceChoice) -> Result<usize> {
    let ordinals = match device {
        DeviceChoice::Cpu => bail!(
            "this command measures kernels of CUDA devices, which the CPU does not run\n  hint: `skep bench engine --device cpu` \
             measures the CPU"
        ),
        DeviceChoice::Auto => Ordinals::FIRST,
        DeviceChoice::Cuda(ordinals) => ordinals,
    };
    let mut all = ordinals.iter();
    match (all.next(), all.next()) {
        (Some(ordinal), None) => Ok(ordinal),
        _ => bail!("kernels are measured on one device\n  hint: name one, such as --device cuda:0"),
    }
}

/// Returns the operations whose label contains the text.
fn chosen(cases: &Cases, sizes: &Sizes, only: Option<&str>) -> Result<Vec<Operation>> {
    let all = cases.operations(sizes);
    let Some(only) = only else { return Ok(all) };
    let mut names: Vec<String> = all.iter().map(Operation::name).collect();
    names.dedup();
    let label = |operation: &Operation| format!("{} {}", operation.name(), operation.shape(sizes));
    let chosen: Vec<_> = all.into_iter().filter(|operation| label(operation).contains(only)).collect();
    if chosen.is_empty() {
        bail!("no operation contains {only:?}; the operations are: {}", names.join(", "));
    }
    Ok(chosen)
}

fn sizes(config: &ModelConfig) -> Sizes {
    Sizes {
        hidden: config.hidden_size as u32,
        heads: config.head_count as u32,
        kv_heads: config.kv_head_count as u32,
        head_size: config.head_size as u32,
        wide: config.feed_forward_size as u32,
        vocabulary: config.vocabulary_size as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_cuda_device_is_measured() {
        let number =
            |device: &str| ordinal(device.parse().expect("a device")).map_err(|error| error.to_string());
        assert_eq!([number("auto"), number("cuda"), number("cuda:3")], [Ok(0), Ok(0), Ok(3)]);
        let error = number("cpu").expect_err("no kernels");
        assert!(error.contains("skep bench engine"), "{error}");
        let error = number("cuda:0,1").expect_err("two");
        assert!(error.contains("cuda:0"), "{error}");
    }

    #[test]
    fn operations_are_chosen_by_a_part_of_their_label() {
        let cases = Cases::whole();
        for shape in ModelConfig::SHAPES {
            let sizes = sizes(&ModelConfig::shape(shape).expect(shape));
            let count = |only| chosen(&cases, &sizes, only).map(|chosen| chosen.len());
            let attention = count(Some("attention")).expect("some");
            assert_eq!(attention, cases.decodes.len() + cases.prompts.len(), "{shape}");
            assert!(count(None).expect("all") > attention, "{shape}");
            let error = count(Some("convolution")).expect_err("none").to_string();
            assert!(error.contains("rms_norm, qkv BF16"), "{error}");
        }
    }
}
