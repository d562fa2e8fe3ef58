//! Schedules: what wakes a session, set by the session itself or by the manifest of its agent.
//!
//! A schedule is a row that a turn's commit, or a deployment, writes; `courier` calls the agent when it is due.

pub(crate) mod manifest;
mod summary;
mod timing;

pub use manifest::ManifestSchedule;
pub use summary::{ScheduleState, ScheduleSummary};
pub use timing::ScheduleTiming;

use crate::event::MAX_DATA_BYTES;
use serde_json::Value;
use skep_store::NewSchedule;

/// Of the name of a schedule.
const MAX_NAME_BYTES: usize = 128;
/// How often each time is tried, unless the schedule says so.
const TRIES: u32 = 6;
const MAX_TRIES: u32 = 20;

/// What is to be set.
pub(crate) struct Wanted<'a> {
    pub(crate) name: &'a str,
    /// The session that it wakes.
    pub(crate) target: &'a str,
    pub(crate) principal: &'a str,
    pub(crate) timing: ScheduleTiming,
    pub(crate) data: Option<&'a Value>,
    pub(crate) tries: Option<u32>,
}

impl Wanted<'_> {
    /// The row of it, under this id. What is wrong with it names what would be right.
    pub(crate) fn prepare(self, id: String, now_ms: u64) -> Result<NewSchedule, String> {
        let Wanted { name, target, principal, timing, data, tries } = self;
        if !(1..=MAX_NAME_BYTES).contains(&name.len()) || name.chars().any(char::is_control) {
            let shown: String = name.chars().take(80).collect();
            return Err(format!(
                "the name of a schedule has 1 to {MAX_NAME_BYTES} printable bytes, not {shown:?}"
            ));
        }
        let tries = tries.unwrap_or(TRIES);
        if !(1..=MAX_TRIES).contains(&tries) {
            return Err(format!("a schedule is tried 1 to {MAX_TRIES} times, not {tries}"));
        }
        let data = data.map(|data| serde_json::to_vec(data).expect("JSON is always JSON"));
        let bytes = data.as_ref().map_or(0, Vec::len);
        if bytes > MAX_DATA_BYTES {
            return Err(format!(
                "the data of a schedule has {bytes} bytes; {MAX_DATA_BYTES} are allowed, keep more in the state"
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

    fn wanted(name: &str) -> Wanted<'_> {
        Wanted {
            name,
            target: "s",
            principal: "p",
            timing: ScheduleTiming::Every(5_000),
            data: None,
            tries: None,
        }
    }

    #[test]
    fn a_schedule_is_bounded_in_name_data_and_tries() {
        let row = wanted("digest").prepare("1".into(), 10).expect("fine");
        assert_eq!((row.due_ms, row.tries, row.repeats), (5_010, TRIES, true));
        let large = Value::String("x".repeat(MAX_DATA_BYTES));
        for (refused, why) in [
            (wanted(""), "1 to 128"),
            (wanted("a\n"), "1 to 128"),
            (wanted(&"x".repeat(129)), "1 to 128"),
            (Wanted { tries: Some(0), ..wanted("a") }, "1 to 20 times"),
            (Wanted { tries: Some(21), ..wanted("a") }, "1 to 20 times"),
            (Wanted { data: Some(&large), ..wanted("a") }, "are allowed"),
        ] {
            let message = refused.prepare("1".into(), 10).expect_err(why);
            assert!(message.contains(why), "{message}");
        }
    }
}
