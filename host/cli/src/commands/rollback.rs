//! `skep rollback`.

use anyhow::Result;

use super::{HostArgs, deploy::short, out};

/// Put an earlier version of an agent into force
///
/// Without --to it is the one before the version in force. Turns that run finish on their own version, and sessions go
/// on with the version that is in force. The versions there are: skep list --versions AGENT
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep rollback concierge
  skep rollback concierge --to 3")]
pub struct Args {
    /// The agent's name
    agent: String,
    /// Version to put into force
    #[arg(long, value_name = "N")]
    to: Option<u64>,
    #[command(flatten)]
    host: HostArgs,
    /// Print the agent as JSON
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    let agent = args.host.client()?.rollback(&args.agent, args.to).await?;
    if args.json {
        return out::json(&agent);
    }
    out::line(&format!("{} is at version {} ({})", agent.name, agent.version, short(&agent.digest)))
}
