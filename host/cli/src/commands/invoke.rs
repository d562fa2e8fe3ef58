//! `skep invoke`.

use std::io::Read as _;

use anyhow::{Context as _, Result};

use super::{HostArgs, out};
use crate::style;

/// Send one message to an agent and print its answer
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep invoke concierge 'Two pizzas, please'
  skep invoke concierge 'What did I order so far?' --session room-7
  echo 'A long message' | skep invoke concierge -
  skep invoke concierge 'A taxi, please' --json | jq .tool_calls")]
pub struct Args {
    agent: String,
    /// The message; `-` reads it from stdin
    message: String,
    /// Session to speak in; the agent remembers per session
    #[arg(long, short, default_value = "default")]
    session: String,
    #[command(flatten)]
    host: HostArgs,
    /// Print the whole answer as JSON: text, data, tool calls, usage, timing
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    let message = if args.message == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("cannot read the message from stdin")?;
        text
    } else {
        args.message
    };
    let turn = args.host.client()?.send(&args.agent, &args.session, &message).await?;
    if args.json {
        return out::json(&turn);
    }
    let paint = style::stderr();
    for call in &turn.tool_calls {
        eprintln!("{}", paint.dim(&format!("  {}({})", call.name, call.arguments)));
    }
    out::line(turn.text.trim_end())?;
    if let Some(data) = turn.data.filter(|data| !data.is_null()) {
        eprintln!("{}", paint.dim(&format!("  data: {data}")));
    }
    Ok(())
}
