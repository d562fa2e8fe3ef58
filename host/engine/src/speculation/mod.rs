//! Speculative decoding: draft tokens enter a step as further rows of their sequence and are all checked at
//! once.
//!
//! The output is the same as without drafts, for greedy decoding and for every seed. A draft is a point mass,
//! so exact rejection sampling (Leviathan et al. 2023) amounts to this: draw the next token from the model's
//! own distribution, and keep the draft while the two are the same token. The draw at a position is a function
//! of the seed and the position alone, so it is the draw that would have been made there anyway, and the first
//! draw that differs from its draft is itself the next token. No token is ever drawn from another distribution.
//!
//! The form of an output predicts tokens as well, mostly correctly. Drafts from the form are made for every
//! constrained sequence; drafts from earlier text are made if speculation is on.
//!
//! The module decides how much to draft. It knows neither pages nor budgets; the scheduler passes in what is
//! left over.

mod pace;
mod prompt_lookup;

use std::collections::HashMap;
use std::time::Duration;

use crate::draft::{Draft, DraftOutcome, Proposal};
use crate::sequence::Sequence;
use crate::sequence_id::SequenceId;
use crate::{DraftLimits, Speculation};

pub(crate) use pace::Load;
use pace::{History, Pace};
use prompt_lookup::PromptLookup;

/// Predicts how sequences continue. There is one per engine; its state for a sequence is keyed by the
/// sequence's id.
pub(crate) trait Proposer: Send {
    /// Returns at most `limit` tokens that may come after `tokens`, which are a sequence's prompt and output so
    /// far. Between two calls for one sequence, its tokens only grow.
    fn propose(&mut self, id: SequenceId, tokens: &[u32], limit: usize) -> Vec<u32>;

    /// Forgets one sequence, which starts over with its next call.
    fn forget(&mut self, id: SequenceId);

    /// Forgets the sequences that are not `alive`.
    fn retain(&mut self, alive: &dyn Fn(SequenceId) -> bool);
}

/// The drafts of one engine: their sources, and how many of them pay.
pub(crate) struct Speculator {
    limits: DraftLimits,
    /// Drafts from earlier text; `None` if speculation is off.
    lookup: Option<Box<dyn Proposer>>,
    pace: Pace,
    histories: HashMap<SequenceId, History>,
}

impl Speculator {
    /// Creates a speculator for an executor that begins steps ahead or not. Without speculation, only sequences with a
    /// constraint can get drafts.
    pub fn new(speculation: Speculation, begins_ahead: bool) -> Self {
        let (limits, looks_up) = match speculation {
            Speculation::Auto => (DraftLimits::default(), !begins_ahead),
            Speculation::Off => (DraftLimits::default(), false),
            Speculation::PromptLookup(limits) => (limits, true),
        };
        let lookup = looks_up.then(|| Box::<PromptLookup>::default() as Box<dyn Proposer>);
        Speculator { limits, lookup, pace: Pace::default(), histories: HashMap::new() }
    }

    /// Returns whether sequences without a constraint get drafts too.
    pub fn looks_up(&self) -> bool {
        self.lookup.is_some()
    }

    /// Returns the draft for `sequence` in a step of that `load`: at most `room` tokens, all of which its
    /// constraint and limits allow. The draft is added to the load.
    pub fn draft(&mut self, sequence: &mut Sequence, room: usize, load: &mut Load) -> Draft {
        let room = room.min(self.limits.max_tokens);
        if room == 0 {
            return Draft::default();
        }
        let proposal = self.propose(sequence, room, load);
        let mut draft = sequence.admissible(&proposal, room);
        if draft.tokens.is_empty() {
            return draft;
        }
        let pace = &mut self.pace;
        let history = self.histories.entry(sequence.id).or_insert_with(|| pace.new_history());
        if self.limits.adaptive {
            draft.tokens.truncate(pace.best_length(&draft, history, load));
        }
        load.rows += draft.tokens.len();
        load.tokens += history.expected(&draft.tokens);
        draft
    }

    /// Returns the tokens that the form of the output predicts, extended from earlier text if that agrees with
    /// them.
    fn propose(&mut self, sequence: &mut Sequence, room: usize, load: &Load) -> Proposal {
        let tokens = sequence.likely(room);
        let by_grammar = tokens.len();
        let lookup_room = room.min(self.pace.row_limit().saturating_sub(load.rows));
        if let Some(lookup) = &mut self.lookup
            && lookup_room > 0
            && sequence.has_begun()
        {
            let said_before = lookup.propose(sequence.id, &sequence.tokens, lookup_room);
            if said_before.starts_with(&tokens) {
                return Proposal { tokens: said_before, by_grammar };
            }
        }
        Proposal { tokens, by_grammar }
    }

    /// Records the result of a sequence's draft.
    pub fn record_draft(&mut self, id: SequenceId, tried: &[DraftOutcome]) {
        if let Some(history) = self.histories.get_mut(&id) {
            history.record(tried);
            self.pace.record_draft(tried);
        }
    }

    /// Forgets a sequence's tokens after some of them were rolled back.
    pub fn forget_tokens(&mut self, id: SequenceId) {
        if let Some(lookup) = &mut self.lookup {
            lookup.forget(id);
        }
    }

    /// Records the duration of a step of `rows` tokens, each with logits.
    pub fn record_step(&mut self, rows: usize, time: Duration) {
        self.pace.record_step(rows, time);
    }

    /// Forgets the sequences that are not `alive`.
    pub fn retain(&mut self, alive: impl Fn(SequenceId) -> bool) {
        self.histories.retain(|id, _| alive(*id));
        if let Some(lookup) = &mut self.lookup {
            lookup.retain(&alive);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_looked_up_by_default_unless_steps_begin_ahead() {
        for (speculation, begins_ahead, expected) in [
            (Speculation::Auto, false, true),
            (Speculation::Auto, true, false),
            (Speculation::Off, false, false),
            (Speculation::prompt_lookup(), true, true),
        ] {
            let speculator = Speculator::new(speculation, begins_ahead);
            assert_eq!(speculator.looks_up(), expected, "{speculation:?}, ahead: {begins_ahead}");
        }
    }
}
