//! Delays before retries.

use rand::RngExt as _;

/// Exponential backoff with jitter, so that work that failed together is not retried together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Backoff {
    /// Delay before the first retry.
    pub(super) first_ms: u64,
    /// Ratio of each delay to the one before.
    pub(super) factor: u64,
    /// Longest delay, without jitter.
    pub(super) most_ms: u64,
}

impl Backoff {
    /// Returns an upper bound of all delays.
    pub(super) fn longest_ms(self) -> u64 {
        self.most_ms + self.most_ms / 4
    }

    /// Returns the delay after this many attempts. Jitter adds up to a quarter.
    pub(super) fn delay_ms(self, attempt: u32) -> u64 {
        let exponent = attempt.saturating_sub(1);
        let delay = self.factor.saturating_pow(exponent).saturating_mul(self.first_ms).min(self.most_ms);
        delay + rand::rng().random_range(0..=delay / 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_a_limit_with_jitter() {
        let backoff = Backoff { first_ms: 2_000, factor: 2, most_ms: 60_000 };
        for (attempt, least) in [(1, 2_000), (2, 4_000), (5, 32_000), (6, 60_000), (200, 60_000)] {
            let delays: Vec<u64> = (0..50).map(|_| backoff.delay_ms(attempt)).collect();
            assert!(delays.iter().all(|delay| (least..=least + least / 4).contains(delay)), "{delays:?}");
            assert!(delays.iter().any(|delay| *delay != delays[0]), "there is no jitter");
        }
    }
}
