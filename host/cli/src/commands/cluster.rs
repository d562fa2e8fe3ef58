//! `skep cluster`: the hosts that share a database.

use std::time::Duration;

use anyhow::Result;
use skep_api::{ClusterHost, ClusterHostWork, ClusterHosts};

use super::{HostArgs, out};
use crate::client::Client;
use crate::failure::Unreachable;

/// Time between two looks at a host that drains.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Show the hosts that share a database, and take one of them out of service
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Status(StatusArgs),
    Drain(DrainArgs),
}

/// Show the hosts of the cluster: where they are, whether they drain, their versions and leases, and how much they do
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep cluster status
  skep cluster status --json | jq '.hosts[] | select(.state == \"serving\") | .url'")]
pub struct StatusArgs {
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Have a host hand its sessions over to the others, and then end
///
/// Sessions move as soon as they are idle; running turns may finish within `drain_s`. The process ends with status 0,
/// as after SIGTERM. Any host of the cluster takes this command. Needs an admin key if the hosts require keys.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep cluster drain 3
  skep cluster drain 3 --wait              returns when the host has ended")]
pub struct DrainArgs {
    /// Number of the host, as `skep cluster status` shows it
    #[arg(value_name = "NUMBER")]
    number: i64,
    /// Wait until the host has ended
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Runs the command.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::Status(StatusArgs { host, json }) => {
            let hosts = host.client()?.cluster().await?;
            if json {
                return out::json(&hosts);
            }
            let rows: Vec<[String; 14]> = hosts.hosts.iter().map(row).collect();
            let header = [
                "HOST", "ADDRESS", "STATE", "ROLE", "VERSION", "PROTOCOL", "SESSIONS", "TURNS", "LOAD",
                "WAITING", "TOKENS", "SEEN", "LEASE", "MODELS",
            ];
            out::table(header, &rows)
        }
        Command::Drain(DrainArgs { number, wait, host }) => {
            let client = host.client()?;
            let is_asked = this(&client.cluster().await?) == Some(number);
            client.drain_host(number).await?;
            if !wait {
                return out::line(&format!("host {number} hands its sessions over, and then ends"));
            }
            until_ended(&client, number, is_asked).await?;
            out::line(&format!("host {number} has ended"))
        }
    }
}

/// Resolves when a host has ended. `is_asked` says whether it is the host that the client asks.
async fn until_ended(client: &Client, number: i64, is_asked: bool) -> Result<()> {
    let mut shown = None;
    loop {
        let hosts = match client.cluster().await {
            Ok(hosts) => hosts,
            // Nobody else answers at its address.
            Err(error) if is_asked && error.is::<Unreachable>() => return Ok(()),
            Err(error) => return Err(error),
        };
        let Some(host) = hosts.hosts.iter().find(|host| host.number == number) else { return Ok(()) };
        let left = (host.work.sessions, host.work.running_turns);
        if shown != Some(left) {
            let (sessions, turns) = (out::count(left.0, "session"), out::count(left.1, "running turn"));
            eprintln!("  host {number}: {sessions}, {turns}");
            shown = Some(left);
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Returns the number of the host that gave the answer.
fn this(hosts: &ClusterHosts) -> Option<i64> {
    hosts.hosts.iter().find(|host| host.this).map(|host| host.number)
}

fn row(host: &ClusterHost) -> [String; 14] {
    let ClusterHost {
        number,
        name,
        version,
        versions,
        state,
        this,
        seen_ms_ago,
        lease_left_ms,
        role,
        models,
        work,
        ..
    } = host;
    let ClusterHostWork {
        sessions,
        running_turns,
        load_percent,
        waiting_requests,
        prefill_tokens,
        decode_tokens,
    } = work;
    let mark = if *this { " (this one)" } else { "" };
    [
        number.to_string(),
        format!("{name}{mark}"),
        state.to_string(),
        role.to_string(),
        version.clone(),
        versions.map_or("-".to_owned(), |versions| versions.protocol.to_string()),
        sessions.to_string(),
        running_turns.to_string(),
        load_percent.map_or("-".to_owned(), |percent| format!("{percent} %")),
        waiting_requests.to_string(),
        format!("{prefill_tokens} + {decode_tokens}"),
        format!("{seen_ms_ago} ms ago"),
        lease_left_ms.map_or("-".to_owned(), |left| format!("{:.1} s", left as f64 / 1e3)),
        models.join(", "),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_api::{ClusterHostRole, ClusterHostState, ClusterVersions};

    #[test]
    fn a_row_marks_the_host_that_answers() {
        let host = ClusterHost {
            number: 3,
            name: "10.0.0.2:8080".to_owned(),
            url: "http://10.0.0.2:8080".to_owned(),
            version: "0.2.0".to_owned(),
            versions: Some(ClusterVersions { protocol: 2, schema: 29 }),
            state: ClusterHostState::Draining,
            this: true,
            started_at: "2026-01-02T03:04:05.006Z".to_owned(),
            seen_ms_ago: 120,
            lease_left_ms: Some(9_880),
            role: ClusterHostRole::Gateway,
            models: vec!["a".to_owned(), "b".to_owned()],
            work: ClusterHostWork {
                sessions: 12,
                running_turns: 2,
                load_percent: Some(125),
                waiting_requests: 1,
                prefill_tokens: 900,
                decode_tokens: 70,
            },
        };
        let work = ClusterHostWork { load_percent: None, ..host.work.clone() };
        let early = ClusterHost { versions: None, lease_left_ms: None, work, ..host.clone() };
        let other = ClusterHost { number: 4, this: false, ..early };
        assert_eq!(
            row(&host).join("|"),
            "3|10.0.0.2:8080 (this one)|draining|gateway|0.2.0|2|12|2|125 %|1|900 + 70|120 ms ago|9.9 s|a, b"
        );
        let other_row = row(&other);
        assert_eq!([1, 5, 8, 12].map(|column| other_row[column].as_str()), ["10.0.0.2:8080", "-", "-", "-"]);
        assert_eq!(this(&ClusterHosts { hosts: vec![other, host] }), Some(3));
    }
}
