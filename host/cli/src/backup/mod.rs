//! Backups of a data folder: what they contain, how they are taken while a host runs, and how they are
//! restored.
//!
//! A backup is a folder with the database as it was at one moment, the key that its secrets are sealed with,
//! the compiled code, and a manifest that lists all of these files with their digests. The manifest is
//! written last, and the folder gets its name when it is complete.

mod restore;
mod take;

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::path::{Component, Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::progress::Step;
pub use restore::{Restored, restore};
pub use take::take;

/// The manifest, which lists the other files.
const MANIFEST: &str = "backup.json";
/// Format of the manifest; a newer skep writes a higher number.
const FORMAT: u32 = 1;
const DATABASE: &str = "skep.db";
const KEY: &str = "secrets.key";
const ARTIFACTS: &str = "artifacts";
/// Space that must stay free on the disk, in addition to the files themselves.
const SPARE_BYTES: u64 = 16 << 20;
const CHUNK_BYTES: usize = 1 << 20;

/// The contents of a backup.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    format: u32,
    /// Version of the skep that wrote the backup.
    skep: String,
    /// Version of the database's tables.
    schema: i64,
    /// Everything that was acknowledged before this time is in the backup.
    pub taken_at_ms: u64,
    pub agents: u64,
    pub sessions: u64,
    pub open_turns: u64,
    pub deliveries: u64,
    /// Batches that had not ended. Backups of the first format did not count them.
    #[serde(default)]
    pub batches: u64,
    files: Vec<BackupFile>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct BackupFile {
    /// Path in the backup, and in the data folder.
    path: String,
    bytes: u64,
    sha256: String,
}

impl Manifest {
    /// Returns the size of all files of the backup.
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.bytes))
    }

    /// Reads and checks the manifest of a backup, but not the files that it lists.
    fn read(backup: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct Header {
            format: u32,
        }
        let path = backup.join(MANIFEST);
        let text = std::fs::read(&path).with_context(|| {
            format!(
                "{} is not a backup: cannot read {}\n  hint: pass the folder that `skep backup` wrote",
                backup.display(),
                path.display()
            )
        })?;
        let broken = || format!("{} is damaged\n  hint: use another backup", path.display());
        let Header { format } = serde_json::from_slice(&text).with_context(broken)?;
        if format > FORMAT {
            bail!(
                "{} was written by a newer skep (format {format}, this one knows {FORMAT})\n  hint: upgrade skep",
                backup.display()
            );
        }
        let manifest: Self = serde_json::from_slice(&text).with_context(broken)?;
        let known = skep_store::known_schema();
        if manifest.schema > known {
            bail!(
                "{} was written by skep {} (schema {}, this one knows {known})\n  hint: upgrade skep",
                backup.display(),
                manifest.skep,
                manifest.schema
            );
        }
        if let Some(file) = manifest.files.iter().find(|file| !file.is_ours()) {
            bail!(
                "{} lists {:?}, which is not a file of a backup\n  hint: use another backup",
                path.display(),
                file.path
            );
        }
        if !manifest.files.iter().any(|file| file.path == DATABASE) {
            bail!("{} does not list a database\n  hint: use another backup", path.display());
        }
        Ok(manifest)
    }
}

impl BackupFile {
    /// Returns whether backups have a file with this path. None of these paths leads out of the backup's
    /// folder.
    fn is_ours(&self) -> bool {
        let parts: Vec<_> = Path::new(&self.path).components().collect();
        match parts.as_slice() {
            [Component::Normal(_)] => [DATABASE, KEY].contains(&self.path.as_str()),
            [Component::Normal(folder), Component::Normal(_)] => *folder == ARTIFACTS,
            _ => false,
        }
    }
}

