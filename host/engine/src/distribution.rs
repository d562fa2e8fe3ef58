//! Distributions of durations, counted in buckets whose bounds grow by an eighth of a power of two, so that a quantile
//! is at most an eighth too large. They are written without a lock and cost a few kilobytes each.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Buckets for each power of two.
const PARTS: u64 = 8;
/// Durations above 2^36 µs, which is 19 hours, count as that.
const POWERS: u64 = 36;
const BUCKETS: usize = (POWERS * PARTS) as usize;

/// A distribution that several threads write.
pub(crate) struct Distribution(Box<[AtomicU64]>);

/// A distribution as it was at some time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts(Vec<u64>);

impl Default for Distribution {
    fn default() -> Self {
        Distribution((0..BUCKETS).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Distribution {
    /// Counts a duration.
    pub fn record(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.0[bucket(micros)].fetch_add(1, Relaxed);
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> Counts {
        Counts(self.0.iter().map(|count| count.load(Relaxed)).collect())
    }
}

impl Counts {
    /// Returns what was counted after `before`, which is the same distribution at an earlier time.
    pub fn since(&self, before: &Counts) -> Counts {
        let earlier = before.0.iter().chain(std::iter::repeat(&0));
        Counts(self.0.iter().zip(earlier).map(|(now, before)| now.saturating_sub(*before)).collect())
    }

    pub(crate) fn plus(self, other: Counts) -> Counts {
        if self.0.is_empty() {
            return other;
        }
        let others = other.0.iter().chain(std::iter::repeat(&0));
        Counts(self.0.iter().zip(others).map(|(one, other)| one + other).collect())
    }

    /// Returns the number of durations.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Returns a time that a share `quantile` of the durations does not exceed, or `None` if there are none.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        let total = self.count();
        let rank = ((total as f64 * quantile).ceil() as u64).clamp(1, total.max(1));
        let mut seen = 0;
        let found = self.0.iter().position(|count| {
            seen += count;
            seen >= rank
        })?;
        Some(Duration::from_micros(upper_bound(found)))
    }
}

/// Returns the bucket of a duration. The first buckets are one microsecond wide.
fn bucket(micros: u64) -> usize {
    if micros < PARTS {
        return micros as usize;
    }
    let power = u64::from(micros.ilog2());
    let part = (micros >> (power - PARTS.ilog2() as u64)) - PARTS;
    let bucket = (power - u64::from(PARTS.ilog2()) + 1) * PARTS + part;
    (bucket as usize).min(BUCKETS - 1)
}

/// Returns the largest duration that falls into a bucket, in microseconds.
fn upper_bound(bucket: usize) -> u64 {
    let (power, part) = (bucket as u64 / PARTS, bucket as u64 % PARTS);
    match power {
        0 => part,
        power => ((PARTS + part + 1) << (power - 1)) - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_falls_into_a_bucket_at_most_an_eighth_larger() {
        for micros in (0..3000).chain([1 << 20, (1 << 20) + 12_345, 3_600_000_000]) {
            let bound = upper_bound(bucket(micros));
            assert!(bound >= micros && bound <= micros + micros / 8, "{micros}: {bound}");
            assert!(bucket(bound) == bucket(micros) && bucket(bound + 1) == bucket(micros) + 1, "{micros}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_are_of_the_durations_since_an_earlier_time() {
        let distribution = Distribution::default();
        assert_eq!(distribution.counts().quantile(0.5), None);
        distribution.record(Duration::from_secs(9));
        let before = distribution.counts();
        for ms in 1..=100 {
            distribution.record(Duration::from_millis(ms));
        }
        let counts = distribution.counts().since(&before);
        for (quantile, ms) in [(0.5, 50.0), (0.9, 90.0), (0.99, 99.0)] {
            let found = counts.quantile(quantile).unwrap().as_secs_f64() * 1e3;
            assert!((ms..ms * 1.125).contains(&found), "{quantile}: {found}");
        }
        assert!(distribution.counts().quantile(1.0).unwrap() >= Duration::from_secs(9));
        assert_eq!(Counts::default().plus(counts.clone()), counts);
    }
}
