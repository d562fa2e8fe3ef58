//! The pages that no other host had when they were asked a moment ago.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use skep_cache::Digest;

/// Time for which nobody is asked again for a page that nobody gave. A host that has just computed it writes it within two
/// seconds.
const MISSED_FOR: Duration = Duration::from_secs(2);
/// Maximum number of such pages that are remembered.
const MAX_MISSES: usize = 256;

/// The pages that no host gave recently, oldest first.
#[derive(Default)]
pub(super) struct RecentMisses(VecDeque<(Instant, Digest)>);

impl RecentMisses {
    /// Records that nobody has given a page.
    pub fn note(&mut self, name: Digest, now: Instant) {
        if self.0.len() == MAX_MISSES {
            self.0.pop_front();
        }
        self.0.push_back((now, name));
    }

    /// Returns whether no host had a page when they were asked a moment ago.
    pub fn has(&mut self, name: Digest, now: Instant) -> bool {
        while self.0.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) >= MISSED_FOR) {
            self.0.pop_front();
        }
        self.0.iter().any(|(_, missed)| *missed == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_nobody_gave_is_asked_for_again_after_a_while() {
        let (mut misses, start) = (RecentMisses::default(), Instant::now());
        misses.note(Digest([1; 32]), start);
        misses.note(Digest([2; 32]), start + Duration::from_secs(1));
        assert!(misses.has(Digest([1; 32]), start + Duration::from_millis(1_999)));
        assert!(!misses.has(Digest([1; 32]), start + MISSED_FOR));
        assert!(misses.has(Digest([2; 32]), start + MISSED_FOR));
        (0..=255u8).for_each(|name| misses.note(Digest([name; 32]), start + MISSED_FOR));
        assert_eq!(misses.0.len(), MAX_MISSES);
    }
}
