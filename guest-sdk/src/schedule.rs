//! What wakes the session: schedules, set by name and committed with the turn.

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use crate::ScheduleError;
use crate::host::Host;

/// When a schedule is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScheduleTiming {
    /// Once, in milliseconds since 1970-01-01 UTC.
    At(u64),
    /// Again and again.
    Every(Duration),
    /// By the calendar of a time zone.
    Cron {
        /// `minute hour day month weekday`, or a name such as `@daily`.
        expression: String,
        /// Of the IANA database, such as `Europe/Berlin`.
        time_zone: String,
    },
}

/// A schedule of the session. The function of `#[agent(on_alarm = …)]` is called when it is due.
#[derive(Debug, Clone, PartialEq)]
pub struct Scheduled {
    /// Another one each time that it is set.
    pub id: String,
    /// Unique in the session.
    pub name: String,
    /// When it is due, as it was asked for.
    pub timing: ScheduleTiming,
    /// JSON that the alarm brings.
    pub data: Option<Value>,
    /// The time that comes, or that is being tried.
    pub due_at_ms: u64,
    /// Why it was given up, if it was. It stays until it is replaced or cancelled.
    pub failed: Option<String>,
}

/// What the host is asked for.
#[derive(Debug, Clone, PartialEq)]
pub enum When<'a> {
    After(Duration),
    At(u64),
    Every(Duration),
    Cron { expression: &'a str, time_zone: &'a str },
}

/// What comes with it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ScheduleOptions {
    pub data: Option<Value>,
    pub tries: Option<u32>,
}

/// The session's schedules. See [`Context::schedule`](crate::Context::schedule).
///
/// Setting a name again replaces its schedule. What is set and cancelled is committed when the turn ends well, and only
/// then.
#[derive(Clone, Copy)]
pub struct Schedule<'a> {
    pub(crate) host: &'a dyn Host,
    pub(crate) tries: Option<u32>,
}

impl Schedule<'_> {
    /// How often each time is tried before it is given up; 6 unless it is set here.
    pub fn tries(self, tries: u32) -> Self {
        Self { tries: Some(tries), ..self }
    }

    /// Once, so long from now; a second at least. `data` is what the alarm brings, `&()` for nothing.
    pub fn after<T: Serialize + ?Sized>(
        &self,
        name: &str,
        delay: Duration,
        data: &T,
    ) -> Result<(), ScheduleError> {
        self.set(name, &When::After(delay), data)
    }

    /// Once, at this time in milliseconds since 1970-01-01 UTC. A time that has passed is due in a second.
    pub fn at<T: Serialize + ?Sized>(&self, name: &str, time_ms: u64, data: &T) -> Result<(), ScheduleError> {
        self.set(name, &When::At(time_ms), data)
    }

    /// Again and again, the first time after one interval of a second at least.
    pub fn every<T: Serialize + ?Sized>(
        &self,
        name: &str,
        interval: Duration,
        data: &T,
    ) -> Result<(), ScheduleError> {
        self.set(name, &When::Every(interval), data)
    }

    /// Whenever the calendar says so: `minute hour day month weekday` in a time zone such as `Europe/Berlin`.
    pub fn cron<T: Serialize + ?Sized>(
        &self,
        name: &str,
        expression: &str,
        time_zone: &str,
        data: &T,
    ) -> Result<(), ScheduleError> {
        self.set(name, &When::Cron { expression, time_zone }, data)
    }

    /// Whether it was there.
    pub fn cancel(&self, name: &str) -> bool {
        self.host.schedule_cancel(name)
    }

    /// Those of the session by name, with what this turn did to them.
    pub fn list(&self) -> Vec<Scheduled> {
        self.host.schedule_list()
    }

    fn set<T: Serialize + ?Sized>(&self, name: &str, when: &When<'_>, data: &T) -> Result<(), ScheduleError> {
        let data = serde_json::to_value(data);
        let data = data.map_err(|error| ScheduleError::InvalidArgument(format!("the data: {error}")))?;
        let options = ScheduleOptions { data: Some(data).filter(|data| !data.is_null()), tries: self.tries };
        self.host.schedule_set(name, when, options)
    }
}
