//! Space and speed: the free part of the disk, the rate of writes, and the measured rate of reads.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Assumed latency of a read, until it has been measured.
const READ_LATENCY_S: f64 = 0.002;
/// Assumed read rate in bytes per second, until it has been measured: that of a slow solid-state disk.
const READ_BYTES_PER_S: f64 = 200e6;
/// Lifetime of a measured rate. Afterwards the default is assumed again.
const MEASURED_FOR: Duration = Duration::from_secs(30);
/// Weight of the newest read in the moving average.
const NEWEST: f64 = 0.25;

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

/// The measured rate of reads.
#[derive(Debug, Default)]
pub(super) struct ReadRate(Mutex<Option<(f64, Instant)>>);

impl ReadRate {
    /// Counts a read of `bytes` bytes. Recent reads count for more.
    pub fn record(&self, bytes: u64, took: Duration, now: Instant) {
        let mut rate = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = took.as_secs_f64() / bytes.max(1) as f64;
        let old = rate.filter(|(_, at)| now.saturating_duration_since(*at) < MEASURED_FOR);
        *rate = Some((old.map_or(newest, |(old, _)| old + NEWEST * (newest - old)), now));
    }

    /// Estimates the time of a read of `bytes`.
    pub fn estimate(&self, bytes: u64, now: Instant) -> Duration {
        let rate = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let measured = rate.filter(|(_, at)| now.saturating_duration_since(*at) < MEASURED_FOR);
        let byte_s = measured.map_or(1.0 / READ_BYTES_PER_S, |(byte_s, _)| byte_s);
        Duration::from_secs_f64((READ_LATENCY_S + bytes as f64 * byte_s).min(3600.0))
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
    fn a_slow_disk_is_known_as_slow_for_a_while() {
        let (rate, start) = (ReadRate::default(), Instant::now());
        let before = rate.estimate(1 << 20, start);
        rate.record(1 << 20, Duration::from_secs(1), start);
        assert!(rate.estimate(1 << 20, start) >= Duration::from_secs(1));
        assert_eq!(rate.estimate(1 << 20, start + MEASURED_FOR), before);
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
