//! A bucket that fills at a steady rate: the virtual scheduling form of the generic cell rate algorithm (ITU-T I.371).
//!
//! It stores a single time, at which the bucket will be full. More may be taken than the bucket holds, for amounts
//! that are known only after they have been used. The bucket has no clock.

use std::{
    num::NonZeroU32,
    time::{Duration, Instant},
};

const MINUTE_NS: u128 = 60_000_000_000;

/// The rate at which a bucket fills, and its capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate {
    pub per_minute: NonZeroU32,
    pub burst: NonZeroU32,
}

/// A token bucket. A full bucket is equivalent to a missing one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    full_at: Instant,
}

/// The state of a bucket as it is reported to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub limit: u32,
    pub remaining: u32,
    /// The time until the bucket is full.
    pub reset: Duration,
}

impl Rate {
    /// Creates a rate whose capacity is the amount of one minute.
    pub fn per_minute(per_minute: NonZeroU32) -> Self {
        Rate { per_minute, burst: per_minute }
    }

    /// Returns the time in which `count` is added.
    fn time(self, count: u64) -> Duration {
        let nanoseconds = u128::from(count) * MINUTE_NS / u128::from(self.per_minute.get());
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}

impl Bucket {
    /// Creates a bucket from which the whole burst can be taken.
    pub fn full(now: Instant) -> Self {
        Bucket { full_at: now }
    }

    /// Returns whether the bucket is full, so that it can be dropped.
    pub fn is_full(self, now: Instant) -> bool {
        self.full_at <= now
    }

    /// Returns the time until one can be taken, which is zero if one is available.
    pub fn wait(self, rate: Rate, now: Instant) -> Duration {
        (self.missing(now) + rate.time(1)).saturating_sub(rate.time(rate.burst.get().into()))
    }

    /// Takes `count` now, even if the bucket holds less; later requests then wait longer.
    pub fn take(&mut self, count: u64, rate: Rate, now: Instant) {
        // An amount whose time is too far in the future to be represented is not added.
        self.full_at = self.full_at.max(now).checked_add(rate.time(count)).unwrap_or(self.full_at);
    }

    /// Returns the state for the response headers, rounded down.
    pub fn window(self, rate: Rate, now: Instant) -> Window {
        let missing = self.missing(now);
        let held = rate.time(rate.burst.get().into()).saturating_sub(missing);
        let remaining = held.as_nanos() * u128::from(rate.per_minute.get()) / MINUTE_NS;
        Window {
            limit: rate.per_minute.get(),
            remaining: u32::try_from(remaining).unwrap_or(u32::MAX),
            reset: missing,
        }
    }

    /// Changes the rate. What was taken stays taken, and is added at the new rate from now on.
    pub fn change_rate(&mut self, before: Rate, after: Rate, now: Instant) {
        let missing = self.missing(now).as_nanos() * u128::from(before.per_minute.get());
        let missing = u64::try_from(missing / u128::from(after.per_minute.get())).unwrap_or(u64::MAX);
        self.full_at = now.checked_add(Duration::from_nanos(missing)).unwrap_or(self.full_at);
    }

    fn missing(self, now: Instant) -> Duration {
        self.full_at.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(per_minute: u32, burst: u32) -> Rate {
        let number = |number| NonZeroU32::new(number).unwrap();
        Rate { per_minute: number(per_minute), burst: number(burst) }
    }

    #[test]
    fn consumed_tokens_stay_consumed_when_the_rate_changes() {
        let (before, after, now) = (rate(10, 10), rate(20, 20), Instant::now());
        let mut bucket = Bucket::full(now);
        bucket.take(10, before, now);
        bucket.change_rate(before, after, now);
        assert_eq!((bucket.window(after, now).remaining, bucket.wait(after, now)), (10, Duration::ZERO));
        bucket.change_rate(after, before, now);
        assert_eq!(bucket.window(before, now).remaining, 0);
        let mut full = Bucket::full(now);
        full.change_rate(before, after, now);
        assert!(full.is_full(now));
    }

    #[test]
    fn a_burst_is_available_at_once_and_then_refills_at_the_rate() {
        for (per_minute, burst) in [(60, 60), (60, 5), (7, 7), (1, 1), (1_000_000, 3)] {
            let (rate, start) = (rate(per_minute, burst), Instant::now());
            let mut bucket = Bucket::full(start);
            for taken in 0..burst {
                assert_eq!(bucket.window(rate, start).remaining, burst - taken, "{rate:?}");
                assert_eq!(bucket.wait(rate, start), Duration::ZERO, "{rate:?}");
                bucket.take(1, rate, start);
            }
            let mut now = start;
            for _ in 0..3 {
                assert_eq!(bucket.window(rate, now).remaining, 0, "{rate:?}");
                let wait = bucket.wait(rate, now);
                assert!(wait > Duration::ZERO, "{rate:?}");
                assert!(bucket.wait(rate, now + wait - Duration::from_nanos(1)) > Duration::ZERO, "{rate:?}");
                now += wait;
                assert_eq!(bucket.wait(rate, now), Duration::ZERO, "{rate:?}");
                bucket.take(1, rate, now);
            }
            let passed = (now - start).as_secs_f64() * f64::from(per_minute) / 60.0;
            assert!((passed - 3.0).abs() < 1e-3, "{rate:?}: three were added, not {passed}");
        }
    }

    #[test]
    fn an_overdraft_extends_the_wait() {
        let (rate, now) = (rate(600, 600), Instant::now());
        let mut bucket = Bucket::full(now);
        bucket.take(900, rate, now);
        assert_eq!(
            bucket.window(rate, now),
            Window { limit: 600, remaining: 0, reset: Duration::from_secs(90) }
        );
        assert_eq!(bucket.wait(rate, now), Duration::from_millis(30_100));
        let later = now + Duration::from_secs(90);
        assert!(bucket.is_full(later) && !bucket.is_full(later - Duration::from_nanos(1)));
        assert_eq!(
            bucket.window(rate, later + Duration::from_secs(900)).remaining,
            600,
            "the bucket holds no more than its capacity"
        );
    }

    #[test]
    fn the_largest_count_does_not_overflow() {
        let (rate, now) = (rate(1, u32::MAX), Instant::now());
        let mut bucket = Bucket::full(now);
        for _ in 0..10 {
            bucket.take(u64::MAX, rate, now);
        }
        assert!(bucket.wait(rate, now) > Duration::from_secs(3_600));
    }
}
