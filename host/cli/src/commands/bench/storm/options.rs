//! Options of the commands that use this load, and the folder of their host.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use rand::RngExt as _;
use tempfile::TempDir;

use super::{Plan, Storm};
use crate::catalog;
use crate::progress::Terminal;

/// Flags of the commands that put this load on a host.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Clients that run at the same time
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    workers: u32,
    /// Seed of all random choices [default: a different one each time]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Model of the host; a tiny one is the best choice
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Folder for the host's data, which is kept [default: a temporary one, which is kept if something went
    /// wrong]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

/// The load before its host is started.
pub struct Stage {
    pub storm: Arc<Storm>,
    pub seed: u64,
    /// `None` if the user named the folder.
    temporary: Option<TempDir>,
}

impl Options {
    /// Prepares the load and the folder of its host. With `deletes_all`, clients delete every session at its end.
    pub async fn prepare(&self, deletes_all: bool) -> Result<Stage> {
        let seed = self.seed.unwrap_or_else(|| rand::rng().random_range(0..1_000_000));
        let (folder, temporary) = match &self.folder {
            Some(folder) => (folder.clone(), None),
            None => {
                let temporary = tempfile::Builder::new().prefix("skep-storm-").tempdir()?;
                (temporary.path().to_owned(), Some(temporary))
            }
        };
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let plan = Plan { seed, workers: self.workers as usize, deletes_all };
        let model = catalog::resolve(&self.model, &Terminal)?.path;
        let model = model.to_str().context("the model's path is not UTF-8")?;
        let storm = Storm::prepare(&folder, model, plan).await?;
        Ok(Stage { storm, seed, temporary })
    }
}

impl Stage {
    /// Keeps the folder if it is a temporary one, and prints where it is.
    pub fn keep(self) {
        if let Some(temporary) = self.temporary {
            let kept = temporary.keep();
            eprintln!("  the data folder, the log and the configuration are in {}", kept.display());
        }
    }
}
