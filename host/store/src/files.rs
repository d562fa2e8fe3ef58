//! Files beside and under the database: how they are created, and the space that they have.

use std::path::Path;

/// Creates the file with mode 600, if it does not exist. SQLite gives the same mode to the files that it
/// creates beside it.
pub(crate) fn make_for_its_owner(path: &Path) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    match options.open(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Returns the space that the file system of `path` has left, if it is known.
pub(crate) fn free_bytes(path: &Path) -> Option<u64> {
    let room = rustix::fs::statvfs(path).ok()?;
    Some(room.f_bavail.saturating_mul(room.f_frsize))
}
