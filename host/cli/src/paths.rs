//! Locations of Skep's own files: one cache folder per user, with a subfolder for each kind of file.
//!
//! Everything in it can be deleted at any time and is created again when it is needed. Everything in it is
//! complete: it is created beside its final path and renamed to it, under a lock that other processes
//! respect.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// Environment variable with the path of the cache folder.
pub const HOME_VARIABLE: &str = "SKEP_HOME";

/// Environment variable with the path of a folder of compiled kernels.
pub const CUBINS_VARIABLE: &str = "SKEP_CUBINS";

/// Environment variable with the path of the folder that has NIXL's library.
pub const NIXL_VARIABLE: &str = "SKEP_NIXL";

/// Returns the cache folder: `$SKEP_HOME`, or `skep` in the platform's cache folder for this user.
pub fn cache_dir() -> Result<PathBuf> {
    if let Some(home) = std::env::var_os(HOME_VARIABLE).filter(|home| !home.is_empty()) {
        let home = PathBuf::from(home);
        return std::path::absolute(&home).with_context(|| format!("{HOME_VARIABLE}={}", home.display()));
    }
    match directories::BaseDirs::new() {
        Some(base) => Ok(base.cache_dir().join("skep")),
        None => bail!("this user has no home folder; set {HOME_VARIABLE} to a folder for Skep's files"),
    }
}

/// Returns a subfolder of the cache, which is created if it is missing.
pub fn cache_subdir(name: &str) -> Result<PathBuf> {
    let dir = cache_dir()?.join(name);
    std::fs::create_dir_all(&dir).with_context(|| {
        format!("cannot create {}; set {HOME_VARIABLE} to a writable folder", dir.display())
    })?;
    Ok(dir)
}

/// Returns the folder that caches GPU kernels which were compiled on this machine.
pub fn cubin_cache() -> Result<PathBuf> {
    Ok(cache_dir()?.join("cubins"))
}

/// Returns the folder of kernels that came with the binary: `$SKEP_CUBINS`, or the folder `cubins` beside the
/// binary, if there is one.
pub fn shipped_cubins() -> Result<Option<PathBuf>> {
    let binary = std::env::current_exe().ok();
    shipped(std::env::var_os(CUBINS_VARIABLE), binary.as_deref().and_then(Path::parent))
}

fn shipped(named: Option<OsString>, beside: Option<&Path>) -> Result<Option<PathBuf>> {
    match named.filter(|named| !named.is_empty()).map(PathBuf::from) {
        Some(named) if named.is_dir() => Ok(Some(named)),
        Some(named) => bail!(
            "{CUBINS_VARIABLE}={}: no such folder\n  hint: create it with `skep kernels build --out {}`, or unset it",
            named.display(),
            named.display()
        ),
        None => Ok(beside.map(|beside| beside.join("cubins")).filter(|folder| folder.is_dir())),
    }
}

/// Returns the folder with NIXL's library that the environment names: `$SKEP_NIXL`.
pub fn nixl_folder() -> Option<PathBuf> {
    std::env::var_os(NIXL_VARIABLE).filter(|named| !named.is_empty()).map(PathBuf::from)
}

/// Returns the default folder of the host's data: the platform's data folder for this user, or inside
/// `$SKEP_HOME`.
pub fn data_dir() -> Result<PathBuf> {
    if std::env::var_os(HOME_VARIABLE).is_some_and(|home| !home.is_empty()) {
        return Ok(cache_dir()?.join("data"));
    }
    match directories::BaseDirs::new() {
        Some(base) => Ok(base.data_dir().join("skep")),
        None => bail!("this user has no home folder; pass --data DIR"),
    }
}

/// Locks `lock_path` exclusively until the result is dropped. Calls `waiting` before it waits for another
/// process.
pub fn lock(lock_path: &Path, waiting: impl FnOnce()) -> Result<File> {
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(lock_path)
        .with_context(|| format!("cannot open {}", lock_path.display()))?;
    if file.try_lock().is_err() {
        waiting();
        file.lock().with_context(|| format!("cannot lock {}", lock_path.display()))?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_kernels_are_in_the_configured_folder_or_beside_the_binary() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let cubins = dir.path().join("cubins");
        let found = |named: Option<&Path>| {
            shipped(named.map(|named| named.as_os_str().to_owned()), Some(dir.path()))
                .map_err(|error| error.to_string())
        };
        assert_eq!(found(None), Ok(None));
        let error = found(Some(&cubins)).expect_err("not there yet");
        assert!(error.contains("SKEP_CUBINS=") && error.contains("skep kernels build"), "{error}");
        std::fs::create_dir(&cubins).expect("a folder");
        assert_eq!(found(None), Ok(Some(cubins.clone())));
        assert_eq!(found(Some(Path::new(""))), Ok(Some(cubins)));
        assert_eq!(found(Some(dir.path())), Ok(Some(dir.path().to_owned())));
    }

    #[test]
    fn second_holder_of_a_lock_waits_for_the_first() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("x.lock");
        let first = lock(&path, || panic!("nobody holds it")).expect("free lock");
        let (said, heard) = std::sync::mpsc::channel();
        let waiter = std::thread::spawn(move || lock(&path, || said.send(()).expect("main waits")).map(drop));
        heard.recv().expect("the second holder reports that it waits");
        drop(first);
        waiter.join().expect("no panic").expect("lock after the first is gone");
    }
}
