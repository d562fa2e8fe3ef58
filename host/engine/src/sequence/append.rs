//! The growth of a sequence's output, and the rollback of its end.
//!
//! Invariant: a reported token is never rolled back. A token is reported at once, or held until the values that
//! it belongs to have been checked.

use std::time::Instant;

use skep_model::RowOutput;

use super::{Constrained, Sequence, logprob};
use crate::take_back::{Before, HeldToken, Verdict};
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
    GoesOn,
    /// The output is shorter than it was.
    TakenBack,
    Ends(FinishReason),
}

impl Sequence {
    /// Appends a sampled token and the tokens that the constraint forces after it. `Some` ends the sequence.
    pub fn append_sampled(&mut self, draw: Draw) -> Result<Option<FinishReason>, EngineError> {
        let now = Instant::now();
        let telemetry = &self.telemetry;
        telemetry.record_tokens(TokenKind::Sampled, 1);
        match self.last_token.replace(now) {
            Some(last) => telemetry.record_inter_token(now - last),
            None => {
                self.first_token = Some(now);
                telemetry.record_first_token(now.saturating_duration_since(self.submitted));
            }
        }
        let Draw { row, choices, accepted } = draw;
        if accepted {
            self.accepted_tokens += 1;
            telemetry.record_tokens(TokenKind::Accepted, 1);
        }
        let origin = Origin::Drawn { choices, accepted };
        match self.append(Next { id: row.token, origin, logprob: logprob(row) })? {
            Appended::GoesOn => self.append_forced(),
            Appended::TakenBack => Ok(None),
            Appended::Ends(reason) => Ok(Some(reason)),
        }
    }

    /// Ends output after which the constraint allows nothing more. `None` means that output was rolled back and
    /// the sequence continues.
    pub fn end_complete(&mut self) -> Result<Option<FinishReason>, EngineError> {
        let verdict = match &mut self.checked {
            Some(checked) => checked.complete()?,
            None => Verdict::Hold,
        };
        match verdict {
            Verdict::TakeBack(position) => self.take_back(position).map(|()| None),
            Verdict::Tell(tokens) => {
                self.tell(tokens);
                Ok(Some(FinishReason::ConstraintDone))
            }
            Verdict::Hold => Ok(Some(FinishReason::ConstraintDone)),
        }
    }

    /// Reports the held tokens of an output that ends here.
    pub(super) fn tell_held(&mut self) {
        let held = self.checked.as_mut().map_or_else(Vec::new, |checked| checked.release());
        self.tell(held);
    }

    /// Appends the tokens that are forced at the beginning of the output, and those that an earlier run
    /// produced.
    pub(super) fn append_known(&mut self) -> Result<Option<FinishReason>, EngineError> {
        let resume = std::mem::take(&mut self.request.resume);
        let mut ended = None;
        while ended.is_none()
            && let Some(id) = resume.get(self.output().len()).copied()
        {
            ended = match self.append_told(id)? {
                Appended::GoesOn | Appended::TakenBack => None,
                Appended::Ends(reason) => Some(reason),
            };
        }
        if ended.is_some() {
            return Ok(ended);
        }
        // The earlier run had checked values and reported them only in part. This run generates them again in
        // the same way.
        if let Some(position) = self.checked.as_mut().and_then(|checked| checked.begin_again()) {
            self.drop_output(position)?;
            // None of the dropped output was computed.
            self.recompute_from = None;
        }
        self.append_forced()
    }

    /// Appends a token that an earlier run reported. A token that the constraint forces now must be the one it
    /// forced then.
    fn append_told(&mut self, id: u32) -> Result<Appended, EngineError> {
        let forced = match &mut self.constraint {
            Constrained::By(constraint) => constraint.only_token(),
            Constrained::No | Constrained::Lent => None,
        };
        match forced {
            Some(only) if only != id => {
                let message = "the output to resume from does not fit the constraint".to_string();
                Err(EngineError::Failed(message))
            }
            Some(_) => self.append_only(id),
            None => self.append(Next { id, origin: Origin::Resumed, logprob: None }),
        }
    }

    fn append_only(&mut self, id: u32) -> Result<Appended, EngineError> {
        self.forced_tokens += 1;
        self.telemetry.record_tokens(TokenKind::Forced, 1);
        self.append(Next { id, origin: Origin::Forced, logprob: None })
    }

