//! `skep kernels`: GPU kernels that are compiled ahead of time and shipped with the binary.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use indicatif::HumanBytes;
use serde_json::json;
use skep_kernels::cuda::architecture::Architecture;
use skep_kernels::cuda::compile::Compiler;
use skep_kernels::cuda::shipped::{self, Shipped};
use skep_kernels::cuda::source::SOURCES;
use skep_kernels::cuda::usage;

use super::out;
use crate::paths;
use crate::progress::{Progress as _, Terminal};

/// Compile the GPU kernels ahead of time, and list them
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Build(BuildArgs),
    List(ListArgs),
}

/// Compile the kernels into a folder that can be shipped with the binary
///
/// Without such a folder, NVRTC compiles the kernels when a GPU is first opened, and they are cached from
/// then on. With it, a machine needs no NVRTC. Compiling needs no GPU: it can be done where the binary is
/// built, by the same version of `skep`; kernels of another version are not used. A host finds the folder
/// through SKEP_CUBINS, or if its name is `cubins` and it is beside the binary.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep kernels build --out cubins
  skep kernels build --out cubins --arch sm_90a         only for H100 and H200
  pip install --target nvrtc nvidia-cuda-nvrtc && skep kernels build --out cubins \\
      --nvrtc nvrtc/nvidia/cu13/lib/libnvrtc.so.13

Architectures:
  sm_80   A100        sm_89    L4, RTX 40      sm_100   B200
  sm_86   RTX 30      sm_90a   H100, H200      sm_120   RTX 50")]
pub struct BuildArgs {
    /// Folder for the compiled kernels; files that are already in it stay
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Architecture to compile for; may be repeated [default: all]
    #[arg(long = "arch", value_name = "ARCH", value_parser = architecture())]
    architectures: Vec<Architecture>,
    /// Path of the NVRTC library [default: the newest that the system finds]
    #[arg(long, value_name = "FILE")]
    nvrtc: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// List compiled kernels with the registers that they use
///
/// For each kernel and architecture: the registers per thread, and if a thread uses local memory, the bytes
/// that spill there and those of its stack frame, as in 255+12/16.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep kernels list
  skep kernels list --dir cubins --json | jq '.[] | select(.spilled_bytes > 0)'")]
pub struct ListArgs {
    /// Folder that `skep kernels build` wrote [default: the folder that a host uses]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Compiles the kernels, or lists compiled ones.
pub fn run(command: Command) -> Result<()> {
    match command {
        Command::Build(args) => build(args),
        Command::List(args) => list(args),
    }
}

fn architecture() -> impl clap::builder::TypedValueParser<Value = Architecture> {
    let named = |name: String| Architecture::ALL.into_iter().find(|architecture| architecture.name() == name);
    PossibleValuesParser::new(Architecture::ALL.map(Architecture::name))
        .map(move |name| named(name).expect("one of the possible values"))
}

fn build(args: BuildArgs) -> Result<()> {
    let BuildArgs { out, mut architectures, nvrtc, json } = args;
    if architectures.is_empty() {
        architectures = Architecture::ALL.to_vec();
    }
    architectures.sort_unstable();
    architectures.dedup();
    let compiler = Compiler::when_needed(nvrtc, Some(paths::cubin_cache()?));
    let nvrtc = compiler.nvrtc();
    let version = nvrtc
        .map_err(|error| anyhow!("{error}\n  hint: pass the path of the library with --nvrtc FILE"))?
        .version();
    let total = (architectures.len() * SOURCES.len()) as u64;
    let step = Terminal.count(&format!("compiling kernels with NVRTC {version}"), total);
    let (done, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
    let progress = |shipped: Shipped| {
        bytes.fetch_add(shipped.cubin_bytes as u64, Ordering::Relaxed);
        step.note(&format!("{} for {}", shipped.source.name, shipped.architecture));
        step.advance_to(done.fetch_add(1, Ordering::Relaxed) + 1);
    };
    shipped::ship(&compiler, &out, &architectures, progress)?;
    let (modules, bytes) = (done.into_inner(), bytes.into_inner());
    step.finish(&format!("{modules} modules"));
    if json {
        return out::json(&json!({
            "folder": out,
            "architectures": names(&architectures),
            "nvrtc": version.to_string(),
            "modules": modules,
            "bytes": bytes,
        }));
    }
    let folder = out.display();
    out::line(&format!("{folder}: {} for {}", HumanBytes(bytes), names(&architectures).join(", ")))?;
    out::line(&format!(
        "Ship it beside the binary as `cubins`, or set its path: SKEP_CUBINS={folder} skep up"
    ))
}

fn list(args: ListArgs) -> Result<()> {
    let folder = match args.dir {
        Some(dir) => dir,
        None => paths::shipped_cubins()?.context(
            "no kernels were shipped with this binary\n  hint: build them with `skep kernels build --out DIR`, then \
             pass the folder with --dir or SKEP_CUBINS",
        )?,
    };
    let mut found = Vec::new();
    for architecture in Architecture::ALL {
        for source in SOURCES {
            let module = shipped::module(&folder, *source, architecture);
            let kernels = module.into_iter().flat_map(|module| module.kernels);
            found.extend(kernels.map(|usage| (source.name, architecture, usage)));
        }
    }
    if found.is_empty() {
        let folder = folder.display();
        bail!(
            "{folder} has no kernels of this version of skep\n  hint: build them with `skep kernels build --out {folder}`"
        );
    }
    if args.json {
        let kernels: Vec<_> = found
            .iter()
            .map(|(source, architecture, usage)| {
                json!({
                    "kernel": usage.kernel,
                    "source": source,
                    "architecture": architecture.name(),
                    "registers": usage.registers,
                    "spilled_bytes": usage.spilled_bytes,
                    "stack_bytes": usage.stack_bytes,
                    "shared_bytes": usage.shared_bytes,
                })
            })
            .collect();
        return out::json(&kernels);
    }
    let usages: Vec<_> = found.into_iter().map(|(_, architecture, usage)| (architecture, usage)).collect();
    out::line(&usage::table(&usages))?;
    out::line(&format!("\n{}: {}", folder.display(), completeness(&folder)))
}

/// Describes the architectures that the folder is complete for.
fn completeness(folder: &Path) -> String {
    match shipped::complete(folder).as_slice() {
        [] => "complete for no architecture; missing kernels are compiled by NVRTC".to_owned(),
        complete => format!("complete for {}", names(complete).join(", ")),
    }
}

fn names(architectures: &[Architecture]) -> Vec<&'static str> {
    architectures.iter().map(|architecture| architecture.name()).collect()
}
