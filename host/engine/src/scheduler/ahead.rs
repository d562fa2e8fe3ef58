//! The rows of a step that starts ahead, before the tokens of the step under way are drawn.
//!
//! Invariant: such a step preempts nothing and takes no sequence's turn. If it would have to, it is not started, and
//! the scheduler plans the next step when the tokens are known.

use skep_model::{Batch, BatchSequence, LogitsWanted, PAGE_TOKENS};

use super::{PlannedSequence, Scheduler, StepShape, is_background};
use crate::kv::pages_for;
use crate::sequence::Sequence;
use crate::sequence_id::SequenceId;

/// Maximum number of known tokens in a step that starts ahead: the result of a tool, or what a constraint forces. A longer
/// prompt is divided among steps by the plan.
const MAX_KNOWN_TOKENS: usize = 64;

impl Scheduler {
    /// Returns the ids of the running sequences in the order of their admission.
    pub fn running_ids(&self) -> Vec<SequenceId> {
        self.running.iter().map(|sequence| sequence.id).collect()
    }

    /// Returns the maximum number of known tokens in a step that starts ahead, beside this many decodes.
    pub fn known_tokens_ahead(&self, decodes: usize) -> usize {
        let room = self.limits.tokens.saturating_sub(decodes);
        self.pace.prefill_tokens(decodes, room).min(MAX_KNOWN_TOKENS)
    }

    /// Returns the row for the token after those that a sequence knows, which is being drawn. Returns `None` if there is
    /// no page for it.
    pub fn drawn_ahead(&mut self, id: SequenceId) -> Option<BatchSequence> {
        let start = self.sequence(id)?.tokens.len();
        self.row_ahead(id, start, vec![0])
    }

    /// Returns the row for the known tokens of a sequence of which the step under way computes the next `computing`.
    /// Returns `None` if there are none or more than `most`, if there are no pages for them, or if the sequence needs more
    /// of the step than that: scores of its prompt, or its turn among background work.
    pub fn known_ahead(&mut self, id: SequenceId, computing: usize, most: usize) -> Option<BatchSequence> {
        let sequence = self.sequence(id)?;
        let start = sequence.computed.tokens + computing;
        let tokens = sequence.tokens.get(start..)?.to_vec();
        let takes_turns = is_background(sequence) && self.running.iter().any(|other| !is_background(other));
        let has_head_start = self.disk.head_starts.contains_key(&id);
        let is_plain = sequence.next_scored_row().is_none() && !sequence.is_prefill_only() && !has_head_start;
        let fits = (1..=most).contains(&tokens.len());
        if takes_turns || !is_plain || !fits { None } else { self.row_ahead(id, start, tokens) }
    }

    /// Returns whether more background work is among these sequences than a step gets beside interactive work.
    pub fn has_too_much_background(&self, ids: &[SequenceId]) -> bool {
        let background = ids.iter().filter(|id| self.sequence(**id).is_some_and(is_background)).count();
        background > self.pace.background_tokens() && self.running.iter().any(|other| !is_background(other))
    }

    fn row_ahead(&mut self, id: SequenceId, start: usize, tokens: Vec<u32>) -> Option<BatchSequence> {
        let sequence = self.running.iter_mut().find(|sequence| sequence.id == id)?;
        let pages = pages_for(start + tokens.len());
        let grown = self.kv.grow(&mut sequence.computed.pages, pages);
        grown.then(|| BatchSequence {
            tokens,
            start,
            pages: sequence.computed.pages.pages()[..pages].to_vec(),
            logits: LogitsWanted::Tail(1),
        })
    }

    /// Returns whether a row that was computed ahead is one of this sequence: it is still running, and what it knows and
    /// holds is what the row was computed from.
    pub fn continues_with(&self, id: SequenceId, row: &BatchSequence) -> bool {
        let is_of = |sequence: &Sequence| {
            let known = sequence.tokens.get(row.start..).unwrap_or_default();
            let pages = sequence.computed.pages.pages();
            sequence.computed.tokens == row.start
                && known.starts_with(&row.tokens)
                && pages.starts_with(&row.pages)
        };
        self.sequence(id).is_some_and(is_of)
    }

    /// Records that a step has been started ahead. No page that it writes to gets another owner before the next call of
    /// this function or of [`Scheduler::end_ahead`].
    pub fn begin_ahead(&mut self, step: &Batch) {
        let written = step.sequences.iter().flat_map(|row| {
            let end = pages_for(row.start + row.tokens.len());
            &row.pages[row.start / PAGE_TOKENS..end]
        });
        self.kv.set_written(written.copied().collect());
    }

    /// Records that no step that was started ahead is under way.
    pub fn end_ahead(&mut self) {
        self.kv.set_written(Vec::new());
    }

