//! `skep deploy`.

use std::path::PathBuf;

use anyhow::{Context as _, Result};

use super::{HostArgs, out};
use crate::agent_source::AgentSource;
use crate::progress::Terminal;

/// Deploy an agent to a running host
///
/// A folder is built first. An agent of the same name is replaced; its sessions go on with the new version.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep deploy my-agent                        builds the crate in that folder
  skep deploy my-agent.wasm                   with the agent.toml beside it, or a name after the file
  skep deploy agent.wasm --manifest prod.toml")]
pub struct Args {
    /// Folder of an agent, or a .wasm file
    #[arg(value_name = "DIR|FILE.wasm")]
    path: PathBuf,
    /// The agent.toml to use
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    #[command(flatten)]
    host: HostArgs,
    /// Print the deployed agent as JSON
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    let client = args.host.client()?;
    // Before a build that may take a minute.
    client.agents().await?;
    let load = || AgentSource::load(&args.path, args.manifest.as_deref(), &Terminal);
    let source = tokio::task::block_in_place(load)?;
    let agent = client
        .deploy(&source.manifest_toml, source.component)
        .await
        .with_context(|| format!("deploying {}", source.manifest.name.as_str()))?;
    if args.json {
        return out::json(&agent);
    }
    let digest = short(&agent.digest);
    out::line(&format!("deployed {}, version {} ({digest})", agent.name, agent.version))?;
    out::line(&format!("talk to it with: skep chat {}", agent.name))
}

/// Enough of a digest for people.
pub fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}
