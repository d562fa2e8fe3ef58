//! `skep list`.

use anyhow::Result;

use super::{HostArgs, deploy, out};

/// List the agents of a running host
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep list
  skep list --json | jq -r '.[].name'")]
pub struct Args {
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    let agents = args.host.client()?.agents().await?;
    if args.json {
        return out::json(&agents);
    }
    if agents.is_empty() {
        return out::line("no agents yet; deploy one with: skep deploy DIR");
    }
    let rows: Vec<_> = agents
        .into_iter()
        .map(|agent| {
            let digest = deploy::short(&agent.digest).to_owned();
            [agent.name, agent.model, agent.tools.join(", "), agent.routes.join(", "), digest]
        })
        .collect();
    out::table(["AGENT", "MODEL", "TOOLS", "ROUTES", "DIGEST"], &rows)
}
