//! The sessions that this host has sent to others, until their reports count them.

use std::collections::HashMap;

/// Time between two reports of a host.
const WINDOW_MS: u64 = 500;
/// Time for which a host that could not be reached gets no session.
const AVOIDED_MS: u64 = 2_000;

/// Counts what was sent to each host in the current and in the last half second. A report may be that old.
#[derive(Debug, Default)]
pub struct Sent {
    counts: HashMap<i64, Window>,
    avoided: HashMap<i64, u64>,
    /// The half second in which entries were last removed.
    tidied: u64,
}

#[derive(Debug, Default)]
struct Window {
    number: u64,
    current: u32,
    last: u32,
}

impl Sent {
    /// Counts a session that is sent to a host.
    pub fn note(&mut self, host: i64, now_ms: u64) {
        self.tidy(now_ms);
        let number = now_ms / WINDOW_MS;
        let window = self.counts.entry(host).or_default();
        let (current, last) = (window.current_at(number).saturating_add(1), window.last_at(number));
        *window = Window { number, current, last };
    }

    /// Returns how many sessions were sent to a host that it may not have reported yet.
    pub fn count(&self, host: i64, now_ms: u64) -> u32 {
        let number = now_ms / WINDOW_MS;
        let window = self.counts.get(&host);
        window.map_or(0, |window| window.current_at(number).saturating_add(window.last_at(number)))
    }

    /// Makes sessions avoid a host that could not be reached.
    pub fn avoid(&mut self, host: i64, now_ms: u64) {
        self.tidy(now_ms);
        self.avoided.insert(host, now_ms.saturating_add(AVOIDED_MS));
    }

    /// Returns whether sessions avoid a host.
    pub fn avoids(&self, host: i64, now_ms: u64) -> bool {
        self.avoided.get(&host).is_some_and(|until_ms| now_ms < *until_ms)
    }

    /// Removes what says nothing anymore, at most once in half a second.
    fn tidy(&mut self, now_ms: u64) {
        let number = now_ms / WINDOW_MS;
        if std::mem::replace(&mut self.tidied, number) != number {
            self.counts.retain(|_, window| window.number + 1 >= number);
            self.avoided.retain(|_, until_ms| now_ms < *until_ms);
        }
    }
}

impl Window {
    fn current_at(&self, number: u64) -> u32 {
        if self.number == number { self.current } else { 0 }
    }

    fn last_at(&self, number: u64) -> u32 {
        match number.checked_sub(self.number) {
            Some(0) => self.last,
            Some(1) => self.current,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_counts_for_up_to_a_second() {
        let mut sent = Sent::default();
        for now_ms in [1_000, 1_100, 1_500] {
            sent.note(7, now_ms);
        }
        let counts = [1_500, 1_999, 2_000, 2_499, 2_500].map(|now_ms| sent.count(7, now_ms));
        assert_eq!(counts, [3, 3, 1, 1, 0]);
        assert_eq!(sent.count(8, 1_500), 0);
    }

    #[test]
    fn outdated_entries_are_removed() {
        let mut sent = Sent::default();
        for host in 0..100 {
            sent.note(host, 1_000);
            sent.avoid(host, 1_000);
        }
        assert!(sent.avoids(5, 2_999) && !sent.avoids(5, 3_000));
        sent.note(1, 9_000);
        assert_eq!((sent.counts.len(), sent.avoided.len()), (1, 0));
    }
}
