//! `skep:agent/schedule` and `skep:agent/events`, in the SDK's types.

use std::time::Duration;

use serde_json::Value;

use super::bindings::skep::agent::{events, schedule};
use crate::host::{ScheduleOptions, When};
use crate::{EmitError, ScheduleError, ScheduleTiming, Scheduled};

pub(super) fn set(name: &str, when: &When<'_>, options: ScheduleOptions) -> Result<(), ScheduleError> {
    let ScheduleOptions { data, tries } = options;
    let options = schedule::Options { data: data.map(|data| data.to_string()), tries };
    let set = match when {
        When::After(delay) => schedule::after(name, milliseconds(*delay), &options),
        When::At(time_ms) => schedule::at(name, *time_ms, &options),
        When::Every(interval) => schedule::every(name, milliseconds(*interval), &options),
        When::Cron { expression, time_zone } => {
            let (expression, time_zone) = ((*expression).to_owned(), (*time_zone).to_owned());
            schedule::cron(name, &schedule::Calendar { expression, time_zone }, &options)
        }
    };
    set.map_err(|error| match error {
        schedule::ScheduleError::InvalidArgument(what) => ScheduleError::InvalidArgument(what),
        schedule::ScheduleError::QuotaExceeded(why) => ScheduleError::QuotaExceeded(why),
        schedule::ScheduleError::Denied(why) => ScheduleError::Denied(why),
    })
}

pub(super) fn cancel(name: &str) -> bool {
    schedule::cancel(name)
}

pub(super) fn list() -> Vec<Scheduled> {
    schedule::list().into_iter().map(scheduled_from).collect()
}

pub(super) fn emit(topic: &str, data: Option<Value>) -> Result<(), EmitError> {
    let data = data.map(|data| data.to_string());
    events::emit(topic, data.as_deref()).map_err(|error| match error {
        events::EmitError::InvalidArgument(what) => EmitError::InvalidArgument(what),
        events::EmitError::Denied(why) => EmitError::Denied(why),
        events::EmitError::QuotaExceeded(why) => EmitError::QuotaExceeded(why),
        events::EmitError::TooManyHops(limit) => EmitError::TooManyHops { limit },
    })
}

/// Converts a duration to milliseconds. It saturates; the host rejects values that are too large.
fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn scheduled_from(entry: schedule::Entry) -> Scheduled {
    let schedule::Entry { id, name, timing, data, due_at_ms, failed } = entry;
    let timing = match timing {
        schedule::Timing::At(time_ms) => ScheduleTiming::At(time_ms),
        schedule::Timing::Every(interval_ms) => ScheduleTiming::Every(Duration::from_millis(interval_ms)),
        schedule::Timing::Cron(schedule::Calendar { expression, time_zone }) => {
            ScheduleTiming::Cron { expression, time_zone }
        }
    };
    let data = data.and_then(|data| serde_json::from_str(&data).ok());
    Scheduled { id, name, timing, data, due_at_ms, failed }
}