    /// Records that a step begins which was started ahead. The pages of the step after it may be allocated before the next
    /// plan, so the order of eviction is brought up to date.
    pub fn begin_step(&mut self, plan: &[PlannedSequence]) {
        self.order_evictions();
        let decodes = plan.iter().filter(|planned| planned.tokens == 1).count();
        let all: usize = plan.iter().map(|planned| planned.tokens).sum();
        self.pace.begin(StepShape { decodes, prefill_tokens: all - decodes });
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Harness;
    use super::*;
    use crate::kv::SequencePages;
    use crate::tests::fixture::greedy;
    use crate::{FinishReason, Priority};

    #[test]
    fn a_row_counts_only_while_its_sequence_continues_as_expected() {
        let mut harness = Harness::new(8, 4, 64);
        let id = SequenceId(harness.submit(greedy("0123456789", 20)));
        harness.step();
        let row = harness.scheduler.drawn_ahead(id).expect("there are pages");
        assert_eq!((row.start, row.tokens.len(), row.pages.len()), (11, 1, 1));
        assert!(!harness.scheduler.continues_with(id, &row), "the step under way is not over");
        harness.step();
        let drawn = BatchSequence { tokens: vec![u32::from(b'x')], ..row.clone() };
        assert!(harness.scheduler.continues_with(id, &drawn));
        assert!(!harness.scheduler.continues_with(id, &row), "another token was drawn");
        let elsewhere = BatchSequence { pages: vec![skep_model::PageId(99)], ..drawn.clone() };
        assert!(!harness.scheduler.continues_with(id, &elsewhere), "its pages are others");
        harness.step();
        assert!(!harness.scheduler.continues_with(id, &drawn), "it is a step further");
        harness.scheduler.end(id, Ok(FinishReason::Length));
        assert!(!harness.scheduler.continues_with(id, &drawn), "it has ended");
    }

    #[test]
    fn the_page_of_an_ended_sequence_is_held_until_the_started_step_is_over() {
        let mut harness = Harness::new(4, 4, 64);
        let id = SequenceId(harness.submit(greedy("0123456789", 20)));
        harness.step();
        let scheduler = &mut harness.scheduler;
        let row = scheduler.drawn_ahead(id).expect("there are pages");
        scheduler.begin_ahead(&Batch { sequences: vec![row] });
        scheduler.end(id, Ok(FinishReason::Length));
        scheduler.check_integrity(std::iter::empty());
        assert_eq!(scheduler.kv.available_pages(), 3);
        scheduler.end_ahead();
        scheduler.check_integrity(std::iter::empty());
        assert_eq!(scheduler.kv.available_pages(), 4);
    }

    #[test]
    fn a_step_that_starts_ahead_has_no_prompt_that_is_long_or_whose_pages_are_missing() {
        let mut harness = Harness::new(4, 4, 8);
        let id = SequenceId(harness.submit(greedy(&"a".repeat(30), 20)));
        harness.step();
        let scheduler = &mut harness.scheduler;
        let mut taken = SequencePages::default();
        assert!(scheduler.kv.grow(&mut taken, 3));
        // The first step has computed eight tokens, and the one under way computes as many.
        assert!(scheduler.known_ahead(id, 8, 14).is_none(), "no page is left");
        scheduler.kv.release("", taken, &[]);
        assert!(scheduler.known_ahead(id, 8, 13).is_none(), "there are too many tokens");
        let row = scheduler.known_ahead(id, 8, 14).expect("there are pages");
        assert_eq!((row.start, row.tokens.len(), row.pages.len()), (16, 14, 2));
        assert!(scheduler.known_ahead(id, 22, 14).is_none(), "all of it is being computed");
    }

    #[test]
    fn the_order_of_eviction_is_up_to_date_after_a_step_that_was_started_ahead_begins() {
        let mut harness = Harness::new(4, 4, 64);
        harness.submit(greedy("0123456789", 20));
        let scheduler = &mut harness.scheduler;
        assert!(scheduler.may_evict() && scheduler.is_eviction_order_old);
        scheduler.begin_step(&[]);
        assert!(!scheduler.is_eviction_order_old);
    }

    #[test]
    fn background_work_does_not_exceed_its_share_beside_interactive_work() {
        let mut harness = Harness::new(64, 8, 64);
        let background = || {
            let mut request = greedy("background", 20);
            request.priority = Priority::Background;
            request
        };
        let [first, second] = [(); 2].map(|()| SequenceId(harness.submit(background())));
        harness.step();
        assert!(!harness.scheduler.has_too_much_background(&[first, second]), "nobody else is there");
        assert!(harness.scheduler.known_ahead(second, 0, 64).is_some());
        let chat = SequenceId(harness.submit(greedy("a chat", 20)));
        harness.step();
        assert!(harness.scheduler.has_too_much_background(&[first, second, chat]));
        assert!(!harness.scheduler.has_too_much_background(&[first, chat]));
        assert!(harness.scheduler.known_ahead(second, 0, 64).is_none(), "it waits for its turn");
        assert!(harness.scheduler.known_ahead(chat, 0, 64).is_some());
    }
}
