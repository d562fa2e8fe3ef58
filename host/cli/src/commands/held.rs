//! `skep held`: decides about the work that a restored host holds.

use anyhow::Result;
use skep_api::{Held, HeldDecision};

use super::{HostArgs, out};

/// Resume or drop the work that a restored host holds
///
/// A host that was restored from a backup does not continue with the work that was in flight when the backup
/// was taken: open turns, events for agents and webhooks, schedules that were due, and batches. The host that
/// is gone may have done this work after the backup.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Show(ShowArgs),
    Resume(ResumeArgs),
    Drop(DropArgs),
}

/// Show how much work is held
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

/// Resume everything that is held; some of it may happen a second time
///
/// Webhook messages keep their ids and say `"restored": true`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep held resume")]
pub struct ResumeArgs {
    #[command(flatten)]
    host: HostArgs,
}

/// Drop everything that is held; some of it may never have happened
///
/// Turns fail with `turn_dropped`, batches are cancelled, and schedules continue with their next time. Events
/// become dead letters, which can be delivered one by one with `skep webhook redeliver`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep held drop")]
pub struct DropArgs {
    #[command(flatten)]
    host: HostArgs,
}

/// Lists, resumes or drops the work that a restored host holds.
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
                    "held since the restore of a backup that was taken {}: {}",
                    out::ago(at_ms),
                    sum(&held)
                )),
            }
        }
        Command::Resume(args) => {
            let held = args.host.client()?.decide_held(HeldDecision::Resume).await?;
            out::line(&format!("resumed {}", sum(&held)))
        }
        Command::Drop(args) => {
            let held = args.host.client()?.decide_held(HeldDecision::Drop).await?;
            out::line(&format!("dropped {}", sum(&held)))
        }
    }
}

fn sum(held: &Held) -> String {
    counted(held.turns, held.deliveries, held.schedules, held.batches)
}

/// Returns the amounts of held work as one text.
pub(super) fn counted(turns: u64, events: u64, schedules: u64, batches: u64) -> String {
    let parts = [(turns, "turn"), (events, "event"), (schedules, "schedule"), (batches, "batch")];
    parts.map(|(number, noun)| out::count(number, noun)).join(", ")
}
