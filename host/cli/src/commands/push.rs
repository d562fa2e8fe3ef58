//! `skep push`: stores an agent in a registry.

use std::path::PathBuf;

use anyhow::Result;
use serde_json::json;

use super::{out, registry_args::RegistryArgs};
use crate::agent_source::AgentSource;
use crate::progress::Terminal;
use crate::registry::{ArtifactName, Registry};

/// Store an agent in an OCI registry
///
/// The artifact holds the component and its agent.toml. If you pass a folder, it is built first.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep push my-agent oci://registry.example.com/agents/my-agent:1.2
  skep push my-agent.wasm oci://localhost:5000/my-agent --manifest prod.toml
Then, wherever the registry can be reached:
  skep deploy oci://registry.example.com/agents/my-agent:1.2")]
pub struct Args {
    /// Folder of an agent, or a .wasm file
    #[arg(value_name = "DIR|FILE.wasm")]
    path: PathBuf,
    /// Artifact to store the agent as
    #[arg(value_name = "oci://REGISTRY/REPOSITORY:TAG")]
    name: ArtifactName,
    /// agent.toml to use
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    #[command(flatten)]
    registry: RegistryArgs,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Stores the agent, and prints the digest of its artifact.
pub async fn run(args: Args) -> Result<()> {
    let load = || AgentSource::load(&args.path, args.manifest.as_deref(), &Terminal);
    let source = tokio::task::block_in_place(load)?;
    let registry = Registry::new(args.name.clone(), args.registry.login()?, args.registry.plain_http)?;
    let digest = registry.push(&source, &Terminal).await?;
    let name = args.name.to_string();
    if args.json {
        return out::json(&json!({"name": name, "digest": digest, "agent": source.manifest.name}));
    }
    out::line(&format!("pushed {name} ({digest})"))?;
    out::line(&format!("deploy it with: skep deploy {name}"))
}
