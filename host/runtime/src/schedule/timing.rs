//! Computes when a schedule is due: once, at intervals, or by the calendar of a time zone.

use croner::{
    Cron,
    parser::{CronParser, Seconds, Year},
};
use jiff::{Timestamp, Zoned, tz::TimeZone};
use serde::{Deserialize, Serialize};

/// Minimum interval, and minimum delay of anything: a schedule alone must not keep a host busy.
pub(crate) const MIN_INTERVAL_MS: u64 = 1_000;
/// Ten years.
const MAX_DELAY_MS: u64 = 10 * 366 * 24 * 3600 * 1000;
/// Maximum number of missed times that are counted.
const MAX_MISSED: u32 = 10_000;

/// The timing of a schedule, as requested and as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleTiming {
    /// Once, at a time in milliseconds since 1970-01-01 UTC.
    At(u64),
    /// Repeatedly, with this many milliseconds in between.
    Every(u64),
    Cron {
        /// Five fields, or a name such as `@daily`.
        expression: String,
        /// Name from the IANA database, such as `Europe/Berlin`.
        time_zone: String,
    },
}

impl ScheduleTiming {
    pub(crate) fn after(now_ms: u64, delay_ms: u64) -> Result<Self, String> {
        if !(MIN_INTERVAL_MS..=MAX_DELAY_MS).contains(&delay_ms) {
            return Err(format!("the delay is {delay_ms} ms; it may be {MIN_INTERVAL_MS} to {MAX_DELAY_MS}"));
        }
        Ok(ScheduleTiming::At(now_ms + delay_ms))
    }

    /// Creates a timing that is due once. A past time is due after the minimum interval.
    pub(crate) fn at(now_ms: u64, time_ms: u64) -> Result<Self, String> {
        if time_ms > now_ms + MAX_DELAY_MS {
            return Err(format!("{time_ms} is more than {MAX_DELAY_MS} ms from now"));
        }
        Ok(ScheduleTiming::At(time_ms.max(now_ms + MIN_INTERVAL_MS)))
    }

    pub(crate) fn every(interval_ms: u64) -> Result<Self, String> {
        if !(MIN_INTERVAL_MS..=MAX_DELAY_MS).contains(&interval_ms) {
            return Err(format!(
                "the interval is {interval_ms} ms; it may be {MIN_INTERVAL_MS} to {MAX_DELAY_MS}"
            ));
        }
        Ok(ScheduleTiming::Every(interval_ms))
    }

    pub(crate) fn cron(expression: &str, time_zone: &str) -> Result<Self, String> {
        calendar(expression, time_zone)?;
        Ok(ScheduleTiming::Cron { expression: expression.to_owned(), time_zone: time_zone.to_owned() })
    }

    pub(crate) fn repeats(&self) -> bool {
        !matches!(self, ScheduleTiming::At(_))
    }

    /// Returns the first time after `now_ms`. For `At`, this is its time.
    pub(crate) fn first(&self, now_ms: u64) -> Result<u64, String> {
        match self {
            ScheduleTiming::At(at_ms) => Ok(*at_ms),
            ScheduleTiming::Every(interval_ms) => Ok(now_ms + interval_ms),
            ScheduleTiming::Cron { expression, time_zone } => {
                let (cron, zone) = calendar(expression, time_zone)?;
                occurrence(&cron, &zone, now_ms).ok_or_else(|| {
                    format!("cron {expression:?} is never due in the next years; write another")
                })
            }
        }
    }

    /// Returns the latest time that is not after `now_ms`, starting from the due time `due_ms`, and
    /// how many times before it were missed.
    pub(crate) fn latest(&self, due_ms: u64, now_ms: u64) -> (u64, u32) {
        let mut latest = (due_ms, 0);
        match self {
            ScheduleTiming::At(_) => {}
            ScheduleTiming::Every(interval_ms) => {
                let passed = now_ms.saturating_sub(due_ms) / interval_ms.max(&1);
                let missed = u32::try_from(passed).unwrap_or(u32::MAX).min(MAX_MISSED);
                latest = (due_ms + passed * interval_ms, missed);
            }
            ScheduleTiming::Cron { expression, time_zone } => {
                let Ok((cron, zone)) = calendar(expression, time_zone) else { return latest };
                while let Some(next) = occurrence(&cron, &zone, latest.0).filter(|next| *next <= now_ms) {
                    latest = (next, latest.1 + 1);
                    if latest.1 == MAX_MISSED {
                        let before = zoned(now_ms, &zone).and_then(|now| {
                            cron.find_previous_occurrence(&now, true).ok().map(|last| unix_ms(&last))
                        });
                        latest.0 = before.unwrap_or(latest.0).max(latest.0);
                        break;
                    }
                }
            }
        }
        latest
    }

    /// Returns the time after the due time `due_ms`, or `None` if there is none.
    pub(crate) fn next(&self, due_ms: u64) -> Option<u64> {
        match self {
            ScheduleTiming::At(_) => None,
            ScheduleTiming::Every(interval_ms) => Some(due_ms + interval_ms),
            ScheduleTiming::Cron { expression, time_zone } => {
                let (cron, zone) = calendar(expression, time_zone).ok()?;
                occurrence(&cron, &zone, due_ms)
            }
        }
    }

    pub(crate) fn encode(&self) -> String {
        serde_json::to_string(self).expect("numbers and strings always serialize")
    }

    pub(crate) fn decode(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| format!("the stored timing is unreadable: {error}"))
    }
}

