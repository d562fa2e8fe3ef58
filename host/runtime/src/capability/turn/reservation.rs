//! The tokens and the money that one generation holds, and what it used of them.
//!
//! Invariant: what an attempt used is counted once, when the generation ends or when its server broke the attempt off and it is
//! requested again.

use super::{AskedTokens, GenerationStart, Turn};
use crate::{
    bindings::types::Error,
    limits::Counted,
    usage::{Amount, ModelUse, RequestUse, ReservedCost},
};
use skep_engine::{Unreported, UnreportedUse, Usage};
use std::sync::Arc;

/// Tokens reserved for one generation. Dropping it returns the tokens that were not produced.
pub(crate) struct Reservation {
    turn: Arc<Turn>,
    asked: AskedTokens,
    /// The model that usage reports name.
    model: String,
    pub(crate) max_tokens: u32,
    reserved: Amount,
    /// Number of tokens produced so far that are not counted yet for an attempt that was cut off.
    produced: u32,
    used: RequestUse,
    unreported: Unreported,
    /// The use of earlier attempts, or of one that an earlier run recorded, that no event reported.
    earlier: Vec<UnreportedUse>,
}

impl Reservation {
    pub(super) fn new(turn: Arc<Turn>, asked: AskedTokens, reserved: ReservedCost) -> Self {
        let ReservedCost { output_tokens: max_tokens, amount: reserved } = reserved;
        Reservation {
            turn,
            model: asked.model.clone(),
            asked,
            max_tokens,
            reserved,
            produced: 0,
            used: RequestUse::default(),
            unreported: Unreported::kept(),
            earlier: Vec::new(),
        }
    }

    /// Records the model that a route chose, for usage reports.
    pub(crate) fn routed(&mut self, model: &str) {
        model.clone_into(&mut self.model);
    }

    /// Returns the record of the attempt's unreported use, which goes into the options of its request.
    pub(crate) fn unreported(&self) -> Unreported {
        self.unreported.clone()
    }

    /// Sets the unreported use that an earlier run recorded.
    pub(crate) fn repeat_unreported(&mut self, recorded: Vec<UnreportedUse>) {
        self.earlier = recorded;
    }

    /// Returns the model that usage reports name and what a running generation has used so far.
    pub(crate) fn in_flight(&self) -> Option<(&str, Usage)> {
        Some((&self.model, self.used.estimate()?))
    }

    /// Records that the model has begun.
    pub(crate) fn started(&mut self, prompt_tokens: u32, cached_tokens: u32, cache_write_tokens: u32) {
        self.used.started(prompt_tokens, cached_tokens, cache_write_tokens);
    }

    /// Records that the attempt has produced `tokens` tokens so far. Tokens that were rolled back count, so this may
    /// exceed the requested number.
    pub(crate) fn produced(&mut self, tokens: usize) {
        self.count_produced(tokens + self.earlier_tokens());
        let reported = tokens.saturating_sub(self.unreported.output_tokens());
        self.used.produced(u32::try_from(reported).unwrap_or(u32::MAX));
    }

    fn count_produced(&mut self, tokens: usize) {
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        let mut spent = self.turn.lock();
        spent.produced = spent.produced - u64::from(self.produced) + u64::from(tokens);
        self.turn.journal.turn_use().set(Counted::Tokens, spent.produced);
        drop(spent);
        self.produced = tokens;
    }

    /// Counts an attempt whose answer was cut off, as an estimate, and reserves the same for the next one. The turn's own
    /// limit is not reduced, as after a crash of the host, so that the next attempt may be as long.
    ///
    /// If a budget of the day refuses the next attempt, the reservation holds nothing anymore.
    pub(crate) fn begin_again(&mut self) -> Result<(), Error> {
        self.earlier.extend(self.unreported.uses());
        self.unreported = Unreported::kept();
        let used = std::mem::take(&mut self.used);
        let models = ModelUse::of_request(&self.model, &used, &[]);
        let reported = u32::try_from(used.produced_tokens()).unwrap_or(u32::MAX);
        let earlier = self.earlier_tokens();
        self.count_produced(reported as usize + earlier);
        self.produced -= reported;
        let max_tokens = std::mem::take(&mut self.max_tokens);
        let reserved = std::mem::take(&mut self.reserved);
        let turn = self.turn.clone();
        // Nobody else gets what is released here, because the turn is locked until it is reserved again.
        let mut spent = turn.lock();
        spent.models.add_all(&models);
        spent.tokens -= max_tokens;
        turn.day.settle(max_tokens, reported);
        turn.day.money.settle(reserved, &models);
        let again =
            turn.reserve_for_today(&self.asked, max_tokens, GenerationStart::New, &mut spent.refused)?;
        spent.tokens += again.output_tokens;
        (self.max_tokens, self.reserved) = (again.output_tokens, again.amount);
        self.model.clone_from(&self.asked.model);
        Ok(())
    }

    /// Records the final usage of a finished generation.
    pub(crate) fn settle(&mut self, usage: &Usage) {
        self.produced(usage.produced_tokens() + self.unreported.output_tokens());
        self.used.finished(usage);
        self.turn.lock().usage.add(usage);
    }

    /// Records the estimate for a generation that was cut off in an earlier run.
    pub(crate) fn settle_cut(&mut self, estimate: &Usage) {
        self.produced(estimate.produced_tokens() + self.unreported.output_tokens());
        self.used.was_cut(estimate);
    }

    /// Returns the number of output tokens that no event reported.
    fn unreported_tokens(&self) -> usize {
        self.unreported.output_tokens() + self.earlier_tokens()
    }

    fn earlier_tokens(&self) -> usize {
        self.earlier.iter().map(|hidden| hidden.usage.produced_tokens()).sum()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // A generation that failed before its first event reported nothing.
        self.count_produced(self.used.produced_tokens() as usize + self.unreported_tokens());
        let unreported = [self.unreported.uses(), std::mem::take(&mut self.earlier)].concat();
        let models = ModelUse::of_request(&self.model, &self.used, &unreported);
        let call = self.asked.call;
        let mut spent = self.turn.lock();
        spent.tokens = (spent.tokens - self.max_tokens).saturating_add(self.produced);
        spent.running -= 1;
        spent.models.add_all(&models);
        if !unreported.is_empty() {
            spent.unreported.insert(call, unreported);
        }
        spent.cut.extend(self.used.estimate().map(|estimate| (call, estimate)));
        drop(spent);
        self.turn.day.settle(self.max_tokens, self.produced);
        self.turn.day.money.settle(self.reserved, &models);
    }
}
