//! Sequences that compute the beginning of their prompt while pages after it are read, and are admitted only then.
//!
//! Such a sequence runs, but nothing is reported or charged before it is known how many of its pages were read. After its head
//! start it is in the queue again, before the others of its class, and is admitted with what is cached by then.
//!
//! Invariant: a sequence computes no token after its head start before it is admitted, so it draws none.

use skep_model::PAGE_TOKENS;

use super::Scheduler;
use crate::kv::SequencePages;
use crate::sequence::Sequence;
use crate::sequence_id::SequenceId;
use crate::{EngineError, FinishReason};

/// The beginning of a prompt that a sequence computes before it is admitted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadStart {
    /// Number of tokens before the pages that are read.
    pub tokens: usize,
    /// Maximum number of tokens in a step. Pages that were read are taken between two steps.
    pub step_tokens: usize,
}

impl Scheduler {
    /// Gives a sequence a head start, before it is admitted.
    pub fn give_head_start(&mut self, id: SequenceId, head_start: HeadStart) {
        self.disk.head_starts.insert(id, head_start);
    }

    /// Returns the number of tokens that a sequence has computed of its head start, `None` if it has none anymore. A sequence that
    /// waits has computed nothing.
    pub fn head_start_progress(&self, id: SequenceId) -> Option<usize> {
        self.disk.head_starts.get(&id)?;
        match self.sequence(id) {
            Some(sequence) => Some(sequence.computed.tokens),
            None => self.is_waiting(id).then_some(0),
        }
    }

    /// Ends a head start. The sequence is admitted next, with what is cached of its prompt.
    pub fn end_head_start(&mut self, id: SequenceId) {
        if self.disk.head_starts.remove(&id).is_none() {
            return;
        }
        let Some(at) = self.running.iter().position(|sequence| sequence.id == id) else { return };
        let mut sequence = self.running.remove(at);
        self.release_pages(&mut sequence);
        self.waiting.push_preempted(sequence);
    }

    /// Ends the head start of a sequence that has computed `head`, and holds the sequence back. Returns the pages of these tokens
    /// for the read of those after them, or `None` if they are not cached.
    pub fn take_head(&mut self, id: SequenceId, (tenant, head): (&str, &[u32])) -> Option<SequencePages> {
        let pages = head.len() / PAGE_TOKENS;
        let held = self.kv.borrow_pages(tenant, head, pages);
        if held.pages().len() < pages {
            self.kv.release(tenant, held, &[]);
            return None;
        }
        self.hold(id);
        self.end_head_start(id);
        Some(held)
    }

    /// Frees the pages of a read that have no place in the prefix tree.
    pub fn drop_read(&mut self, read: SequencePages) {
        self.kv.release("", read, &[]);
    }

    /// Gives a sequence its first pages, in which `computed` tokens are computed, for its head start or its admission. A head
    /// start of which everything is cached ends.
    pub(super) fn begin(
        &mut self,
        sequence: &mut Sequence,
        pages: SequencePages,
        computed: usize,
    ) -> Result<Option<FinishReason>, EngineError> {
        if self.disk.head_starts.get(&sequence.id).is_some_and(|head_start| computed < head_start.tokens) {
            sequence.begin_head_start(pages, computed);
            return Ok(None);
        }
        self.disk.head_starts.remove(&sequence.id);
        if let Some(prefilled) = self.disk.prefilled.remove(&sequence.id) {
            sequence.record_prefilled(prefilled);
        }
        sequence.admit(pages, computed)
    }

    /// Returns the maximum number of tokens of a sequence in the next step, if it has a head start.
    pub(super) fn head_start_step(&self, id: SequenceId) -> Option<usize> {
        let head_start = self.disk.head_starts.get(&id)?;
        let left = head_start.tokens.checked_sub(self.sequence(id)?.computed.tokens)?;
        debug_assert!(left > 0, "a head start that is over is ended before the next plan");
        Some(left.min(head_start.step_tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Harness;
    use super::*;
    use crate::Affinity;
    use crate::tests::fixture::greedy;

    const ID: SequenceId = SequenceId(0);

    /// Returns a scheduler with a sequence of 100 tokens that computes the first 32 of them before it is admitted, 16 in a step.
    fn harness() -> (Harness, Vec<u32>) {
        let mut harness = Harness::new(64, 4, 64);
        harness.scheduler.give_head_start(ID, HeadStart { tokens: 32, step_tokens: 16 });
        let request = greedy(&"a".repeat(100), 4);
        let tokens = request.prompt.clone();
        harness.submit(request);
        (harness, tokens)
    }

    #[test]
    fn a_sequence_is_admitted_with_the_pages_that_were_read_during_its_head_start() {
        let (mut harness, tokens) = harness();
        assert_eq!([harness.step(), harness.step()], [[(0, 16)]; 2]);
        let scheduler = &mut harness.scheduler;
        assert_eq!(scheduler.head_start_progress(ID), Some(32));
        let mut read = SequencePages::default();
        assert!(scheduler.grow_held(&mut read, 2).is_some());
        let mut held = scheduler.take_head(ID, ("", &tokens[..32])).expect("it is computed");
        scheduler.check_integrity([&held, &read].into_iter());
        assert!(scheduler.is_waiting(ID) && scheduler.head_start_progress(ID).is_none());
        held.append(read);
        scheduler.share_held("", &mut held, &tokens[..64]);
        scheduler.check_integrity([&held].into_iter());
        scheduler.release_held(ID, &Affinity::default(), (held, &tokens[..64]), false);
        scheduler.release_hold(ID);
        assert_eq!(harness.step(), [(0, 36)]);
        assert_eq!(harness.cached_tokens(0), 32, "two of the four pages were computed");
    }

    #[test]
    fn what_a_sequence_computed_before_it_was_admitted_does_not_count_as_cached() {
        let (mut harness, _) = harness();
        harness.step();
        harness.scheduler.preempt(0);
        assert_eq!(harness.step(), [(0, 16)], "it continues its head start");
        harness.scheduler.end_head_start(ID);
        assert_eq!(harness.step(), [(0, 64)]);
        assert_eq!(harness.cached_tokens(0), 0);
    }

    #[test]
    fn a_head_start_ends_with_the_executor() {
        let (mut harness, _) = harness();
        harness.step();
        harness.scheduler.end_head_start(ID);
        harness.scheduler.lose_pages();
        harness.scheduler.check_integrity(std::iter::empty());
        assert_eq!(harness.step(), [(0, 64)]);
        assert_eq!(harness.cached_tokens(0), 0);
    }
}
