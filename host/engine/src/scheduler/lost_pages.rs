//! The loss of all pages, when an executor has failed and another one takes its place.

use super::Scheduler;

impl Scheduler {
    /// Takes the pages of all sequences, which compute their tokens again later, and forgets all cached pages. The reads that lock
    /// some of them have ended before.
    pub fn lose_pages(&mut self) {
        self.forget_continuations(|_| true);
        while !self.running.is_empty() {
            self.preempt(self.running.len() - 1);
        }
        self.kv.clear();
        self.outdate_orders();
    }
}
