//! The `[[schedule]]` entries of `agent.toml`: schedules that exist while their version is active.

use super::{ScheduleRequest, ScheduleTiming};
use crate::{RuntimeError, SessionId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use skep_store::NewSchedule;

const MAX_SCHEDULES: usize = 64;
/// The moment for which a manifest is checked, 2026-01-01 UTC. A manifest has no times of its own, so the result is the
/// same for every other moment.
const CHECKED_AT_MS: u64 = 1_767_225_600_000;

/// A schedule of a manifest. Exactly one of `cron` and `every` must be set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestSchedule {
    /// Name, unique in the manifest.
    pub name: String,
    /// The session that the schedule wakes.
    pub session: String,
    /// Cron expression, such as `0 7 * * 1-5`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cron: Option<String>,
    /// Time zone of the cron expression. The default is UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_zone: Option<String>,
    /// Interval, such as `15m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every: Option<String>,
    /// Maximum number of attempts for each due time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tries: Option<u32>,
    /// Data passed to the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Value>,
}

impl ManifestSchedule {
    fn timing(&self) -> Result<ScheduleTiming, String> {
        match (&self.cron, &self.every, &self.time_zone) {
            (Some(cron), None, zone) => ScheduleTiming::cron(cron, zone.as_deref().unwrap_or("UTC")),
            (None, Some(every), None) => ScheduleTiming::every(interval_ms(every)?),
            (None, Some(_), Some(_)) => Err("time_zone applies only to cron; remove it, or use cron".to_owned()),
            _ => Err("exactly one of cron and every is required, such as cron = \"0 7 * * 1-5\" or every = \"15m\"".to_owned()),
        }
    }

    fn row(&self, principal: &str, now_ms: u64) -> Result<NewSchedule, String> {
        SessionId::new(&self.session).map_err(|error| error.to_string())?;
        let wanted = ScheduleRequest {
            name: &self.name,
            target: &self.session,
            principal,
            timing: self.timing()?,
            data: self.data.as_ref(),
            tries: self.tries,
        };
        wanted.prepare(uuid::Uuid::now_v7().simple().to_string(), now_ms)
    }
}

/// Checks the schedules of a manifest.
pub(crate) fn check(schedules: &[ManifestSchedule]) -> Result<(), RuntimeError> {
    let invalid = |message: String| Err(RuntimeError::Manifest { message });
    if schedules.len() > MAX_SCHEDULES {
        return invalid(format!("{} schedules; at most {MAX_SCHEDULES} are allowed", schedules.len()));
    }
    for (index, schedule) in schedules.iter().enumerate() {
        if schedules[..index].iter().any(|other| other.name == schedule.name) {
            return invalid(format!("schedule {:?} is defined twice; rename one", schedule.name));
        }
        if let Err(why) = schedule.row("", CHECKED_AT_MS) {
            return invalid(format!("schedule {:?}: {why}", schedule.name));
        }
    }
    Ok(())
}

/// Builds the rows for the schedules of a manifest that was checked.
pub(crate) fn rows(
    schedules: &[ManifestSchedule],
    principal: &str,
    now_ms: u64,
) -> Result<Vec<NewSchedule>, RuntimeError> {
    let rows = schedules.iter().map(|schedule| schedule.row(principal, now_ms));
    rows.collect::<Result<_, _>>().map_err(|message| RuntimeError::Manifest { message })
}

/// Parses a number followed by `s`, `m`, `h` or `d`.
fn interval_ms(text: &str) -> Result<u64, String> {
    let wrong =
        || format!("every = {text:?} is not an interval; write a number with s, m, h or d, such as \"15m\"");
    let (unit_at, unit) = text.char_indices().next_back().ok_or_else(wrong)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3_600,
        'd' => 86_400,
        _ => return Err(wrong()),
    };
    let number: u64 = text[..unit_at].trim_end().parse().map_err(|_| wrong())?;
    number.checked_mul(seconds * 1_000).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_has_a_number_and_a_unit() {
        assert_eq!(interval_ms("15m"), Ok(900_000));
        assert_eq!(interval_ms("2 h"), Ok(7_200_000));
        for bad in ["", "m", "15", "15ms", "-1s", "1.5h", "99999999999999999d", "1ä"] {
            assert!(interval_ms(bad).expect_err(bad).contains("such as \"15m\""));
        }
    }
}
