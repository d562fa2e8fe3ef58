//! `skep list`: lists agents, their versions and their tools.

use anyhow::Result;
use skep_api::Agents;

use super::{HostArgs, deploy, out};
use crate::client::Client;
use crate::style;

/// List the agents of a running host
///
/// Agents that the host could not start again are printed to standard error, with the reason.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep list
  skep list --versions concierge        the versions to roll back to
  skep list --tools concierge           its tools, their hints, and which need approval
  skep list --tools --json | jq '.[][] | select(.hints.destructive).name'
  skep list --json | jq -r '.[].name'")]
pub struct Args {
    /// List only this agent
    #[arg(value_name = "AGENT")]
    agent: Option<String>,
    /// List the versions that can be rolled back to
    #[arg(long)]
    versions: bool,
    /// List the tools
    #[arg(long, conflicts_with = "versions")]
    tools: bool,
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

const NO_AGENTS: &str = "no agents yet; deploy one with: skep deploy DIR";

/// Prints the agents, or the versions of one.
pub async fn run(args: Args) -> Result<()> {
    let client = args.host.client()?;
    if let Some(name) = &args.agent {
        client.find_agent(name).await?;
    }
    let Agents { ready: mut agents, broken, .. } = client.agents().await?;
    agents.retain(|agent| args.agent.as_ref().is_none_or(|name| agent.name == *name));
    for agent in broken.iter().filter(|_| args.agent.is_none()) {
        eprintln!("  {} {}: {}", style::stderr().red("broken"), agent.name, agent.reason);
    }
    if args.versions || args.tools {
        let names = args
            .agent
            .map_or_else(|| agents.into_iter().map(|agent| agent.name).collect(), |name| vec![name]);
        return match args.tools {
            true => tools(&client, names, args.json).await,
            false => versions(&client, names, args.json).await,
        };
    }
    if args.json {
        return out::json(&agents);
    }
    match (agents.is_empty(), broken.is_empty()) {
        (true, true) => return out::line(NO_AGENTS),
        (true, false) => return Ok(()),
        (false, _) => {}
    }
    let rows: Vec<_> = agents
        .into_iter()
        .map(|agent| {
            let digest = deploy::short(&agent.digest).to_owned();
            [
                agent.name,
                agent.version.to_string(),
                agent.model,
                agent.tools.join(", "),
                agent.routes.join(", "),
                digest,
            ]
        })
        .collect();
    out::table(["AGENT", "VERSION", "MODEL", "TOOLS", "ROUTES", "DIGEST"], &rows)
}

async fn versions(client: &Client, agents: Vec<String>, json: bool) -> Result<()> {
    let mut listed = Vec::new();
    for agent in agents {
        let versions = client.versions(&agent).await?;
        listed.push((agent, versions));
    }
    if json {
        let listed: serde_json::Map<_, _> =
            listed.into_iter().map(|(agent, versions)| (agent, serde_json::json!(versions))).collect();
        return out::json(&listed);
    }
    let rows: Vec<_> = listed
        .into_iter()
        .flat_map(|(agent, versions)| {
            versions.into_iter().map(move |version| {
                let digest = deploy::short(&version.digest).to_owned();
                let state = if version.in_force { "active" } else { "" }.to_owned();
                let number = version.version.to_string();
                [agent.clone(), number, state, digest, out::ago(version.deployed_at_ms), version.deployed_by]
            })
        })
        .collect();
    if rows.is_empty() {
        return out::line(NO_AGENTS);
    }
    out::table(["AGENT", "VERSION", "", "DIGEST", "DEPLOYED", "BY"], &rows)
}

async fn tools(client: &Client, names: Vec<String>, json: bool) -> Result<()> {
    let mut listed = Vec::new();
    for agent in names.clone() {
        let tools = client.tools(&agent).await?;
        listed.push((agent, tools));
    }
    if json {
        let listed: serde_json::Map<_, _> =
            listed.into_iter().map(|(agent, tools)| (agent, serde_json::json!(tools))).collect();
        return out::json(&listed);
    }
    let rows: Vec<_> = listed
        .into_iter()
        .flat_map(|(agent, tools)| {
            tools.into_iter().map(move |tool| {
                let approval = if tool.needs_approval { "required" } else { "" };
                let description = tool.description.lines().next().unwrap_or_default().to_owned();
                [agent.clone(), tool.name, tool.hints.words(), approval.to_owned(), description]
            })
        })
        .collect();
    if rows.is_empty() {
        return out::line(&match names.as_slice() {
            [] => NO_AGENTS.to_owned(),
            [name] => format!("agent {name:?} has no tools"),
            _ => "no agent has tools".to_owned(),
        });
    }
    out::table(["AGENT", "TOOL", "HINTS", "APPROVAL", "DESCRIPTION"], &rows)
}
