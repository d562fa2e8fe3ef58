//! The time after which a file is deleted, as clients choose it.

use crate::ApiError;

/// Bounds of the time in seconds. The upper one is the default.
const SECONDS: std::ops::RangeInclusive<u64> = 3_600..=2_592_000;
const ANCHOR: &str = "created_at";

/// Checks the event from which the time counts.
pub(super) fn check(field: &str, anchor: &str) -> Result<(), ApiError> {
    match anchor {
        ANCHOR => Ok(()),
        other => {
            let message = format!("the anchor is {other:?}; it must be {ANCHOR:?}");
            Err(ApiError::parameter(field, message))
        }
    }
}

/// Returns the time, which is the default if none is given.
pub(super) fn seconds(field: &str, given: Option<u64>) -> Result<u64, ApiError> {
    match given {
        None => Ok(*SECONDS.end()),
        Some(seconds) if SECONDS.contains(&seconds) => Ok(seconds),
        Some(_) => {
            let (least, most) = (SECONDS.start(), SECONDS.end());
            let message = format!("the time until the file is deleted must be {least} to {most} seconds");
            Err(ApiError::parameter(field, message))
        }
    }
}
