//! The numbers of a turn's calls, in the order in which the guest makes them.
//!
//! A call that the host makes for one of the guest's (a summary that makes room for an answer) has a number too, and is made
//! when the host finds that it is necessary. Its number is recorded before any later one can be; when the turn is run again,
//! the guest may come to that number before the host does, and passes it by.

use std::collections::BTreeSet;

#[derive(Debug)]
pub(super) struct Numbers {
    /// Of the guest's next call, unless the host has it.
    next: u32,
    /// Numbers of the host's calls that the guest has not come to.
    ahead: BTreeSet<u32>,
    /// Numbers that the guest has passed by, of calls that the host has not made yet.
    passed: BTreeSet<u32>,
}

impl Numbers {
    pub(super) fn new() -> Self {
        Numbers { next: 1, ahead: BTreeSet::new(), passed: BTreeSet::new() }
    }

    /// The number of the guest's next call. `is_of_host` knows the calls that the host made before.
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

    /// The host makes a call that it made before.
    pub(super) fn take_known(&mut self, number: u32) {
        if !self.passed.remove(&number) {
            self.ahead.insert(number);
            self.pass_ahead();
        }
    }

    /// A number for a call that the host makes now, behind the last one that is recorded.
    pub(super) fn take_new(&mut self, last_recorded: u32) -> u32 {
        let mut number = self.next.max(last_recorded + 1);
        while self.ahead.contains(&number) {
            number += 1;
        }
        self.ahead.insert(number);
        self.pass_ahead();
        number
    }

    /// All calls up to this number have been made.
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
    fn the_host_takes_a_number_among_those_of_the_guest() {
        let mut numbers = Numbers::new();
        let none = |_| false;
        assert_eq!(numbers.take(none), 1);
        assert_eq!(numbers.take_new(0), 2);
        assert_eq!((numbers.made(), numbers.take(none), numbers.made()), (2, 3, 3));
    }

    #[test]
    fn run_again_the_guest_passes_by_what_the_host_made() {
        let is_of_host = |number| number == 2;
        // The guest is first.
        let mut numbers = Numbers::new();
        assert_eq!((numbers.take(is_of_host), numbers.take(is_of_host)), (1, 3));
        assert_eq!(numbers.made(), 1, "the second call has not been made");
        numbers.take_known(2);
        assert_eq!((numbers.made(), numbers.take(is_of_host)), (3, 4));
        // The host is first.
        let mut numbers = Numbers::new();
        numbers.take_known(2);
        assert_eq!((numbers.take(|_| false), numbers.made(), numbers.take(|_| false)), (1, 2, 3));
    }

    #[test]
    fn a_new_call_of_the_host_comes_behind_all_that_is_recorded() {
        let mut numbers = Numbers::new();
        let none = |_| false;
        assert_eq!(numbers.take(none), 1);
        assert_eq!(numbers.take_new(3), 4);
        assert_eq!(numbers.made(), 1);
        assert_eq!((numbers.take(none), numbers.take(none), numbers.take(none)), (2, 3, 5));
        assert_eq!(numbers.made(), 5);
    }
}
