//! Days of usage, in UTC.

use jiff::{ToSpan as _, civil};
use serde::{Deserialize, Deserializer, de::Error as _};
use std::{fmt, str::FromStr};

const DAY_MS: u64 = 24 * 3_600 * 1_000;
const EPOCH: civil::Date = civil::date(1970, 1, 1);

/// A day in UTC, written as `2026-01-31`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UsageDay(u32);

impl UsageDay {
    /// Creates a day from the number of days since 1970.
    pub(crate) fn from_number(number: u32) -> Self {
        UsageDay(number)
    }

    pub(crate) fn number(self) -> u32 {
        self.0
    }

    /// Returns the day of a time in milliseconds since 1970.
    pub fn of_ms(ms: u64) -> Self {
        UsageDay(u32::try_from(ms / DAY_MS).unwrap_or(u32::MAX))
    }

    /// Returns the day this many days earlier.
    pub fn earlier(self, days: u32) -> Self {
        UsageDay(self.0.saturating_sub(days))
    }

    /// Parses a day, or a number of days such as `7d`, which begins so many days ago, `today` included.
    pub fn parse_since(text: &str, today: UsageDay) -> Result<Self, String> {
        let days = text.strip_suffix('d').and_then(|days| days.parse::<u32>().ok());
        match days {
            Some(0) => Err("0d has no day; write 1d for today".to_owned()),
            Some(days) => Ok(today.earlier(days - 1)),
            None => text.parse(),
        }
    }
}

impl fmt::Display for UsageDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match EPOCH.checked_add(i64::from(self.0).days()) {
            Ok(date) => write!(f, "{date}"),
            Err(_) => write!(f, "day {}", self.0),
        }
    }
}

impl FromStr for UsageDay {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let shown: String = text.chars().take(40).collect();
        let invalid = || format!("{shown:?} is not a day; write 2026-01-31, or 7d for the last seven days");
        let date: civil::Date = text.parse().map_err(|_| invalid())?;
        let days = date.since(EPOCH).map_err(|_| invalid())?.get_days();
        match u32::try_from(days) {
            // A longer form, such as one with a time, is not a day.
            Ok(number) if UsageDay(number).to_string() == text => Ok(UsageDay(number)),
            _ => Err(invalid()),
        }
    }
}

impl<'de> Deserialize<'de> for UsageDay {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        String::deserialize(reader)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_dates_in_utc() {
        for (number, text) in [(0, "1970-01-01"), (19_782, "2024-02-29"), (20_454, "2026-01-01")] {
            assert_eq!(UsageDay(number).to_string(), text);
            assert_eq!(text.parse(), Ok(UsageDay(number)));
            assert_eq!(UsageDay::of_ms(u64::from(number) * DAY_MS + DAY_MS - 1), UsageDay(number));
        }
        for text in ["2026-02-30", "1969-12-31", "yesterday", "2026-01-01T00:00", "", "7", "-1d"] {
            text.parse::<UsageDay>().expect_err(text);
        }
        let today = UsageDay(20_454);
        assert_eq!(UsageDay::parse_since("1d", today), Ok(today));
        assert_eq!(UsageDay::parse_since("7d", today), Ok(UsageDay(20_448)));
        assert_eq!(UsageDay::parse_since("2024-02-29", today), Ok(UsageDay(19_782)));
        UsageDay::parse_since("0d", today).expect_err("no day");
    }
}
