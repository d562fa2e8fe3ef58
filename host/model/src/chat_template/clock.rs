//! Implements `strftime_now`: the current date, which some templates put into the system message.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Formats the current time, in UTC, with a C format string.
pub(super) fn strftime_now(format: &str) -> Result<String, String> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(format, seconds)
}

fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    let days = seconds / 86_400;
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let month_name = MONTHS[month as usize - 1];
    // 1970-01-01 was a Thursday.
    let weekday = WEEKDAYS[((days + 4) % 7) as usize];
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let mut code = characters.next();
        let unpadded = code == Some('-');
        if unpadded {
            code = characters.next();
        }
        let two = |value: u64| if unpadded { value.to_string() } else { format!("{value:02}") };
        text.push_str(&match code {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('H') => two(hour),
            Some('I') => two((hour + 11) % 12 + 1),
            Some('p') => (if hour < 12 { "AM" } else { "PM" }).to_owned(),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let code = other.map_or(String::new(), String::from);
                return Err(format!("strftime_now does not support %{code}"));
            }
        });
    }
    Ok(text)
}

/// Returns the year, month and day of a day number since 1970-01-01 (Howard Hinnant's
/// `civil_from_days`).
pub fn civil_date(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let era = z / 146_097;
    let day_of_era = z % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_match_the_calendar() {
        let date = |seconds| strftime("%Y-%m-%d %A %-d %b %y %H:%M:%S %I %p", seconds).unwrap();
        assert_eq!(date(0), "1970-01-01 Thursday 1 Jan 70 00:00:00 12 AM");
        assert_eq!(date(951_782_400 + 3661), "2000-02-29 Tuesday 29 Feb 00 01:01:01 01 AM");
        assert_eq!(date(4_102_444_799), "2099-12-31 Thursday 31 Dec 99 23:59:59 11 PM");
        assert!(strftime("%Q", 0).is_err() && strftime("%", 0).is_err());
    }
}
