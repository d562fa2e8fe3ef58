//! `skep build`.

use std::path::PathBuf;

use anyhow::Result;
use serde_json::json;

use super::out;
use crate::guest_build::{self, BuildRequest, GuestTarget};
use crate::progress::Terminal;

/// Build an agent's crate to a WebAssembly component
///
/// Prepares a Rust toolchain for WebAssembly the first time. The component is written to target/skep/NAME.wasm of the
/// crate's workspace.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep build                     the crate in this folder
  skep build examples/hello
  skep build --example spin tests/guests")]
pub struct Args {
    /// Folder of the crate
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// Build this example of the crate instead of its library
    #[arg(long, value_name = "NAME")]
    example: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let target = args.example.clone().map_or(GuestTarget::Library, GuestTarget::Example);
    let built = guest_build::build(&BuildRequest { dir: args.dir.clone(), target }, &Terminal)?;
    if args.json {
        return out::json(
            &json!({"path": built.path, "bytes": built.component.len(), "seconds": built.seconds}),
        );
    }
    out::line(&built.path.display().to_string())
}
