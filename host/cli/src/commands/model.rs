//! `skep model`: pulls, lists, inspects and verifies models.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};
use indicatif::HumanBytes;
use serde_json::json;
use skep_kernels::Isa;
use skep_model::{Checkpoint, VerifyOptions};

use super::out;
use crate::catalog::{self, CATALOG};
use crate::progress::Terminal;
use crate::style;

/// Pull, list, inspect and verify models
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Pull(PullArgs),
    List(ListArgs),
    Inspect(InspectArgs),
    Verify(VerifyArgs),
}

/// Download a model into the cache, so that it can be used without a network
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model pull
  skep model pull hf:Qwen/Qwen2.5-0.5B-Instruct
  skep model pull hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q4_k_m.gguf")]
pub struct PullArgs {
    /// Name from the catalog, or hf:OWNER/REPO[:FILE]
    #[arg(default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// List the models in the catalog and those in the cache
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model list
  skep model list --json")]
pub struct ListArgs {
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Show the contents of a model file
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model inspect smollm2-135m
  skep model inspect model.gguf --tensors
  skep model inspect folder-with-safetensors --json")]
pub struct InspectArgs {
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path
    model: String,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Check a model's logits against expected.safetensors in its folder
///
/// The file holds `input_ids` (n, i64) and `logits` (n × vocabulary, f32), computed elsewhere from the same
/// weights in float32. Fails if the largest difference is over 1e-3 of the largest logit.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model verify my-model
  skep model verify my-model --json
  skep model verify my-model --tp 2 --isa portable")]
pub struct VerifyArgs {
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
    /// Instruction set: portable, avx2 or avx512 [default: the best that the CPU has]
    #[arg(long, value_name = "ISA")]
    isa: Option<Isa>,
    /// Tokens that are computed at once
    #[arg(long, value_name = "N")]
    chunk: Option<usize>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(command: Command) -> Result<()> {
    tokio::task::block_in_place(|| match command {
        Command::Pull(args) => pull(&args),
        Command::List(args) => list(&args),
        Command::Inspect(args) => inspect(&args),
        Command::Verify(args) => verify(&args),
    })
}

fn pull(args: &PullArgs) -> Result<()> {
    let model = catalog::resolve(&args.model, &Terminal)?;
    if args.json {
        return out::json(&json!({"name": model.name, "path": model.path}));
    }
    out::line(&model.path.display().to_string())
}

fn list(args: &ListArgs) -> Result<()> {
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

fn inspect(args: &InspectArgs) -> Result<()> {
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
    let tokenizer = checkpoint.tokenizer()?.map(|tokenizer| tokenizer.vocabulary_size());
    let template = checkpoint.chat_template()?.map(|template| template.knows_tools());
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
            "tokenizer_vocabulary": tokenizer, "chat_template_knows_tools": template,
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
    for (kind, (count, bytes)) in kinds {
        say("weights", format!("{count} tensors in {kind}, {}", HumanBytes(bytes)))?;
    }
    for (name, dtype, shape) in tensors {
        out::line(&format!("  {name:50} {dtype:5} {shape:?}"))?;
    }
    Ok(())
}

fn verify(args: &VerifyArgs) -> Result<()> {
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
            "path": args.path, "tokens": verification.tokens,
            "max_relative_error": verification.max_relative_error, "mean_abs_error": verification.mean_abs_error,
            "argmax_agreement": verification.argmax_agreement, "passed": verification.passed,
        }))?;
    } else {
        let paint = style::stdout();
        let word = if verification.passed { paint.green("passed") } else { paint.red("failed") };
        out::line(&format!(
            "{word}: {} tokens, largest error {:.2e} of the largest logit, mean error {:.2e}, same most likely token {:.1} %",
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
