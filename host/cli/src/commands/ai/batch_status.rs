//! `skep ai status` and `skep ai cancel`: the state of a batch, its answers, and its cancellation.

use std::path::PathBuf;

use anyhow::{Result, bail};
use skep_api::{BatchPhase, BatchStatus};

use super::batch::write_answers;
use crate::commands::{HostArgs, out};

/// Show the state of a batch, or fetch its answers
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep ai status 0199f3c2b7a87d3e9d1c4a5b6c7d8e9f
  skep ai status 0199f3c2b7a87d3e9d1c4a5b6c7d8e9f --results > answers.jsonl
  skep ai status 0199f3c2b7a87d3e9d1c4a5b6c7d8e9f --json | jq .items")]
pub struct StatusArgs {
    /// Id of the batch, as `skep ai batch` prints it
    id: String,
    /// Write the answers, one JSON object per line
    #[arg(long, conflicts_with = "json")]
    results: bool,
    /// File to write the answers to [default: standard output]
    #[arg(long, short, value_name = "FILE", requires = "results")]
    output: Option<PathBuf>,
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Cancel the requests of a batch that have not been answered
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep ai cancel 0199f3c2b7a87d3e9d1c4a5b6c7d8e9f")]
pub struct CancelArgs {
    /// Id of the batch, as `skep ai batch` prints it
    id: String,
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Prints the state of a batch, or its answers.
pub async fn status(args: StatusArgs) -> Result<()> {
    let client = args.host.client()?;
    let status = client.ai_batch(&args.id).await?;
    if !args.results {
        return show(&status, args.json);
    }
    match status.status {
        BatchPhase::Complete | BatchPhase::Cancelled => {
            write_answers(&client, &status, args.output.as_deref()).await
        }
        BatchPhase::Queued | BatchPhase::Running | BatchPhase::Other(_) => {
            let left = status.items.waiting + status.items.running;
            bail!("{left} of {} requests are not answered yet; try again later", status.items.total)
        }
    }
}

/// Cancels a batch, and prints its state.
pub async fn cancel(args: CancelArgs) -> Result<()> {
    let status = args.host.client()?.ai_cancel(&args.id).await?;
    show(&status, args.json)
}

fn show(status: &BatchStatus, json: bool) -> Result<()> {
    if json {
        return out::json(status);
    }
    let phase = &status.status;
    let items = &status.items;
    out::line(&format!(
        "{phase}: {} of {} answered, {} failed, {} running, {} waiting, {} cancelled ({})",
        items.done, items.total, items.failed, items.running, items.waiting, items.cancelled, status.model
    ))
}
