//! `skep logs`: prints the log lines of agents.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use clap::ValueEnum;
use skep_api::LogLine;
use skep_runtime::for_terminal;

use super::follow::follow;
use super::{HostArgs, out};
use crate::client::LogQuery;
use crate::style::{self, Painter};

/// Print the log lines of agents
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep logs                                       the newest lines of all agents
  skep logs concierge --follow                    and new ones, also after a restart of the host
  skep logs concierge --session ada --level warn --since 10m
  skep logs --follow --json | jq -r .message")]
pub struct Args {
    /// Only lines of this agent
    agent: Option<String>,
    /// Only lines of this session
    #[arg(long)]
    session: Option<String>,
    /// Only lines of this level and of higher ones
    #[arg(long, value_enum)]
    level: Option<Level>,
    /// Only lines that are not older than this, such as 90s, 10m, 2h or 1d
    #[arg(long, value_name = "AGE", value_parser = age)]
    since: Option<Duration>,
    /// Keep printing new lines until Ctrl-C
    #[arg(long, short)]
    follow: bool,
    /// Maximum number of lines; the newest are printed
    #[arg(long, short = 'n', default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    #[command(flatten)]
    host: HostArgs,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Level {
    Debug,
    Info,
    Warn,
    Error,
}

/// Format of printed lines.
struct Printer {
    json: bool,
    /// Whether a line names its agent, because there may be several.
    names_agent: bool,
    paint: Painter,
}

/// Prints the log lines of agents, and follows them if asked to.
pub async fn run(args: Args) -> Result<()> {
    let client = args.host.client()?;
    let printer = Printer { json: args.json, names_agent: args.agent.is_none(), paint: style::stdout() };
    let level = args.level.and_then(|level| Some(level.to_possible_value()?.get_name().to_owned()));
    let since_ms = args.since.map(ms_before_now);
    let query = LogQuery { agent: args.agent, session: args.session, level, since_ms, limit: args.limit };
    if args.follow {
        return follow(async |last| client.follow_logs(&query, last).await, |line| printer.print(line)).await;
    }
    let lines = client.logs(&query).await?;
    if lines.is_empty() && !args.json {
        return out::line(&match &query.agent {
            Some(agent) => format!("no log lines of agent {agent:?} for this query"),
            None => "no log lines for this query".to_owned(),
        });
    }
    lines.iter().try_for_each(|line| printer.print(line))
}

impl Printer {
    fn print(&self, line: &LogLine) -> Result<()> {
        if self.json { out::json_line(line) } else { out::line(&self.for_people(line)) }
    }

    fn for_people(&self, line: &LogLine) -> String {
        let paint = self.paint;
        let level = match line.level.as_str() {
            "error" => paint.red("ERROR"),
            "warn" => paint.yellow(" WARN"),
            "info" => paint.green(" INFO"),
            other => format!("{:>5}", other.to_uppercase()),
        };
        let at = time_of_day(line.at_ms);
        let agent = if self.names_agent { format!(" {}", line.agent) } else { String::new() };
        // Lines that an agent logs while it is described belong to no session.
        let place = match (line.session.as_str(), line.turn) {
            ("", _) => String::new(),
            (session, turn) => format!(" {session}#{turn}"),
        };
        format!(
            "{} {level}{} {}",
            paint.dim(&at),
            paint.dim(&format!("{agent}{place}")),
            for_terminal(&line.message)
        )
    }
}

/// Returns the time of day in UTC.
pub(super) fn time_of_day(at_ms: u64) -> String {
    let seconds = at_ms / 1000;
    let (hours, minutes, rest) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{hours:02}:{minutes:02}:{rest:02}.{:03}", at_ms % 1000)
}

/// Returns the time this long ago, in milliseconds since 1970.
pub(super) fn ms_before_now(age: Duration) -> u64 {
    let at = SystemTime::now().checked_sub(age).unwrap_or(UNIX_EPOCH);
    u64::try_from(at.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

/// Parses a number and a unit.
pub(super) fn age(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not an age; write 90s, 10m, 2h or 1d");
    let unit = text.chars().next_back().ok_or_else(wrong)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3_600,
        'd' => 86_400,
        _ => return Err(wrong()),
    };
    let count: u64 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
    count.checked_mul(seconds).map(Duration::from_secs).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_has_time_level_session_turn_and_message() {
        let mut line = LogLine {
            id: 1,
            agent: "concierge".into(),
            session: "room-7".into(),
            turn: 3,
            at_ms: 1_700_000_000_123,
            level: "info".into(),
            message: "hello".into(),
        };
        // Tests do not run on a terminal, so nothing is colored.
        let printer = |names_agent| Printer { json: false, names_agent, paint: style::stdout() };
        assert_eq!(printer(false).for_people(&line).trim(), "22:13:20.123  INFO room-7#3 hello");
        assert_eq!(printer(true).for_people(&line).trim(), "22:13:20.123  INFO concierge room-7#3 hello");
        line.message = "\u{1b}[2Jone\n22:13:21.000 ERROR forged".into();
        let shown = printer(false).for_people(&line);
        assert!(shown.ends_with("\\u{1b}[2Jone\n    22:13:21.000 ERROR forged"), "{shown:?}");
        line.message = "hello".into();
        line.session.clear();
        assert_eq!(printer(false).for_people(&line).trim(), "22:13:20.123  INFO hello");
    }

    #[test]
    fn an_age_has_a_unit() {
        assert_eq!(age("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(age("2h"), Ok(Duration::from_secs(7_200)));
        for wrong in ["", "10", "m", "1w", "-1s", "1é", "99999999999999999999d"] {
            assert!(age(wrong).is_err_and(|message| message.contains("90s, 10m")), "{wrong}");
        }
    }
}
