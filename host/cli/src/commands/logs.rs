//! `skep logs`.

use std::time::Duration;

use anyhow::Result;

use super::{HostArgs, out};
use crate::client::LogLine;
use crate::style::{self, Painter};

/// How often a follower asks for more.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(500);

/// Print what an agent logged
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep logs concierge
  skep logs concierge --follow
  skep logs concierge --json --limit 1000 | jq -r .message")]
pub struct Args {
    agent: String,
    /// Keep printing new lines until Ctrl-C
    #[arg(long, short)]
    follow: bool,
    /// The newest so many lines
    #[arg(long, short = 'n', default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    #[command(flatten)]
    host: HostArgs,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    let client = args.host.client()?;
    let paint = style::stdout();
    let mut lines = client.logs(&args.agent, None, args.limit).await?;
    let mut last = 0;
    loop {
        for line in &lines {
            if args.json {
                out::json_line(line)?;
            } else {
                out::line(&for_people(line, paint))?;
            }
            last = last.max(line.id);
        }
        if !args.follow {
            return Ok(());
        }
        tokio::time::sleep(FOLLOW_INTERVAL).await;
        lines = client.logs(&args.agent, Some(last), 1000).await?;
    }
}

fn for_people(line: &LogLine, paint: Painter) -> String {
    let level = match line.level.as_str() {
        "error" => paint.red("ERROR"),
        "warn" => paint.yellow(" WARN"),
        "info" => paint.green(" INFO"),
        other => format!("{:>5}", other.to_uppercase()),
    };
    let seconds = line.at_ms / 1000;
    let (hours, minutes, rest) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let at = format!("{hours:02}:{minutes:02}:{rest:02}.{:03}", line.at_ms % 1000);
    let whence = match (&line.session, line.turn) {
        (Some(session), Some(turn)) => format!(" {session}#{turn}"),
        (Some(session), None) => format!(" {session}"),
        _ => String::new(),
    };
    format!("{} {level}{} {}", paint.dim(&at), paint.dim(&whence), line.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_has_time_level_session_turn_and_message() {
        let line = LogLine {
            id: 1,
            session: Some("room-7".into()),
            turn: Some(3),
            at_ms: 1_700_000_000_123,
            level: "info".into(),
            message: "hello".into(),
        };
        // Tests do not run on a terminal, so nothing is coloured.
        assert_eq!(for_people(&line, style::stdout()).trim(), "22:13:20.123  INFO room-7#3 hello");
    }
}
