//! The limits of an upstream: requests in flight, and requests and tokens a minute.
//!
//! A request takes its share of both rates when it is admitted, and waits until the rates have caught up; a share
//! that could not be had within the longest wait is given back, and the request is refused. Requests that wait
//! for a slot in flight get it in the order of their arrival.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use crate::{failure::Failure, options::LimitOptions};

/// Retry delay for a request that found no free slot.
const RETRY_AFTER: Duration = Duration::from_secs(1);

pub(crate) struct Limits {
    slots: Arc<Semaphore>,
    requests: Option<Rate>,
    tokens: Option<Rate>,
    max_wait: Duration,
}

/// The share of one request, which ends when it is dropped.
pub(crate) struct Share {
    limits: Arc<Limits>,
    _slot: OwnedSemaphorePermit,
    /// The tokens that were taken before the request.
    tokens: f64,
    sent: bool,
}

impl Limits {
    pub(crate) fn new(options: &LimitOptions) -> Arc<Self> {
        Arc::new(Limits {
            slots: Arc::new(Semaphore::new(options.max_in_flight)),
            requests: options.requests_per_minute.map(Rate::new),
            tokens: options.tokens_per_minute.map(Rate::new),
            max_wait: options.max_wait,
        })
    }

    /// Waits until the limits allow a request of about `tokens` tokens. A request that they would not allow before
    /// `deadline`, which the caller enforces, is refused at once.
    pub(crate) async fn admit(self: &Arc<Self>, tokens: usize, deadline: Instant) -> Result<Share, Failure> {
        let until = Instant::now() + self.max_wait;
        let slot = tokio::time::timeout_at(until, self.slots.clone().acquire_owned()).await;
        let Ok(slot) = slot else {
            let message = "the limit of concurrent requests (`max_in_flight`) is reached".to_owned();
            return Err(Failure::Busy { message, retry_after: Some(RETRY_AFTER) });
        };
        let slot = slot.expect("the semaphore is never closed");
        let now = Instant::now();
        let tokens = self.tokens.as_ref().map_or(0.0, |rate| rate.at_most(tokens));
        // From here on, dropping the share gives back what it took.
        let share = Share { limits: self.clone(), _slot: slot, tokens, sent: false };
        let waits = [
            self.requests.as_ref().map(|rate| rate.take(1.0, now)),
            self.tokens.as_ref().map(|rate| rate.take(tokens, now)),
        ];
        let wait = waits.into_iter().flatten().max().unwrap_or_default();
        if !wait.is_zero() && now + wait > until.min(deadline) {
            let message = format!(
                "its rate limit (`requests_per_minute` or `tokens_per_minute`) is reached; retry in {:.1} s",
                wait.as_secs_f64()
            );
            return Err(Failure::Busy { message, retry_after: Some(wait) });
        }
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        Ok(share)
    }

    /// Returns the number of requests that could be sent now without waiting.
    pub(crate) fn free(&self) -> usize {
        let now = Instant::now();
        let requests = self.requests.as_ref().map_or(usize::MAX, |rate| rate.level(now) as usize);
        let has_tokens = self.tokens.as_ref().is_none_or(|rate| rate.level(now) >= 1.0);
        if has_tokens { self.slots.available_permits().min(requests) } else { 0 }
    }
}

impl Share {
    /// Records that the request is sent, so that it counts even if nobody waits for its answer.
    pub(crate) fn sent(&mut self) {
        self.sent = true;
    }

    /// Replaces the estimate with the tokens that the server counted.
    pub(crate) fn settle(&mut self, tokens: usize) {
        if let Some(rate) = &self.limits.tokens {
            rate.take(tokens as f64 - self.tokens, Instant::now());
            self.tokens = tokens as f64;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if !self.sent {
            let now = Instant::now();
            if let Some(rate) = &self.limits.requests {
                rate.take(-1.0, now);
            }
            if let Some(rate) = &self.limits.tokens {
                rate.take(-self.tokens, now);
            }
        }
    }
}

/// A token bucket that holds the amount of a minute and may be overdrawn: the debt is the wait.
struct Rate {
    per_minute: f64,
    bucket: Mutex<Bucket>,
}

struct Bucket {
    level: f64,
    at: Instant,
}

impl Rate {
    fn new(per_minute: u32) -> Self {
        let per_minute = f64::from(per_minute);
        Rate { per_minute, bucket: Mutex::new(Bucket { level: per_minute, at: Instant::now() }) }
    }

