//! `skep backup`.

use std::path::PathBuf;

use anyhow::Result;

use super::out;
use crate::progress::Terminal;
use crate::{backup, places};

/// Back up a data folder, while its host runs or not
///
/// Writes the database as it is at one moment, the key that secrets are sealed with, and the compiled code to a new folder.
/// What was acknowledged before the command began is in it. Nobody who writes waits for it. Keep the folder as safe as the
/// data folder: whoever has it can read every secret.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep backup /backups/skep-monday --data data
  skep backup /backups/$(date +%F) --json && rsync -a /backups/ elsewhere:")]
pub struct Args {
    /// Folder to write, which must be empty or not there
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// The data folder [default: the user's data folder]
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    let data = args.data.map_or_else(places::data_dir, Ok)?;
    let manifest = backup::take(&data, &args.dir, &Terminal).await?;
    if args.json {
        return out::json(&manifest);
    }
    let backup::Manifest { agents, sessions, open_turns, deliveries, .. } = &manifest;
    out::line(&format!(
        "{} has {agents} agents, {sessions} sessions, {open_turns} open turns, {deliveries} events on their way; {} MB",
        args.dir.display(),
        manifest.bytes().div_ceil(1 << 20)
    ))
}
