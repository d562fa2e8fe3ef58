//! Schedules that wake a session, set by the session itself or by its agent's manifest.
//!
//! A schedule is a row written by a turn's commit or by a deployment; `courier` calls the agent
//! when it is due.

pub(crate) mod manifest;
mod summary;
mod timing;

pub use manifest::ManifestSchedule;
pub use summary::{ScheduleState, ScheduleSummary};
pub use timing::ScheduleTiming;

use crate::event::MAX_DATA_BYTES;
use crate::text::excerpt;
use serde_json::Value;
use skep_store::NewSchedule;

/// Maximum size of a schedule's name.
const MAX_NAME_BYTES: usize = 128;
/// Default number of attempts for each due time.
const TRIES: u32 = 6;
const MAX_TRIES: u32 = 20;

/// A schedule to be set.
pub(crate) struct ScheduleRequest<'a> {
    pub(crate) name: &'a str,
    /// The session that the schedule wakes.
    pub(crate) target: &'a str,
    pub(crate) principal: &'a str,
    pub(crate) timing: ScheduleTiming,
    pub(crate) data: Option<&'a Value>,
    pub(crate) tries: Option<u32>,
}

impl ScheduleRequest<'_> {
    /// Validates the schedule and builds its row with this id. Errors say what would be valid.
    pub(crate) fn prepare(self, id: String, now_ms: u64) -> Result<NewSchedule, String> {
        let ScheduleRequest { name, target, principal, timing, data, tries } = self;
        if !(1..=MAX_NAME_BYTES).contains(&name.len()) || name.chars().any(char::is_control) {
            let shown = excerpt(name);
            return Err(format!(
                "the name of a schedule must have 1 to {MAX_NAME_BYTES} bytes without control characters, not {shown:?}"
            ));
        }
        let tries = tries.unwrap_or(TRIES);
        if !(1..=MAX_TRIES).contains(&tries) {
            return Err(format!("a schedule can be tried 1 to {MAX_TRIES} times, not {tries}"));
        }
        let data = data.map(|data| serde_json::to_vec(data).expect("JSON values always serialize"));
        let bytes = data.as_ref().map_or(0, Vec::len);
        if bytes > MAX_DATA_BYTES {
            return Err(format!(
                "the data of a schedule has {bytes} bytes; at most {MAX_DATA_BYTES} are allowed, so keep larger data in \
                 the session's state"
            ));
        }
        Ok(NewSchedule {
            id,
            name: name.to_owned(),
            target: target.to_owned(),
            principal: principal.to_owned(),
            repeats: timing.repeats(),
            due_ms: timing.first(now_ms)?,
            timing: timing.encode(),
            data,
            tries,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(name: &str) -> ScheduleRequest<'_> {
        ScheduleRequest {
            name,
            target: "s",
            principal: "p",
            timing: ScheduleTiming::Every(5_000),
            data: None,
            tries: None,
        }
    }

    #[test]
    fn name_data_and_tries_are_limited() {
        let row = wanted("digest").prepare("1".into(), 10).expect("valid");
        assert_eq!((row.due_ms, row.tries, row.repeats), (5_010, TRIES, true));
        let large = Value::String("x".repeat(MAX_DATA_BYTES));
        for (refused, why) in [
            (wanted(""), "1 to 128"),
            (wanted("a\n"), "1 to 128"),
            (wanted(&"x".repeat(129)), "1 to 128"),
            (ScheduleRequest { tries: Some(0), ..wanted("a") }, "1 to 20 times"),
            (ScheduleRequest { tries: Some(21), ..wanted("a") }, "1 to 20 times"),
            (ScheduleRequest { data: Some(&large), ..wanted("a") }, "are allowed"),
        ] {
            let message = refused.prepare("1".into(), 10).expect_err(why);
            assert!(message.contains(why), "{message}");
        }
    }
}
