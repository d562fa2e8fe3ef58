//! `skep deploy`: deploys an agent to a running host.

use std::path::PathBuf;

use anyhow::{Context as _, Result};

use super::{HostArgs, out, registry_args::RegistryArgs};
use crate::agent_source::AgentSource;
use crate::failure::Usage;
use crate::progress::Terminal;
use crate::registry::{ArtifactName, Registry};
use crate::style;

/// Deploy an agent to a running host
///
/// If you pass a folder, it is built first. An agent with the same name is replaced, and its sessions continue with the new
/// version. If the same version is already active, it keeps its number.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep deploy my-agent                        builds the crate in that folder
  skep deploy my-agent.wasm                   with the agent.toml beside it, if there is one
  skep deploy agent.wasm --manifest prod.toml
  skep deploy oci://registry.example.com/agents/my-agent:1.2")]
pub struct Args {
    /// Folder of an agent, a .wasm file, or an artifact in a registry
    #[arg(value_name = "DIR|FILE.wasm|oci://…")]
    path: PathBuf,
    /// agent.toml to use
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    #[command(flatten)]
    registry: RegistryArgs,
    #[command(flatten)]
    host: HostArgs,
    /// Print the deployed agent as JSON
    #[arg(long)]
    json: bool,
}

/// Deploys the agent, and prints its version.
pub async fn run(args: Args) -> Result<()> {
    let client = args.host.client()?;
    // An unreachable host is reported before a build that may take a minute.
    let before = client.agents().await?;
    let source = args.source().await?;
    let agent = client
        .deploy(&source.manifest_toml, source.component)
        .await
        .with_context(|| format!("deploying {}", source.manifest.name.as_str()))?;
    style::warn(&agent.warnings);
    if args.json {
        return out::json(&agent);
    }
    let (name, version, digest) = (&agent.name, agent.version, short(&agent.digest));
    match before.ready.iter().any(|before| before.name == *name && before.version == version) {
        true => out::line(&format!("unchanged {name}, version {version} is active ({digest})"))?,
        false => out::line(&format!("deployed {name}, version {version} ({digest})"))?,
    }
    out::line(&format!("talk to it with: skep chat {}", agent.name))
}

impl Args {
    async fn source(&self) -> Result<AgentSource> {
        let manifest = self.manifest.as_deref();
        match self.path.to_str() {
            Some(name) if name.starts_with(ArtifactName::SCHEME) => {
                let name: ArtifactName = name.parse().map_err(Usage)?;
                let registry = Registry::new(name, self.registry.login()?, self.registry.plain_http)?;
                let pulled = registry.pull(&Terminal).await?;
                AgentSource::from_parts(pulled.manifest_toml, &pulled.component, manifest)
            }
            _ => tokio::task::block_in_place(|| AgentSource::load(&self.path, manifest, &Terminal)),
        }
    }
}

/// Returns enough of a digest for people.
pub fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}
