//! `skep invoke`: sends one message to an agent.

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
  skep invoke concierge 'A taxi, please' --json | jq .tool_calls
  skep invoke concierge 'A long letter, please' --detach
  skep invoke concierge 'Pay the bill' --idempotency-key bill-7")]
pub struct Args {
    /// Name of the agent
    agent: String,
    /// The message; - reads it from standard input
    message: String,
    /// Session to talk in; the agent remembers each session separately
    #[arg(long, short, default_value = "default")]
    session: String,
    /// Print the turn's id as soon as the message is durable, and let the turn run without a client; see
    /// `skep turn`
    #[arg(long)]
    detach: bool,
    /// Messages with the same key in the same session are one turn, however often they are sent; the turn
    /// does not end with its client
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    #[command(flatten)]
    host: HostArgs,
    /// Print the whole answer as JSON: text, data, the turn's number and id, tool calls, usage, timing
    #[arg(long)]
    json: bool,
}

/// Sends the message, and prints the reply.
pub async fn run(args: Args) -> Result<()> {
    let message = if args.message == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("cannot read the message from stdin")?;
        text
    } else {
        args.message
    };
    let client = args.host.client()?;
    let key = args.idempotency_key.as_deref();
    if args.detach {
        let accepted = client.send_detached(&args.agent, &args.session, &message, key).await?;
        if args.json {
            return out::json(&accepted);
        }
        return out::line(&accepted.turn_id);
    }
    // The answer is read as events, because the first one has the turn's id: if the host is lost, the turn
    // can be found again.
    let turn = client.stream_once(&args.agent, &args.session, &message, key).await?.answer().await?;
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
