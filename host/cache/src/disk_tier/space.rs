//! Space and speed: the free part of the disk, and the rate of writes.

use std::path::Path;
use std::time::{Duration, Instant};

/// Returns the bytes that may still be written until less than `min_free_percent` of the disk is free.
pub(super) fn writable_bytes(folder: &Path, min_free_percent: u8) -> u64 {
    let Ok(found) = rustix::fs::statvfs(folder) else { return 0 };
    let used = found.f_blocks.saturating_sub(found.f_bfree);
    writable_blocks(used, found.f_bavail, min_free_percent).saturating_mul(found.f_frsize)
}

/// Returns how many of the available blocks may be written. Blocks reserved for the superuser are not counted, as in
/// `df`: they can be most of the disk.
fn writable_blocks(used: u64, available: u64, min_free_percent: u8) -> u64 {
    let kept = used.saturating_add(available) / 100 * u64::from(min_free_percent);
    available.saturating_sub(kept)
}

/// Bounds the rate of writes.
#[derive(Debug)]
pub(super) struct Pace {
    bytes_per_s: u64,
    next: Instant,
}

impl Pace {
    /// Creates a bound of this many bytes in a second, at least one.
    pub fn new(bytes_per_s: u64) -> Self {
        Pace { bytes_per_s: bytes_per_s.max(1), next: Instant::now() }
    }

    /// Returns how long to wait after `bytes` were written.
    pub fn wait(&mut self, bytes: u64, now: Instant) -> Duration {
        let took = Duration::from_secs_f64(bytes as f64 / self.bytes_per_s as f64);
        self.next = self.next.max(now) + took;
        self.next.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_paced_on_average() {
        let start = Instant::now();
        let mut pace = Pace { bytes_per_s: 1000, next: start };
        assert_eq!(pace.wait(500, start), Duration::from_millis(500));
        assert_eq!(pace.wait(500, start), Duration::from_millis(1000));
        let later = start + Duration::from_secs(9);
        assert_eq!(pace.wait(100, later), Duration::from_millis(100), "idle time is not saved up");
    }

    #[test]
    fn the_free_part_of_the_disk_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(writable_bytes(folder.path(), 100), 0);
        assert!(writable_bytes(folder.path(), 0) > 0);
        assert_eq!(writable_bytes(&folder.path().join("missing"), 0), 0);
    }

    #[test]
    fn blocks_of_the_superuser_are_neither_used_nor_free() {
        assert_eq!(writable_blocks(600, 400, 10), 300);
        assert_eq!(writable_blocks(950, 50, 10), 0);
        assert_eq!(writable_blocks(0, 0, 10), 0);
    }
}
