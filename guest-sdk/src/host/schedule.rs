//! Schedules as they cross between the SDK and its host.

use std::time::Duration;

use serde_json::Value;

/// When a schedule is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScheduleTiming {
    /// Once, at this time in milliseconds since 1970-01-01 UTC.
    At(u64),
    /// Repeatedly, at this interval.
    Every(Duration),
    /// At the times of a cron expression in a time zone.
    Cron {
        /// The cron expression: `minute hour day month weekday`, or a name such as `@daily`.
        expression: String,
        /// A name from the IANA time zone database, such as `Europe/Berlin`.
        time_zone: String,
    },
}

/// A schedule of the session. The function of `#[agent(on_alarm = …)]` is called when it is due.
#[derive(Debug, Clone, PartialEq)]
pub struct Scheduled {
    /// The id, which changes each time the schedule is set.
    pub id: String,
    /// The name, unique in the session.
    pub name: String,
    /// The timing that was requested.
    pub timing: ScheduleTiming,
    /// JSON that is passed to the alarm.
    pub data: Option<Value>,
    /// The next due time, or the one that is being attempted, in milliseconds since 1970-01-01 UTC.
    pub due_at_ms: u64,
    /// Why the schedule failed permanently, if it did. It stays listed until it is replaced or cancelled.
    pub failed: Option<String>,
}

/// The timing as requested from the host.
#[derive(Debug, Clone, PartialEq)]
pub enum When<'a> {
    After(Duration),
    At(u64),
    Every(Duration),
    Cron { expression: &'a str, time_zone: &'a str },
}

/// The settings of a schedule besides its timing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ScheduleOptions {
    pub data: Option<Value>,
    pub tries: Option<u32>,
}
