//! `skep model rm`: deletes a model from the cache.

use anyhow::{Result, bail};
use indicatif::DecimalBytes;
use serde_json::json;

use crate::catalog;
use crate::commands::{confirmation::confirmed, out};

/// Delete a model from the cache
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model rm qwen3-0.6b
  skep model rm hf:Qwen/Qwen2.5-0.5B-Instruct --yes")]
pub struct Args {
    /// Name or reference, as `skep model list` prints it
    model: String,
    /// Do not ask for confirmation
    #[arg(long)]
    yes: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Deletes the model from the cache, once the user has confirmed it.
pub fn run(args: &Args) -> Result<()> {
    let models = catalog::models()?;
    let found: Vec<_> = models.iter().filter(|model| model.is_called(&args.model)).collect();
    let model = match found.as_slice() {
        [model] => *model,
        [] => bail!(
            "no model {:?} in the cache\n  hint: `skep model list` shows what is in the cache; delete files outside of the \
             cache yourself",
            args.model
        ),
        several => {
            let references: Vec<_> = several.iter().map(|model| model.reference.as_str()).collect();
            bail!("several models are called {}\n  hint: name one of {}", args.model, references.join(", "))
        }
    };
    let question = format!("delete {} ({}) from the cache?", model.name, DecimalBytes(model.bytes));
    if !args.yes && !confirmed(&question)? {
        bail!("nothing was deleted");
    }
    let freed = catalog::remove(model)?;
    if args.json {
        return out::json(&json!({"name": model.name, "reference": model.reference, "freed_bytes": freed}));
    }
    out::line(&format!("deleted {}, which frees {}", model.name, DecimalBytes(freed)))
}
