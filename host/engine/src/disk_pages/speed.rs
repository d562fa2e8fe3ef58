//! The rate at which a replica computes, which decides between computing pages and getting them from elsewhere.

use std::time::Duration;

use super::promotion::PAGES_AT_ONCE;

/// Assumed number of tokens that are computed in a second, until it has been measured. It is the speed of a slow machine,
/// so that the first prefix after a start is read rather than computed.
const TOKENS_PER_S: f64 = 500.0;
/// Until the speed of computing has been measured, a read is abandoned if it takes longer than expected by this time.
const FIRST_PATIENCE: Duration = Duration::from_secs(2);
/// A read is abandoned after this multiple of the estimated compute time, because a slow machine is slow at both.
const PATIENCE: u32 = 2;
/// A step with fewer tokens says little about the speed of prefills.
const MEASURED_TOKENS: usize = 48;
/// Weight of the newest step in the moving average.
const NEWEST: f64 = 0.25;

/// The recent rate of a replica.
#[derive(Default)]
pub(super) struct Speed {
    /// Tokens that are computed in a second, if it was measured.
    tokens_per_s: Option<f64>,
    /// Duration of a step.
    step_s: f64,
}

impl Speed {
    /// Records a step of this many tokens.
    pub fn record_step(&mut self, tokens: usize, took: Duration) {
        let took = took.as_secs_f64().max(1e-6);
        self.step_s += NEWEST * (took - self.step_s);
        if tokens >= MEASURED_TOKENS {
            let newest = tokens as f64 / took;
            let before = self.tokens_per_s.unwrap_or(newest);
            self.tokens_per_s = Some(before + NEWEST * (newest - before));
        }
    }

    /// Returns whether a prefill has been measured.
    pub fn is_measured(&self) -> bool {
        self.tokens_per_s.is_some()
    }

    /// Returns the time that computing these tokens is expected to take.
    pub fn compute_time(&self, tokens: usize) -> Duration {
        Duration::from_secs_f64(tokens as f64 / self.tokens_per_s.unwrap_or(TOKENS_PER_S).max(1.0))
    }

    /// Returns the time that steps take meanwhile while pages are taken between them.
    pub fn take_time(&self, pages: usize) -> Duration {
        Duration::from_secs_f64(pages.div_ceil(PAGES_AT_ONCE) as f64 * self.step_s)
    }

    /// Returns how long a read may take that is expected to take `read`, in place of computing for `compute`.
    pub fn patience(&self, read: Duration, compute: Duration) -> Duration {
        match self.tokens_per_s {
            Some(_) => PATIENCE * compute,
            None => (PATIENCE * compute).min(PATIENCE * read + FIRST_PATIENCE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unmeasured_speed_does_not_make_a_request_wait_long_for_the_disk() {
        let mut speed = Speed::default();
        // A prompt of 8,000 tokens on a disk that is thought to take a tenth of a second.
        let (read, compute) = (Duration::from_millis(100), speed.compute_time(8_000));
        assert_eq!(compute, Duration::from_secs(16));
        assert_eq!(speed.patience(read, compute), Duration::from_millis(2_200));
        assert_eq!(speed.patience(read, Duration::from_millis(50)), Duration::from_millis(100));
        speed.record_step(1_000, Duration::from_secs(1));
        let compute = speed.compute_time(8_000);
        assert_eq!(compute, Duration::from_secs(8), "the first measurement counts in full");
        assert_eq!(speed.patience(read, compute), Duration::from_secs(16));
    }

    #[test]
    fn long_steps_make_a_read_slow() {
        let mut speed = Speed::default();
        (0..100).for_each(|_| speed.record_step(1, Duration::from_millis(50)));
        let seconds = speed.take_time(160).as_secs_f64();
        assert!((0.99..=1.01).contains(&seconds), "{seconds} s for 20 steps");
        assert_eq!(speed.compute_time(500), Duration::from_secs(1), "steps of one token are no measurement");
    }
}
