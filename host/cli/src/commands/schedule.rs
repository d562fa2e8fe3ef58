//! `skep schedule`: lists, runs and cancels schedules.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use skep_api::{Schedule, ScheduleTiming};

use super::{HostArgs, out};

/// List, run and cancel the schedules that wake agents
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    List(ListArgs),
    Run(OneArgs),
    Cancel(CancelArgs),
}

/// List schedules: the next due ones first, those that failed permanently last
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep schedule list
  skep schedule list concierge
  skep schedule list --json | jq -r '.[] | select(.state == \"failed\").last_error'")]
pub struct ListArgs {
    /// Only schedules of this agent
    agent: Option<String>,
    /// Maximum number of schedules
    #[arg(long, short = 'n', default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Make a schedule due now; one that failed permanently is tried again
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep schedule run concierge 0199f3c2b7a87d3e9d1c4a5b6c7d8e9f-1")]
pub struct OneArgs {
    /// Name of the agent
    agent: String,
    /// Id of the schedule, as `skep schedule list` shows it
    id: String,
    #[command(flatten)]
    host: HostArgs,
}

/// Cancel a schedule; one from the manifest comes back with the next deployment
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep schedule cancel concierge 0199f3c2b7a87d3e9d1c4a5b6c7d8e9f-1")]
pub struct CancelArgs {
    #[command(flatten)]
    one: OneArgs,
}

/// Lists, runs or cancels schedules.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::List(args) => list(args).await,
        Command::Run(OneArgs { agent, id, host }) => {
            host.client()?.run_schedule(&agent, &id).await?;
            out::line(&format!("{id} is due now"))
        }
        Command::Cancel(CancelArgs { one: OneArgs { agent, id, host } }) => {
            host.client()?.cancel_schedule(&agent, &id).await?;
            out::line(&format!("{id} is cancelled"))
        }
    }
}

async fn list(args: ListArgs) -> Result<()> {
    let schedules = args.host.client()?.schedules(args.agent.as_deref(), args.limit).await?;
    if args.json {
        return out::json(&schedules);
    }
    if schedules.is_empty() {
        if let Some(agent) = &args.agent {
            return out::line(&format!("no schedules of agent {agent:?}"));
        }
        return out::line("no schedules; agents set them in a turn, or with [[schedule]] in agent.toml");
    }
    let rows: Vec<_> = schedules.into_iter().map(row).collect();
    out::table(["AGENT", "SESSION", "NAME", "WHEN", "DUE", "STATE", "ID"], &rows)
}

fn row(schedule: Schedule) -> [String; 7] {
    let state = match (schedule.state.as_str(), &schedule.last_error) {
        ("waiting", Some(error)) => {
            format!("attempt {} of {} failed: {error}", schedule.attempt, schedule.tries)
        }
        ("failed", Some(error)) => format!("failed: {error}"),
        (state, _) => state.to_owned(),
    };
    let when = when(&schedule.timing);
    let due = in_words(schedule.due_at_ms);
    [schedule.agent, schedule.session, schedule.name, when, due, state, schedule.id]
}

fn when(timing: &ScheduleTiming) -> String {
    match timing {
        ScheduleTiming::At { .. } => "once".to_owned(),
        ScheduleTiming::Every { every_ms } => format!("every {} s", *every_ms as f64 / 1_000.0),
        ScheduleTiming::Cron { cron, time_zone } => format!("{cron} {time_zone}"),
    }
}

fn in_words(at_ms: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    match at_ms.saturating_sub(now_ms) / 1_000 {
        0 => "now".to_owned(),
        seconds @ 1..120 => format!("in {seconds} s"),
        seconds @ 120..7_200 => format!("in {} min", seconds / 60),
        seconds @ 7_200..172_800 => format!("in {} h", seconds / 3_600),
        seconds => format!("in {} days", seconds / 86_400),
    }
}
