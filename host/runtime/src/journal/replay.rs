//! The contents of a journal from before a restart, call by call.

use super::record::{Identity, Record};
use crate::{Json, RunEvent, RuntimeError};
use skep_engine::{ModelDigest, RolledBack, Usage};
use std::collections::{BTreeMap, BTreeSet};
use tokio::sync::watch;

/// The records of one call.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    pub(super) identity: Option<Identity>,
    /// Tokens of a generation that has no result yet.
    pub(super) tokens: Vec<u32>,
    /// Output that the generation had taken back by the last token.
    pub(super) taken_back: RolledBack,
    /// The model that produced the tokens. Early versions did not record it.
    pub(super) model: Option<ModelDigest>,
    /// Number of bytes of the tokens' text that the caller was shown.
    pub(super) shown_bytes: usize,
    /// Whether the call was made or was about to be made.
    pub(super) dispatched: bool,
    /// Number of the guest's call on whose behalf the host made this one.
    pub(super) parent: Option<u32>,
    /// Number of events of the call that the caller was shown.
    pub(super) events: u32,
    /// Whether the caller was shown some of the answer since the generation last began.
    pub(super) shows_answer: bool,
    /// The attempts at a generation, in order.
    pub(super) attempts: Vec<Attempt>,
    /// The guest's reads of the call's text, in order.
    pub(super) reads: Vec<Read>,
    pub(super) result: Option<Json>,
    /// Number of results that came before this one.
    pub(super) order: u32,
    /// Number of calls that the guest had made when the result came.
    pub(super) made: u32,
}

impl Recorded {
    /// Returns whether an early version recorded the call. Early versions recorded neither the
    /// model of a generation nor the guest's reads.
    pub(super) fn is_of_early_version(&self) -> bool {
        !self.tokens.is_empty() && self.model.is_none()
    }

    pub(super) fn is_of_host(&self) -> bool {
        self.identity.as_ref().is_some_and(Identity::is_of_host)
    }
}

/// An attempt at a generation, with the last record of what it used.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Attempt {
    pub(super) number: u32,
    /// The model that usage reports name.
    pub(crate) model: String,
    pub(crate) usage: Usage,
}

/// A generation of a turn that does not run again.
pub(crate) struct LeftGeneration {
    pub(crate) attempts: Vec<Attempt>,
    /// Number of tokens in the journal, which a generation has that a local model did not finish.
    pub(crate) tokens: usize,
    pub(crate) result: Option<Json>,
}

/// Returns the generations of a turn that does not run again.
pub(crate) fn left_generations(
    records: Vec<skep_store::Record>,
) -> Result<Vec<LeftGeneration>, RuntimeError> {
    let calls = Replay::read(records)?.calls.into_values().filter(|call| !call.attempts.is_empty());
    let generation =
        |Recorded { attempts, tokens, result, .. }| LeftGeneration { attempts, tokens: tokens.len(), result };
    Ok(calls.map(generation).collect())
}

/// A guest's read of part of a text, ordered among the results.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    pub(super) bytes: usize,
    pub(super) order: u32,
    pub(super) made: u32,
}

/// A decoded journal.
#[derive(Default)]
pub(super) struct Replay {
    pub(super) calls: BTreeMap<u32, Recorded>,
    pub(super) shown: Vec<(u64, RunEvent)>,
    pub(super) last_position: u64,
    /// Number of results and reads.
    pub(super) results: u32,
}

