//! The rate at which pages come from where they are kept, as measured recently.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lifetime of a measured rate. Afterwards the assumed one counts again.
const MEASURED_FOR: Duration = Duration::from_secs(30);
/// Weight of the newest transfer in the moving average.
const NEWEST: f64 = 0.25;

/// The measured rate of transfers.
#[derive(Debug)]
pub struct TransferRate {
    latency_s: f64,
    /// Seconds for a byte, until they have been measured.
    assumed_byte_s: f64,
    measured: Mutex<Option<(f64, Instant)>>,
}

impl TransferRate {
    /// Returns a rate that was not measured yet. Each transfer begins with the latency.
    pub fn assumed(latency_s: f64, bytes_per_s: f64) -> Self {
        TransferRate { latency_s, assumed_byte_s: 1.0 / bytes_per_s.max(1.0), measured: Mutex::default() }
    }

    /// Counts a transfer of `bytes` bytes. Recent transfers count for more.
    pub fn record(&self, bytes: u64, took: Duration, now: Instant) {
        let mut rate = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = took.as_secs_f64() / bytes.max(1) as f64;
        let old = rate.filter(|(_, at)| now.saturating_duration_since(*at) < MEASURED_FOR);
        *rate = Some((old.map_or(newest, |(old, _)| old + NEWEST * (newest - old)), now));
    }

    /// Estimates the time of a transfer of `bytes`.
    pub fn estimate(&self, bytes: u64, now: Instant) -> Duration {
        let rate = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        let measured = rate.filter(|(_, at)| now.saturating_duration_since(*at) < MEASURED_FOR);
        let byte_s = measured.map_or(self.assumed_byte_s, |(byte_s, _)| byte_s);
        Duration::from_secs_f64((self.latency_s + bytes as f64 * byte_s).min(3600.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_source_is_known_as_slow_for_a_while() {
        let (rate, start) = (TransferRate::assumed(0.002, 200e6), Instant::now());
        let before = rate.estimate(1 << 20, start);
        rate.record(1 << 20, Duration::from_secs(1), start);
        assert!(rate.estimate(1 << 20, start) >= Duration::from_secs(1));
        assert_eq!(rate.estimate(1 << 20, start + MEASURED_FOR), before);
    }
}
