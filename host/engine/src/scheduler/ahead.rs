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
        let is_plain = sequence.next_scored_row().is_none() && !sequence.is_prefill_only();
        let fits = (1..=most).contains(&tokens.len());
        if takes_turns || !is_plain || !fits { None } else { self.row_ahead(id, start, tokens) }
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

    /// Records that a step begins which was started ahead.
    pub fn begin_step(&mut self, plan: &[PlannedSequence]) {
        let decodes = plan.iter().filter(|planned| planned.tokens == 1).count();
        let all: usize = plan.iter().map(|planned| planned.tokens).sum();
        self.pace.begin(StepShape { decodes, prefill_tokens: all - decodes });
    }
}
