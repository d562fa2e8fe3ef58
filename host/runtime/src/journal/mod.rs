//! The journal of a turn, which makes the turn durable while it runs.
//!
//! Every host call whose result is not a function of the guest's past (a generation, a clock, the
//! list of models) is numbered in the order in which the guest makes it. Its result is appended to
//! the store; the tokens of a generation are appended as they arrive. When the host starts again,
//! the guest is rerun from the beginning, and its calls are answered from the journal until the
//! journal ends. From then on the turn is live. A guest that does not repeat its earlier calls
//! fails with [`RuntimeError::Divergence`], and nothing of the turn is committed.
//!
//! Events that the caller sees are part of the journal. They are published to the feed only after
//! they are stored, under their number in the journal.
//!
//! Random numbers need no records: all of them are drawn from the turn's seed.

mod call;
mod calls;
mod flight;
mod guest_clocks;
mod numbers;
mod random;
mod reads;
mod record;
mod replay;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use call::{Call, Made};
pub(crate) use flight::WaitingCall;
pub(crate) use guest_clocks::{GuestMonotonicClock, GuestWallClock};
use numbers::Numbers;
pub(crate) use random::{random, seed};
pub(crate) use reads::{NextRead, Reads};
pub(crate) use record::{Identity, NO_PROGRESS, SUMMARIZE};
pub(crate) use replay::{Attempt, LeftGeneration, ReplayPosition, left_generations};

use crate::{Clock, Json, RunEvent, RuntimeError, feed::Feed, limits::TurnUse, turn_timeline::Stage};
use flight::Flight;
use record::{Record, first_u64};
use replay::{Recorded, Replay, ReplayOrder};
use serde::Serialize;
use sha2::{Digest, Sha256};
use skep_engine::{Model, ModelDigest, RolledBack, Usage};
use skep_store::{Store, TurnKey};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
};
use tokio::sync::watch;

/// Limits on the journal of one turn.
const MAX_RECORDS: u64 = 100_000;
const MAX_BYTES: usize = 64 << 20;

/// The journal of a running turn.
pub(crate) struct Journal {
    store: Store,
    clock: Clock,
    turn: TurnKey,
    seed: Vec<u8>,
    feed: Arc<Feed>,
    order: ReplayOrder,
    inner: Mutex<Inner>,
    /// Whether a write to the store is in progress.
    writing: watch::Sender<bool>,
    /// The last stored position, or `u64::MAX` once nothing more will be stored.
    stored: watch::Sender<u64>,
    flight: Flight,
}

struct Inner {
    numbers: Numbers,
    /// Recorded calls that have not been replayed yet.
    recorded: BTreeMap<u32, Recorded>,
    last_position: u64,
    /// Position of the last record that was shown to the caller.
    last_shown: u64,
    bytes: usize,
    waiting: Vec<Waiting>,
    failure: Failure,
}

/// The reason why the turn cannot continue.
enum Failure {
    None,
    Known(RuntimeError),
    /// The reason was returned to the turn, which is over.
    Reported,
}

/// A record that has not been stored yet.
struct Waiting {
    position: u64,
    call: u32,
    record: Record,
}

/// Publishes the events of an ended turn again, except for its end. Returns the number of the last
/// event.
pub(crate) fn republish_events(
    feed: &Feed,
    number: u64,
    records: Vec<skep_store::Record>,
) -> Result<u64, RuntimeError> {
    let shown = Replay::read(records)?.shown;
    let last_id = shown.last().map_or(0, |(id, _)| *id);
    feed.publish([(0, RunEvent::Started { turn: number })]);
    feed.publish(shown);
    Ok(last_id)
}

/// The error with which the guest's call stops. The journal holds the reason.
#[derive(Debug, thiserror::Error)]
#[error("the turn's journal cannot be continued")]
pub(crate) struct Stopped;

impl Journal {
    /// Opens the journal of a turn with its existing records. Events that were already shown are
    /// published to the feed again.
    pub(crate) fn open(
        store: Store,
        clock: Clock,
        turn: TurnKey,
        seed: Vec<u8>,
        feed: Arc<Feed>,
        records: Vec<skep_store::Record>,
    ) -> Result<Arc<Self>, RuntimeError> {
        let Replay { calls, shown, last_position, results } = Replay::read(records)?;
        let last_shown = shown.last().map_or(0, |(id, _)| *id);
        feed.publish(shown);
        feed.timeline().start(clock.now_ms());
        let inner = Inner {
            numbers: Numbers::new(),
            recorded: calls,
            last_position,
            last_shown,
            bytes: 0,
            waiting: Vec::new(),
            failure: Failure::None,
        };
        Ok(Arc::new(Journal {
            store,
            clock,
            turn,
            seed,
            feed,
            order: ReplayOrder::new(results),
            inner: Mutex::new(inner),
            writing: watch::Sender::new(false),
            stored: watch::Sender::new(last_position),
            flight: Flight::default(),
        }))
    }

