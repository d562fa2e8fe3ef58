//! Restoring a backup to a data folder.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use skep_store::{Durability, Held, Store};

use super::{ARTIFACTS, Manifest, beside, check_room, copy, is_empty_or_absent, now_ms, put_in_place};
use crate::data_lock::DataLock;
use crate::progress::Progress;
use crate::server;

/// The result of a restore.
#[derive(Debug)]
pub struct Restored {
    pub manifest: Manifest,
    /// Work that was in flight when the backup was taken.
    pub held: Held,
    /// New path of the folder that was there before.
    pub moved: Option<PathBuf>,
}

/// Restores the backup in `from` to the data folder `data`, and holds all work that was in flight. A folder
/// that is not empty is moved aside if `force` is set; otherwise it is an error.
pub async fn restore(from: &Path, data: &Path, force: bool, progress: &dyn Progress) -> Result<Restored> {
    let manifest = Manifest::read(from)?;
    let is_free = is_empty_or_absent(data)?;
    // Keeps a host from starting on the folder in the meantime.
    let lock = if is_free { None } else { Some(DataLock::take(data)?) };
    if !is_free && !force {
        bail!(
            "{} is not empty\n  hint: choose a folder that does not exist yet, or move this one aside with --force",
            data.display()
        );
    }
    let folder = beside(data, is_free, ".skep-restore-")?;
    check_room(folder.path(), manifest.bytes())?;
    let step = progress.begin("restoring", Some(manifest.bytes()));
    tokio::task::block_in_place(|| {
        let mut done = 0;
        for file in &manifest.files {
            if file.path.starts_with(ARTIFACTS) {
                std::fs::create_dir_all(folder.path().join(ARTIFACTS))?;
            }
            let source = from.join(&file.path);
            // A link may lead to a file without an end.
            if std::fs::symlink_metadata(&source).is_ok_and(|metadata| !metadata.is_file()) {
                bail!("{} is not a file\n  hint: use another backup", source.display());
            }
            let (bytes, sha256) = copy(
                &source,
                &folder.path().join(&file.path),
                file.bytes.saturating_add(1),
                step.as_ref(),
                done,
            )?;
            if bytes != file.bytes || sha256 != file.sha256 {
                bail!(
                    "{} is not the file that was backed up: it has {bytes} bytes and the SHA-256 {sha256}, but had {} and \
                     {}\n  hint: use another backup",
                    source.display(),
                    file.bytes,
                    file.sha256
                );
            }
            done += bytes;
        }
        Ok(())
    })?;
    let store = Store::open(&server::database(folder.path()), Durability::Power).await?;
    // The clock of this machine may be behind the clock of the host that wrote the backup.
    store.hold_all(manifest.taken_at_ms, now_ms().max(manifest.taken_at_ms)).await?;
    let held = store.held().await?.context("the restored database does not record the restore")?;
    store.close().await;
    let moved = match is_free {
        true => None,
        false => Some(move_aside(data)?),
    };
    put_in_place(folder, data, super::DATABASE)?;
    drop(lock);
    step.finish("");
    Ok(Restored { manifest, held, moved })
}

fn move_aside(data: &Path) -> Result<PathBuf> {
    let mut name = data.file_name().context("the data folder has no name")?.to_owned();
    name.push(format!(".before-restore-{}", now_ms()));
    let to = data.with_file_name(name);
    std::fs::rename(data, &to)
        .with_context(|| format!("cannot rename {} to {}", data.display(), to.display()))?;
    Ok(to)
}
