//! The numbers of the requests that other hosts have sent, so that none is accepted twice.
//!
//! A signature is accepted while its time is at most [`WINDOW`] away in either direction, so a number is remembered for
//! at least twice that time. Only requests that were signed with the key get here, so only hosts can fill the memory.

use super::key::{Nonce, WINDOW};
use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Time after which the newer half becomes the older one, so that a number is remembered for at least this time. It is longer
/// than a signature counts, because the system's clock may be corrected meanwhile.
const TURN: Duration = WINDOW.saturating_mul(3);
/// Maximum number of requests in a half: 11,000 each second.
const MAX: usize = 1 << 20;

#[derive(Default)]
pub(super) struct Nonces(Mutex<Option<Halves>>);

struct Halves {
    newer: HashSet<Nonce>,
    older: HashSet<Nonce>,
    began: Instant,
}

/// Why a number is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Repeated,
    /// Too many requests have arrived to remember one more.
    Full,
}

impl Nonces {
    /// Remembers a number. Fails if it is known.
    pub(super) fn take(&self, nonce: Nonce, now: Instant) -> Result<(), Refused> {
        let mut halves = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let halves =
            halves.get_or_insert_with(|| Halves { newer: HashSet::new(), older: HashSet::new(), began: now });
        if now.duration_since(halves.began) >= TURN {
            halves.older = std::mem::take(&mut halves.newer);
            halves.began = now;
        }
        if halves.older.contains(&nonce) || halves.newer.contains(&nonce) {
            return Err(Refused::Repeated);
        }
        if halves.newer.len() >= MAX {
            return Err(Refused::Full);
        }
        halves.newer.insert(nonce);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_accepted_once_for_as_long_as_its_signature_could_be() {
        let (nonces, begin) = (Nonces::default(), Instant::now());
        assert_eq!(nonces.take(Nonce(1), begin), Ok(()));
        assert_eq!(nonces.take(Nonce(2), begin), Ok(()));
        // A signature of the future is accepted until its time and the window are over.
        for passed in [Duration::ZERO, WINDOW, 2 * WINDOW, TURN] {
            assert_eq!(nonces.take(Nonce(1), begin + passed), Err(Refused::Repeated), "after {passed:?}");
        }
        assert_eq!(nonces.take(Nonce(3), begin + TURN), Ok(()));
        assert_eq!(nonces.take(Nonce(2), begin + TURN + WINDOW), Err(Refused::Repeated));
        assert_eq!(nonces.take(Nonce(4), begin + 2 * TURN), Ok(()));
        assert_eq!(nonces.take(Nonce(3), begin + 2 * TURN), Err(Refused::Repeated));
        assert_eq!(nonces.take(Nonce(1), begin + 2 * TURN), Ok(()), "long forgotten");
    }

    #[test]
    fn the_memory_is_bounded() {
        let (nonces, begin) = (Nonces::default(), Instant::now());
        for number in 0..MAX as u128 {
            assert_eq!(nonces.take(Nonce(number), begin), Ok(()));
        }
        assert_eq!(nonces.take(Nonce(MAX as u128), begin), Err(Refused::Full));
        assert_eq!(nonces.take(Nonce(MAX as u128), begin + TURN), Ok(()));
    }
}
