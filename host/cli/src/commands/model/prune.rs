//! `skep model prune`: deletes what no model in the cache needs.

use anyhow::Result;
use indicatif::DecimalBytes;
use serde_json::{Value, json};

use crate::catalog;
use crate::commands::out;

/// Delete partial downloads, and files in the cache that no model needs
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model prune --dry-run
  skep model prune")]
pub struct Args {
    /// Only say what would be deleted
    #[arg(long)]
    dry_run: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Deletes what no model needs, and prints how much space that frees.
pub fn run(args: &Args) -> Result<()> {
    let leftovers = catalog::leftovers(args.dry_run)?;
    let bytes = leftovers.bytes();
    if args.json {
        let found: Vec<Value> =
            leftovers.found.iter().map(|(path, bytes)| json!({"path": path, "bytes": bytes})).collect();
        return out::json(&json!({
            "deleted": !args.dry_run, "found": found, "bytes": bytes, "busy": leftovers.busy,
        }));
    }
    for (path, bytes) in &leftovers.found {
        out::line(&format!("{:>12}  {}", DecimalBytes(*bytes).to_string(), path.display()))?;
    }
    for folder in &leftovers.busy {
        eprintln!("  - a running pull uses {}; it was kept", folder.display());
    }
    let frees = if args.dry_run { "would free" } else { "freed" };
    out::line(&format!("{frees} {}", DecimalBytes(bytes)))
}
