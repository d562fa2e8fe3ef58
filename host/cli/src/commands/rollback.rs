//! `skep rollback`: activates an earlier version of an agent.

use anyhow::Result;

use super::{HostArgs, deploy::short, out};
use crate::style;

/// Roll an agent back to an earlier version
///
/// Without --to, this is the version before the active one. Running turns finish on their own version;
/// sessions continue with the active version. To see the versions: skep list --versions AGENT
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep rollback concierge
  skep rollback concierge --to 3")]
pub struct Args {
    /// Name of the agent
    agent: String,
    /// Version to roll back to
    #[arg(long, value_name = "N")]
    to: Option<u64>,
    #[command(flatten)]
    host: HostArgs,
    /// Print the agent as JSON
    #[arg(long)]
    json: bool,
}

/// Activates the earlier version, and prints its number.
pub async fn run(args: Args) -> Result<()> {
    let agent = args.host.client()?.rollback(&args.agent, args.to).await?;
    style::warn(&agent.warnings);
    if args.json {
        return out::json(&agent);
    }
    out::line(&format!("{} is at version {} ({})", agent.name, agent.version, short(&agent.digest)))
}
