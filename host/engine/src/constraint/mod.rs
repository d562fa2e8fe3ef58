//! Constraints on the output, enforced token by token.
//!
//! A constraint is compiled once and cached; each generation gets its own [`OutputConstraint`]. A schema passes
//! through `schema_bounds` and `schema_keywords` (validation) → `canonical` (conversion to one draft) →
//! `relaxed` (the part that a mask can follow) → `unenforced_paths` (the values that are left to check) → `form` (the
//! whole output as a grammar) → `compiler`.
//!
//! Invariant: a keyword is enforced by the mask, or the value that it applies to is among
//! [`OutputConstraint::unenforced`]; no keyword is left out.

#[cfg(test)]
mod accepted_tests;
mod call_parts;
mod canonical;
mod compile_share;
mod compiler;
mod document;
mod drafts;
mod error_location;
mod form;
mod multiples;
mod one_of;
mod references;
mod relaxed;
#[cfg(test)]
mod relaxed_tests;
mod rule_grammar;
mod schema_bounds;
mod schema_check;
mod schema_keywords;
mod spelling;
#[cfg(test)]
mod tests;
mod token_env;
mod unenforced;
mod unenforced_paths;
mod written_argument;
mod written_unenforced;
mod written_value;

use std::sync::Arc;

use llguidance::Matcher;
use llguidance::toktrie::{SimpleVob, TokTrie};

use crate::EngineError;

pub(crate) use compile_share::CompileShares;
pub(crate) use compiler::ConstraintCompiler;
use form::Ending;
pub(crate) use form::text_without;
pub use schema_check::{CheckedValue, SchemaNotes};
pub(crate) use spelling::Spelling;
pub(crate) use unenforced::{PathStep, UnenforcedValue};
pub(crate) use written_argument::written_argument;

/// The parameter that an error names if the constraint is the request's own.
pub(crate) const PARAMETER: &str = "constraint";

/// The state of one constrained generation.
pub(crate) struct OutputConstraint {
    matcher: Matcher,
    vocabulary_size: usize,
    ending: Ending,
    last_token: Option<u32>,
    /// Tokens of white space, and tokens that end the output.
    blank: Arc<SimpleVob>,
    unenforced: Arc<[UnenforcedValue]>,
    warnings: Arc<[String]>,
}

/// The tokens that may come next: bit `t % 32` of word `t / 32`.
pub(crate) struct TokenMask {
    set: SimpleVob,
    words: usize,
}

impl TokenMask {
    /// Returns the words of the mask, which cover the vocabulary: bit `t % 32` of word `t / 32` allows token `t`.
    pub fn words(&self) -> &[u32] {
        &self.set.as_slice()[..self.words]
    }

    /// Returns how many tokens outside `banned` are allowed.
    pub fn choices(&self, banned: &[u32]) -> usize {
        self.set.num_set() - banned.iter().filter(|id| self.set.is_allowed(**id)).count()
    }

    /// Removes a token from the mask. Does nothing if the token is not allowed.
    pub fn exclude(&mut self, token: u32) {
        if self.set.is_allowed(token) {
            self.set.disallow_token(token);
        }
    }
}

impl OutputConstraint {
    /// Returns the next token if the mask allows only this one. The token is not accepted yet. `None` does not
    /// mean that there are several: finding out would take a mask.
    pub fn only_token(&mut self) -> Option<u32> {
        let forced = self.forced_bytes();
        if forced.is_empty() {
            return None;
        }
        let env = self.matcher.tok_env().ok()?;
        only_token(env.tok_trie(), &forced)
    }

    /// Returns the tokens that the tokenizer would make of the text that has to come next. Other tokens may
    /// spell it too.
    pub fn forced(&mut self) -> Vec<u32> {
        let forced = self.forced_bytes();
        match self.matcher.tok_env() {
            Ok(env) if !forced.is_empty() => env.tokenize_bytes_marker(&forced).0,
            _ => Vec::new(),
        }
    }

    /// Returns the tokens that may come next: only those that end the output, once nothing else can follow.
    pub fn mask(&mut self) -> Result<TokenMask, EngineError> {
        let set = self.matcher.compute_mask_or_eos().map_err(failed)?;
        Ok(TokenMask { set, words: self.vocabulary_size.div_ceil(32) })
    }

