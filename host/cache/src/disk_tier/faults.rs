//! The settings and the faults of a tier in tests.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use super::{DiskTier, EraseFilter, TierOptions, TierShares};

impl TierOptions {
    /// Returns the settings of a tier for tests: 64 MiB in this folder, at the speed of the disk, and without keys.
    pub fn for_tests(folder: &Path) -> TierOptions {
        TierOptions {
            folder: folder.to_owned(),
            max_bytes: 64 << 20,
            min_free_percent: 0,
            write_bytes_per_s: 1 << 40,
            read_bytes_per_s: None,
            queue_bytes: 64 << 20,
            reads_always: false,
            shares: TierShares::default(),
            key: None,
            name_key: None,
        }
    }
}

impl DiskTier {
    /// Erases pages from a disk that does not fail, and returns their number.
    pub fn forget(&self, which: EraseFilter) -> u64 {
        self.erase(vec![which]).expect("the disk takes the erasure")
    }
}

/// Faults that a test switches on.
#[derive(Debug, Default)]
pub struct Faults {
    /// Whether each write fails as on a full disk.
    pub disk_is_full: AtomicBool,
    /// Whether each erasure fails.
    pub erasures_fail: AtomicBool,
    /// Time by which the erasure of each page is delayed, in milliseconds.
    pub erase_delay_ms: AtomicU64,
    /// Time by which each read is delayed, in milliseconds.
    pub read_delay_ms: AtomicU64,
    /// Time by which each write is delayed, in milliseconds.
    pub write_delay_ms: AtomicU64,
}

impl Faults {
    pub(super) fn write(&self) -> io::Result<()> {
        std::thread::sleep(Duration::from_millis(self.write_delay_ms.load(SeqCst)));
        match self.disk_is_full.load(SeqCst) {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => Ok(()),
        }
    }

    pub(super) fn erase(&self) -> io::Result<()> {
        std::thread::sleep(Duration::from_millis(self.erase_delay_ms.load(SeqCst)));
        match self.erasures_fail.load(SeqCst) {
            true => Err(io::Error::other("the disk does not take the erasure")),
            false => Ok(()),
        }
    }

    pub(super) fn read(&self) {
        std::thread::sleep(Duration::from_millis(self.read_delay_ms.load(SeqCst)));
    }
}
