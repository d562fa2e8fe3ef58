//! `skep status`: shows what a host is doing, on one screen.

use anyhow::Result;
use indicatif::HumanBytes;
use skep_api::{DataPlace, DiskStatus, HostStatus, LimitStatus, ModelStatus};

use super::{HostArgs, out};
use crate::style::{self, Painter};

/// Show a running host: its models, agents, sessions and queues, and limits that are nearly used up
///
/// The KV pages of a model count as used while sequences hold them; pages that are only cached are free. Needs an
/// admin key if the host requires keys.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep status
  skep status --json | jq .queues
  skep status --json | jq -e '.held == null'           fails if a restored host holds work")]
pub struct Args {
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Prints what the host is doing.
pub async fn run(args: Args) -> Result<()> {
    let client = args.host.client()?;
    let status = client.status().await?;
    if args.json {
        return out::json(&status);
    }
    for line in lines(&status, style::stdout()) {
        out::line(&line)?;
    }
    Ok(())
}

/// Returns the screen: a label and a value in each line.
fn lines(status: &HostStatus, paint: Painter) -> Vec<String> {
    let HostStatus {
        version,
        build,
        uptime_s,
        address,
        models,
        agents,
        sessions,
        queues,
        held,
        data,
        disk,
        limits,
        ..
    } = status;
    let mut screen = Screen { paint, lines: Vec::new() };
    let since = out::duration(*uptime_s);
    screen.line("host", &format!("skep {version} ({build}), up for {since}"));
    if let Some(address) = address {
        screen.line("address", &paint.cyan(&format!("http://{address}")));
    }
    for model in models {
        screen.line("model", &model_line(model, paint));
    }
    let failed = match agents.failed {
        0 => String::new(),
        failed => paint.red(&format!(", {failed} failed to start (see `skep list`)")),
    };
    screen.line("agents", &format!("{} deployed{failed}", agents.ready));
    screen.line(
        "sessions",
        &format!(
            "{}, {} active, {} waiting for approval",
            sessions.total,
            out::count(sessions.active_turns, "turn"),
            sessions.waiting_for_approval
        ),
    );
    screen.line(
        "queues",
        &format!(
            "{}, {}, {}, {}, {} ({})",
            out::count(queues.messages, "message"),
            out::count(queues.alarms, "alarm"),
            out::count(queues.events, "event"),
            out::count(queues.webhooks, "webhook"),
            out::count(queues.batches, "batch"),
            out::count(queues.batch_requests, "request"),
        ),
    );
    if queues.dead_letters > 0 {
        let dead = out::count(queues.dead_letters, "dead letter");
        screen.line("", &paint.yellow(&format!("{dead} (see `skep webhook dead-letters`)")));
    }
    match held {
        None => screen.line("held", "nothing"),
        Some(held) => {
            let held = format!(
                "{}, {}, {}, {}, {} since a restore (see `skep held`)",
                out::count(held.sessions, "session"),
                out::count(held.turns, "turn"),
                out::count(held.deliveries, "event"),
                out::count(held.schedules, "schedule"),
                out::count(held.batches, "batch")
            );
            screen.line("held", &paint.yellow(&held));
        }
    }
    match (disk, data) {
        (Some(disk), _) => screen.line("data", &disk_line(disk, paint)),
        (None, DataPlace::Postgres) => screen.line("data", "on a PostgreSQL server"),
        (None, _) => screen.line("data", "in memory, lost when the host stops"),
    }
    let near: Vec<&LimitStatus> = limits.iter().filter(|limit| limit.is_near()).collect();
    if near.is_empty() {
        screen.line("limits", &paint.green("none nearly used up"));
    }
    for (index, LimitStatus { name, of, used, limit }) in near.into_iter().enumerate() {
        let label = if index == 0 { "limits" } else { "" };
        let of = of.as_ref().map_or_else(String::new, |of| format!(" of {of}"));
        screen.line(label, &paint.yellow(&format!("{name}{of}: {used} of {limit} used")));
    }
    screen.lines
}

struct Screen {
    paint: Painter,
    lines: Vec<String>,
}

impl Screen {
    fn line(&mut self, label: &str, value: &str) {
        let label = self.paint.bold(&format!("{label:<9}"));
        self.lines.push(format!("{label} {value}"));
    }
}

fn model_line(model: &ModelStatus, paint: Painter) -> String {
    let ModelStatus { name, device, replicas, context_length, kv_pages, running, waiting, problem } = model;
    let replicas = match replicas {
        1 => String::new(),
        replicas => format!(" with {replicas} replicas"),
    };
    let problem = problem.as_ref().map(|problem| paint.red(&format!(", failing: {problem}")));
    format!(
        "{name} on {device}{replicas}, context {context_length}, KV pages {} of {} used, {running} running, {waiting} waiting{}",
        kv_pages.used,
        kv_pages.total,
        problem.unwrap_or_default()
    )
}

fn disk_line(disk: &DiskStatus, paint: Painter) -> String {
    let database = HumanBytes(disk.database_bytes + disk.wal_bytes);
    match disk.free_bytes {
        None => format!("database {database}"),
        Some(free) if disk.is_low => {
            let free = format!("only {} free on the disk", HumanBytes(free));
            format!("database {database}, {}", paint.red(&free))
        }
        Some(free) => format!("database {database}, {} free on the disk", HumanBytes(free)),
    }
}
