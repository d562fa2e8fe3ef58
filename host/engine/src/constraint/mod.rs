//! What the output must look like, token by token.
//!
//! A constraint is compiled once and cached; each generation gets its own [`OutputConstraint`]. Invariant: a constraint
//! is either enforced in full or refused with an error that names what cannot be enforced; it never fails open. It
//! knows nothing of tool calls or chat; those are written as schemas and grammars by others.

mod compiler;
mod complaint;
mod one_of;
mod schema_bounds;
mod schema_form;
mod schema_keywords;
#[cfg(test)]
mod tests;
mod token_env;

use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;

use crate::EngineError;

pub(crate) use compiler::{ConstraintCompiler, spelled_schema};

/// The parameter that an error names where the constraint is the request's own.
pub(crate) const PARAMETER: &str = "constraint";

/// The state of one constrained generation.
pub(crate) struct OutputConstraint {
    matcher: Matcher,
    vocabulary_size: usize,
}

/// The tokens that may come next: bit `t % 32` of word `t / 32`.
pub(crate) struct TokenMask {
    set: SimpleVob,
    words: usize,
}

impl TokenMask {
    pub fn words(&self) -> &[u32] {
        &self.set.as_slice()[..self.words]
    }

    /// Whether a token outside `banned` is allowed.
    pub fn allows_other_than(&self, banned: &[u32]) -> bool {
        let allowed_and_banned = banned.iter().filter(|id| self.set.is_allowed(**id)).count();
        self.set.num_set() > allowed_and_banned
    }
}

impl OutputConstraint {
    /// Tokens that the constraint leaves no choice about. They are not accepted yet.
    pub fn forced(&mut self) -> Vec<u32> {
        if self.is_done() { Vec::new() } else { self.matcher.compute_ff_tokens() }
    }

    pub fn mask(&mut self) -> Result<TokenMask, EngineError> {
        let set = self.matcher.compute_mask_or_eos().map_err(failed)?;
        Ok(TokenMask { set, words: self.vocabulary_size.div_ceil(32) })
    }

    pub fn accept(&mut self, token: u32) -> Result<(), EngineError> {
        self.matcher.consume_token(token).map_err(failed)
    }

    /// The same state again, to look ahead from. It shares the lexer with the original, so the two are used in turns.
    pub fn fork(&self) -> Self {
        OutputConstraint { matcher: self.matcher.clone(), vocabulary_size: self.vocabulary_size }
    }

    /// Accepts a token if it may come next, and leaves the state as it is if not.
    pub fn try_accept(&mut self, token: u32) -> bool {
        self.matcher.try_consume_tokens(&[token]).is_ok_and(|accepted| accepted == 1)
    }

    /// Complete, and nothing more may follow.
    pub fn is_done(&self) -> bool {
        self.matcher.is_stopped()
    }
}

fn failed(error: impl std::fmt::Display) -> EngineError {
    let text = error.to_string();
    let message = text.split("\n<").next().unwrap_or_default();
    EngineError::Failed(format!("the output constraint cannot go on: {message}"))
}
