//! What a journal holds from before a restart, call by call.

use super::record::{Identity, Record};
use crate::{Json, RunEvent, RuntimeError};
use skep_engine::{ModelDigest, TakenBack};
use std::collections::{BTreeMap, BTreeSet};
use tokio::sync::watch;

/// What was recorded of one call.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    pub(super) identity: Option<Identity>,
    /// Tokens of a generation that has no result yet.
    pub(super) tokens: Vec<u32>,
    /// What it had taken back by the last of them.
    pub(super) taken_back: TakenBack,
    /// The model that produced them. Early versions recorded none.
    pub(super) model: Option<ModelDigest>,
    /// Bytes of their text that the caller was shown.
    pub(super) shown_bytes: usize,
    /// It was made, or was about to be.
    pub(super) dispatched: bool,
    /// The guest's call for which the host made it.
    pub(super) parent: Option<u32>,
    /// What the caller was shown of it while it went on.
    pub(super) events: u32,
    /// What the guest read of its text, one after the other.
    pub(super) reads: Vec<Read>,
    pub(super) result: Option<Json>,
    /// How many results came before this one.
    pub(super) order: u32,
    /// How many calls the guest had made when it came.
    pub(super) made: u32,
}

impl Recorded {
    /// Early versions recorded neither the model of a generation nor what the guest read of it.
    pub(super) fn is_of_early_version(&self) -> bool {
        !self.tokens.is_empty() && self.model.is_none()
    }

    pub(super) fn is_of_host(&self) -> bool {
        self.identity.as_ref().is_some_and(Identity::is_of_host)
    }
}

/// A part of a text that the guest read, which has its place among the results.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    pub(super) bytes: usize,
    pub(super) order: u32,
    pub(super) made: u32,
}

/// A journal as it was read.
#[derive(Default)]
pub(super) struct Replay {
    pub(super) calls: BTreeMap<u32, Recorded>,
    pub(super) shown: Vec<(u64, RunEvent)>,
    pub(super) last_position: u64,
    /// Results, and parts of texts that were read.
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

/// Lets recorded results through in the order in which they came the first time, and none before the guest has made the
/// calls that it had made by then: a guest that waits for several at once may do something else in another order, and one
/// that gets the first result too early never makes the second call.
#[derive(Debug)]
pub(super) struct Order {
    reached: watch::Sender<Reached>,
    /// Results that there are.
    results: u32,
}

/// How far the guest has come.
#[derive(Debug, Default)]
struct Reached {
    made: u32,
    /// All results before this one.
    delivered: u32,
    /// Results behind that which nobody waits for any more.
    ahead: BTreeSet<u32>,
}

/// The place of one result. Dropping it lets the next one through.
#[derive(Debug)]
pub(crate) struct Place {
    reached: watch::Sender<Reached>,
    place: u32,
    made: u32,
}

impl Order {
    pub(super) fn new(results: u32) -> Self {
        Order { reached: watch::Sender::default(), results }
    }

    /// All calls up to this one have been made.
    pub(super) fn made(&self, call: u32) {
        self.reached.send_if_modified(|reached| {
            reached.made = reached.made.max(call);
            reached.delivered < self.results
        });
    }

    /// Resolves when all of them have been delivered.
    pub(super) async fn ended(&self) {
        // The sender is part of this; it is not dropped meanwhile.
        let _ = self.reached.subscribe().wait_for(|reached| reached.delivered >= self.results).await;
    }

    pub(super) fn place(&self, place: u32, made: u32) -> Place {
        Place { reached: self.reached.clone(), place, made }
    }
}

impl Place {
    /// Resolves when all results that came before have been delivered, and all calls that were made before are made.
    pub(crate) async fn reached(&self) {
        let is_next = |reached: &Reached| reached.delivered >= self.place && reached.made >= self.made;
        // The sender is part of this; it is not dropped meanwhile.
        let _ = self.reached.subscribe().wait_for(is_next).await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.reached.send_modify(|reached| {
            reached.ahead.insert(self.place);
            while reached.ahead.remove(&reached.delivered) {
                reached.delivered += 1;
            }
        });
    }
}
