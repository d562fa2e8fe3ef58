//! Schedules that wake the session, set by name and committed with the turn.

use std::time::Duration;

use serde::Serialize;

use crate::error::ScheduleError;
use crate::host::{Host, ScheduleOptions, Scheduled, When};

/// The session's schedules. See [`Context::schedule`](crate::Context::schedule).
///
/// Setting a name again replaces its schedule. All changes are committed when the turn succeeds, and dropped
/// when it fails.
#[derive(Clone, Copy)]
pub struct Schedule<'a> {
    pub(crate) host: &'a dyn Host,
    pub(crate) tries: Option<u32>,
}

impl Schedule<'_> {
    /// Sets the number of attempts for each due time before it fails permanently. The default is 6.
    pub fn tries(self, tries: u32) -> Self {
        Self { tries: Some(tries), ..self }
    }

    /// Sets an alarm that is due once, after a delay of at least one second. `data` is passed to the alarm;
    /// use `&()` for none.
    pub fn after<T: Serialize + ?Sized>(
        &self,
        name: &str,
        delay: Duration,
        data: &T,
    ) -> Result<(), ScheduleError> {
        self.set(name, &When::After(delay), data)
    }

    /// Sets an alarm that is due once, at this time in milliseconds since 1970-01-01 UTC. A time in the past
    /// is due in one second.
    pub fn at<T: Serialize + ?Sized>(&self, name: &str, time_ms: u64, data: &T) -> Result<(), ScheduleError> {
        self.set(name, &When::At(time_ms), data)
    }

    /// Sets an alarm that is due repeatedly, the first time after one interval. The minimum interval is one
    /// second.
    pub fn every<T: Serialize + ?Sized>(
        &self,
        name: &str,
        interval: Duration,
        data: &T,
    ) -> Result<(), ScheduleError> {
        self.set(name, &When::Every(interval), data)
    }

    /// Sets an alarm that is due at the times of a cron expression, `minute hour day month weekday`, in a
    /// time zone such as `Europe/Berlin`.
    pub fn cron<T: Serialize + ?Sized>(
        &self,
        name: &str,
        expression: &str,
        time_zone: &str,
        data: &T,
    ) -> Result<(), ScheduleError> {
        self.set(name, &When::Cron { expression, time_zone }, data)
    }

    /// Cancels a schedule. Returns whether it existed.
    pub fn cancel(&self, name: &str) -> bool {
        self.host.schedule_cancel(name)
    }

    /// Returns the schedules of the session by name, with the changes of this turn applied.
    pub fn list(&self) -> Vec<Scheduled> {
        self.host.schedule_list()
    }

    fn set<T: Serialize + ?Sized>(&self, name: &str, when: &When<'_>, data: &T) -> Result<(), ScheduleError> {
        let data = serde_json::to_value(data);
        let data = data.map_err(|error| {
            ScheduleError::InvalidArgument(format!("the data cannot be written as JSON: {error}"))
        })?;
        let options = ScheduleOptions { data: Some(data).filter(|data| !data.is_null()), tries: self.tries };
        self.host.schedule_set(name, when, options)
    }
}
