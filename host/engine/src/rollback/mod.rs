//! Values that masks cannot enforce. They are checked when they are complete. A value that fails is rolled back
//! to the last token that could have been another one; that token is then excluded, and the value is generated
//! again.
//!
//! Invariant: a reported token is never rolled back. From the first token of an unchecked value until the value
//! has been checked, tokens are held here. What happens then is a function of the tokens before them and of how
//! much was rolled back before, so a generation that is resumed repeats it.

mod checks;
mod instance;
mod json_values;
#[cfg(test)]
mod json_values_tests;
mod opener;
mod written_arguments;

use std::sync::Arc;

use crate::constraint::OutputConstraint;
use crate::detokenize::Detokenizer;
use crate::request::BeforeCalls;
use crate::{Constraint, EngineError, RolledBack, Token};

use checks::InvalidInstance;
pub(crate) use checks::{Checks, ChecksCache};
use json_values::{Check, Complete, JsonValues, Layout};
use opener::Opener;

/// Maximum number of rollbacks of one generation: most values are right after one or two, and a schema that
/// nothing satisfies should not keep a slot in the batch for long.
const MAX_TIMES: u32 = 64;
/// Maximum number of tokens that one generation rolls back: enough to produce a long answer twice.
const MAX_TOKENS: u32 = 4096;
/// Number of failures of one value after which it is rolled back further each time: the wrong choice may be an
/// early one.
const NEAR_RETRIES: u32 = 4;

/// The output of one generation, parts of which have to be checked.
pub(crate) struct CheckedOutput {
    checks: Arc<Checks>,
    layout: Layout,
    opener: Opener,
    values: JsonValues,
    bytes: Vec<u8>,
    /// The offset of the byte after each token of the output.
    ends: Vec<usize>,
    held: Option<HeldTokens>,
    /// Tokens that are not drawn again at their position in the output.
    excluded: Vec<(usize, u32)>,
    /// Number of failures of each held value, by its check and its first byte.
    failures: Vec<((Check, usize), u32)>,
    rolled_back: RolledBack,
    /// The value of `rolled_back` when the last token was reported.
    reported: RolledBack,
    /// The tokens that the held region began with in the run that is resumed.
    expected: Vec<u32>,
}

/// Tokens that have not been reported yet.
struct HeldTokens {
    /// The position of the first held token in the output.
    from: usize,
    before: StateBefore,
    tokens: Vec<HeldToken>,
}

/// The state of the sequence before the first held token.
pub(crate) struct StateBefore {
    pub constraint: OutputConstraint,
    pub text: Detokenizer,
}

/// A token of the output, and the circumstances of its draw.
#[derive(Debug)]
pub(crate) struct HeldToken {
    pub token: Token,
    /// Number of tokens that it was drawn from; one if it was not drawn.
    pub choices: usize,
    /// Whether it had been drafted.
    pub accepted: bool,
}

/// The decision about tokens.
#[derive(Debug)]
pub(crate) enum RollbackDecision {
    Hold,
    Report(Vec<Token>),
    /// Rolls back the output from this position on.
    RollBack(usize),
}

impl CheckedOutput {
    /// Creates the state of an output. `rolled_back` is what the resumed run had rolled back.
    pub fn new(checks: Arc<Checks>, constraint: Option<&Constraint>, rolled_back: RolledBack) -> Self {
        let (layout, opener) = match constraint {
            Some(Constraint::ToolCalls(form)) => (layout(&form.before), Opener::of(form)),
            _ => (Layout::Document, Opener::default()),
        };
        CheckedOutput {
            values: JsonValues::new(layout, &opener),
            checks,
            layout,
            opener,
            bytes: Vec::new(),
            ends: Vec::new(),
            held: None,
            excluded: Vec::new(),
            failures: Vec::new(),
            rolled_back,
            reported: rolled_back,
            expected: Vec::new(),
        }
    }

    /// Returns how often the output was rolled back, earlier runs of a resumed request included.
    pub fn rolled_back(&self) -> RolledBack {
        self.rolled_back
    }

