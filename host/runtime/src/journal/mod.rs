//! The journal of a turn: what makes it durable while it runs.
//!
//! Every host call whose result is not a function of the guest's own past (a generation, a clock, the list of models) is
//! numbered in the order in which the guest makes it. Its result is appended to the store; a generation's tokens are
//! appended as they come. When the host starts again, the guest is run again from its beginning, and its calls are
//! answered from here until the journal ends: then the turn goes on live. A guest that does not make the calls that it
//! made before gets [`RuntimeError::Divergence`], and nothing of the turn is committed.
//!
//! The output gate: what the caller is shown is part of the journal, and reaches the feed only when it is stored, under
//! the number that it has there.
//!
//! Random numbers need no records: all of them are drawn from the turn's seed.

mod call;
mod calls;
mod clock;
mod flight;
mod numbers;
mod random;
mod reads;
mod record;
mod replay;
#[cfg(test)]
mod tests;

pub(crate) use call::{Call, Made};
pub(crate) use clock::{MonotonicClock, WallClock};
pub(crate) use flight::Waits;
use numbers::Numbers;
pub(crate) use random::{random, seed};
pub(crate) use reads::{NextRead, Reads};
pub(crate) use record::{Identity, SUMMARISE};
pub(crate) use replay::Place;

use crate::{Json, RunEvent, RuntimeError, feed::Feed};
use flight::Flight;
use record::{Record, first_u64};
use replay::{Order, Recorded, Replay};
use serde::Serialize;
use sha2::{Digest, Sha256};
use skep_engine::{ModelDigest, TakenBack};
use skep_store::{Store, TurnKey};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
};
use tokio::sync::watch;

/// Of one turn.
const MAX_RECORDS: u64 = 100_000;
const MAX_BYTES: usize = 64 << 20;

/// The journal of one turn that runs.
pub(crate) struct Journal {
    store: Store,
    turn: TurnKey,
    seed: Vec<u8>,
    feed: Arc<Feed>,
    order: Order,
    inner: Mutex<Inner>,
    /// Whether something is on its way to the store.
    writing: watch::Sender<bool>,
    /// The last position that is stored; the highest there is once nothing more will be.
    stored: watch::Sender<u64>,
    flight: Flight,
}

struct Inner {
    numbers: Numbers,
    /// What is left to be replayed.
    recorded: BTreeMap<u32, Recorded>,
    last_position: u64,
    /// Of the records that the caller was shown.
    last_shown: u64,
    bytes: usize,
    waiting: Vec<Waiting>,
    failure: Failure,
}

/// Why the turn cannot go on.
enum Failure {
    None,
    Known(RuntimeError),
    /// It was said, and the turn is over.
    Told,
}

/// A record on its way to the store.
struct Waiting {
    position: u64,
    call: u32,
    record: Record,
}

