//! The space on the disk that models are stored on.

use std::io;
use std::path::Path;

use anyhow::{Result, bail};
use indicatif::DecimalBytes;

/// Space that a download leaves to others.
const SPARE_BYTES: u64 = 16 << 20;

/// Returns the space that the file system of `folder` has left, if it is known.
pub fn free_bytes(folder: &Path) -> Option<u64> {
    let room = rustix::fs::statvfs(folder).ok()?;
    Some(room.f_bavail.saturating_mul(room.f_frsize))
}

/// Returns an error unless the file system of `folder`, which is in the cache, has room for `bytes` more bytes of `what`.
pub fn require(folder: &Path, bytes: u64, what: &str) -> Result<()> {
    let hint = "free space there (`skep model prune` and `skep model rm` help), or set SKEP_HOME to a folder on another disk";
    require_or(folder, bytes, what, hint)
}

/// Returns an error with a hint unless the file system of `folder` has room for `bytes` more bytes of `what`.
pub fn require_or(folder: &Path, bytes: u64, what: &str, hint: &str) -> Result<()> {
    match free_bytes(folder) {
        Some(free) if free < bytes.saturating_add(SPARE_BYTES) => bail!(
            "{what} needs {} more, but the disk of {} has {} free\n  hint: {hint}",
            DecimalBytes(bytes),
            folder.display(),
            DecimalBytes(free)
        ),
        _ => Ok(()),
    }
}

/// Returns whether a write failed for lack of space: a full disk, a quota, or a limit on the size of files.
pub fn is_exhausted(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_free_space_is_refused_with_both_figures() {
        let dir = tempfile::tempdir().expect("temporary folder");
        require(dir.path(), 1, "a model").expect("there is room for a byte");
        let error = require(dir.path(), 1 << 60, "a model").expect_err("an exbibyte").to_string();
        for part in ["a model needs", "EB more", "free\n  hint:", "skep model prune", "SKEP_HOME"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        let error =
            require_or(dir.path(), 1 << 60, "a file", "choose another disk").expect_err("an exbibyte");
        assert!(error.to_string().ends_with("free\n  hint: choose another disk"), "{error}");
    }
}
