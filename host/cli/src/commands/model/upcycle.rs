//! `skep model upcycle`: cuts a dense model into a mixture of experts.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use indicatif::DecimalBytes;
use serde_json::json;
use skep_model::Checkpoint;
use skep_model::upcycle::{Upcycle, UpcycleFormat, UpcycleOptions, UpcycleRouter};

use crate::catalog;
use crate::commands::out;
use crate::progress::{Progress, Silent, Terminal};

/// Cut a dense model into a mixture of experts that computes the same
///
/// Each feed-forward block is cut along its width into experts. With the uniform router, all of them are chosen with the
/// same weight, so apart from rounding the mixture is the dense model: it runs the code of mixtures on real text. With
/// a random router and --top-k below the number of experts, it is another model, whose text makes no sense.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Formats:
  bf16, f32  safetensors
  int4       safetensors in BF16, with experts in INT4, groups of 32 (compressed-tensors)
  fp8        safetensors in BF16, with experts and attention in FP8 in blocks of 128 × 128
  gguf       a GGUF file in the formats of the source, which has to be one, too; nothing is rounded

Examples:
  skep model upcycle --experts 4 --format gguf --out smollm2-moe.gguf
  skep model upcycle qwen3-0.6b --experts 8 --format int4 --out qwen3-moe
  skep model upcycle --experts 8 --router random --top-k 2 --seed 7 --out random-moe")]
pub struct Args {
    /// Dense model: a name, hf:OWNER/REPO[:FILE], or a path
    #[arg(default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// New folder, or new file with --format gguf
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// Experts that each feed-forward block is cut into
    #[arg(long, default_value_t = 4, value_name = "N")]
    experts: usize,
    /// Experts that each token passes through [default: all]
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// How experts are chosen
    #[arg(long, value_enum, default_value_t = Router::Uniform)]
    router: Router,
    /// Seed of the random router [default: 0]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Files to write: bf16, f32, int4, fp8 or gguf
    #[arg(long, default_value_t = UpcycleFormat::Bf16, value_name = "FORMAT")]
    format: UpcycleFormat,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Router {
    /// All experts with the same weight
    Uniform,
    /// By random weights
    Random,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let router = match (args.router, args.seed) {
        (Router::Uniform, None) => UpcycleRouter::Uniform,
        (Router::Uniform, Some(_)) => {
            bail!("--seed has no effect on the uniform router\n  hint: add --router random")
        }
        (Router::Random, seed) => UpcycleRouter::Random { seed: seed.unwrap_or(0) },
    };
    let progress: &dyn Progress = if args.json { &Silent } else { &Terminal };
    let model = catalog::resolve(&args.model, progress)?;
    let checkpoint =
        Checkpoint::open(&model.path).with_context(|| format!("cannot read {}", model.path.display()))?;
    let options = UpcycleOptions { experts: args.experts, used: args.top_k, router, format: args.format };
    let upcycle =
        Upcycle::plan(&checkpoint, &options).with_context(|| format!("cannot cut {}", model.name))?;
    let folder = args.out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    catalog::require_space(
        folder,
        upcycle.bytes(),
        &args.out.display().to_string(),
        "free space there, or choose a path on another disk with --out",
    )?;
    let step = progress.begin(&format!("writing {}", args.out.display()), Some(upcycle.bytes()));
    upcycle
        .write(&args.out, &|written| step.advance_to(written))
        .with_context(|| format!("cannot cut {} into experts", model.name))?;
    step.finish(&DecimalBytes(upcycle.bytes()).to_string());
    if args.json {
        return out::json(&json!({
            "path": args.out, "source": model.name, "architecture": format!("{:?}", upcycle.architecture()),
            "format": args.format.to_string(), "experts": args.experts, "top_k": upcycle.used(),
            "expert_width": upcycle.expert_width(), "bytes": upcycle.bytes(),
        }));
    }
    eprintln!(
        "  - {:?} with {} experts of width {}, of which each token passes through {}",
        upcycle.architecture(),
        args.experts,
        upcycle.expert_width(),
        upcycle.used()
    );
    out::line(&args.out.display().to_string())
}
