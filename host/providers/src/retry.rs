//! The wait before a request is sent again.

use std::time::Duration;

use rand::RngExt as _;
use reqwest::header::HeaderMap;

use crate::options::RetryOptions;

/// Returns the wait that a response asks for. A date instead of a number of seconds is ignored.
pub(crate) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let number = |name: &str| {
        let number: f64 = headers.get(name)?.to_str().ok()?.trim().parse().ok()?;
        (number >= 0.0).then_some(number)
    };
    let seconds = number("retry-after-ms").map(|ms| ms / 1e3).or_else(|| number("retry-after"))?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// Returns the wait after `failed` attempts, or `None` if the server asks for a longer one than is allowed.
/// Waits are spread, so that requests that failed together are not sent together again.
pub(crate) fn wait(options: &RetryOptions, failed: u32, asked: Duration) -> Option<Duration> {
    if asked > options.max_wait {
        return None;
    }
    let doubled = options.first_wait.saturating_mul(1 << failed.saturating_sub(1).min(16));
    let own = doubled.mul_f64(rand::rng().random_range(0.5..1.5)).min(options.max_wait);
    // A server that names a time gets requests after it, not before.
    Some(if asked.is_zero() { own } else { asked + own.min(asked / 4) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_are_spread_and_respect_the_server() {
        let options = RetryOptions {
            first_wait: Duration::from_millis(100),
            max_wait: Duration::from_secs(1),
            ..RetryOptions::default()
        };
        for _ in 0..100 {
            let wait = |failed, asked| wait(&options, failed, Duration::from_millis(asked));
            let within = |wait: Option<Duration>, low, high| {
                let wait = wait.expect("a wait").as_millis();
                assert!((low..=high).contains(&wait), "{wait}");
            };
            within(wait(1, 0), 50, 150);
            within(wait(3, 0), 200, 600);
            within(wait(60, 0), 1000, 1000);
            within(wait(1, 800), 800, 1000);
            assert_eq!(wait(1, 1001), None);
        }
    }

    #[test]
    fn headers_tell_seconds_or_milliseconds() {
        let headers = |name: &'static str, value: &'static str| {
            [(name.parse().expect("a name"), value.parse().expect("a value"))]
                .into_iter()
                .collect::<HeaderMap>()
        };
        assert_eq!(retry_after(&headers("retry-after", "2")), Some(Duration::from_secs(2)));
        assert_eq!(retry_after(&headers("retry-after-ms", "1500")), Some(Duration::from_millis(1500)));
        for ignored in ["", "-1", "inf", "NaN", "Wed, 21 Oct 2015 07:28:00 GMT", "1e300"] {
            assert_eq!(retry_after(&headers("retry-after", ignored)), None, "{ignored}");
        }
    }
}
