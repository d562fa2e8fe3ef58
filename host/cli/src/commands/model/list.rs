//! `skep model list`: the models in the cache, or all models that have a name.

use anyhow::Result;
use indicatif::DecimalBytes;
use serde_json::{Value, json};

use crate::catalog::{self, CatalogEntry, Support};
use crate::commands::out;
use crate::machine;

/// List the models in the cache, or those that can be pulled by name
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model list                      what is in the cache, and the disk space that it takes
  skep model list --available          every model that has a name
  skep model list --available --json   with digests, sampling defaults, list prices")]
pub struct Args {
    /// List the whole catalog
    #[arg(long)]
    available: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Prints the models in the cache, or all that have a name.
pub fn run(args: &Args) -> Result<()> {
    if args.available { available(args.json) } else { cached(args.json) }
}

fn cached(as_json: bool) -> Result<()> {
    let models = catalog::models()?;
    let total: u64 = models.iter().map(|model| model.bytes).sum();
    let leftover = catalog::leftovers(true)?.bytes();
    if as_json {
        return out::json(&json!({"models": models, "total_bytes": total, "leftover_bytes": leftover}));
    }
    if models.is_empty() {
        out::line(
            "no models in the cache; `skep model pull` fetches the default, `skep model list --available` shows others",
        )?;
    } else {
        let rows: Vec<_> = models
            .iter()
            .map(|model| {
                let path = model.path.display().to_string();
                [model.name.clone(), DecimalBytes(model.bytes).to_string(), model.reference.clone(), path]
            })
            .collect();
        out::table(["MODEL", "SIZE", "FROM", "WHERE"], &rows)?;
        out::line(&format!("{} in {}", DecimalBytes(total), out::count(models.len() as u64, "model")))?;
    }
    if leftover > 0 {
        out::line(&format!(
            "{} in partial downloads and files that no model needs; `skep model prune` deletes them",
            DecimalBytes(leftover)
        ))?;
    }
    Ok(())
}

fn available(as_json: bool) -> Result<()> {
    let memory = machine::available_memory_bytes();
    if as_json {
        let models: Result<Vec<Value>> = catalog::entries().iter().map(described).collect();
        return out::json(&json!({"models": models?, "available_memory_bytes": memory}));
    }
    let mut rows = Vec::new();
    for entry in catalog::entries() {
        let here = match (entry.support(), memory) {
            (Support::Lacks(_), _) => "not yet",
            (Support::Runs, Some(memory)) if memory < entry.bytes() => "too large",
            (Support::Runs, _) => "yes",
        };
        let context = entry.context.to_string();
        rows.push([
            entry.name.clone(),
            entry.size_text(),
            context,
            entry.license.clone(),
            here.to_owned(),
            entry.good_for.clone(),
        ]);
    }
    out::table(["MODEL", "SIZE", "CONTEXT", "LICENSE", "RUNS HERE", "GOOD FOR"], &rows)?;
    say_what_is_missing(catalog::entries().iter())?;
    match memory {
        Some(memory) => out::line(&format!("{} of memory are available", DecimalBytes(memory))),
        None => Ok(()),
    }
}

/// Says for the models that do not run yet what Skep lacks, models that lack the same together.
pub(super) fn say_what_is_missing<'a>(entries: impl Iterator<Item = &'a CatalogEntry>) -> Result<()> {
    let mut missing: Vec<(Vec<String>, Vec<&str>)> = Vec::new();
    for entry in entries {
        let Support::Lacks(lacks) = entry.support() else { continue };
        match missing.iter_mut().find(|(known, _)| *known == lacks) {
            Some((_, names)) => names.push(&entry.name),
            None => missing.push((lacks, vec![&entry.name])),
        }
    }
    for (lacks, names) in missing {
        out::line(&format!("not yet: {} (Skep lacks {})", names.join(", "), lacks.join(", ")))?;
    }
    Ok(())
}

/// Describes an entry of the catalog in JSON, with all that is known.
pub(super) fn described(entry: &CatalogEntry) -> Result<Value> {
    let (runs, lacks) = match entry.support() {
        Support::Runs => (true, Vec::new()),
        Support::Lacks(lacks) => (false, lacks),
    };
    Ok(json!({
        "name": entry.name, "aliases": entry.aliases, "family": entry.family, "kind": entry.kind,
        "source": entry.source.to_string(), "bytes": entry.bytes(), "bytes_are_exact": entry.file.bytes.is_some(),
        "sha256": entry.file.sha256, "million_parameters": entry.parameters, "context": entry.context,
        "license": entry.license, "template": entry.template, "tool_markup": entry.tool_markup,
        "architecture": entry.requires.architecture, "good_for": entry.good_for, "sampling": entry.sampling,
        "runs": runs, "lacks": lacks, "path": catalog::present(entry)?,
        "list_price": entry.list_price.as_ref().map(|price| json!({
            "input": price.input.to_string(), "cached_input": price.cached_input.to_string(),
            "output": price.output.to_string(), "currency": price.currency.to_string(), "provider": price.provider,
        })),
    }))
}
