//! The growth of a sequence's output, and the rollback of its end.
//!
//! Invariant: a reported token is never rolled back. A token is reported at once, or held until the values that
//! it belongs to have been checked.

use std::time::Instant;

use skep_model::RowOutput;

use super::state::Constrained;
use super::{Sequence, logprob};
use crate::rollback::{HeldToken, RollbackDecision, StateBefore};
use crate::telemetry::TokenKind;
use crate::{EngineError, FinishReason, Token, TokenEvent, TokenLogprob};

/// A token that was drawn.
pub(crate) struct Draw {
    pub row: RowOutput,
    /// Number of tokens that it was drawn from.
    pub choices: usize,
    /// Whether the token was drafted, so that it took no step of its own.
    pub accepted: bool,
}

/// The next token of the output.
struct Next {
    id: u32,
    origin: Origin,
    logprob: Option<TokenLogprob>,
}

#[derive(Clone, Copy)]
enum Origin {
    Drawn {
        choices: usize,
        accepted: bool,
    },
    Forced,
    /// An earlier run produced it.
    Resumed,
}

/// The result of appending a token.
enum Appended {
    Continues,
    /// The output is shorter than it was.
    RolledBack,
    Ends(FinishReason),
}

impl Sequence {
    /// Appends a sampled token and the tokens that the constraint forces after it. `Some` ends the sequence.
    pub fn append_sampled(&mut self, draw: Draw) -> Result<Option<FinishReason>, EngineError> {
        let now = Instant::now();
        let telemetry = &self.telemetry;
        telemetry.record_tokens(TokenKind::Sampled, 1);
        match self.times.last_token.replace(now) {
            Some(last) => telemetry.record_inter_token(now - last),
            None => {
                self.times.first_token = Some(now);
                telemetry.record_first_token(self.times.since_submission(now));
            }
        }
        let Draw { row, choices, accepted } = draw;
        if accepted {
            self.counts.accepted += 1;
            telemetry.record_tokens(TokenKind::Accepted, 1);
        }
        let origin = Origin::Drawn { choices, accepted };
        match self.append(Next { id: row.token, origin, logprob: logprob(row) })? {
            Appended::Continues => self.append_forced(),
            Appended::RolledBack => Ok(None),
            Appended::Ends(reason) => Ok(Some(reason)),
        }
    }

    /// Ends output after which the constraint allows nothing more. `None` means that output was rolled back and
    /// the sequence continues.
    pub fn end_complete(&mut self) -> Result<Option<FinishReason>, EngineError> {
        let verdict = match &mut self.form.checked {
            Some(checked) => checked.complete()?,
            None => RollbackDecision::Hold,
        };
        match verdict {
            RollbackDecision::RollBack(position) => self.rollback(position).map(|()| None),
            RollbackDecision::Report(tokens) => {
                self.report(tokens);
                Ok(Some(FinishReason::ConstraintDone))
            }
            RollbackDecision::Hold => Ok(Some(FinishReason::ConstraintDone)),
        }
    }

    /// Reports the held tokens of an output that ends here.
    pub(super) fn report_held(&mut self) {
        let held = self.form.checked.as_mut().map_or_else(Vec::new, |checked| checked.release());
        self.report(held);
    }

    /// Appends the tokens that are forced at the beginning of the output, and those that an earlier run
    /// produced.
    pub(super) fn append_known(&mut self) -> Result<Option<FinishReason>, EngineError> {
        let resume = std::mem::take(&mut self.request.resume);
        let mut ended = None;
        while ended.is_none()
            && let Some(id) = resume.get(self.output().len()).copied()
        {
            ended = match self.append_reported(id)? {
                Appended::Continues | Appended::RolledBack => None,
                Appended::Ends(reason) => Some(reason),
            };
        }
        if ended.is_some() {
            return Ok(ended);
        }
        // The earlier run had checked values and reported them only in part. This run generates them again in
        // the same way.
        if let Some(position) = self.form.checked.as_mut().and_then(|checked| checked.begin_again()) {
            self.drop_output(position)?;
            // None of the dropped output was computed.
            self.computed.recompute_from = None;
        }
        self.append_forced()
    }

    /// Appends a token that an earlier run reported. A token that the constraint forces now must be the one it
    /// forced then.
    fn append_reported(&mut self, id: u32) -> Result<Appended, EngineError> {
        match self.only_token() {
            Some(only) if only != id => {
                let message = "the output to resume from does not fit the constraint".to_string();
                Err(EngineError::Failed(message))
            }
            Some(_) => self.append_only(id),
            None => self.append(Next { id, origin: Origin::Resumed, logprob: None }),
        }
    }

    /// Returns the token that has to come next, if there is one.
    fn only_token(&mut self) -> Option<u32> {
        if self.is_thinking() {
            return self.form.thinking.as_ref()?.forced();
        }
        match &mut self.form.constraint {
            Constrained::By(constraint) => constraint.only_token(),
            Constrained::No | Constrained::Lent => None,
        }
    }

    fn append_only(&mut self, id: u32) -> Result<Appended, EngineError> {
        self.counts.forced += 1;
        self.telemetry.record_tokens(TokenKind::Forced, 1);
        self.append(Next { id, origin: Origin::Forced, logprob: None })
    }

