//! The bytes of a model: a file mapped into memory read-only, or bytes generated in memory.
//!
//! Invariant: the mapping is private to this crate and is never written through. Mapping a file is the only unsafe
//! operation in this crate: no operating system kernel prevents another process from truncating a mapped file, and a
//! read past the new end faults. Model files must therefore be replaced by renaming, never rewritten in place.

use std::fs::{File, Metadata};
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::ModelError;

/// Read-ahead of a device, in bytes, from which it is kept busy by threads that read in order.
///
/// Pages that a thread reads in order come in large units, whereas those that are only asked for come in units of 4 KiB. Measured with
/// 1.5 GB: 0.02 s of a CPU instead of 0.32 s, and no page faults instead of 23,000.
const LARGE_READ_AHEAD: u64 = 1 << 20;
/// Reads pages and maps them.
#[cfg(target_os = "linux")]
const READ_NOW: Option<memmap2::Advice> = Some(memmap2::Advice::PopulateRead);
#[cfg(all(unix, not(target_os = "linux")))]
const READ_NOW: Option<memmap2::Advice> = None;

#[derive(Debug)]
pub(crate) struct Mapping {
    path: PathBuf,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    File {
        mapped: Mmap,
        /// If true, the operating system reads far ahead of a thread that reads the file in order.
        is_read_ahead: bool,
    },
    /// Bytes without a file, which stay in memory.
    Made(Vec<u8>),
}

impl Mapping {
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let io = |source| ModelError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            return Err(ModelError::NotAModel {
                path: path.to_owned(),
                problem: "it is not a regular file".into(),
            });
        }
        if metadata.len() == 0 {
            return Err(ModelError::Malformed { path: path.to_owned(), problem: "the file is empty".into() });
        }
        // SAFETY: the mapping is read-only and lives as long as `Mapping`. Truncation by another process is excluded
        // by the contract in the module's header.
        #[allow(unsafe_code)]
        let mapped = unsafe { Mmap::map(&file) }.map_err(io)?;
        let read_ahead = read_ahead(Path::new("/sys/dev/block"), &metadata);
        let is_read_ahead = read_ahead.is_some_and(|bytes| bytes >= LARGE_READ_AHEAD);
        Ok(Self { path: path.to_owned(), bytes: Bytes::File { mapped, is_read_ahead } })
    }

    /// Wraps bytes that are in no file. Errors show `name` in place of a path.
    pub(crate) fn made(name: &str, bytes: Vec<u8>) -> Self {
        Self { path: PathBuf::from(name), bytes: Bytes::Made(bytes) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Lets the operating system read `bytes` from the file. It returns once they are in memory if the device reads far ahead, and
    /// at once otherwise.
    pub(crate) fn will_read(&self, bytes: Range<usize>) {
        #[cfg(unix)]
        if let Bytes::File { mapped, is_read_ahead } = &self.bytes {
            let advise = |advice| mapped.advise_range(advice, bytes.start, bytes.len());
            // Systems before Linux 5.14 reject it.
            if READ_NOW.is_some_and(|read_now| *is_read_ahead && advise(read_now).is_ok()) {
                return;
            }
            if let Err(error) = advise(memmap2::Advice::WillNeed) {
                tracing::debug!(path = %self.path.display(), %error, "cannot read the mapped file ahead");
            }
        }
    }

    /// Lets the operating system drop the pages of `bytes`. A later read loads them from the file again.
    pub(crate) fn release(&self, bytes: Range<usize>) {
        #[cfg(unix)]
        if let Bytes::File { mapped, .. } = &self.bytes {
            // SAFETY: the mapping is file-backed and never written, so dropped pages come back with the same bytes.
            #[allow(unsafe_code)]
            let advised = unsafe {
                mapped.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, bytes.start, bytes.len())
            };
            if let Err(error) = advised {
                tracing::debug!(path = %self.path.display(), %error, "cannot release pages of the mapped file");
            }
        }
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::File { mapped, .. } => mapped,
            Bytes::Made(bytes) => bytes,
        }
    }
}

/// Returns how far the operating system reads ahead on the device of a file, in bytes, from its folder of block devices. Files
/// that are on no block device, such as those of a network, have none.
#[cfg(target_os = "linux")]
fn read_ahead(devices: &Path, metadata: &Metadata) -> Option<u64> {
    use std::os::linux::fs::MetadataExt as _;
    let number = metadata.st_dev();
    let major = number >> 8 & 0xfff | number >> 32 & !0xfff;
    let minor = number & 0xff | number >> 12 & !0xff;
    let device = devices.join(format!("{major}:{minor}"));
    // A partition has the queue of its drive, which is the folder above.
    let queue = ["queue", "../queue"].map(|queue| device.join(queue).join("read_ahead_kb"));
    let kibibytes = queue.iter().find_map(|file| std::fs::read_to_string(file).ok())?;
    kibibytes.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(not(target_os = "linux"))]
fn read_ahead(_devices: &Path, _metadata: &Metadata) -> Option<u64> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Returns how many bytes of a file are in the address space of this process.
    fn mapped_bytes(path: &Path) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let own = maps.split_once(path.to_str().unwrap()).unwrap().1;
        let line = own.lines().find(|line| line.starts_with("Rss:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
    }

    #[test]
    fn a_file_that_is_read_far_ahead_is_in_memory_when_its_reads_return() {
        const MIB: usize = 1 << 20;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::fs::write(&path, vec![7u8; 8 * MIB]).unwrap();
        let Bytes::File { mapped, .. } = Mapping::open(&path).unwrap().bytes else { panic!("a file") };
        if READ_NOW.is_none_or(|read_now| mapped.advise_range(read_now, 0, 1).is_err()) {
            return eprintln!("skipped: Linux reads and maps pages at once since version 5.14");
        }
        let file = Mapping { path: path.clone(), bytes: Bytes::File { mapped, is_read_ahead: true } };
        file.release(0..8 * MIB);
        assert_eq!(mapped_bytes(&path), 0);
        file.will_read(2 * MIB + 5..6 * MIB);
        assert!(mapped_bytes(&path) >= 4 * MIB, "{}", mapped_bytes(&path));
        file.release(0..8 * MIB);
        assert_eq!(mapped_bytes(&path), 0);
        assert!(file.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn the_read_ahead_of_a_file_is_that_of_its_drive() {
        use std::os::linux::fs::MetadataExt as _;
        let devices = tempfile::tempdir().unwrap();
        let metadata = devices.path().metadata().unwrap();
        assert_eq!(read_ahead(devices.path(), &metadata), None);
        let number = metadata.st_dev();
        // Numbers of devices have 20 bits for the minor one and 12 bits for the major one in use.
        let (major, minor) = (number >> 8 & 0xfff, number & 0xff | number >> 12 & 0xfff00);
        let drive = devices.path().join("drive");
        let partition = drive.join("partition");
        std::fs::create_dir_all(drive.join("queue")).unwrap();
        std::fs::create_dir_all(&partition).unwrap();
        std::os::unix::fs::symlink(&partition, devices.path().join(format!("{major}:{minor}"))).unwrap();
        for (text, expected) in [("128\n", Some(128 << 10)), ("8192\n", Some(8 << 20)), ("many\n", None)] {
            std::fs::write(drive.join("queue/read_ahead_kb"), text).unwrap();
            assert_eq!(read_ahead(devices.path(), &metadata), expected);
        }
        std::fs::create_dir_all(partition.join("queue")).unwrap();
        std::fs::write(partition.join("queue/read_ahead_kb"), "64").unwrap();
        assert_eq!(read_ahead(devices.path(), &metadata), Some(64 << 10));
    }
}
