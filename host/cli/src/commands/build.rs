//! `skep build`: builds an agent to a WebAssembly component.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use serde_json::json;

use super::out;
use crate::agent_source::{self, AgentSource};
use crate::guest_build::{self, BuildRequest, GuestTarget};
use crate::progress::Terminal;

/// Build an agent to a WebAssembly component
///
/// The first build prepares a Rust toolchain for WebAssembly. The component is written to
/// target/skep/NAME.wasm in the crate's workspace. If the folder's agent.toml has a [build] command, that
/// command runs instead, and the component is at the path that agent.toml gives.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep build                     the crate in this folder
  skep build examples/hello
  skep build examples/py-diary   an agent with a [build] command, here one in Python
  skep build --example spin tests/guests")]
pub struct Args {
    /// Folder of the crate, or of an agent with a [build] command
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// Build this example of the crate instead of its library
    #[arg(long, value_name = "NAME")]
    example: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Builds the component, and prints its path.
pub fn run(args: &Args) -> Result<()> {
    if args.example.is_none()
        && let Some(path) = agent_source::built_component(&args.dir)?
    {
        let started = Instant::now();
        let source = AgentSource::load(&args.dir, None, &Terminal)?;
        return print(args, &path, source.component.len(), started.elapsed().as_secs_f64());
    }
    let target = args.example.clone().map_or(GuestTarget::Library, GuestTarget::Example);
    let built = guest_build::build(&BuildRequest { dir: args.dir.clone(), target }, &Terminal)?;
    print(args, &built.path, built.component.len(), built.seconds)
}

fn print(args: &Args, path: &Path, bytes: usize, seconds: f64) -> Result<()> {
    if args.json {
        return out::json(&json!({"path": path, "bytes": bytes, "seconds": seconds}));
    }
    out::line(&path.display().to_string())
}
