//! The numbers of a turn's calls, in the order in which the guest makes them.
//!
//! A call that the host makes on behalf of the guest (a summary that makes room for an answer) is
//! numbered too, and is made when the host finds it necessary. Its number is recorded before any
//! later number can be. In a rerun the guest may reach that number before the host does, and then
//! skips it.

use std::collections::BTreeSet;

#[derive(Clone, Debug)]
pub(super) struct Numbers {
    /// Number of the guest's next call, unless a call of the host has it.
    next: u32,
    /// Numbers of the host's calls that the guest has not reached yet.
    ahead: BTreeSet<u32>,
    /// Numbers that the guest has skipped, of calls that the host has not made yet.
    passed: BTreeSet<u32>,
}

impl Numbers {
    pub(super) fn new() -> Self {
        Numbers { next: 1, ahead: BTreeSet::new(), passed: BTreeSet::new() }
    }

    /// Returns the number of the guest's next call. `is_of_host` returns whether a number belongs
    /// to a call that the host made before.
    pub(super) fn take(&mut self, is_of_host: impl Fn(u32) -> bool) -> u32 {
        self.pass_ahead();
        while is_of_host(self.next) {
            self.passed.insert(self.next);
            self.next += 1;
            self.pass_ahead();
        }
        let number = self.next;
        self.next += 1;
        self.pass_ahead();
        number
    }

    /// Marks a call that the host made before as repeated.
    pub(super) fn take_recorded(&mut self, number: u32) {
        if !self.passed.remove(&number) {
            self.ahead.insert(number);
            self.pass_ahead();
        }
    }

    /// Returns a number for a new call of the host, greater than the last recorded one.
    pub(super) fn take_new(&mut self, last_recorded: u32) -> u32 {
        let mut number = self.next.max(last_recorded + 1);
        while self.ahead.contains(&number) {
            number += 1;
        }
        self.ahead.insert(number);
        self.pass_ahead();
        number
    }

    /// Returns the number up to which all calls have been made.
    pub(super) fn made(&self) -> u32 {
        self.passed.first().map_or(self.next, |first| *first) - 1
    }

    fn pass_ahead(&mut self) {
        while self.ahead.remove(&self.next) {
            self.next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_shares_the_number_sequence_of_the_guest() {
        let mut numbers = Numbers::new();
        let none = |_| false;
        assert_eq!(numbers.take(none), 1);
        assert_eq!(numbers.take_new(0), 2);
        assert_eq!((numbers.made(), numbers.take(none), numbers.made()), (2, 3, 3));
    }

    #[test]
    fn a_rerun_guest_skips_the_numbers_of_the_host() {
        let is_of_host = |number| number == 2;
        // The guest reaches the number first.
        let mut numbers = Numbers::new();
        assert_eq!((numbers.take(is_of_host), numbers.take(is_of_host)), (1, 3));
        assert_eq!(numbers.made(), 1, "the second call has not been made");
        numbers.take_recorded(2);
        assert_eq!((numbers.made(), numbers.take(is_of_host)), (3, 4));
        // The host reaches the number first.
        let mut numbers = Numbers::new();
        numbers.take_recorded(2);
        assert_eq!((numbers.take(|_| false), numbers.made(), numbers.take(|_| false)), (1, 2, 3));
    }

    #[test]
    fn a_new_host_call_is_numbered_after_all_recorded_ones() {
        let mut numbers = Numbers::new();
        let none = |_| false;
        assert_eq!(numbers.take(none), 1);
        assert_eq!(numbers.take_new(3), 4);
        assert_eq!(numbers.made(), 1);
        assert_eq!((numbers.take(none), numbers.take(none), numbers.take(none)), (2, 3, 5));
        assert_eq!(numbers.made(), 5);
    }
}
