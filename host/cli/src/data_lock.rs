//! A data folder has one host at a time: it holds a lock of the operating system on a file in it.
//!
//! The lock goes with the process, however that ends, so nothing has to be cleaned up after a crash; the file stays. What
//! is written in it is only what the error of the next one says. Commands that read and write single rows, such as
//! `skep key --data`, take it only to bring the tables up to date.

use std::fs::{File, TryLockError};
use std::io::{Read as _, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result, bail};

const FILE: &str = "host.lock";
/// A process id has no more digits.
const MAX_PID_BYTES: u64 = 20;

/// The right to run a host on a folder, until it is dropped.
#[derive(Debug)]
pub(crate) struct DataLock {
    _locked: File,
}

impl DataLock {
    /// Makes the folder if it is not there.
    pub(crate) fn take(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| {
            format!("cannot create the data folder {}\n  hint: name another with --data", dir.display())
        })?;
        let path = dir.join(FILE);
        let mut file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .with_context(|| {
                format!("cannot write to {}\n  hint: name another data folder with --data", path.display())
            })?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "the data folder {} is in use by another host{}\n  hint: stop that one, or name another folder with --data",
                dir.display(),
                holder(&file)
            ),
            Err(TryLockError::Error(error)) => {
                let hint = "use a data folder on a disk of this machine";
                return Err(error).with_context(|| format!("cannot lock {}\n  hint: {hint}", path.display()));
            }
        }
        let written = file.set_len(0).and_then(|()| write!(file, "{}", std::process::id()));
        written.with_context(|| format!("cannot write to {}", path.display()))?;
        Ok(Self { _locked: file })
    }
}

/// The holder's process, if it has come to write it down.
fn holder(file: &File) -> String {
    let mut pid = String::new();
    match file.take(MAX_PID_BYTES).read_to_string(&mut pid).map(|_| pid.parse::<u32>()) {
        Ok(Ok(pid)) => format!(", process {pid}"),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_has_a_host_is_refused_with_the_hosts_process() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let folder = dir.path().join("data");
        let first = DataLock::take(&folder).expect("nobody has it");
        let error = DataLock::take(&folder).expect_err("it is taken").to_string();
        let wanted =
            format!("{} is in use by another host, process {}", folder.display(), std::process::id());
        assert!(error.contains(&wanted) && error.contains("--data"), "{error}");
        drop(first);
        DataLock::take(&folder).expect("the first one is gone");
    }

    #[test]
    fn what_a_host_left_behind_is_no_lock() {
        let dir = tempfile::tempdir().expect("temporary folder");
        std::fs::write(dir.path().join(FILE), "4000000000").expect("writable");
        let _lock = DataLock::take(dir.path()).expect("no process holds it");
        let written = std::fs::read_to_string(dir.path().join(FILE)).expect("readable");
        assert_eq!(written, std::process::id().to_string());
    }
}
