//! The slots of a ring and their states: which bytes of the shared memory may be written by whom.
//!
//! ```text
//!            lend                free
//!    Free ---------> Lent ----------------> Free
//!
//!            reserve             post               arrive
//!    Free ---------> Reserved ---------> Reading ----------> Reserved
//!                        | free            |  |  settle
//!                        v                 |  +-------------> Free
//!                      Free                | quarantine
//!                                          v       settle
//!                                     Quarantined ----------> Free
//! ```
//!
//! Invariant: a slot leaves Reading and Quarantined only when its READ has ended or when the process that reads is dead. A run
//! of slots is a token: only its owner can change their state, and it exists once.

/// The use of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotState {
    Free,
    /// It has an image that another host may read.
    Lent,
    /// Only this host uses it: it waits for a READ, or has an image that arrived.
    Reserved,
    /// A READ writes into it.
    Reading,
    /// A READ that nobody waits for may still write into it.
    Quarantined,
}

/// Slots that follow each other, for one image.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Run {
    first: usize,
    count: usize,
}

impl Run {
    /// Returns the first byte and the number of bytes in slots of this size.
    pub(crate) fn bytes(&self, slot_bytes: usize) -> (usize, usize) {
        (self.first * slot_bytes, self.count * slot_bytes)
    }
}

/// Number of slots in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotCounts {
    pub free: usize,
    pub lent: usize,
    pub reserved: usize,
    pub reading: usize,
    pub quarantined: usize,
}

/// The states of all slots of a ring. The first half is lent, the second half is read into, so that neither use can take the
/// room of the other.
#[derive(Debug)]
pub(crate) struct Slots {
    states: Vec<SlotState>,
}

impl Slots {
    pub(crate) fn new(count: usize) -> Self {
        Slots { states: vec![SlotState::Free; count] }
    }

    /// Returns the number of slots that one use may have.
    pub(crate) fn half(&self) -> usize {
        self.states.len() / 2
    }

    /// Takes free slots for an image that other hosts read.
    pub(crate) fn lend(&mut self, count: usize) -> Option<Run> {
        self.take(0, count, SlotState::Lent)
    }

    /// Takes free slots for an image of another host.
    pub(crate) fn reserve(&mut self, count: usize) -> Option<Run> {
        self.take(self.half(), count, SlotState::Reserved)
    }

    /// Notes that a READ writes into the slots from now on.
    pub(crate) fn post(&mut self, run: &Run) {
        self.change(run, &[SlotState::Reserved], SlotState::Reading);
    }

    /// Notes that the READ has succeeded.
    pub(crate) fn arrive(&mut self, run: &Run) {
        self.change(run, &[SlotState::Reading], SlotState::Reserved);
    }

    /// Notes that nobody waits for the READ anymore, which has not ended.
    pub(crate) fn quarantine(&mut self, run: &Run) {
        self.change(run, &[SlotState::Reading], SlotState::Quarantined);
    }

    /// Gives slots back whose READ has ended without a use, or whose reading process is dead.
    pub(crate) fn settle(&mut self, run: Run) {
        self.change(&run, &[SlotState::Reading, SlotState::Quarantined], SlotState::Free);
    }

    /// Gives slots back that no READ writes into.
    pub(crate) fn free(&mut self, run: Run) {
        self.change(&run, &[SlotState::Lent, SlotState::Reserved], SlotState::Free);
    }

    pub(crate) fn counts(&self) -> SlotCounts {
        let count = |state| self.states.iter().filter(|found| **found == state).count();
        SlotCounts {
            free: count(SlotState::Free),
            lent: count(SlotState::Lent),
            reserved: count(SlotState::Reserved),
            reading: count(SlotState::Reading),
            quarantined: count(SlotState::Quarantined),
        }
    }

    /// Takes the first free slots of a half that follow each other.
    fn take(&mut self, begin: usize, count: usize, state: SlotState) -> Option<Run> {
        let half = self.states.get(begin..begin + self.half())?;
        let mut free = 0;
        let end = half.iter().position(|found| {
            free = if *found == SlotState::Free { free + 1 } else { 0 };
            free >= count.max(1)
        })?;
        let run = Run { first: begin + end + 1 - count.max(1), count: count.max(1) };
        self.change(&run, &[SlotState::Free], state);
        Some(run)
    }

    fn change(&mut self, run: &Run, from: &[SlotState], to: SlotState) {
        let slots = &mut self.states[run.first..run.first + run.count];
        assert!(slots.iter().all(|state| from.contains(state)), "{run:?} is not in {from:?}");
        slots.fill(to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lending_and_reading_have_a_half_each_and_take_runs_that_fit() {
        let mut slots = Slots::new(8);
        let lent = slots.lend(3).unwrap();
        assert_eq!(slots.lend(2), None, "one slot is left");
        let one = slots.lend(1).unwrap();
        assert_eq!((slots.lend(1), slots.reserve(5)), (None, None));
        let reserved = slots.reserve(4).unwrap();
        assert_eq!(reserved.bytes(10), (40, 40));
        assert_eq!(slots.reserve(1), None);
        slots.free(lent);
        assert_eq!(slots.lend(3).unwrap().bytes(10), (0, 30));
        slots.free(one);
        slots.free(reserved);
        assert_eq!(slots.counts(), SlotCounts { free: 5, lent: 3, ..SlotCounts::default() });
    }

    #[test]
    fn a_slot_is_quarantined_until_its_read_has_ended() {
        let mut slots = Slots::new(4);
        let run = slots.reserve(2).unwrap();
        slots.post(&run);
        slots.arrive(&run);
        slots.post(&run);
        slots.quarantine(&run);
        assert_eq!(slots.counts(), SlotCounts { free: 2, quarantined: 2, ..SlotCounts::default() });
        assert_eq!(slots.reserve(1), None, "what is quarantined is not given out");
        slots.settle(run);
        assert_eq!(slots.counts().free, 4);
    }

    #[test]
    #[should_panic(expected = "is not in")]
    fn slots_that_a_read_writes_into_cannot_be_given_back() {
        let mut slots = Slots::new(2);
        let run = slots.reserve(1).unwrap();
        slots.post(&run);
        slots.free(run);
    }

    #[test]
    #[should_panic(expected = "is not in")]
    fn a_quarantined_slot_does_not_arrive() {
        let mut slots = Slots::new(2);
        let run = slots.reserve(1).unwrap();
        slots.post(&run);
        slots.quarantine(&run);
        slots.arrive(&run);
    }
}