    fn append_forced(&mut self) -> Result<Option<FinishReason>, EngineError> {
        while let Some(id) = self.only_token() {
            match self.append_only(id)? {
                Appended::Continues => {}
                Appended::RolledBack => return Ok(None),
                Appended::Ends(reason) => return Ok(Some(reason)),
            }
        }
        Ok(None)
    }

    fn append(&mut self, next: Next) -> Result<Appended, EngineError> {
        let Next { id, origin, logprob } = next;
        self.tokens.push(id);
        self.delivery.spent.set(self.output().len() + self.rolled_back_tokens());
        let ends = !self.request.ignore_eos && self.context.eos.contains(&id);
        let thinks = self.form.thinking.as_mut().is_some_and(|thinking| thinking.take(id));
        let following = match (&mut self.form.checked, &self.form.constraint) {
            (Some(checked), _) if thinks => {
                checked.skip();
                None
            }
            (Some(checked), Constrained::By(constraint)) => {
                let bytes = if ends { &[] } else { spelling(&self.context.tokenizer, id) };
                let before =
                    || StateBefore { constraint: constraint.fork(), text: self.delivery.text.clone() };
                Some(checked.follow(bytes, before))
            }
            _ => None,
        };
        let mut reason = ends.then_some(FinishReason::Eos);
        let mut text = String::new();
        if !ends {
            match &mut self.form.constraint {
                Constrained::No => {}
                _ if thinks => {}
                Constrained::By(constraint) => constraint.accept(id)?,
                Constrained::Lent => {
                    return Err(EngineError::Failed("the output constraint was lost".to_string()));
                }
            }
            let delta = self.delivery.text.push(id);
            text = delta.text;
            reason = delta.stopped.map(FinishReason::Stop);
            if reason.is_none()
                && !thinks
                && let Constrained::By(constraint) = &mut self.form.constraint
                && constraint.is_complete()
            {
                reason = Some(FinishReason::ConstraintDone);
            }
            if reason.is_none() && self.tokens_left() == 0 {
                reason = Some(FinishReason::Length);
            }
        }
        let forced = matches!(origin, Origin::Forced);
        let token = Token { id, text, forced, logprob, rolled_back: Default::default() };
        let (choices, accepted) = match origin {
            Origin::Drawn { choices, accepted } => (choices, accepted),
            Origin::Forced | Origin::Resumed => (1, false),
        };
        let is_complete = reason.as_ref().is_some_and(|reason| !reason.cuts_off());
        let verdict = match (&mut self.form.checked, following) {
            (Some(checked), Some(following)) => {
                checked.decide(following, HeldToken { token, choices, accepted }, is_complete)?
            }
            _ => RollbackDecision::Report(vec![token]),
        };
        match verdict {
            RollbackDecision::RollBack(position) => {
                self.rollback(position)?;
                return Ok(Appended::RolledBack);
            }
            RollbackDecision::Report(tokens) => self.report(tokens),
            RollbackDecision::Hold => {}
        }
        Ok(reason.map_or(Appended::Continues, Appended::Ends))
    }

    /// Rolls the output back to `position`, because the value that it ended with failed its check.
    fn rollback(&mut self, position: usize) -> Result<(), EngineError> {
        self.telemetry.record_tokens(TokenKind::RolledBack, self.output().len() - position);
        self.drop_output(position)
    }

    /// Restores the state that the sequence had before the output from `position` on.
    fn drop_output(&mut self, position: usize) -> Result<(), EngineError> {
        let Some(checked) = &mut self.form.checked else { return Ok(()) };
        let Some((before, from, dropped)) = checked.rollback(position) else { return Ok(()) };
        self.counts.forced -= dropped.iter().filter(|held| held.token.forced).count();
        self.counts.accepted -= dropped.iter().filter(|held| held.accepted).count();
        let kept = self.prompt_len + position;
        self.seen.take_if(|seen| seen.marked() > kept);
        if let Some(occurrences) = &mut self.occurrences {
            occurrences.shorten(&self.tokens[self.prompt_len..], position);
        }
        self.tokens.truncate(kept);
        // The row that draws the next token belongs to the last known token.
        let known = self.tokens.len() - 1;
        self.computed.recompute_from = Some(self.computed.recompute_from.unwrap_or(usize::MAX).min(known));
        let mut constraint = before.constraint.fork();
        self.delivery.text = before.text.clone();
        for id in &self.tokens[self.prompt_len + from..] {
            constraint.accept(*id)?;
            self.delivery.text.push(*id);
        }
        self.form.constraint = Constrained::By(Box::new(constraint));
        let thought = self.thought_tokens();
        if let Some(drafter) = &mut self.form.drafter {
            drafter.rollback(position.saturating_sub(thought));
        }
        Ok(())
    }

    fn report(&self, tokens: Vec<Token>) {
        tokens.into_iter().for_each(|token| self.emit(Ok(TokenEvent::Token(token))));
    }
}

/// Returns the bytes of a token in the output, or the text of a special token.
fn spelling(tokenizer: &skep_model::Tokenizer, id: u32) -> &[u8] {
    match tokenizer.is_special(id) {
        true => tokenizer.token_text(id).unwrap_or_default().as_bytes(),
        false => tokenizer.token_bytes(id).unwrap_or_default(),
    }
}
