//! The bytes that were written on each UTC day, which wear the disk out. The numbers survive a restart.

use std::time::{SystemTime, UNIX_EPOCH};

/// The file of the numbers in the folder.
pub(super) const FILE: &str = "written";
/// Bytes after which the numbers are written to the file. A process that is killed loses at most this many.
const SAVED_AFTER: u64 = 64 << 20;

/// The bytes of today and of the day before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WrittenDays {
    day: u64,
    today: u64,
    day_before: u64,
    unsaved: u64,
}

impl WrittenDays {
    /// Reads the numbers from the text of the file. Anything else counts as nothing written.
    pub fn decode(text: &str) -> Self {
        let numbers: Vec<u64> = text.split_whitespace().map_while(|word| word.parse().ok()).collect();
        match numbers[..] {
            [day, today, day_before] => WrittenDays { day, today, day_before, unsaved: 0 },
            _ => WrittenDays::default(),
        }
    }

    /// Returns the text of the file.
    pub fn encode(&self) -> String {
        format!("{} {} {}\n", self.day, self.today, self.day_before)
    }

    /// Counts bytes that were written on `day`, and returns whether the numbers should be saved.
    pub fn add(&mut self, bytes: u64, day: u64) -> bool {
        let [today, day_before] = self.on(day);
        let is_new = day != self.day;
        *self = WrittenDays { day, today: today + bytes, day_before, unsaved: self.unsaved + bytes };
        let is_due = is_new || self.unsaved >= SAVED_AFTER;
        if is_due {
            self.unsaved = 0;
        }
        is_due
    }

    /// Returns the bytes of `day` and of the day before it. A clock that was set back counts into the later day.
    pub fn on(&self, day: u64) -> [u64; 2] {
        match day.saturating_sub(self.day) {
            0 => [self.today, self.day_before],
            1 => [0, self.today],
            _ => [0, 0],
        }
    }
}

/// Returns the number of the current UTC day since 1970.
pub(super) fn today() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 86_400)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_count_for_their_day_and_the_one_after() {
        let mut days = WrittenDays::default();
        assert!(days.add(5, 100), "the first of a day is saved");
        assert!(!days.add(7, 100));
        assert_eq!((days.on(100), days.on(101), days.on(102)), ([12, 0], [0, 12], [0, 0]));
        assert!(days.add(1, 101));
        assert_eq!(days.on(101), [1, 12]);
        assert!(days.add(SAVED_AFTER, 101));
        assert_eq!(WrittenDays::decode(&days.encode()), days);
        assert_eq!(WrittenDays::decode("rubbish"), WrittenDays::default());
        assert_eq!(WrittenDays::decode(""), WrittenDays::default());
    }
}