fn calendar(expression: &str, time_zone: &str) -> Result<(Cron, TimeZone), String> {
    if expression.len() > 256 {
        return Err(format!("a cron expression has {} bytes; at most 256 are allowed", expression.len()));
    }
    let parser = CronParser::builder().seconds(Seconds::Disallowed).year(Year::Disallowed).build();
    let cron = parser.parse(expression).map_err(|error| {
        format!("cron {expression:?}: {error}; five fields are allowed: minute hour day month weekday")
    })?;
    let zone = TimeZone::get(time_zone).map_err(|_| {
        format!(
            "unknown time zone {time_zone:?}; use a name from the IANA database, such as Europe/Berlin or UTC"
        )
    })?;
    Ok((cron, zone))
}

fn occurrence(cron: &Cron, zone: &TimeZone, after_ms: u64) -> Option<u64> {
    cron.find_next_occurrence(&zoned(after_ms, zone)?, false).ok().map(|next| unix_ms(&next))
}

fn zoned(at_ms: u64, zone: &TimeZone) -> Option<Zoned> {
    let at = Timestamp::from_millisecond(i64::try_from(at_ms).ok()?).ok()?;
    Some(at.to_zoned(zone.clone()))
}

fn unix_ms(time: &Zoned) -> u64 {
    u64::try_from(time.timestamp().as_millisecond()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(time: &str) -> u64 {
        u64::try_from(time.parse::<Timestamp>().expect("a time").as_millisecond()).expect("after 1970")
    }

    fn text(at_ms: u64) -> String {
        Timestamp::from_millisecond(at_ms.cast_signed()).expect("a time").to_string()
    }

    fn times(timing: &ScheduleTiming, from: &str, count: usize) -> Vec<String> {
        let mut at = timing.first(ms(from)).expect("the timing has a first time");
        let mut times = vec![text(at)];
        while times.len() < count {
            at = timing.next(at).expect("it repeats");
            times.push(text(at));
        }
        times
    }

    #[test]
    fn cron_follows_the_local_time_across_daylight_saving_changes() {
        let seven = ScheduleTiming::cron("0 7 * * *", "Europe/Berlin").expect("valid");
        assert_eq!(
            times(&seven, "2026-03-27T12:00:00Z", 3),
            ["2026-03-28T06:00:00Z", "2026-03-29T05:00:00Z", "2026-03-30T05:00:00Z"]
        );
        // 02:30 does not exist on the 29th, so the schedule is due when the clock has jumped.
        let gap = ScheduleTiming::cron("30 2 * * *", "Europe/Berlin").expect("valid");
        assert_eq!(times(&gap, "2026-03-28T12:00:00Z", 2), ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]);
        // 02:30 occurs twice on 25 October and counts once.
        assert_eq!(times(&gap, "2026-10-24T12:00:00Z", 2), ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]);
        let weekdays = ScheduleTiming::cron("0 7 * * 1-5", "UTC").expect("valid");
        assert_eq!(
            times(&weekdays, "2026-11-20T08:00:00Z", 2),
            ["2026-11-23T07:00:00Z", "2026-11-24T07:00:00Z"]
        );
    }

    #[test]
    fn missed_times_are_combined_into_the_latest_one() {
        let due = ms("2026-01-01T00:00:00Z");
        let quarter = ScheduleTiming::every(900_000).expect("long enough");
        assert_eq!(quarter.latest(due, due + 899_999), (due, 0));
        assert_eq!(quarter.latest(due, due + 4 * 900_000 + 1), (due + 4 * 900_000, 4));
        assert_eq!(quarter.next(due), Some(due + 900_000));
        assert_eq!(quarter.latest(due, due - 5), (due, 0), "a clock that was set back");
        let daily = ScheduleTiming::cron("@daily", "UTC").expect("valid");
        let now = ms("2026-01-03T12:00:00Z");
        assert_eq!(daily.latest(due, now), (ms("2026-01-03T00:00:00Z"), 2));
        assert_eq!(daily.next(due), Some(ms("2026-01-02T00:00:00Z")));
        let minutes = ScheduleTiming::cron("* * * * *", "UTC").expect("valid");
        assert_eq!(
            minutes.latest(due, ms("2027-01-01T00:00:30Z")),
            (ms("2027-01-01T00:00:00Z"), MAX_MISSED),
            "counting stops at the maximum"
        );
        let once = ScheduleTiming::At(due);
        assert_eq!((once.latest(due, now), once.next(due)), ((due, 0), None));
    }

    #[test]
    fn invalid_timings_are_rejected_with_a_hint() {
        let now = ms("2026-01-01T00:00:00Z");
        for (refused, why) in [
            (ScheduleTiming::after(now, 999), "it may be 1000 to"),
            (ScheduleTiming::after(now, u64::MAX), "it may be 1000 to"),
            (ScheduleTiming::at(now, u64::MAX - 1), "from now"),
            (ScheduleTiming::every(10), "it may be 1000 to"),
            (ScheduleTiming::cron("61 * * * *", "UTC"), "five fields are allowed"),
            (ScheduleTiming::cron("* * * * * *", "UTC"), "five fields are allowed"),
            (ScheduleTiming::cron("0 7 * * *", "Berlin"), "such as Europe/Berlin"),
            (ScheduleTiming::cron(&"*".repeat(300), "UTC"), "at most 256"),
        ] {
            let message = refused.expect_err(why);
            assert!(message.contains(why), "{message}");
        }
        let never = ScheduleTiming::cron("0 0 30 2 *", "UTC").expect("the expression is well formed");
        assert!(never.first(now).expect_err("there is no 30 February").contains("never due"));
        assert_eq!(
            ScheduleTiming::at(now, 5),
            Ok(ScheduleTiming::At(now + MIN_INTERVAL_MS)),
            "a past time is due after the minimum interval"
        );
        let timing = ScheduleTiming::cron("@hourly", "Asia/Kolkata").expect("valid");
        assert_eq!(ScheduleTiming::decode(&timing.encode()), Ok(timing));
    }
}
