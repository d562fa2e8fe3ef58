//! `skep model synthesize`: writes a mixture with the widths of a published one and random weights.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::builder::PossibleValuesParser;
use indicatif::DecimalBytes;
use serde_json::json;
use skep_model::synthesis::{self, Synthesis, SynthesisOptions};
use skep_model::{Checkpoint, DType};

use crate::catalog;
use crate::commands::out;
use crate::progress::{Progress, Silent, Terminal};

/// Write a mixture of experts with the widths of a published one and random weights
///
/// The GGUF file computes as fast as the first layers of the trained model, here and in llama.cpp, and nothing is downloaded
/// for it but a vocabulary. Its text makes no sense. The same options give the same file.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Formats:
  f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4
  Norms and routers are in F32. Rows that are not whole blocks of 256 values have blocks of 32.

Examples:
  skep model synthesize --like qwen3-30b-a3b --layers 4 qwen3.gguf
  skep model synthesize --like deepseek-v2-lite --layers 4 --weights q8_0 deepseek.gguf
  skep bench engine --model qwen3.gguf --model deepseek.gguf --against 'llama-bench -fa 1'")]
pub struct Args {
    /// New file
    #[arg(value_name = "PATH")]
    out: PathBuf,
    /// Model whose widths the file has
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(synthesis::names()))]
    like: String,
    /// Layers to write, from the first on [default: all]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Tokens that a sequence may have [default: those of the model]
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Format of the matrices
    #[arg(long, default_value = "q4_0", value_name = "FORMAT", value_parser = synthesis::weight_format)]
    weights: DType,
    /// Seed of the weights
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// Model in a GGUF file whose vocabulary and chat template the file gets: a name, hf:OWNER/REPO[:FILE], or a path
    #[arg(long, default_value = catalog::DEFAULT_MODEL, value_name = "MODEL")]
    tokenizer: String,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let progress: &dyn Progress = if args.json { &Silent } else { &Terminal };
    let source = catalog::resolve(&args.tokenizer, progress)?;
    let vocabulary =
        Checkpoint::open(&source.path).with_context(|| format!("cannot read {}", source.path.display()))?;
    let options = SynthesisOptions {
        like: &args.like,
        layers: args.layers,
        context: args.context,
        weights: args.weights,
        seed: args.seed,
    };
    let failed = || format!("cannot write a model like {}", args.like);
    let synthesis = Synthesis::plan(&vocabulary, &options).with_context(failed)?;
    let folder = args.out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    catalog::require_space(
        folder,
        synthesis.bytes(),
        &args.out.display().to_string(),
        "free space there, choose a path on another disk, or write fewer --layers",
    )?;
    let step = progress.begin(&format!("writing {}", args.out.display()), Some(synthesis.bytes()));
    synthesis.write(&args.out, &|written| step.advance_to(written)).with_context(failed)?;
    step.finish(&DecimalBytes(synthesis.bytes()).to_string());
    if args.json {
        return out::json(&json!({
            "path": args.out, "like": args.like, "architecture": synthesis.family(), "layers": synthesis.layers(),
            "weights": args.weights.to_string(), "tokenizer": source.name, "parameters": synthesis.parameters(),
            "bytes": synthesis.bytes(),
        }));
    }
    eprintln!(
        "  - {} with {} layers and {:.1} million random weights",
        synthesis.family(),
        synthesis.layers(),
        synthesis.parameters() as f64 / 1e6
    );
    out::line(&args.out.display().to_string())
}