/// Shows the events of an ended turn again, all but its end. Gives the number of the last one.
pub(crate) fn show_again(
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

/// The guest must not go on; the journal knows why.
#[derive(Debug, thiserror::Error)]
#[error("the turn's journal cannot be continued")]
pub(crate) struct Stopped;

impl Journal {
    /// The journal of a turn, with the records that it has. What was shown already is shown in the feed again.
    pub(crate) fn open(
        store: Store,
        turn: TurnKey,
        seed: Vec<u8>,
        feed: Arc<Feed>,
        records: Vec<skep_store::Record>,
    ) -> Result<Arc<Self>, RuntimeError> {
        let Replay { calls, shown, last_position, results } = Replay::read(records)?;
        let last_shown = shown.last().map_or(0, |(id, _)| *id);
        feed.publish(shown);
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
            turn,
            seed,
            feed,
            order: Order::new(results),
            inner: Mutex::new(inner),
            writing: watch::Sender::new(false),
            stored: watch::Sender::new(last_position),
            flight: Flight::default(),
        }))
    }

    /// A generation of `model` produced tokens, and the caller is shown `text`.
    pub(crate) fn tokens(
        self: &Arc<Self>,
        call: &Call,
        model: &ModelDigest,
        ids: &[u32],
        taken_back: TakenBack,
        text: &str,
    ) {
        let mut inner = self.lock();
        // What the guest read of the text meanwhile was there before.
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
        let model = (!call.is_journalled.swap(true, Ordering::Relaxed)).then(|| model.clone());
        let record = Record::Tokens { call: call.identity.clone(), ids, text, taken_back, model };
        self.append(&mut inner, call.number, [record]);
    }

    /// Resolves when everything that was answered before a restart has been answered again. A call that has no result yet waits
    /// for that before it does anything: the guest may be about to give it up, as it did the first time.
    pub(crate) async fn caught_up(&self) {
        self.order.ended().await;
    }

    /// A call that may not be made twice is about to be made: after this, [`Call::was_dispatched`] knows it.
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
        // The sender is part of this; it is not dropped meanwhile.
        let _ = self.stored.subscribe().wait_for(|stored| *stored >= position).await;
        if matches!(self.lock().failure, Failure::None) { Ok(()) } else { Err(Stopped) }
    }

    /// The caller is shown something of a call that goes on.
    pub(crate) fn shown(self: &Arc<Self>, call: &Call, event: RunEvent) {
        call.shown.fetch_add(1, Ordering::Relaxed);
        let record = Record::Shown { call: call.identity.clone(), event };
        self.append(&mut self.lock(), call.number, [record]);
    }

    /// One of the calls waits for a person; see [`Journal::only_waits`].
    pub(crate) fn waits(&self) -> Waits {
        self.flight.waits()
    }

    /// Resolves when nothing happens in the turn any more until a person decides.
    pub(crate) async fn only_waits(&self) {
        self.flight.only_waits().await;
    }

    pub(crate) fn turn(&self) -> TurnKey {
        self.turn
    }

    pub(crate) fn seed(&self) -> Vec<u8> {
        self.seed.clone()
    }

    /// The call has its result, and the caller is shown `events`: all of it or, after a crash, nothing.
    pub(crate) fn ended(self: &Arc<Self>, call: &Call, result: &impl Serialize, events: Vec<RunEvent>) {
        let value = Json::written(result).expect("results of host calls are always JSON");
        let mut inner = self.lock();
        let result = Record::Result { call: call.identity.clone(), value, made: inner.numbers.made() };
        let records = std::iter::once(result).chain(events.into_iter().map(Record::Event));
        self.append(&mut inner, call.number, records);
    }

    /// A seed for the draws of a call.
    pub(crate) fn seed_for(&self, call: &Call) -> u64 {
        first_u64(&self.derive(&format!("generation {}", call.number)))
    }

    /// 32 bytes that depend on the turn's seed and on `purpose`.
    pub(crate) fn derive(&self, purpose: &str) -> [u8; 32] {
        Sha256::new().chain_update(&self.seed).chain_update(purpose).finalize().into()
    }

    /// The turn fails, for the first reason that is given.
    pub(crate) fn fail(&self, error: RuntimeError) {
        self.lock().fail(error);
    }

    /// Waits until everything is stored, and says what went wrong if something did. Gives the number of the last event that
    /// was shown.
    pub(crate) async fn close(&self) -> Result<u64, RuntimeError> {
        // The sender is part of this; it is not dropped meanwhile.
        let _ = self.writing.subscribe().wait_for(|writing| !writing).await;
        let mut inner = self.lock();
        match std::mem::replace(&mut inner.failure, Failure::Told) {
            Failure::Known(error) => Err(error),
            Failure::None => {
                inner.failure = Failure::None;
                Ok(inner.last_shown)
            }
            Failure::Told => Err(RuntimeError::Cancelled),
        }
    }

    /// Waits until everything is stored. Whether that went well; if not, [`Journal::close`] says why.
    pub(crate) async fn is_stored(&self) -> bool {
        // The sender is part of this; it is not dropped meanwhile.
        let _ = self.writing.subscribe().wait_for(|writing| !writing).await;
        matches!(self.lock().failure, Failure::None)
    }

    /// After a guest that ended well: whether it made all calls that it made before.
    pub(crate) fn check_replayed(&self) -> Result<(), RuntimeError> {
        let inner = self.lock();
        let Some((number, recorded)) = inner.recorded.first_key_value() else { return Ok(()) };
        let expected = recorded.identity.as_ref().map_or_else(String::new, |identity| identity.name.clone());
        Err(RuntimeError::Divergence { call: *number, expected, made: "nothing more".to_owned() })
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

    /// Stores what waits until nothing does. What comes meanwhile is stored together.
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
    /// The first reason counts.
    fn fail(&mut self, error: RuntimeError) {
        if matches!(self.failure, Failure::None) {
            self.failure = Failure::Known(error);
        }
    }
}
