//! How many requests a turn makes, and with how much.

use crate::Limits;
use std::sync::{Mutex, MutexGuard, PoisonError};

const MAX_AT_ONCE: u32 = 16;
/// Of one response: it is a record of the turn's journal, which are bounded.
const MAX_RESPONSE_BYTES: usize = 1 << 20;

/// What a turn has spent.
#[derive(Debug)]
pub(super) struct FetchBudget {
    fetches: u32,
    bytes: usize,
    limit_kb: u32,
    spent: Mutex<Spent>,
}

#[derive(Debug, Default)]
struct Spent {
    fetches: u32,
    running: u32,
    /// Moved, or promised to a request that runs.
    bytes: usize,
}

/// Room for one request and its response. Dropped without being settled, it gives back what the response might have had.
#[derive(Debug)]
pub(super) struct FetchPlace<'a> {
    budget: &'a FetchBudget,
    pub(super) response_bytes: usize,
    received: usize,
}

impl FetchBudget {
    pub(super) fn new(limits: &Limits) -> Self {
        let Limits { fetches, fetch_kb: limit_kb, .. } = *limits;
        FetchBudget { fetches, bytes: limit_kb as usize * 1024, limit_kb, spent: Mutex::default() }
    }

    /// Takes a place for a request of so many bytes, or says which line would allow it.
    pub(super) fn begin(&self, request_bytes: usize) -> Result<FetchPlace<'_>, String> {
        let mut spent = self.lock();
        if spent.fetches >= self.fetches {
            return Err(format!(
                "the turn has made {} requests; `fetches` under [limits] in agent.toml asks for more, in skep.toml it \
                 is the operator's ceiling",
                self.fetches
            ));
        }
        if spent.running >= MAX_AT_ONCE {
            return Err(format!("{MAX_AT_ONCE} requests of the turn are under way; wait for one of them"));
        }
        let left = self.bytes.saturating_sub(spent.bytes).saturating_sub(request_bytes);
        if left == 0 {
            return Err(format!(
                "the turn's requests have {} KiB, which are used or promised to those under way; `fetch_kb` under \
                 [limits] in agent.toml asks for more, in skep.toml it is the operator's ceiling",
                self.limit_kb
            ));
        }
        let response_bytes = left.min(MAX_RESPONSE_BYTES);
        spent.fetches += 1;
        spent.running += 1;
        spent.bytes += request_bytes + response_bytes;
        Ok(FetchPlace { budget: self, response_bytes, received: 0 })
    }

    fn lock(&self) -> MutexGuard<'_, Spent> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FetchPlace<'_> {
    /// The response had so many bytes.
    pub(super) fn settle(mut self, received: usize) {
        self.received = received.min(self.response_bytes);
    }
}

impl Drop for FetchPlace<'_> {
    fn drop(&mut self) {
        let mut spent = self.budget.lock();
        spent.running -= 1;
        spent.bytes -= self.response_bytes - self.received;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(fetches: u32, fetch_kb: u32) -> FetchBudget {
        FetchBudget::new(&Limits { fetches, fetch_kb, ..Limits::default() })
    }

    #[test]
    fn requests_are_counted_whatever_came_of_them() {
        let budget = budget(2, 10);
        drop(budget.begin(0).expect("one of two"));
        budget.begin(0).expect("two of two").settle(10);
        let error = budget.begin(0).expect_err("three of two");
        assert!(error.contains("2 requests") && error.contains("`fetches` under [limits]"), "{error}");
    }

    #[test]
    fn bytes_are_counted_both_ways_and_what_was_not_received_is_given_back() {
        let budget = budget(10, 3);
        let place = budget.begin(1_024).expect("1 of 3 KiB");
        assert_eq!(place.response_bytes, 2_048);
        let error = budget.begin(0).expect_err("everything is promised");
        assert!(error.contains("`fetch_kb` under [limits]"), "{error}");
        place.settle(1_024);
        assert!(budget.begin(1_024).is_err(), "1 KiB is left, and no byte of it for a response");
        assert_eq!(budget.begin(1_000).expect("24 bytes are left").response_bytes, 24);
    }

    #[test]
    fn so_many_run_at_once() {
        let budget = budget(100, 32_768);
        let places = (0..MAX_AT_ONCE).map(|_| budget.begin(0).expect("there is room")).collect::<Vec<_>>();
        assert!(budget.begin(0).expect_err("one too many").contains("wait for one"));
        drop(places);
        assert!(budget.begin(0).is_ok());
    }
}
