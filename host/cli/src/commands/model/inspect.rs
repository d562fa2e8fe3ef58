//! `skep model inspect`: the contents of a model file.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use indicatif::HumanBytes;
use serde_json::json;
use skep_engine::chat::Markup;
use skep_model::Checkpoint;

use crate::catalog;
use crate::commands::out;
use crate::progress::Terminal;

/// Show the contents of a model file
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model inspect smollm2-135m
  skep model inspect model.gguf --tensors
  skep model inspect folder-with-safetensors --json")]
pub struct Args {
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path
    model: String,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Prints the contents of the model's files.
pub fn run(args: &Args) -> Result<()> {
    let model = catalog::resolve(&args.model, &Terminal)?;
    let checkpoint =
        Checkpoint::open(&model.path).with_context(|| format!("cannot read {}", model.path.display()))?;
    let config = checkpoint.config();
    let mut kinds: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    let (mut parameters, mut tensors) = (0u64, Vec::new());
    for tensor in checkpoint.tensors() {
        let kind = kinds.entry(tensor.dtype.to_string()).or_default();
        kind.0 += 1;
        kind.1 += tensor.data.len() as u64;
        parameters += tensor.shape.iter().map(|&size| size as u64).product::<u64>();
        if args.tensors {
            tensors.push((tensor.name.to_owned(), tensor.dtype.to_string(), tensor.shape.to_vec()));
        }
    }
    tensors.sort();
    let tokenizer = checkpoint.tokenizer()?;
    let template = checkpoint.chat_template()?;
    let source = template.as_ref().map_or("", |template| template.source());
    let markup = Markup::of_model(source, tokenizer.as_ref()).name;
    let tokenizer = tokenizer.map(|tokenizer| tokenizer.vocabulary_size());
    let template = template.map(|template| template.knows_tools());
    if args.json {
        let kinds: BTreeMap<_, _> = kinds
            .into_iter()
            .map(|(kind, (count, bytes))| (kind, json!({"tensors": count, "bytes": bytes})))
            .collect();
        let tensors: Vec<_> = tensors
            .into_iter()
            .map(|(name, dtype, shape)| json!({"name": name, "dtype": dtype, "shape": shape}))
            .collect();
        return out::json(&json!({
            "name": model.name, "path": model.path, "format": checkpoint.format(), "bytes": checkpoint.bytes(),
            "architecture": format!("{:?}", config.architecture), "parameters": parameters,
            "layers": config.layer_count, "hidden_size": config.hidden_size, "heads": config.head_count,
            "kv_heads": config.kv_head_count, "head_size": config.head_size,
            "feed_forward_size": config.feed_forward_size, "vocabulary_size": config.vocabulary_size,
            "context_length": config.context_length, "rope_theta": config.rope.theta, "tied_head": config.tied_head,
            "eos": config.eos, "bos": config.bos, "add_bos": config.add_bos,
            "tokenizer_vocabulary": tokenizer, "chat_template_knows_tools": template, "markup": markup,
            "dtypes": kinds, "tensors": if args.tensors { Some(tensors) } else { None },
        }));
    }
    let say = |name: &str, value: String| out::line(&format!("{name:14}{value}"));
    say("model", format!("{} ({})", model.name, model.path.display()))?;
    say("format", format!("{}, {}", checkpoint.format(), HumanBytes(checkpoint.bytes())))?;
    say(
        "architecture",
        format!("{:?}, {:.1} million parameters", config.architecture, parameters as f64 / 1e6),
    )?;
    say(
        "layers",
        format!(
            "{} of width {}, feed-forward {}",
            config.layer_count, config.hidden_size, config.feed_forward_size
        ),
    )?;
    let (heads, kv_heads) = (config.head_count, config.kv_head_count);
    say(
        "attention",
        format!(
            "{heads} heads over {kv_heads} KV heads of {}, rope theta {}",
            config.head_size, config.rope.theta
        ),
    )?;
    say("context", format!("{} tokens", config.context_length))?;
    let head = if config.tied_head { "tied head" } else { "separate head" };
    say("vocabulary", format!("{}, {head}, end of generation {:?}", config.vocabulary_size, config.eos))?;
    say("tokenizer", tokenizer.map_or_else(|| "none".to_owned(), |size| format!("{size} tokens")))?;
    let template = match template {
        None => "none; ChatML is used",
        Some(true) => "yes, with tools",
        Some(false) => "yes, without tools",
    };
    say("chat template", template.to_owned())?;
    say("markup", markup.to_owned())?;
    for (kind, (count, bytes)) in kinds {
        say("weights", format!("{} in {kind}, {}", out::count(count, "tensor"), HumanBytes(bytes)))?;
    }
    for (name, dtype, shape) in tensors {
        out::line(&format!("  {name:50} {dtype:5} {shape:?}"))?;
    }
    Ok(())
}
