//! Backups of a data folder: what is in one, how it is taken beside a running host, and how it becomes a data folder again.
//!
//! A backup is a folder with the database as it was at one moment, the key that its secrets are sealed with, the compiled
//! code, and a file that names them all with their digests. That file is written last, and the folder gets its name when it
//! is complete.

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

/// The file that names the others.
const MANIFEST: &str = "backup.json";
/// Format of the manifest; a later skep writes a higher number.
const FORMAT: u32 = 1;
const DATABASE: &str = "skep.db";
const KEY: &str = "secrets.key";
const ARTIFACTS: &str = "artifacts";
/// Beside the files themselves, a disk keeps so much free.
const SPARE_BYTES: u64 = 16 << 20;
const CHUNK_BYTES: usize = 1 << 20;

/// The contents of a backup.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    format: u32,
    /// The skep that wrote it.
    skep: String,
    /// The version of the database's tables.
    schema: i64,
    /// Everything that was acknowledged before is in it.
    pub taken_at_ms: u64,
    pub agents: u64,
    pub sessions: u64,
    pub open_turns: u64,
    pub deliveries: u64,
    files: Vec<BackupFile>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct BackupFile {
    /// In the backup, and in the data folder.
    path: String,
    bytes: u64,
    sha256: String,
}

impl Manifest {
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.bytes))
    }

    /// Reads and checks the file of a backup; not yet the others.
    fn read(backup: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct Header {
            format: u32,
        }
        let path = backup.join(MANIFEST);
        let text = std::fs::read(&path).with_context(|| {
            format!(
                "{} is not a backup: cannot read {}\n  hint: name the folder that `skep backup` has written",
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
                "{} names {:?}, which no backup has\n  hint: use another backup",
                path.display(),
                file.path
            );
        }
        if !manifest.files.iter().any(|file| file.path == DATABASE) {
            bail!("{} names no database\n  hint: use another backup", path.display());
        }
        Ok(manifest)
    }
}

impl BackupFile {
    /// No backup has files anywhere else, and none leads out of its folder.
    fn is_ours(&self) -> bool {
        let parts: Vec<_> = Path::new(&self.path).components().collect();
        match parts.as_slice() {
            [Component::Normal(_)] => [DATABASE, KEY].contains(&self.path.as_str()),
            [Component::Normal(folder), Component::Normal(_)] => *folder == ARTIFACTS,
            _ => false,
        }
    }
}

/// Copies at most so many bytes of a file to one that is not there, for its owner alone, and waits for the disk. `done` bytes
/// were copied before.
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

/// The length and the digest of a file that is there.
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

/// A new file that only its owner can read.
fn make_for_owner(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Makes a folder on the disk of `place`, whose contents get there later: inside of a folder that is there and empty, which
/// may be a disk of its own, or beside it.
fn beside(place: &Path, is_free: bool, prefix: &str) -> Result<tempfile::TempDir> {
    let parent = match place.parent() {
        _ if is_free && place.is_dir() => place.to_owned(),
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    std::fs::create_dir_all(&parent).with_context(|| format!("cannot make {}", parent.display()))?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(prefix);
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700));
    let made = builder.tempdir_in(&parent);
    made.with_context(|| format!("cannot make a folder in {}", parent.display()))
}

/// Gives what is complete its place, where nothing is yet. The file that makes it whole, `last`, comes after the others.
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
        // It has gone to its place; there is nothing to be removed.
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

/// Waits until a folder is on the disk.
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

/// Checks that the disk of a folder has room for so many bytes.
fn check_room(folder: &Path, bytes: u64) -> Result<()> {
    #[cfg(unix)]
    if let Ok(room) = rustix::fs::statvfs(folder) {
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        let wanted = bytes.saturating_add(SPARE_BYTES);
        if free < wanted {
            bail!(
                "the disk of {} has {} MB free, and {} MB are needed\n  hint: free space there, or name a folder on another \
                 disk",
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
