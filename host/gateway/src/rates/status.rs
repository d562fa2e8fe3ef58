//! Reports rate limits to clients: OpenAI's headers on every response, and the error of a refusal.

use super::bucket::Window;
use crate::ApiError;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use std::time::Duration;

/// The remaining allowance of a caller. If several limits apply, the one with the least remaining is reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RateStatus {
    pub requests: Option<Window>,
    pub tokens: Option<Window>,
}

/// The refusal of a request over a limit.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    /// Names the limit, its owner, and the setting that changes it.
    pub message: String,
    pub retry_after: Duration,
    pub status: RateStatus,
}

const REQUESTS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const TOKENS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

impl RateStatus {
    /// Adds the headers `x-ratelimit-*` of each limit that applies.
    pub fn write_headers(&self, headers: &mut HeaderMap) {
        for (names, window) in [(REQUESTS, self.requests), (TOKENS, self.tokens)] {
            let Some(window) = window else { continue };
            let values = [window.limit.into(), window.remaining.into(), duration(window.reset)];
            headers.extend(names.into_iter().zip(values));
        }
    }
}

impl Refusal {
    /// Returns the error that reports the refusal, without the headers of [`RateStatus::write_headers`].
    pub fn into_error(self) -> ApiError {
        let retry_after_ms = u32::try_from(milliseconds(self.retry_after)).unwrap_or(u32::MAX);
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", self.message);
        ApiError { retry_after_ms: Some(retry_after_ms), ..error }
    }
}

/// Formats a duration as OpenAI does: `17ms`, `8.64s`, `6m0s`. It is rounded up to a millisecond.
fn duration(time: Duration) -> HeaderValue {
    let ms = milliseconds(time);
    let (minutes, ms) = (ms / 60_000, ms % 60_000);
    let seconds = format!("{}.{:03}", ms / 1_000, ms % 1_000);
    let seconds = seconds.trim_end_matches('0').trim_end_matches('.');
    let text = match (minutes / 60, minutes % 60) {
        (0, 0) if ms < 1_000 => format!("{ms}ms"),
        (0, 0) => format!("{seconds}s"),
        (0, minutes) => format!("{minutes}m{seconds}s"),
        (hours, minutes) => format!("{hours}h{minutes}m{seconds}s"),
    };
    HeaderValue::try_from(text).expect("digits, letters and a dot are a valid header value")
}

fn milliseconds(time: Duration) -> u128 {
    time.as_nanos().div_ceil(1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_formatted_as_by_openai() {
        for (microseconds, expected) in [
            (0, "0ms"),
            (1, "1ms"),
            (17_000, "17ms"),
            (1_000_000, "1s"),
            (8_640_000, "8.64s"),
            (20_000_000, "20s"),
            (360_000_000, "6m0s"),
            (72_500_000, "1m12.5s"),
            (3_600_000_000, "1h0m0s"),
        ] {
            assert_eq!(duration(Duration::from_micros(microseconds)), expected);
        }
    }
}
