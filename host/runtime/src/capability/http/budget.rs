//! Limits on the number of HTTP requests of a turn and on their bytes.

use crate::{
    Limits,
    limits::{Counted, TurnUse},
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const MAX_AT_ONCE: u32 = 16;
/// Maximum size of one response. It becomes a record of the turn's journal, and records are bounded.
const MAX_RESPONSE_BYTES: usize = 1 << 20;

/// The request budget of one turn.
#[derive(Debug)]
pub(in crate::capability) struct FetchBudget {
    fetches: u32,
    bytes: usize,
    limit_kb: u32,
    spent: Mutex<Spent>,
    used: Arc<TurnUse>,
}

#[derive(Debug, Default)]
struct Spent {
    fetches: u32,
    running: u32,
    /// Bytes transferred, or reserved for a running request.
    bytes: usize,
}

/// A reservation for one request and its response. Dropping it without [`FetchReservation::settle`] returns the response's bytes.
#[derive(Debug)]
pub(in crate::capability) struct FetchReservation<'a> {
    budget: &'a FetchBudget,
    pub(in crate::capability) response_bytes: usize,
    received: usize,
}

impl FetchBudget {
    pub(in crate::capability) fn new(limits: &Limits, used: Arc<TurnUse>) -> Self {
        let Limits { fetches, fetch_kb: limit_kb, .. } = *limits;
        FetchBudget { fetches, bytes: limit_kb as usize * 1024, limit_kb, spent: Mutex::default(), used }
    }

    /// Reserves the budget for a request of `request_bytes`. The error names the setting that would allow it.
    pub(in crate::capability) fn begin(&self, request_bytes: usize) -> Result<FetchReservation<'_>, String> {
        let mut spent = self.lock();
        if spent.fetches >= self.fetches {
            return Err(format!(
                "the turn has made {} requests, which is its limit; raise `fetches` under [limits] in agent.toml, up to \
                 the operator's ceiling in skep.toml",
                self.fetches
            ));
        }
        if spent.running >= MAX_AT_ONCE {
            return Err(format!("{MAX_AT_ONCE} requests of the turn are in flight; wait for one of them"));
        }
        let left = self.bytes.saturating_sub(spent.bytes).saturating_sub(request_bytes);
        if left == 0 {
            return Err(format!(
                "the turn's requests may transfer {} KiB, which are used or reserved for requests in flight; raise \
                 `fetch_kb` under [limits] in agent.toml, up to the operator's ceiling in skep.toml",
                self.limit_kb
            ));
        }
        let response_bytes = left.min(MAX_RESPONSE_BYTES);
        spent.fetches += 1;
        spent.running += 1;
        spent.bytes += request_bytes + response_bytes;
        self.used.add(Counted::Fetches, 1);
        self.used.add(Counted::FetchBytes, request_bytes as u64);
        Ok(FetchReservation { budget: self, response_bytes, received: 0 })
    }

    fn lock(&self) -> MutexGuard<'_, Spent> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FetchReservation<'_> {
    /// Records the size of the response, and returns the rest of its reservation.
    pub(in crate::capability) fn settle(mut self, received: usize) {
        self.received = received.min(self.response_bytes);
    }
}

impl Drop for FetchReservation<'_> {
    fn drop(&mut self) {
        let mut spent = self.budget.lock();
        spent.running -= 1;
        spent.bytes -= self.response_bytes - self.received;
        self.budget.used.add(Counted::FetchBytes, self.received as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(fetches: u32, fetch_kb: u32) -> FetchBudget {
        FetchBudget::new(&Limits { fetches, fetch_kb, ..Limits::default() }, Arc::default())
    }

    #[test]
    fn requests_are_counted_whatever_their_outcome() {
        let budget = budget(2, 10);
        drop(budget.begin(0).expect("one of two"));
        budget.begin(0).expect("two of two").settle(10);
        let error = budget.begin(0).expect_err("three of two");
        assert!(error.contains("2 requests") && error.contains("`fetches` under [limits]"), "{error}");
    }

    #[test]
    fn bytes_are_counted_in_both_directions_and_unused_ones_are_returned() {
        let budget = budget(10, 3);
        let reservation = budget.begin(1_024).expect("1 of 3 KiB");
        assert_eq!(reservation.response_bytes, 2_048);
        let error = budget.begin(0).expect_err("everything is reserved");
        assert!(error.contains("`fetch_kb` under [limits]"), "{error}");
        reservation.settle(1_024);
        assert!(budget.begin(1_024).is_err(), "1 KiB is left, which leaves nothing for a response");
        assert_eq!(budget.begin(1_000).expect("24 bytes are left").response_bytes, 24);
    }

    #[test]
    fn the_number_of_concurrent_requests_is_bounded() {
        let budget = budget(100, 32_768);
        let reservations =
            (0..MAX_AT_ONCE).map(|_| budget.begin(0).expect("within the bound")).collect::<Vec<_>>();
        assert!(budget.begin(0).expect_err("one too many").contains("wait for one"));
        drop(reservations);
        assert!(budget.begin(0).is_ok());
    }
}
