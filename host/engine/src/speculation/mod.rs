//! Guessing ahead: draft tokens that enter a step as further rows of their sequence and are checked all at once.
//!
//! The output is the same as without drafts, for greedy decoding and for every seed. A draft is a point mass, so exact
//! rejection sampling (Leviathan et al. 2023) is: draw the next token from the model's own distribution, and keep the
//! draft while the two are the same token. The draw at a position is a function of the seed and the position alone,
//! so it is the draw that would have been made there anyway, and the first one that differs from its draft is itself
//! the next token. Nothing is ever drawn from another distribution.
//!
//! What the form of an output says next is a guess as well, and mostly right. It is made for every constrained sequence;
//! guesses from what was said before are made where speculation is on.
//!
//! It decides how much to guess and knows neither pages nor budgets; the scheduler says what is left over.

mod draft;
mod grammar;
mod pace;
mod prompt_lookup;

use std::collections::HashMap;
use std::time::Duration;

use crate::sequence::{Sequence, SequenceId};

#[cfg(test)]
pub(crate) use draft::Source;
pub(crate) use draft::{Draft, DraftToken, Proposal, Tried, Walk};
pub(crate) use grammar::GrammarDrafter;
pub(crate) use pace::Load;
use pace::{History, Pace};
use prompt_lookup::PromptLookup;

/// How the engine guesses ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speculation {
    /// Only what the form of an output says next.
    Off,
    /// What followed the same tokens earlier in the prompt or the output is the guess.
    PromptLookup(DraftLimits),
}

/// How much is guessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftLimits {
    /// Of one sequence in one step.
    pub max_tokens: usize,
    /// Draft as much as is expected to pay by the measured time of steps and the sequence's own history, which may be
    /// nothing. False drafts all that can be guessed, to measure what guesses are worth.
    pub adaptive: bool,
}

impl Default for DraftLimits {
    fn default() -> Self {
        DraftLimits { max_tokens: 15, adaptive: true }
    }
}

impl Speculation {
    pub fn prompt_lookup() -> Self {
        Speculation::PromptLookup(DraftLimits::default())
    }
}

/// Guesses how sequences go on. One per engine; what it remembers of a sequence is keyed by its id.
pub(crate) trait Proposer: Send {
    /// At most `limit` tokens that may come after `tokens`, which are a sequence's prompt and output so far. Between
    /// two calls for one sequence its tokens only grow.
    fn propose(&mut self, id: SequenceId, tokens: &[u32], limit: usize) -> Vec<u32>;

    /// Forgets one sequence: it begins anew with its next call.
    fn forget(&mut self, id: SequenceId);

    /// Forgets the sequences that are not `alive`.
    fn retain(&mut self, alive: &dyn Fn(SequenceId) -> bool);
}

/// The drafts of one engine: who proposes them and how many pay.
pub(crate) struct Speculator {
    limits: DraftLimits,
    /// Guesses from what was said before; `None` where speculation is off.
    lookup: Option<Box<dyn Proposer>>,
    pace: Pace,
    histories: HashMap<SequenceId, History>,
}

impl Speculator {
    pub fn new(speculation: Speculation) -> Self {
        let (limits, lookup) = match speculation {
            Speculation::Off => (DraftLimits::default(), None),
            Speculation::PromptLookup(limits) => {
                (limits, Some(Box::<PromptLookup>::default() as Box<dyn Proposer>))
            }
        };
        Speculator { limits, lookup, pace: Pace::default(), histories: HashMap::new() }
    }

    /// Whether sequences without a constraint get drafts too.
    pub fn looks_up(&self) -> bool {
        self.lookup.is_some()
    }

    /// What follows `sequence` perhaps, in a step of that `load`: at most `room` tokens, all of which its constraint
    /// and limits allow. The load then includes it.
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
            draft.tokens.truncate(pace.worth(&draft, history, load));
        }
        load.rows += draft.tokens.len();
        load.tokens += history.expected(&draft.tokens);
        draft
    }

    /// What the form of the output says, and what was said before where that agrees with it.
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

    /// A sequence's draft was checked.
    pub fn record_draft(&mut self, id: SequenceId, tried: &[Tried]) {
        if let Some(history) = self.histories.get_mut(&id) {
            history.record(tried);
            self.pace.record_draft(tried);
        }
    }

    /// Tokens of a sequence were taken back.
    pub fn forget_tokens(&mut self, id: SequenceId) {
        if let Some(lookup) = &mut self.lookup {
            lookup.forget(id);
        }
    }

    /// A step of `rows` tokens, each with logits, took so long.
    pub fn record_step(&mut self, rows: usize, time: Duration) {
        self.pace.record_step(rows, time);
    }

    pub fn retain(&mut self, alive: impl Fn(SequenceId) -> bool) {
        self.histories.retain(|id, _| alive(*id));
        if let Some(lookup) = &mut self.lookup {
            lookup.retain(&alive);
        }
    }
}