/// Copies at most `most` bytes of a file to a new file that only its owner can read, and waits until they are
/// on the disk. Returns their number and their SHA-256. `done` is the number of bytes that were copied
/// before.
fn copy(from: &Path, to: &Path, most: u64, step: &dyn Step, done: u64) -> Result<(u64, String)> {
    let reading = || format!("cannot read {}", from.display());
    let writing = || format!("cannot write {}", to.display());
    let mut source = File::open(from).with_context(reading)?.take(most);
    let mut target = make_for_owner(to).with_context(writing)?;
    let (mut hasher, mut buffer, mut copied) = (Sha256::new(), vec![0; CHUNK_BYTES], 0);
    loop {
        let read = source.read(&mut buffer).with_context(reading)?;
        if read == 0 {
            break;
        }
        target.write_all(&buffer[..read]).with_context(writing)?;
        hasher.update(&buffer[..read]);
        copied += read as u64;
        step.advance_to(done + copied);
    }
    target.sync_all().with_context(writing)?;
    Ok((copied, hex(hasher)))
}

/// Returns the length and the SHA-256 of a file.
fn digest(path: &Path) -> Result<(u64, String)> {
    let mut file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let (mut hasher, mut buffer, mut bytes) = (Sha256::new(), vec![0; CHUNK_BYTES], 0);
    loop {
        let read = file.read(&mut buffer).with_context(|| format!("cannot read {}", path.display()))?;
        if read == 0 {
            return Ok((bytes, hex(hasher)));
        }
        hasher.update(&buffer[..read]);
        bytes += read as u64;
    }
}

fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Creates a new file that only its owner can read.
fn make_for_owner(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Creates a folder on the disk of `place`, whose contents are moved to `place` later. It is created inside
/// `place` if that exists and is empty, because it may be a disk of its own, and otherwise beside it.
fn beside(place: &Path, is_free: bool, prefix: &str) -> Result<tempfile::TempDir> {
    let parent = match place.parent() {
        _ if is_free && place.is_dir() => place.to_owned(),
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    std::fs::create_dir_all(&parent).with_context(|| format!("cannot create {}", parent.display()))?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(prefix);
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700));
    let made = builder.tempdir_in(&parent);
    made.with_context(|| format!("cannot create a folder in {}", parent.display()))
}

/// Moves a complete folder to `place`, which holds nothing yet. The file that makes it valid, `last`, is
/// moved last.
fn put_in_place(folder: tempfile::TempDir, place: &Path, last: &str) -> Result<()> {
    let rename = |from: &Path, to: &Path| {
        std::fs::rename(from, to)
            .with_context(|| format!("cannot rename {} to {}", from.display(), to.display()))
    };
    let artifacts = folder.path().join(ARTIFACTS);
    if artifacts.is_dir() {
        sync(&artifacts)?;
    }
    sync(folder.path())?;
    if folder.path().parent() != Some(place) {
        rename(folder.path(), place)?;
        // The folder has been renamed; there is nothing to remove.
        let _ = folder.keep();
        return sync(
            place.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")),
        );
    }
    let entries = std::fs::read_dir(folder.path()).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
    let mut names: Vec<_> =
        entries.context("cannot read the folder")?.iter().map(|entry| entry.file_name()).collect();
    names.sort_by_key(|name| name == last);
    for name in names {
        rename(&folder.path().join(&name), &place.join(&name))?;
    }
    sync(place)
}

/// Waits until the entries of a folder are on the disk.
fn sync(folder: &Path) -> Result<()> {
    #[cfg(unix)]
    File::open(folder).and_then(|folder| folder.sync_all()).context("cannot write to the disk")?;
    Ok(())
}

fn is_empty_or_absent(folder: &Path) -> Result<bool> {
    match std::fs::read_dir(folder) {
        Ok(mut entries) => Ok(entries.next().is_none()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", folder.display())),
    }
}

/// Checks that the disk of a folder has room for `bytes` bytes.
fn check_room(folder: &Path, bytes: u64) -> Result<()> {
    #[cfg(unix)]
    if let Ok(room) = rustix::fs::statvfs(folder) {
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        let wanted = bytes.saturating_add(SPARE_BYTES);
        if free < wanted {
            bail!(
                "the disk of {} has {} MB free, but {} MB are needed\n  hint: free up space there, or choose a folder on \
                 another disk",
                folder.display(),
                free >> 20,
                wanted.div_ceil(1 << 20)
            );
        }
    }
    #[cfg(not(unix))]
    let _ = (folder, bytes);
    Ok(())
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

#[cfg(test)]
mod tests;