    fn append_forced(&mut self) -> Result<Option<FinishReason>, EngineError> {
        while let Constrained::By(constraint) = &mut self.constraint
            && let Some(id) = constraint.only_token()
        {
            match self.append_only(id)? {
                Appended::GoesOn => {}
                Appended::TakenBack => return Ok(None),
                Appended::Ends(reason) => return Ok(Some(reason)),
            }
        }
        Ok(None)
    }

    fn append(&mut self, next: Next) -> Result<Appended, EngineError> {
        let Next { id, origin, logprob } = next;
        self.tokens.push(id);
        self.spent.set(self.output().len() + self.taken_back_tokens());
        let ends = !self.request.ignore_eos && self.context.eos.contains(&id);
        let following = match (&mut self.checked, &self.constraint) {
            (Some(checked), Constrained::By(constraint)) => {
                let bytes = if ends { &[] } else { spelling(&self.context.tokenizer, id) };
                let before = || Before { constraint: constraint.fork(), text: self.text.clone() };
                Some(checked.follow(bytes, before))
            }
            _ => None,
        };
        let mut reason = ends.then_some(FinishReason::Eos);
        let mut text = String::new();
        if !ends {
            match &mut self.constraint {
                Constrained::No => {}
                Constrained::By(constraint) => constraint.accept(id)?,
                Constrained::Lent => {
                    return Err(EngineError::Failed("the output constraint was lost".to_string()));
                }
            }
            let delta = self.text.push(id);
            text = delta.text;
            reason = delta.stopped.map(FinishReason::Stop);
            if reason.is_none()
                && let Constrained::By(constraint) = &mut self.constraint
                && constraint.is_complete()
            {
                reason = Some(FinishReason::ConstraintDone);
            }
            if reason.is_none() && self.tokens_left() == 0 {
                reason = Some(FinishReason::Length);
            }
        }
        let forced = matches!(origin, Origin::Forced);
        let token = Token { id, text, forced, logprob, taken_back: Default::default() };
        let (choices, accepted) = match origin {
            Origin::Drawn { choices, accepted } => (choices, accepted),
            Origin::Forced | Origin::Resumed => (1, false),
        };
        let is_complete = reason.as_ref().is_some_and(|reason| !reason.cuts_off());
        let verdict = match (&mut self.checked, following) {
            (Some(checked), Some(following)) => {
                checked.judge(following, HeldToken { token, choices, accepted }, is_complete)?
            }
            _ => Verdict::Tell(vec![token]),
        };
        match verdict {
            Verdict::TakeBack(position) => {
                self.take_back(position)?;
                return Ok(Appended::TakenBack);
            }
            Verdict::Tell(tokens) => self.tell(tokens),
            Verdict::Hold => {}
        }
        Ok(reason.map_or(Appended::GoesOn, Appended::Ends))
    }

    /// Rolls the output back to `position`, because the value that it ended with failed its check.
    fn take_back(&mut self, position: usize) -> Result<(), EngineError> {
        self.telemetry.record_tokens(TokenKind::TakenBack, self.output().len() - position);
        self.drop_output(position)
    }

    /// Restores the state that the sequence had before the output from `position` on.
    fn drop_output(&mut self, position: usize) -> Result<(), EngineError> {
        let Some(checked) = &mut self.checked else { return Ok(()) };
        let Some((before, from, dropped)) = checked.take_back(position) else { return Ok(()) };
        self.forced_tokens -= dropped.iter().filter(|held| held.token.forced).count();
        self.accepted_tokens -= dropped.iter().filter(|held| held.accepted).count();
        self.tokens.truncate(self.prompt_len + position);
        // The row that draws the next token belongs to the last known token.
        let known = self.tokens.len() - 1;
        self.recompute_from = Some(self.recompute_from.unwrap_or(usize::MAX).min(known));
        let mut constraint = before.constraint.fork();
        self.text = before.text.clone();
        for id in &self.tokens[self.prompt_len + from..] {
            constraint.accept(*id)?;
            self.text.push(*id);
        }
        self.constraint = Constrained::By(Box::new(constraint));
        if let Some(drafter) = &mut self.drafter {
            drafter.take_back(position);
        }
        Ok(())
    }

    fn tell(&self, tokens: Vec<Token>) {
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
