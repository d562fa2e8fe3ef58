//! `skep model pull`: downloads a model into the cache.

use anyhow::Result;
use serde_json::json;

use crate::catalog;
use crate::commands::out;
use crate::progress::Terminal;

/// Download a model into the cache, so that it can be used without a network
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model pull
  skep model pull hf:Qwen/Qwen2.5-0.5B-Instruct
  skep model pull hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q4_k_m.gguf")]
pub struct Args {
    /// Name from the catalog, or hf:OWNER/REPO[:FILE]
    #[arg(default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let model = catalog::resolve(&args.model, &Terminal)?;
    if args.json {
        return out::json(&json!({"name": model.name, "path": model.path}));
    }
    out::line(&model.path.display().to_string())
}
