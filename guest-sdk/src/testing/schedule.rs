//! Schedules and events in a test. They are recorded but never triggered.

use std::time::Duration;

use serde_json::Value;

use crate::host::{ScheduleOptions, When};
use crate::{EmitError, ScheduleError, ScheduleTiming, Scheduled};

/// The limits of the WIT interface.
const MAX_NAME_BYTES: usize = 128;
const MIN_INTERVAL: Duration = Duration::from_secs(1);
const MAX_TOPIC_BYTES: usize = 128;

/// An event that the agent emitted.
#[derive(Debug, Clone, PartialEq)]
pub struct Emitted {
    /// The topic, such as `order.paid`.
    pub topic: String,
    /// The payload, as JSON.
    pub data: Option<Value>,
}

/// Returns the schedule that a turn at `now_ms` sets. Cron expressions are not evaluated in a test, so the
/// due time of such a schedule is the time of the turn.
pub fn scheduled(
    name: &str,
    when: &When<'_>,
    options: ScheduleOptions,
    now_ms: u64,
) -> Result<Scheduled, ScheduleError> {
    let invalid = |what: &str| Err(ScheduleError::InvalidArgument(what.to_owned()));
    if !(1..=MAX_NAME_BYTES).contains(&name.len()) {
        return invalid("the name of a schedule must have 1 to 128 bytes");
    }
    let after = |duration: &Duration| now_ms + u64::try_from(duration.as_millis()).unwrap_or(u64::MAX / 2);
    let (timing, due_at_ms) = match when {
        When::After(length) | When::Every(length) if *length < MIN_INTERVAL => {
            return invalid(
                "a schedule cannot be due in less than a second, or more often than once a second",
            );
        }
        When::After(delay) => (ScheduleTiming::At(after(delay)), after(delay)),
        When::At(time_ms) => {
            let due = (*time_ms).max(after(&MIN_INTERVAL));
            (ScheduleTiming::At(due), due)
        }
        When::Every(interval) => (ScheduleTiming::Every(*interval), after(interval)),
        When::Cron { expression, .. }
            if expression.split_whitespace().count() != 5 && !expression.starts_with('@') =>
        {
            return invalid("a cron expression must have five fields: minute hour day month weekday");
        }
        When::Cron { expression, time_zone } => {
            let (expression, time_zone) = ((*expression).to_owned(), (*time_zone).to_owned());
            (ScheduleTiming::Cron { expression, time_zone }, now_ms)
        }
    };
    let id = format!("{name}-{now_ms}");
    Ok(Scheduled { id, name: name.to_owned(), timing, data: options.data, due_at_ms, failed: None })
}

/// Checks a topic as the host does: dotted names of at most 128 bytes that do not begin with `skep.`.
pub fn check_topic(topic: &str) -> Result<(), EmitError> {
    let is_part =
        |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    if topic.len() > MAX_TOPIC_BYTES || !topic.split('.').all(is_part) {
        return Err(EmitError::InvalidArgument(format!(
            "{topic:?} is not a valid topic; use dotted names such as order.paid, with letters, digits, - and _"
        )));
    }
    if topic.starts_with("skep.") {
        return Err(EmitError::Denied("topics that begin with `skep.` are reserved for the host".to_owned()));
    }
    Ok(())
}
