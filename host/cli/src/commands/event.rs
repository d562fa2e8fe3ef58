//! `skep event`: sends and lists events.

use anyhow::Result;
use serde_json::Value;

use super::{HostArgs, out};
use crate::failure::Usage;

/// Send events to agents and webhooks, and list them
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Send(SendArgs),
    List(ListArgs),
}

/// Publish an event; agents and webhooks that subscribe to its topic get it
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep event send order.paid '{\"order_id\": \"o-7\"}'
  skep event send order.paid '{\"order_id\": \"o-7\"}' --id payment-815     sent twice, it counts once")]
pub struct SendArgs {
    /// Topic of the event, such as order.paid
    topic: String,
    /// Data of the event, as JSON
    data: Option<String>,
    /// Id of the event; sending the same id again has no effect
    #[arg(long)]
    id: Option<String>,
    /// Print the host's answer as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// List the newest events and the state of their deliveries
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep event list
  skep event list --json | jq '.[] | select(.dead > 0)'")]
pub struct ListArgs {
    /// Maximum number of events
    #[arg(long, short = 'n', default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Sends or lists events.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::Send(args) => send(args).await,
        Command::List(args) => list(args).await,
    }
}

async fn send(args: SendArgs) -> Result<()> {
    let data = args.data.as_deref().map(serde_json::from_str::<Value>).transpose();
    let data = data.map_err(|error| Usage(format!("the data is not JSON: {error}")))?;
    let sent = args.host.client()?.send_event(&args.topic, data.as_ref(), args.id.as_deref()).await?;
    if args.json {
        return out::json(&sent);
    }
    match (sent.state.as_str(), sent.deliveries) {
        ("known", _) => out::line(&format!("{} was sent before", sent.id)),
        (_, 0) => out::line(&format!("{}: no agent and no webhook subscribes to {}", sent.id, args.topic)),
        (_, 1) => out::line(&format!("{} goes to the one subscriber of {}", sent.id, args.topic)),
        (_, many) => out::line(&format!("{} goes to {many} subscribers of {}", sent.id, args.topic)),
    }
}

async fn list(args: ListArgs) -> Result<()> {
    let events = args.host.client()?.events(args.limit).await?;
    if args.json {
        return out::json(&events);
    }
    if events.is_empty() {
        return out::line("no events yet; send one with: skep event send TOPIC JSON");
    }
    let rows: Vec<_> = events
        .into_iter()
        .map(|event| {
            let state = match (event.pending, event.dead) {
                (0, 0) => "done".to_owned(),
                (pending, dead) => format!("{pending} pending, {dead} dead"),
            };
            [event.topic, event.source, event.id, state]
        })
        .collect();
    out::table(["TOPIC", "SOURCE", "ID", "DELIVERIES"], &rows)
}
