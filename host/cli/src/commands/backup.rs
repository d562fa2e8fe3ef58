//! `skep backup`: backs up a data folder.

use std::path::PathBuf;

use anyhow::Result;

use super::out;
use crate::progress::Terminal;
use crate::{backup, paths};

/// Back up a data folder, whether or not its host is running
///
/// Writes the database as it is at one moment, the key that secrets are sealed with, and the compiled code to
/// a new folder. Everything that was acknowledged before the command started is in the backup. Writers do not
/// wait for it. Keep the folder as safe as the data folder: anyone who has it can read every secret.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep backup /backups/skep-monday --data data
  skep backup /backups/$(date +%F) --json && rsync -a /backups/ elsewhere:")]
pub struct Args {
    /// Folder to write to, which must be empty or not exist
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Data folder to back up [default: the user's data folder]
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Takes the backup, and prints what it contains.
pub async fn run(args: Args) -> Result<()> {
    let data = args.data.map_or_else(paths::data_dir, Ok)?;
    let manifest = backup::take(&data, &args.dir, &Terminal).await?;
    if args.json {
        return out::json(&manifest);
    }
    let parts = [
        (manifest.agents, "agent"),
        (manifest.sessions, "session"),
        (manifest.open_turns, "open turn"),
        (manifest.deliveries, "undelivered event"),
        (manifest.batches, "open batch"),
    ];
    out::line(&format!(
        "{} contains {}; {} MB",
        args.dir.display(),
        parts.map(|(number, noun)| out::count(number, noun)).join(", "),
        manifest.bytes().div_ceil(1 << 20)
    ))
}
