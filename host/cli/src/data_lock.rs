//! Limits a data folder to one host at a time, with an operating system lock on a file in the folder.
//!
//! The lock is released when the process ends, however it ends, so nothing has to be cleaned up after a
//! crash. The file stays; its content is used only in the error that the next host prints. Commands that read
//! and write single rows, such as `skep key --data`, take the lock only to bring the tables up to date.

use std::fs::{File, TryLockError};
use std::io::{Read as _, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result, bail};

const FILE: &str = "host.lock";
/// Maximum number of digits of a process id.
const MAX_PID_BYTES: u64 = 20;

/// The right to run a host on a folder. Dropping it releases the lock.
#[derive(Debug)]
pub(crate) struct DataLock {
    _locked: File,
}

impl DataLock {
    /// Returns whether a host has used the folder.
    pub(crate) fn is_known(dir: &Path) -> bool {
        dir.join(FILE).exists()
    }

    /// Takes the lock, and creates the folder if it does not exist.
    pub(crate) fn take(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| {
            format!("cannot create the data folder {}\n  hint: choose another with --data", dir.display())
        })?;
        let path = dir.join(FILE);
        let mut file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .with_context(|| {
                format!("cannot write to {}\n  hint: choose another data folder with --data", path.display())
            })?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "the data folder {} is in use by another host{}\n  hint: stop that host, or choose another folder with --data",
                dir.display(),
                holder(&file)
            ),
            Err(TryLockError::Error(error)) => {
                let hint = "use a data folder on a local disk";
                return Err(error).with_context(|| format!("cannot lock {}\n  hint: {hint}", path.display()));
            }
        }
        let written = file.set_len(0).and_then(|()| write!(file, "{}", std::process::id()));
        written.with_context(|| format!("cannot write to {}", path.display()))?;
        Ok(Self { _locked: file })
    }
}

/// Describes the process that holds the lock, if it has written its id yet.
fn holder(file: &File) -> String {
    let mut pid = String::new();
    match file.take(MAX_PID_BYTES).read_to_string(&mut pid).map(|_| pid.parse::<u32>()) {
        Ok(Ok(pid)) => format!(", process {pid}"),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_folder_in_use_is_refused_with_the_process_id_of_its_host() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let folder = dir.path().join("data");
        let first = DataLock::take(&folder).expect("the lock is free");
        let error = DataLock::take(&folder).expect_err("it is taken").to_string();
        let wanted =
            format!("{} is in use by another host, process {}", folder.display(), std::process::id());
        assert!(error.contains(&wanted) && error.contains("--data"), "{error}");
        drop(first);
        // A process that another test starts has a copy of the open file, and with it the lock, until it runs its program.
        let released = Instant::now();
        while let Err(error) = DataLock::take(&folder) {
            assert!(released.elapsed() < Duration::from_secs(10), "the first lock was not released: {error}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_leftover_lock_file_does_not_lock_the_folder() {
        let dir = tempfile::tempdir().expect("temporary folder");
        std::fs::write(dir.path().join(FILE), "4000000000").expect("writable");
        let _lock = DataLock::take(dir.path()).expect("no process holds it");
        let written = std::fs::read_to_string(dir.path().join(FILE)).expect("readable");
        assert_eq!(written, std::process::id().to_string());
    }
}
