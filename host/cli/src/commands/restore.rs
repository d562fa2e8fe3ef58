//! `skep restore`: restores a backup.

use std::path::PathBuf;

use anyhow::Result;

use super::{held, out};
use crate::progress::Terminal;
use crate::{backup, paths};

/// Restore a backup to a data folder
///
/// Checks every file against its digest. Work that was in flight when the backup was taken may have been done
/// since, so the host holds it until `skep held resume` or `skep held drop`; everything else continues at
/// once.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep restore /backups/skep-monday --data data
  skep restore /backups/skep-monday --data data --force && skep up --data data")]
pub struct Args {
    /// Folder that `skep backup` wrote
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Data folder to create [default: the user's data folder]
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// Move an existing data folder aside
    #[arg(long)]
    force: bool,
}

/// Restores the backup, and prints what the host will hold.
pub async fn run(args: Args) -> Result<()> {
    let data = args.data.map_or_else(paths::data_dir, Ok)?;
    let restored = backup::restore(&args.dir, &data, args.force, &Terminal).await?;
    let backup::Restored { manifest, held: work, moved } = restored;
    if let Some(moved) = moved {
        out::line(&format!("the previous folder was moved to {}", moved.display()))?;
    }
    out::line(&format!(
        "restored {} as it was {}: {}, {}",
        data.display(),
        out::ago(manifest.taken_at_ms),
        out::count(manifest.agents, "agent"),
        out::count(manifest.sessions, "session"),
    ))?;
    out::line(&format!(
        "held, because it may have been done since: {}",
        held::counted(work.turns, work.deliveries, work.schedules, work.batches)
    ))?;
    out::line(&format!(
        "next: skep up --data {}, then `skep held resume` or `skep held drop`",
        data.display()
    ))
}
