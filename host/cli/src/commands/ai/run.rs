//! `skep ai run`: asks a model one question.

use std::io::Read as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::commands::{HostArgs, out};

/// Ask a model one question
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep ai run default 'What is gravity?'
  skep ai run default 'What is gravity?' --stream --max-tokens 100
  skep ai run default 'A person called Ada, aged 36' --schema person.json
  skep ai run @cf/meta/llama-3.1-8b-instruct - < prompt.txt    with [ai.models] in skep.toml")]
pub struct Args {
    /// Name of the model; `default` is the host's own
    model: String,
    /// The prompt; - reads it from standard input
    prompt: String,
    /// File with a JSON Schema that the answer has to match
    #[arg(long, value_name = "FILE")]
    schema: Option<PathBuf>,
    /// Print the answer while it is generated
    #[arg(long, conflicts_with = "json")]
    stream: bool,
    /// Maximum length of the answer [default: the host's, 256]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// Sampling temperature; 0 gives the same answer each time
    #[arg(long, value_name = "0..2")]
    temperature: Option<f32>,
    /// Fail instead of waiting if the model is busy
    #[arg(long)]
    reject_if_busy: bool,
    #[command(flatten)]
    host: HostArgs,
    /// Print the whole result as JSON: response, tool calls, usage
    #[arg(long)]
    json: bool,
}

/// Asks the model, and prints its answer.
pub async fn run(args: Args) -> Result<()> {
    let body = body(&args)?;
    let client = args.host.client()?;
    if args.stream {
        let mut answer = client.ai_stream(&args.model, &body).await?;
        while let Some(text) = answer.next().await? {
            out::piece(&text)?;
        }
        return out::line("");
    }
    let result = client.ai_run(&args.model, &body).await?;
    match &result["response"] {
        _ if args.json => out::json(&result),
        Value::String(text) => out::line(text.trim_end()),
        value => out::json(value),
    }
}

fn body(args: &Args) -> Result<Value> {
    let prompt = if args.prompt == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("cannot read the prompt from stdin")?;
        text
    } else {
        args.prompt.clone()
    };
    let mut body = json!({"prompt": prompt, "stream": args.stream, "rejectIfBusy": args.reject_if_busy});
    if let Some(max_tokens) = args.max_tokens {
        body["max_tokens"] = max_tokens.into();
    }
    if let Some(temperature) = args.temperature {
        body["temperature"] = temperature.into();
    }
    if let Some(path) = &args.schema {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let schema: Value =
            serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))?;
        body["response_format"] = json!({"type": "json_schema", "json_schema": schema});
    }
    Ok(body)
}
