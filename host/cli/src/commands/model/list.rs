//! `skep model list`: the models in the catalog and those in the cache.

use anyhow::Result;
use indicatif::HumanBytes;
use serde_json::json;

use crate::catalog::{self, CATALOG};
use crate::commands::out;

/// List the models in the catalog and those in the cache
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model list
  skep model list --json")]
pub struct Args {
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let mut models = Vec::new();
    for entry in CATALOG {
        let path = catalog::present(entry)?;
        models.push(json!({
            "name": entry.name, "bytes": entry.bytes, "license": entry.license, "description": entry.description,
            "path": path,
        }));
    }
    for pulled in catalog::pulled_from_hub()? {
        let bytes =
            std::fs::metadata(&pulled.path).ok().filter(std::fs::Metadata::is_file).map(|file| file.len());
        models.push(json!({"name": pulled.name, "bytes": bytes, "path": pulled.path}));
    }
    if args.json {
        return out::json(&models);
    }
    let rows: Vec<_> = models
        .iter()
        .map(|model| {
            let size = model["bytes"]
                .as_u64()
                .map_or_else(|| "folder".to_owned(), |bytes| HumanBytes(bytes).to_string());
            let text = |key: &str| model[key].as_str().unwrap_or_default().to_owned();
            let place = if model["path"].is_null() { "not pulled".to_owned() } else { text("path") };
            [text("name"), size, place, text("description")]
        })
        .collect();
    out::table(["MODEL", "SIZE", "WHERE", ""], &rows)
}
