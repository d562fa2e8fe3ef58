//! Drafts, and the reduction of a proposal to the part that may become one.
//!
//! Invariant: a token is drawn after the last token of a draft. A row that only repeats what is certain, or
//! that cannot come true, is not worth computing.

mod grammar;

use crate::constraint::OutputConstraint;

pub(crate) use grammar::GrammarDrafter;

/// Tokens that may follow a sequence; empty if there are none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Draft {
    pub tokens: Vec<DraftToken>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DraftToken {
    pub id: u32,
    /// Whether the constraint leaves no other choice if the tokens before it come true. Such a token is not
    /// drawn.
    pub forced: bool,
    pub source: Source,
}

/// The source of a proposed token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The token spells what the output's form predicts.
    Grammar,
    /// The token followed the same tokens before.
    Lookup,
}

/// Tokens that may come next, before it is known whether they are allowed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Proposal {
    pub tokens: Vec<u32>,
    /// Number of leading tokens that the grammar proposed.
    pub by_grammar: usize,
}

/// The source of a drafted token, and whether the draw produced it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DraftOutcome {
    pub source: Source,
    pub accepted: bool,
}

impl Draft {
    /// Returns the token ids in the order in which they would follow.
    pub fn ids(&self) -> impl Iterator<Item = u32> {
        self.tokens.iter().map(|token| token.id)
    }

    /// Returns whether a token is drawn after the first `count` tokens.
    pub fn draws_after(&self, count: usize) -> bool {
        self.tokens.get(count).is_none_or(|next| !next.forced)
    }
}

/// The bounds of a proposal.
pub(crate) struct DraftFilter<'a> {
    /// The state of the constraint at the end of the known tokens.
    pub constraint: Option<OutputConstraint>,
    /// Tokens that end the sequence, so that nothing after them is computed.
    pub ends: &'a [u32],
    pub limit: usize,
}

impl DraftFilter<'_> {
    /// Follows the proposal as far as it can come true. If the constraint forces a token other than the
    /// proposed one, the forced token replaces it.
    pub fn admit(mut self, proposal: &Proposal) -> Draft {
        let mut draft = Draft::default();
        let mut rest = proposal.tokens.as_slice();
        while let Some((&id, after)) = rest.split_first() {
            let Some(forced) = self.step(id) else { break };
            if draft.tokens.len() + 1 + forced.len() > self.limit {
                break;
            }
            let at = proposal.tokens.len() - rest.len();
            let source = if at < proposal.by_grammar { Source::Grammar } else { Source::Lookup };
            draft.tokens.push(DraftToken { id, forced: false, source });
            rest = after.strip_prefix(forced.as_slice()).unwrap_or_default();
            draft.tokens.extend(forced.into_iter().map(|id| DraftToken { id, forced: true, source }));
        }
        draft
    }

    /// Takes one token and returns the tokens that are then forced. Returns `None` if the token cannot come
    /// true or no token is drawn after it.
    fn step(&mut self, id: u32) -> Option<Vec<u32>> {
        if self.ends.contains(&id) {
            return None;
        }
        let Some(constraint) = &mut self.constraint else { return Some(Vec::new()) };
        if !constraint.try_accept(id) || constraint.is_complete() {
            return None;
        }
        let mut forced = Vec::new();
        while forced.len() < self.limit
            && let Some(only) = constraint.only_token()
        {
            if !constraint.try_accept(only) || constraint.is_complete() {
                return None;
            }
            forced.push(only);
        }
        Some(forced)
    }
}
