//! Models in use: a host holds a lock on its model, so that nobody deletes it meanwhile.

use std::fs::File;
use std::path::Path;

use anyhow::Result;

use crate::progress::Progress;

/// A model that is not deleted until this is dropped.
#[derive(Debug)]
pub struct ModelInUse {
    /// `None` if the file system has no locks.
    _lock: Option<File>,
}

/// Marks a model as used, and pulls it if it is not in the cache.
pub fn hold(name_or_path: &str, progress: &dyn Progress) -> Result<ModelInUse> {
    let path = super::resolve(name_or_path, progress)?.path;
    let lock = File::open(path).ok().filter(|file| file.try_lock_shared().is_ok());
    Ok(ModelInUse { _lock: lock })
}

/// Returns whether a process uses the model at `path`.
pub fn is_held(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    matches!(file.try_lock(), Err(std::fs::TryLockError::WouldBlock))
}
