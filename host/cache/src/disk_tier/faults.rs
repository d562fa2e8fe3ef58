//! Faults of the disk, for tests.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

/// Faults that a test switches on.
#[derive(Debug, Default)]
pub struct Faults {
    /// Whether each write fails as on a full disk.
    pub disk_is_full: AtomicBool,
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

    pub(super) fn read(&self) {
        std::thread::sleep(Duration::from_millis(self.read_delay_ms.load(SeqCst)));
    }
}