impl Replay {
    pub(super) fn read(records: Vec<skep_store::Record>) -> Result<Self, RuntimeError> {
        let mut replay = Replay::default();
        for record in records {
            let decoded = Record::decode(&record.body).map_err(|error| RuntimeError::Internal {
                message: format!("record {} of the turn's journal is unreadable: {error}", record.position),
            })?;
            replay.last_position = record.position;
            if let Some(event) = decoded.event().filter(|_| record.shown) {
                replay.shown.push((record.position, event));
            }
            if let Some(shows) = decoded.shows_answer() {
                replay.calls.entry(record.call).or_default().shows_answer = shows;
            }
            match decoded {
                Record::Tokens { call, ids, text, taken_back, model } => {
                    let recorded = replay.calls.entry(record.call).or_default();
                    recorded.identity = Some(call);
                    recorded.tokens.extend(ids);
                    recorded.taken_back = taken_back;
                    recorded.model = recorded.model.take().or(model);
                    recorded.shown_bytes += text.len();
                }
                Record::Dispatched { call, parent } => {
                    let recorded = replay.calls.entry(record.call).or_default();
                    recorded.identity = Some(call);
                    recorded.parent = parent;
                    recorded.dispatched = true;
                }
                Record::Shown { call, .. } => {
                    let recorded = replay.calls.entry(record.call).or_default();
                    recorded.identity = Some(call);
                    recorded.events += 1;
                }
                Record::Used { call, attempt: number, model, usage } => {
                    let recorded = replay.calls.entry(record.call).or_default();
                    recorded.identity = Some(call);
                    recorded.attempts.retain(|attempt| attempt.number != number);
                    recorded.attempts.push(Attempt { number, model, usage });
                }
                Record::Read { call, bytes, made } => {
                    let recorded = replay.calls.entry(record.call).or_default();
                    recorded.identity = Some(call);
                    recorded.reads.push(Read { bytes, order: replay.results, made });
                    replay.results += 1;
                }
                Record::Result { call, value, made } => {
                    let recorded = replay.calls.entry(record.call).or_default();
                    recorded.identity = Some(call);
                    recorded.result = Some(value);
                    recorded.order = replay.results;
                    recorded.made = made;
                    replay.results += 1;
                }
                Record::Event(_) => {}
            }
        }
        Ok(replay)
    }
}

/// Releases recorded results in their original order, and none before the guest has made the calls
/// that it had made by then. Otherwise a guest that waits for several calls at once could continue
/// in another order, and one that gets its first result too early might never make the second call.
#[derive(Debug)]
pub(super) struct ReplayOrder {
    progress: watch::Sender<GuestProgress>,
    /// Number of recorded results.
    results: u32,
}

/// The guest's progress through the recording.
#[derive(Debug, Default)]
struct GuestProgress {
    made: u32,
    /// Number of results delivered without a gap.
    delivered: u32,
    /// Later results that nobody waits for anymore.
    ahead: BTreeSet<u32>,
}

/// The position of one result in the order. Dropping it releases the next one.
#[derive(Debug)]
pub(crate) struct ReplayPosition {
    progress: watch::Sender<GuestProgress>,
    position: u32,
    made: u32,
}

impl ReplayOrder {
    pub(super) fn new(results: u32) -> Self {
        ReplayOrder { progress: watch::Sender::default(), results }
    }

    /// Records that all calls up to this one have been made.
    pub(super) fn made(&self, call: u32) {
        self.progress.send_if_modified(|progress| {
            progress.made = progress.made.max(call);
            progress.delivered < self.results
        });
    }

    /// Resolves when all results have been delivered.
    pub(super) async fn ended(&self) {
        // The sender is part of `self`, so it is not dropped meanwhile.
        let _ = self.progress.subscribe().wait_for(|progress| progress.delivered >= self.results).await;
    }

    pub(super) fn position(&self, position: u32, made: u32) -> ReplayPosition {
        ReplayPosition { progress: self.progress.clone(), position, made }
    }
}

impl ReplayPosition {
    /// Resolves when all earlier results have been delivered and all earlier calls have been made.
    pub(crate) async fn reached(&self) {
        let is_next =
            |progress: &GuestProgress| progress.delivered >= self.position && progress.made >= self.made;
        // The sender is part of `self`, so it is not dropped meanwhile.
        let _ = self.progress.subscribe().wait_for(is_next).await;
    }
}

impl Drop for ReplayPosition {
    fn drop(&mut self) {
        self.progress.send_modify(|progress| {
            progress.ahead.insert(self.position);
            while progress.ahead.remove(&progress.delivered) {
                progress.delivered += 1;
            }
        });
    }
}