    /// Advances by a token. Fails if the constraint does not allow it.
    pub fn accept(&mut self, token: u32) -> Result<(), EngineError> {
        self.matcher.consume_token(token).map_err(failed)?;
        self.last_token = Some(token);
        Ok(())
    }

    /// Returns a copy of the state, to look ahead with. It shares the lexer with the original, so the two are
    /// used in turns.
    pub fn fork(&self) -> Self {
        OutputConstraint {
            matcher: self.matcher.clone(),
            vocabulary_size: self.vocabulary_size,
            ending: self.ending,
            last_token: self.last_token,
            blank: self.blank.clone(),
            unenforced: self.unenforced.clone(),
            warnings: self.warnings.clone(),
        }
    }

    /// Accepts a token if it may come next, and leaves the state unchanged if not.
    pub fn try_accept(&mut self, token: u32) -> bool {
        let is_accepted = self.matcher.try_consume_tokens(&[token]).is_ok_and(|accepted| accepted == 1);
        if is_accepted {
            self.last_token = Some(token);
        }
        is_accepted
    }

    /// Rolls back the last `tokens` accepted tokens. Returns false if that is not possible; the state is then
    /// unusable.
    pub fn rollback(&mut self, tokens: usize) -> bool {
        self.last_token = None;
        self.matcher.rollback(tokens).is_ok()
    }

    /// Returns whether the output is complete and nothing more may follow.
    pub fn is_done(&self) -> bool {
        self.matcher.is_stopped()
    }

    /// Returns whether the output is complete and at most white space may follow. A number that could continue
    /// is not complete.
    pub(crate) fn is_complete(&mut self) -> bool {
        if self.is_done() {
            return true;
        }
        let may_be = match self.ending {
            Ending::Own => false,
            Ending::Document => true,
            // Text may end anywhere, and may continue anywhere except after a call.
            Ending::Calls => self.last_token.is_some_and(|token| self.ends_markup(token)),
        };
        may_be && self.matcher.is_accepting().unwrap_or(false) && self.allows_only_blanks()
    }

    /// Returns the values that the mask does not enforce in full.
    pub(crate) fn unenforced(&self) -> &Arc<[UnenforcedValue]> {
        &self.unenforced
    }

    /// Returns likely mistakes in the constraint, for its author.
    pub(crate) fn warnings(&self) -> &Arc<[String]> {
        &self.warnings
    }

    fn forced_bytes(&mut self) -> Vec<u8> {
        if self.is_done() { Vec::new() } else { self.matcher.compute_ff_bytes() }
    }

    fn ends_markup(&self, token: u32) -> bool {
        let Ok(env) = self.matcher.tok_env() else { return false };
        env.tok_trie().token(token).iter().any(|byte| matches!(byte, b'>' | b']' | b'|'))
    }

    fn allows_only_blanks(&mut self) -> bool {
        let Ok(allowed) = self.matcher.compute_mask_or_eos() else { return false };
        allowed.as_slice().iter().zip(self.blank.as_slice()).all(|(allowed, blank)| allowed & !blank == 0)
    }
}

/// Returns the only token of `trie` with which text that begins with `forced` can continue, if there is only
/// one.
fn only_token(trie: &TokTrie, forced: &[u8]) -> Option<u32> {
    if let Some(special) = forced.strip_prefix(&[TokTrie::SPECIAL_TOKEN_MARKER, b'[']) {
        // A special token is forced by its number.
        let number =
            special.split(|byte| *byte == b']').next().filter(|number| number.len() < special.len())?;
        return std::str::from_utf8(number).ok()?.parse().ok();
    }
    let mut only = None;
    let mut node = trie.root();
    for byte in forced {
        let mut alike = trie.node_children(node).filter(|child| child.byte() == *byte);
        let Some(child) = alike.next() else { return only };
        // Two tokens have the same text.
        if alike.next().is_some() {
            return None;
        }
        if let Some(id) = child.token_id()
            && only.replace(id).is_some()
        {
            return None;
        }
        node = child;
    }
    // A longer token may spell the forced text and what follows it.
    only.filter(|_| trie.node_children(node).next().is_none())
}

fn failed(error: impl std::fmt::Display) -> EngineError {
    let text = error.to_string();
    let message = text.split("\n<").next().unwrap_or_default();
    EngineError::Failed(format!("the output constraint cannot continue: {message}"))
}
