//! `skep turn`: shows, follows or cancels a turn.

use anyhow::Result;
use skep_api::{LimitStatus, TurnState};

use super::{HostArgs, out, turn_printer};
use crate::style;

/// Show a turn and what it used of its limits, or follow it to its end
///
/// A turn that was started with `skep invoke --detach`, or that lost its client, continues without a client;
/// this command finds it again.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep turn concierge room-7 0199f3c2b7a87d3e9d1c4a5b6c7d8e9f
  skep turn concierge room-7 3                    the third turn of the session
  skep turn concierge room-7 0199f3c2b7a87d3e9d1c4a5b6c7d8e9f --follow
  skep turn concierge room-7 0199f3c2b7a87d3e9d1c4a5b6c7d8e9f --cancel
  skep turn concierge room-7 $(skep invoke concierge 'A taxi, please' -s room-7 --detach) --follow")]
pub struct Args {
    /// Name of the agent
    agent: String,
    /// Session that the turn belongs to
    session: String,
    /// Id of the turn, as `skep invoke --detach` prints it, or its number in the session. A turn that failed leaves its
    /// number to the next one; the number then means the later turn
    #[arg(value_name = "ID|NUMBER")]
    turn: String,
    /// Print the turn's events from its start, and wait for its end
    #[arg(long, short, conflicts_with_all = ["cancel", "json"])]
    follow: bool,
    /// Cancel the turn; a turn that has ended stays as it is
    #[arg(long)]
    cancel: bool,
    /// Print the host's answer as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Prints the state of a turn, or its events until it ends.
pub async fn run(args: Args) -> Result<()> {
    let Args { agent, session, turn, .. } = &args;
    let client = args.host.client()?;
    if args.cancel {
        client.cancel_turn(agent, session, turn).await?;
    }
    if args.follow {
        let mut stream = client.follow(agent, session, turn).await?;
        let report = turn_printer::show(&mut stream).await?;
        eprintln!("{}", style::stderr().dim(&format!("  {}", report.figures())));
        return Ok(());
    }
    let status = client.turn(agent, session, turn).await?;
    if args.json {
        return out::json(&status);
    }
    // The turn may have failed, and its number may mean another one by now.
    let timeline = client.timeline(agent, session, &status.turn_id).await?;
    show(&status.state)?;
    if let Some(used) = used(&timeline.limits) {
        eprintln!("{}", style::stderr().dim(&format!("  used {used}")));
    }
    Ok(())
}

/// Returns what a turn has used of its limits in words, or `None` if it has used nothing.
fn used(limits: &[LimitStatus]) -> Option<String> {
    let used = limits.iter().filter(|limit| limit.used > 0);
    let words: Vec<String> =
        used.map(|LimitStatus { name, used, limit, .. }| format!("{name} {used} of {limit}")).collect();
    (!words.is_empty()).then(|| words.join(", "))
}

fn show(state: &TurnState) -> Result<()> {
    let paint = style::stdout();
    match state {
        TurnState::Waiting => out::line("waiting: other turns of its session come first"),
        TurnState::Running { turn } => out::line(&format!("running as turn {turn} of its session")),
        TurnState::Done { turn, text, .. } => {
            out::line(&paint.dim(&format!("done as turn {turn} of its session")))?;
            out::line(text.trim_end())
        }
        TurnState::Failed { error, .. } => {
            out::line(&format!("{}: {} ({})", paint.red("failed"), error.message, error.code))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_are_not_used_are_left_out() {
        let limit = |name: &str, used| LimitStatus { name: name.to_owned(), of: None, used, limit: 100 };
        let limits = [limit("turn_ms", 40), limit("fetches", 0), limit("host_calls", 7)];
        assert_eq!(used(&limits).as_deref(), Some("turn_ms 40 of 100, host_calls 7 of 100"));
        assert_eq!(used(&limits[1..2]), None);
    }
}
