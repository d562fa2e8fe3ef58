//! The reasoning at the beginning of an output: where it ends, and the tokens that are forced around it.
//!
//! Invariant: the tokens of the reasoning are the leading tokens of the output. The constraint sees none of them, and
//! every token after them. What is forced follows from the tokens before it, so a resumed output repeats it.

use crate::request::Thinking;

/// The reasoning of one output that has a constraint or a budget.
pub(super) struct ThinkingState {
    thinking: Thinking,
    phase: Phase,
    /// Number of tokens before the answer so far, and of those within the reasoning.
    tokens: usize,
    within: usize,
    /// Whether a constraint waits for the answer.
    is_bound: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The token of `begin` with this index comes next.
    Begins(usize),
    Within,
    /// The token of `between` with this index comes next.
    Ends(usize),
    Over,
}

impl ThinkingState {
    /// Returns the state of an output; `None` if nothing depends on its reasoning.
    pub fn new(thinking: Thinking, is_bound: bool) -> Option<Self> {
        if !is_bound && thinking.budget.is_none() {
            return None;
        }
        let phase = if thinking.is_open { Phase::Within } else { Phase::Begins(0) };
        let mut state = ThinkingState { thinking, phase, tokens: 0, within: 0, is_bound };
        state.settle();
        Some(state)
    }

    /// Returns whether the answer has not begun.
    pub fn is_underway(&self) -> bool {
        self.phase != Phase::Over
    }

    /// Returns whether a constraint waits for the answer, so that the output cannot end yet.
    pub fn holds_constraint(&self) -> bool {
        self.is_bound && self.is_underway()
    }

    /// Returns the number of tokens before the answer so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the token that has to come next, if there is one.
    pub fn forced(&self) -> Option<u32> {
        match self.phase {
            Phase::Begins(index) => self.thinking.begin.get(index).copied(),
            Phase::Within if self.left() == 0 => Some(self.thinking.end),
            Phase::Ends(index) => self.thinking.between.get(index).copied(),
            Phase::Within | Phase::Over => None,
        }
    }

    /// Returns the number of tokens that may be drawn before the end is forced.
    pub fn left(&self) -> usize {
        self.thinking.budget.map_or(usize::MAX, |budget| budget.saturating_sub(self.within))
    }

    /// Returns whether no draft continues after the token.
    pub fn ends_with(&self, id: u32) -> bool {
        id == self.thinking.end || self.thinking.interrupts.contains(&id)
    }

    /// Takes the next token of the output. Returns whether it comes before the answer.
    pub fn take(&mut self, id: u32) -> bool {
        match self.phase {
            Phase::Over => return false,
            Phase::Within if self.thinking.interrupts.contains(&id) => {
                self.phase = Phase::Over;
                return false;
            }
            Phase::Within if id == self.thinking.end => self.phase = Phase::Ends(0),
            Phase::Within => self.within += 1,
            Phase::Begins(index) => self.phase = Phase::Begins(index + 1),
            Phase::Ends(index) => self.phase = Phase::Ends(index + 1),
        }
        self.tokens += 1;
        self.settle();
        true
    }

    fn settle(&mut self) {
        if let Phase::Begins(index) = self.phase
            && index == self.thinking.begin.len()
        {
            self.phase = Phase::Within;
        }
        if let Phase::Ends(index) = self.phase
            && index == self.thinking.between.len()
        {
            self.phase = Phase::Over;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thinking(is_open: bool, budget: Option<usize>) -> Thinking {
        Thinking { is_open, begin: vec![1, 2], end: 3, between: vec![4], interrupts: vec![9], budget }
    }

    /// Takes the forced tokens, and where none is forced the next of `drawn`. Returns all tokens before the answer.
    fn run(mut state: ThinkingState, drawn: &[u32]) -> Vec<u32> {
        let (mut taken, mut drawn) = (Vec::new(), drawn.iter().copied());
        while state.is_underway() {
            let Some(id) = state.forced().or_else(|| drawn.next()) else { break };
            if state.take(id) {
                taken.push(id);
            }
        }
        assert_eq!(state.tokens(), taken.len());
        taken
    }

    #[test]
    fn reasoning_is_opened_and_closed_around_what_is_drawn() {
        let state = |is_open, budget| ThinkingState::new(thinking(is_open, budget), true).expect("bound");
        assert_eq!(run(state(false, None), &[7, 8, 3, 7]), [1, 2, 7, 8, 3, 4]);
        assert_eq!(run(state(true, None), &[7, 3]), [7, 3, 4]);
        assert_eq!(run(state(true, Some(2)), &[7, 8, 7, 8]), [7, 8, 3, 4]);
        assert_eq!(run(state(false, Some(0)), &[]), [1, 2, 3, 4]);
        assert_eq!(run(state(true, None), &[7, 9, 7]), [7], "an interrupting token belongs to the answer");
    }

    #[test]
    fn reasoning_without_budget_and_constraint_needs_no_state() {
        assert!(ThinkingState::new(thinking(true, None), false).is_none());
        assert!(
            ThinkingState::new(thinking(true, Some(1)), false).is_some_and(|state| !state.holds_constraint())
        );
    }
}