    /// Returns the position of the first token that may be rolled back, if there is one.
    pub fn held_from(&self) -> Option<usize> {
        self.held.as_ref().map(|held| held.from)
    }

    /// Returns the tokens that may not be drawn at or after a position of the output, each with its offset from
    /// that position.
    pub fn excluded_from(&self, position: usize) -> Vec<(usize, u32)> {
        let behind = |(at, token): &(usize, u32)| Some((at.checked_sub(position)?, *token));
        self.excluded.iter().filter_map(behind).collect()
    }

    /// Takes a token of the reasoning, in which nothing is checked.
    pub fn skip(&mut self) {
        self.ends.push(self.bytes.len());
    }

    /// Takes the bytes of the next token. `before` returns the sequence's state without that token, in case it
    /// has to be kept.
    pub fn follow(&mut self, bytes: &[u8], before: impl FnOnce() -> StateBefore) -> Following {
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len());
        let (complete, began) = self.values.follow(&self.bytes, self.checks.values());
        if began && self.held.is_none() {
            self.held = Some(HeldTokens { from: self.ends.len() - 1, before: before(), tokens: Vec::new() });
        }
        Following { complete }
    }

    /// Decides about the token that was followed. With `is_last`, it completes a number at the end of the
    /// output.
    pub fn decide(
        &mut self,
        following: Following,
        token: HeldToken,
        is_last: bool,
    ) -> Result<RollbackDecision, EngineError> {
        let Some(held) = &mut self.held else {
            let mut token = token.token;
            token.rolled_back = self.rolled_back;
            return Ok(RollbackDecision::Report(vec![token]));
        };
        held.tokens.push(token);
        let mut complete = following.complete;
        if is_last {
            complete.extend(self.values.finish(&self.bytes));
        }
        self.check(complete)
    }

    /// Decides about an output that ended with the previous token.
    pub fn complete(&mut self) -> Result<RollbackDecision, EngineError> {
        let complete = self.values.finish(&self.bytes);
        self.check(complete)
    }

    /// Releases the held tokens of an output that was cut off: no caller takes half a value for a whole one.
    pub fn release(&mut self) -> Vec<Token> {
        self.excluded.clear();
        self.failures.clear();
        let Some(held) = self.held.take() else { return Vec::new() };
        let mut tokens: Vec<Token> = held.tokens.into_iter().map(|held| held.token).collect();
        tokens.iter_mut().for_each(|token| token.rolled_back = self.reported);
        self.reported = self.rolled_back;
        if let Some(last) = tokens.last_mut() {
            last.rolled_back = self.reported;
        }
        tokens
    }

    /// Drops the output from `position` on, which is held. Returns the state before the held tokens, the
    /// position of the first of them, and the dropped tokens.
    pub fn rollback(&mut self, position: usize) -> Option<(&StateBefore, usize, Vec<HeldToken>)> {
        let held = self.held.as_mut()?;
        let dropped = held.tokens.split_off(position.checked_sub(held.from)?);
        self.ends.truncate(position);
        self.bytes.truncate(self.ends.last().copied().unwrap_or(0));
        self.values = JsonValues::new(self.layout, &self.opener);
        // The remaining output was checked before.
        self.values.follow(&self.bytes, self.checks.values());
        Some((&held.before, held.from, dropped))
    }

    /// Marks the end of the output that the earlier run had reported. The part of it that is held is generated
    /// again from the returned position; `None` if no token is held.
    pub fn begin_again(&mut self) -> Option<usize> {
        let held = self.held.as_ref()?;
        self.expected = held.tokens.iter().map(|held| held.token.id).collect();
        (!self.expected.is_empty()).then_some(held.from)
    }

    fn check(&mut self, complete: Vec<Complete>) -> Result<RollbackDecision, EngineError> {
        for complete in complete {
            let text = &self.bytes[complete.found.start..complete.end];
            let flaw = match &self.opener.arguments {
                Some(tags) => tags.flaw(&self.checks, &complete.found, text),
                None => self.checks.flaw(complete.found.check, text),
            };
            if let Some(flaw) = flaw {
                return self.retreat(&complete, flaw).map(RollbackDecision::RollBack);
            }
        }
        if self.values.is_within() {
            return Ok(RollbackDecision::Hold);
        }
        let tokens = self.release();
        let expected = std::mem::take(&mut self.expected);
        if !expected.iter().eq(tokens.iter().map(|token| &token.id).take(expected.len())) {
            let message =
                "the output to resume from differs from the output that is generated again".to_string();
            return Err(EngineError::Failed(message));
        }
        Ok(RollbackDecision::Report(tokens))
    }

    /// Returns the position from which the output is generated again. The token that was drawn there is
    /// excluded from now on.
    fn retreat(&mut self, complete: &Complete, flaw: InvalidInstance) -> Result<usize, EngineError> {
        let Complete { found, .. } = complete;
        let value = (found.check, found.start);
        let earlier = self.failures.iter().position(|(known, _)| *known == value);
        let failures = earlier.map_or(0, |at| self.failures.swap_remove(at).1) + 1;
        self.failures.push((value, failures));
        let back = further_back(failures);
        let position = self.position(found.start, found.start + flaw.end, back);
        let spent = self.rolled_back.times >= MAX_TIMES || self.rolled_back.tokens >= MAX_TOKENS;
        let Some(position) = position.filter(|_| !spent) else { return Err(self.unsatisfied(found, flaw)) };
        let held = self.held.as_ref().expect("a value that is checked is held");
        let token = held.tokens[position - held.from].token.id;
        self.excluded.retain(|(at, _)| *at <= position);
        self.excluded.push((position, token));
        self.rolled_back.times += 1;
        self.rolled_back.tokens += u32::try_from(self.ends.len() - position).unwrap_or(u32::MAX);
        Ok(position)
    }

    /// Returns the position of the last token from `start` to before `end` that could have been another one.
    /// Passes over `back` such tokens, as far as there are earlier ones.
    fn position(&self, start: usize, end: usize, back: usize) -> Option<usize> {
        let held = self.held.as_ref()?;
        let token_of = |byte: usize| self.ends.partition_point(|end| *end <= byte);
        let first = token_of(start).max(held.from);
        let last = token_of(end.saturating_sub(1).max(start)).min(self.ends.len() - 1);
        let could_differ = |position: &usize| held.tokens[*position - held.from].choices > 1;
        let mut positions = (first..=last).rev().filter(could_differ);
        let latest = positions.next()?;
        Some(positions.take(back).last().unwrap_or(latest))
    }

    fn unsatisfied(&self, found: &json_values::Found, flaw: InvalidInstance) -> EngineError {
        let inside = format!("{}{}", found.pointer, flaw.pointer);
        let inside = if inside.is_empty() { "the whole".to_string() } else { format!("`{inside}`") };
        let place = match &found.tool {
            Some(tool) => format!("{inside} of the arguments of `{tool}`"),
            None => format!("{inside} of the output"),
        };
        EngineError::SchemaUnsatisfied { place, reason: flaw.reason, rolled_back: self.rolled_back.tokens }
    }
}

/// Returns the layout of a form with tool calls, whose output may be a JSON document instead.
fn layout(before: &BeforeCalls) -> Layout {
    let answer = match before {
        BeforeCalls::Answer(answer) => Some(answer.as_ref()),
        BeforeCalls::Nothing | BeforeCalls::Text => None,
    };
    match answer {
        Some(Constraint::JsonSchema(_) | Constraint::JsonObject) => Layout::DocumentOrCalls,
        _ => Layout::Calls,
    }
}

/// Values that a token completed.
#[must_use]
pub(crate) struct Following {
    complete: Vec<Complete>,
}

/// Returns how many tokens that could differ are passed over after the given number of failures of one value.
fn further_back(failures: u32) -> usize {
    match failures.checked_sub(NEAR_RETRIES + 1) {
        None => 0,
        Some(more) => 1 << more.min(16),
    }
}