    /// Records that a generation of `model` produced tokens and that the caller is shown `text`.
    pub(crate) fn tokens(
        self: &Arc<Self>,
        call: &Call,
        model: &ModelDigest,
        ids: &[u32],
        taken_back: RolledBack,
        text: &str,
    ) {
        if !text.is_empty() {
            call.shows_answer.store(true, Ordering::Relaxed);
        }
        let mut inner = self.lock();
        // A read by the guest since then only covers text that was there before.
        let is_read =
            |waiting: &Waiting| waiting.call == call.number && matches!(waiting.record, Record::Read { .. });
        if let Some(Waiting { call: number, record, .. }) =
            inner.waiting.iter_mut().rev().find(|waiting| !is_read(waiting))
            && let Record::Tokens { ids: known, text: said, taken_back: before, .. } = record
            && *number == call.number
        {
            known.extend_from_slice(ids);
            said.push_str(text);
            *before = taken_back;
            return;
        }
        let (ids, text) = (ids.to_vec(), text.to_owned());
        let model = (!call.is_journaled.swap(true, Ordering::Relaxed)).then(|| model.clone());
        let record = Record::Tokens { call: call.identity.clone(), ids, text, taken_back, model };
        self.append(&mut inner, call.number, [record]);
    }

    /// Records what a generation has used so far of the model that usage reports name. `model` is the model that was asked:
    /// a remote one is asked again after a restart, and a local one continues.
    pub(crate) fn used(self: &Arc<Self>, call: &Call, model: &Model, billed: &str, usage: Usage) {
        self.feed.timeline().model(call.number, billed);
        let attempt = match model.engine() {
            Some(_) => call.attempts.last().map_or(0, |before| before.number),
            None => call.attempt(),
        };
        let used = Record::Used { call: call.identity.clone(), attempt, model: billed.to_owned(), usage };
        let mut inner = self.lock();
        let is_used = |waiting: &&mut Waiting| {
            waiting.call == call.number
                && matches!(waiting.record, Record::Used { attempt: number, .. } if number == attempt)
        };
        match inner.waiting.iter_mut().rev().find(is_used) {
            Some(waiting) => waiting.record = used,
            None => self.append(&mut inner, call.number, [used]),
        }
    }

    /// Resolves when every recorded result has been replayed. A call without a recorded result
    /// waits for this before it does anything, because the guest may be about to abandon it, as it
    /// did the first time.
    pub(crate) async fn caught_up(&self) {
        self.order.ended().await;
    }

    /// Records that a call that must not be made twice is about to be made. After this,
    /// [`Call::was_dispatched`] returns `true` when the turn is rerun.
    pub(crate) async fn dispatched(self: &Arc<Self>, call: &Call) -> Result<(), Stopped> {
        let position = {
            let mut inner = self.lock();
            self.append(
                &mut inner,
                call.number,
                [Record::Dispatched { call: call.identity.clone(), parent: None }],
            );
            if !matches!(inner.failure, Failure::None) {
                return Err(Stopped);
            }
            inner.last_position
        };
        // The sender is part of `self`, so it is not dropped meanwhile.
        let _ = self.stored.subscribe().wait_for(|stored| *stored >= position).await;
        if matches!(self.lock().failure, Failure::None) { Ok(()) } else { Err(Stopped) }
    }

    /// Shows the caller an event of a call that is still running.
    pub(crate) fn shown(self: &Arc<Self>, call: &Call, event: RunEvent) {
        call.shown.fetch_add(1, Ordering::Relaxed);
        let record = Record::Shown { call: call.identity.clone(), event };
        if let Some(shows) = record.shows_answer() {
            call.shows_answer.store(shows, Ordering::Relaxed);
        }
        self.append(&mut self.lock(), call.number, [record]);
    }

    /// Marks one call as waiting for a person; see [`Journal::only_waits`].
    pub(crate) fn waits(&self) -> WaitingCall {
        self.flight.waits()
    }

    /// Resolves when the turn can make no progress until a person decides.
    pub(crate) async fn only_waits(&self) {
        self.flight.only_waits().await;
    }

    pub(crate) fn turn(&self) -> TurnKey {
        self.turn
    }

    pub(crate) fn seed(&self) -> Vec<u8> {
        self.seed.clone()
    }

    /// Returns the counts of what the turn uses.
    pub(crate) fn turn_use(&self) -> &Arc<TurnUse> {
        self.feed.timeline().used()
    }

    /// Says in the turn's timeline what a call is about.
    pub(crate) fn label(&self, call: &Call, label: &str) {
        self.feed.timeline().label(call.number, label);
    }

    /// Tells the turn's timeline how far a generation has come.
    pub(crate) fn generation_reached(&self, call: &Call, stage: Stage) {
        self.feed.timeline().reached(call.number, stage);
    }

    /// Records the result of a call together with the `events` that the caller is shown. After a
    /// crash, either all of it is stored or nothing.
    pub(crate) fn ended(self: &Arc<Self>, call: &Call, result: &impl Serialize, events: Vec<RunEvent>) {
        let value = Json::written(result).expect("results of host calls always serialize");
        self.feed.timeline().end(call.number, &events);
        let mut inner = self.lock();
        let result = Record::Result { call: call.identity.clone(), value, made: inner.numbers.made() };
        let records = std::iter::once(result).chain(events.into_iter().map(Record::Event));
        self.append(&mut inner, call.number, records);
    }