    /// Caps the amount at the capacity of one minute; a larger amount could never be granted.
    fn at_most(&self, amount: usize) -> f64 {
        (amount as f64).min(self.per_minute)
    }

    /// Takes an amount, which may be negative, and returns the time until the rate has caught up with it.
    fn take(&self, amount: f64, now: Instant) -> Duration {
        self.with(now, |bucket| {
            bucket.level = (bucket.level - amount).min(self.per_minute);
            let debt = (-bucket.level).max(0.0);
            Duration::try_from_secs_f64(debt * 60.0 / self.per_minute).unwrap_or(Duration::MAX / 2)
        })
    }

    fn level(&self, now: Instant) -> f64 {
        self.with(now, |bucket| bucket.level.max(0.0))
    }

    fn with<T>(&self, now: Instant, use_it: impl FnOnce(&mut Bucket) -> T) -> T {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let elapsed = now.saturating_duration_since(bucket.at).as_secs_f64();
        bucket.level = (bucket.level + elapsed * self.per_minute / 60.0).min(self.per_minute);
        bucket.at = bucket.at.max(now);
        use_it(&mut bucket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(requests: Option<u32>, tokens: Option<u32>, in_flight: usize) -> Arc<Limits> {
        Limits::new(&LimitOptions {
            requests_per_minute: requests,
            tokens_per_minute: tokens,
            max_in_flight: in_flight,
            max_wait: Duration::from_millis(50),
        })
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    #[test]
    fn a_rate_holds_a_minute_and_its_debt_is_the_wait() {
        let now = Instant::now();
        let rate = Rate::new(30);
        assert_eq!(rate.take(30.0, now), Duration::ZERO);
        assert_eq!(rate.take(1.0, now), Duration::from_secs(2));
        assert_eq!(rate.take(2.0, now), Duration::from_secs(6));
        assert_eq!(rate.level(now + Duration::from_secs(6)).round(), 0.0);
        assert_eq!(rate.level(now + Duration::from_secs(16)).round(), 5.0);
        assert_eq!(rate.level(now + Duration::from_secs(600)), 30.0);
        assert_eq!(rate.at_most(1000), 30.0);
    }

    #[tokio::test]
    async fn requests_beyond_the_rate_are_refused_and_take_nothing() {
        let limits = limits(Some(30), None, 100);
        assert_eq!(limits.free(), 30);
        for _ in 0..30 {
            limits.admit(1, later()).await.expect("admitted").sent();
        }
        assert_eq!(limits.free(), 0);
        for _ in 0..10 {
            let error = limits.admit(1, later()).await.err().expect("two seconds are too long");
            let wait = error.again().expect("a wait");
            assert!(wait > Duration::from_secs(1) && wait <= Duration::from_secs(2), "{wait:?}");
        }
    }

    #[tokio::test]
    async fn tokens_are_settled_and_unsent_requests_cost_nothing() {
        let limits = limits(None, Some(600), 100);
        drop(limits.admit(600, later()).await.expect("admitted"));
        let mut share = limits.admit(10_000, later()).await.expect("the estimate is bounded");
        share.sent();
        assert!(limits.admit(20, later()).await.is_err(), "all tokens are taken");
        share.settle(500);
        limits.admit(90, later()).await.expect("100 are left").sent();
        assert!(limits.admit(50, later()).await.is_err());
    }

    #[tokio::test]
    async fn a_slot_in_flight_is_waited_for_until_the_deadline() {
        let limits = limits(None, None, 1);
        let share = limits.admit(1, later()).await.expect("free");
        let start = Instant::now();
        let error = limits.admit(1, later()).await.err().expect("full");
        assert_eq!(error.outcome(), "busy");
        assert!(start.elapsed() >= Duration::from_millis(50));
        let (waiting, ()) = tokio::join!(limits.admit(1, later()), async { drop(share) });
        waiting.expect("free again");
    }
}
