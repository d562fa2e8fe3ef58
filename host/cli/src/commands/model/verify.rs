//! `skep model verify`: compares a model's logits with those of another implementation.

use anyhow::{Context as _, Result, bail};
use serde_json::json;
use skep_kernels::Isa;
use skep_model::VerifyOptions;

use crate::commands::out;
use crate::style;

/// Check a model's logits against expected.safetensors in its folder
///
/// The file holds `input_ids` (n, i64) and `logits` (n × vocabulary, f32), computed elsewhere from the same
/// weights in float32. For long sequences, it can have `positions` (k, i64) and only their logits. Fails if the
/// largest difference is over 1e-3 of the largest logit.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model verify my-model
  skep model verify my-model --json
  skep model verify my-model --tp 2 --isa portable")]
pub struct Args {
    /// Folder with the model and expected.safetensors
    path: std::path::PathBuf,
    /// Tensor-parallel ranks, which share each layer
    #[arg(long, default_value_t = 1, value_name = "N")]
    tp: usize,
    /// Pipeline-parallel ranks, which divide the layers among them
    #[arg(long, default_value_t = 1, value_name = "N")]
    pp: usize,
    /// Threads [default: physical cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Instruction set: portable, avx2, avx512 or avx512-bf16 [default: the best that the CPU has]
    #[arg(long, value_name = "ISA")]
    isa: Option<Isa>,
    /// Tokens that are computed at once
    #[arg(long, value_name = "N")]
    chunk: Option<usize>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Computes the logits, and fails if they differ from the expected ones.
pub fn run(args: &Args) -> Result<()> {
    let defaults = VerifyOptions::default();
    let options = VerifyOptions {
        threads: args.threads,
        isa: args.isa,
        tensor_parallel: args.tp,
        pipeline_parallel: args.pp,
        chunk: args.chunk.unwrap_or(defaults.chunk),
    };
    let verification = skep_model::verify(&args.path, options)
        .with_context(|| format!("cannot verify {}", args.path.display()))?;
    if args.json {
        out::json(&json!({
            "path": args.path, "tokens": verification.tokens, "compared": verification.compared,
            "max_relative_error": verification.max_relative_error, "mean_abs_error": verification.mean_abs_error,
            "argmax_agreement": verification.argmax_agreement, "passed": verification.passed,
        }))?;
    } else {
        let paint = style::stdout();
        let word = if verification.passed { paint.green("passed") } else { paint.red("failed") };
        out::line(&format!(
            "{word}: {} of {} tokens, largest error {:.2e} of the largest logit, mean error {:.2e}, same most likely token {:.1} %",
            verification.compared,
            verification.tokens,
            verification.max_relative_error,
            verification.mean_abs_error,
            verification.argmax_agreement * 100.0
        ))?;
    }
    if !verification.passed {
        bail!(
            "{} does not compute the expected logits\n  hint: compare the architecture, rope and head sizes with \
             `skep model inspect {0}`",
            args.path.display()
        );
    }
    Ok(())
}