    /// Returns a seed for the random draws of a call.
    pub(crate) fn seed_for(&self, call: &Call) -> u64 {
        first_u64(&self.derive(&format!("generation {}", call.number)))
    }

    /// Derives 32 bytes from the turn's seed and `purpose`.
    pub(crate) fn derive(&self, purpose: &str) -> [u8; 32] {
        Sha256::new().chain_update(&self.seed).chain_update(purpose).finalize().into()
    }

    /// Makes the turn fail. Only the first reason counts.
    pub(crate) fn fail(&self, error: RuntimeError) {
        self.lock().fail(error);
    }

    /// Waits until everything is stored. Returns the number of the last event that was shown, or
    /// the reason for the failure.
    pub(crate) async fn close(&self) -> Result<u64, RuntimeError> {
        // The sender is part of `self`, so it is not dropped meanwhile.
        let _ = self.writing.subscribe().wait_for(|writing| !writing).await;
        let mut inner = self.lock();
        match std::mem::replace(&mut inner.failure, Failure::Reported) {
            Failure::Known(error) => Err(error),
            Failure::None => {
                inner.failure = Failure::None;
                Ok(inner.last_shown)
            }
            Failure::Reported => Err(RuntimeError::Cancelled),
        }
    }

    /// Waits until everything is stored and returns whether that succeeded. If not,
    /// [`Journal::close`] returns the reason.
    pub(crate) async fn is_stored(&self) -> bool {
        // The sender is part of `self`, so it is not dropped meanwhile.
        let _ = self.writing.subscribe().wait_for(|writing| !writing).await;
        matches!(self.lock().failure, Failure::None)
    }

    /// Checks, after a guest finished successfully, that it repeated all recorded calls.
    pub(crate) fn check_replayed(&self) -> Result<(), RuntimeError> {
        let inner = self.lock();
        let Some((number, recorded)) = inner.recorded.first_key_value() else { return Ok(()) };
        let expected = recorded.identity.as_ref().map_or_else(String::new, |identity| identity.name.clone());
        Err(RuntimeError::Divergence { call: *number, expected, made: "no further call".to_owned() })
    }

    fn append(
        self: &Arc<Self>,
        inner: &mut MutexGuard<'_, Inner>,
        call: u32,
        records: impl IntoIterator<Item = Record>,
    ) {
        if !matches!(inner.failure, Failure::None) {
            return;
        }
        for record in records {
            inner.last_position += 1;
            let position = inner.last_position;
            inner.waiting.push(Waiting { position, call, record });
        }
        if inner.last_position > MAX_RECORDS {
            let message = format!("a turn's journal has at most {MAX_RECORDS} records");
            inner.fail(RuntimeError::LimitExceeded { limit: "journal_records", message });
            return;
        }
        if !self.writing.send_replace(true) {
            tokio::spawn(self.clone().write());
        }
    }

    /// Stores pending records until none are left. Records that arrive during a write are stored
    /// together by the next one.
    async fn write(self: Arc<Self>) {
        loop {
            let waiting = {
                let mut inner = self.lock();
                if inner.waiting.is_empty() {
                    self.writing.send_replace(false);
                    return;
                }
                std::mem::take(&mut inner.waiting)
            };
            if let Err(error) = self.store_and_show(waiting).await {
                let mut inner = self.lock();
                inner.waiting.clear();
                inner.fail(error);
                self.stored.send_replace(u64::MAX);
            }
        }
    }

    async fn store_and_show(&self, waiting: Vec<Waiting>) -> Result<(), RuntimeError> {
        let last_position = waiting.last().map_or(0, |last| last.position);
        let mut shown = Vec::new();
        let mut records = Vec::with_capacity(waiting.len());
        for Waiting { position, call, record } in waiting {
            let event = record.event();
            let shows = event.is_some();
            shown.extend(event.map(|event| (position, event)));
            records.push(skep_store::Record { position, call, shown: shows, body: record.encode() });
        }
        let bytes = {
            let mut inner = self.lock();
            inner.bytes += records.iter().map(|record| record.body.len()).sum::<usize>();
            inner.bytes
        };
        if bytes > MAX_BYTES {
            let message = format!("a turn's journal has at most {MAX_BYTES} bytes");
            return Err(RuntimeError::LimitExceeded { limit: "journal_bytes", message });
        }
        self.store.append_records(self.turn, records).await?;
        self.stored.send_replace(last_position);
        if let Some((id, _)) = shown.last() {
            self.lock().last_shown = *id;
        }
        self.feed.publish(shown);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Records the reason for the failure. Only the first reason counts.
    fn fail(&mut self, error: RuntimeError) {
        if matches!(self.failure, Failure::None) {
            self.failure = Failure::Known(error);
        }
    }
}
