//! `skep held`.

use anyhow::Result;

use super::{HostArgs, out};
use crate::client::Held;

/// Decide about what a restored host holds back
///
/// A host that was restored from a backup does not go on with what was on its way when the backup was taken: open turns,
/// events for agents and webhooks, schedules that were due, and batches. It may have been done after the backup, by the host
/// that is gone.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Show(ShowArgs),
    Resume(ResumeArgs),
    Drop(DropArgs),
}

/// Show how much is held
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep held show
  skep held show --json")]
pub struct ShowArgs {
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Go on with everything that is held; some of it may happen a second time
///
/// Messages of webhooks have the ids that they had, and say `"restored": true`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep held resume")]
pub struct ResumeArgs {
    #[command(flatten)]
    host: HostArgs,
}

/// Give up everything that is held; some of it may never have happened
///
/// Turns fail with `turn_dropped`, batches are cancelled, and schedules go on with their next time. Events become dead letters,
/// which can be delivered one by one with `skep webhook redeliver`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep held drop")]
pub struct DropArgs {
    #[command(flatten)]
    host: HostArgs,
}

pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::Show(args) => {
            let held = args.host.client()?.held().await?;
            if args.json {
                return out::json(&held);
            }
            match held.backup_at_ms {
                None => out::line("nothing is held"),
                Some(at_ms) => out::line(&format!(
                    "held since the restore of a backup of {}: {}",
                    out::ago(at_ms),
                    sum(&held)
                )),
            }
        }
        Command::Resume(args) => {
            let held = args.host.client()?.decide_held("resume").await?;
            out::line(&format!("going on with {}", sum(&held)))
        }
        Command::Drop(args) => {
            let held = args.host.client()?.decide_held("drop").await?;
            out::line(&format!("dropped {}", sum(&held)))
        }
    }
}

fn sum(held: &Held) -> String {
    let Held { turns, deliveries, schedules, batches, .. } = held;
    format!("{turns} turns, {deliveries} events, {schedules} schedules, {batches} batches")
}
