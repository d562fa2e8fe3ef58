//! Attempts at generations whose answers are lost, because the host crashed: a server may bill what they used, so they are
//! counted, as estimates.
//!
//! Invariant: an attempt is counted either by the run that it ends in, or from the journal.

use crate::{
    RuntimeError,
    bindings::types::Error,
    capability::{
        inference::record::{GenerationRecord, WrittenUsage},
        turn::{Reservation, Turn},
    },
    journal::{self, Attempt, Call, LeftGeneration, ReplayPosition},
    usage::{ModelUse, RequestUse},
};
use skep_engine::{Model, UnreportedUse};

/// Counts the attempts of a call that were lost in earlier runs. `recorded` is the end of the call, if it has ended.
pub(in crate::capability) fn count_lost<P>(
    turn: &Turn,
    call: &Call,
    model: &Model,
    recorded: &Option<(GenerationRecord, P)>,
) {
    let continues = model.engine().is_some() && !call.is_of_another(model.digest());
    let ends_here = recorded.as_ref().map_or(continues, |(record, _)| record.ends_attempt());
    lost(call.attempts(), ends_here).iter().for_each(|attempt| turn.count_lost(attempt));
}

/// Returns the error of a generation that was recorded as refused, and counts what it used without an event. Passes all
/// other records on.
pub(in crate::capability) async fn passed_refusal(
    turn: &Turn,
    recorded: Option<(GenerationRecord, ReplayPosition)>,
) -> Result<Option<(GenerationRecord, ReplayPosition)>, Error> {
    let Some((record, position)) = recorded else { return Ok(None) };
    let Some(error) = record.refusal().cloned() else { return Ok(Some((record, position))) };
    turn.count_unreported(&record.unreported());
    position.reached().await;
    Err(error)
}

/// Names the model that usage reports name for a recorded generation, which a route chose.
pub(in crate::capability) fn bill(call: &Call, reservation: &mut Reservation) {
    if let Some(Attempt { model, .. }) = call.attempts().last() {
        reservation.routed(model);
    }
}

/// Returns what the generations of a turn used that does not run again, by model, and the number of tokens that they
/// produced.
pub(crate) fn left_use(records: Vec<skep_store::Record>) -> Result<(ModelUse, u64), RuntimeError> {
    let (mut models, mut produced) = (ModelUse::default(), 0);
    let mut count = |model: &str, used: &RequestUse, unreported: &[UnreportedUse]| {
        let hidden: usize = unreported.iter().map(|hidden| hidden.usage.produced_tokens()).sum();
        produced += used.produced_tokens() + hidden as u64;
        models.add_all(&ModelUse::of_request(model, used, unreported));
    };
    for LeftGeneration { attempts, tokens, result } in journal::left_generations(records)? {
        let record = result.and_then(|result| result.read::<GenerationRecord>().ok());
        let ends_attempt = record.as_ref().is_some_and(GenerationRecord::ends_attempt);
        for attempt in lost(&attempts, ends_attempt) {
            let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
            count(&attempt.model, &attempt.lost_use(tokens), &[]);
        }
        if let (Some(last), Some(record)) = (attempts.last(), record) {
            count(&last.model, &record.request_use(), &record.unreported());
        }
    }
    Ok((models, produced))
}

/// Returns the attempts without the last one if that one's end is recorded or still to come.
fn lost(attempts: &[Attempt], last_is_counted: bool) -> &[Attempt] {
    match attempts.split_last() {
        Some((_, before)) if last_is_counted => before,
        _ => attempts,
    }
}

impl Attempt {
    /// Returns the estimate of what the attempt used. `tokens` are those that the journal has of a local model.
    pub(in crate::capability) fn lost_use(&self, tokens: u32) -> RequestUse {
        let mut usage = self.usage;
        usage.completion_tokens = usage.completion_tokens.max(tokens);
        let mut used = RequestUse::default();
        // A request that was refused used nothing.
        if usage.prompt_tokens > 0 || usage.completion_tokens > 0 {
            used.was_cut(&usage);
        }
        used
    }
}

impl GenerationRecord {
    /// Returns whether the record has what the last attempt used.
    fn ends_attempt(&self) -> bool {
        matches!(
            self,
            GenerationRecord::Ended { usage: Some(_), .. } | GenerationRecord::Ended { cut: Some(_), .. }
        )
    }

    fn request_use(&self) -> RequestUse {
        let mut used = RequestUse::default();
        match self {
            GenerationRecord::Ended { usage: Some(WrittenUsage(usage)), .. } => used.finished(usage),
            GenerationRecord::Ended { cut: Some(estimate), .. } => used.was_cut(&estimate.0),
            GenerationRecord::Ended { .. }
            | GenerationRecord::Refused(_)
            | GenerationRecord::RefusedAfter { .. } => {}
        }
        used
    }
}
