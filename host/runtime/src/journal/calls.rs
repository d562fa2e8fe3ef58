//! Making calls: by the guest, by the host on the guest's behalf, and again after a restart.

use super::{
    Failure, Inner, Journal, Stopped,
    call::{Call, Children, Made, RecordedCall},
    record::{Identity, Record},
    replay::{Recorded, ReplayPosition},
};
use crate::RuntimeError;
use serde::{Serialize, de::DeserializeOwned};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32},
};

impl Journal {
    /// Makes the guest's next call.
    pub(crate) fn call(self: &Arc<Self>, identity: Identity) -> Result<Call, Stopped> {
        let made = self.make()?;
        self.identify(made, identity)
    }

    /// Reserves the number of the guest's next call, whose identity takes long to compute.
    pub(crate) fn make(self: &Arc<Self>) -> Result<Made, Stopped> {
        let mut inner = self.lock();
        if !matches!(inner.failure, Failure::None) {
            return Err(Stopped);
        }
        let Inner { numbers, recorded, .. } = &mut *inner;
        let number = numbers.take(|number| recorded.get(&number).is_some_and(Recorded::is_of_host));
        self.order.made(numbers.made());
        drop(inner);
        Ok(self.made(number))
    }

    /// Makes a call of the host on behalf of the guest's call `parent`, or repeats it. A recorded
    /// call is found by its identity.
    pub(crate) fn call_of_host(
        self: &Arc<Self>,
        identity: Identity,
        parent: Option<u32>,
    ) -> Result<Call, Stopped> {
        debug_assert!(identity.is_of_host(), "guest calls have other names");
        let mut inner = self.lock();
        if !matches!(inner.failure, Failure::None) {
            return Err(Stopped);
        }
        let is_it = |recorded: &Recorded| recorded.identity.as_ref() == Some(&identity);
        let known = inner.recorded.iter().find(|(_, recorded)| is_it(recorded)).map(|(number, _)| *number);
        let number = match known {
            Some(number) => {
                inner.numbers.take_recorded(number);
                number
            }
            None => {
                // The recorded children of the parent were different calls.
                parent.into_iter().for_each(|parent| self.forget_children_in(&mut inner, parent));
                let last_recorded = inner.recorded.last_key_value().map_or(0, |(number, _)| *number);
                let number = inner.numbers.take_new(last_recorded);
                // Recorded before anything with a later number.
                self.append(&mut inner, number, [Record::Dispatched { call: identity.clone(), parent }]);
                number
            }
        };
        self.order.made(inner.numbers.made());
        drop(inner);
        self.identify(self.made(number), identity)
    }

    fn made(self: &Arc<Self>, number: u32) -> Made {
        Made { journal: self.clone(), number, in_flight: Some(self.flight.call()) }
    }

    /// Discards the recorded calls that the host made on behalf of this one and does not repeat.
    pub(crate) fn forget_children(&self, parent: u32) {
        self.forget_children_in(&mut self.lock(), parent);
    }

    fn forget_children_in(&self, inner: &mut Inner, parent: u32) {
        let is_child = |recorded: &Recorded| recorded.parent == Some(parent);
        let children = inner.recorded.iter().filter(|(_, recorded)| is_child(recorded));
        let children: Vec<u32> = children.map(|(number, _)| *number).collect();
        for number in children {
            inner.numbers.take_recorded(number);
            self.forget_in(inner, number);
        }
        self.order.made(inner.numbers.made());
    }

    /// Discards a recorded call that is abandoned in this run.
    pub(super) fn forget(&self, number: u32) {
        self.forget_in(&mut self.lock(), number);
    }

    fn forget_in(&self, inner: &mut Inner, number: u32) {
        let Some(Recorded { reads, result, order, made, .. }) = inner.recorded.remove(&number) else {
            return;
        };
        // Dropping the position of an abandoned result releases the next ones.
        reads.into_iter().for_each(|read| drop(self.order.position(read.order, read.made)));
        if result.is_some() {
            drop(self.order.position(order, made));
        }
    }

    /// Gives a call its identity and looks up what was recorded of it.
    pub(crate) fn identify(self: &Arc<Self>, mut made: Made, identity: Identity) -> Result<Call, Stopped> {
        let number = made.number;
        let in_flight = made.in_flight.take().expect("a call is identified only once");
        let mut inner = self.lock();
        if !matches!(inner.failure, Failure::None) {
            return Err(Stopped);
        }
        let mut shown = 0;
        let mut recorded = inner.recorded.remove(&number);
        let reads = recorded.as_mut().map(|recorded| std::mem::take(&mut recorded.reads)).unwrap_or_default();
        let attempts =
            recorded.as_mut().map(|recorded| std::mem::take(&mut recorded.attempts)).unwrap_or_default();
        let reads_freely = recorded.as_ref().is_some_and(Recorded::is_of_early_version);
        let shows_answer = recorded.as_ref().is_some_and(|recorded| recorded.shows_answer);
        let recorded = match recorded {
            None => RecordedCall::None,
            Some(Recorded { identity: Some(before), .. }) if before != identity => {
                let made = if before.name == identity.name {
                    format!("{} with other arguments", identity.name)
                } else {
                    identity.name
                };
                inner.fail(RuntimeError::Divergence { call: number, expected: before.name, made });
                return Err(Stopped);
            }
            Some(Recorded { result: Some(result), order, made, events, .. }) => {
                shown = events;
                RecordedCall::Finished { result, position: self.order.position(order, made) }
            }
            Some(Recorded { tokens, taken_back, model, shown_bytes, dispatched, events, .. }) => {
                shown = events;
                RecordedCall::Interrupted { tokens, taken_back, model, shown_bytes, dispatched }
            }
        };
        self.feed.timeline().begin(number, &identity.name, matches!(recorded, RecordedCall::Finished { .. }));
        let is_journaled =
            matches!(&recorded, RecordedCall::Interrupted { tokens, .. } if !tokens.is_empty());
        Ok(Call {
            number,
            identity,
            recorded,
            reads,
            attempts,
            repeats: AtomicU32::new(0),
            shown: AtomicU32::new(shown),
            shows_answer: AtomicBool::new(shows_answer),
            is_journaled: AtomicBool::new(is_journaled),
            reads_freely,
            _in_flight: in_flight,
            _children: Children { journal: self.clone(), parent: number },
        })
    }

    /// Makes a call that others may overtake. It is never answered immediately, neither live nor
    /// from the journal, so that a guest that waits for several calls always makes all of them.
    pub(crate) async fn begin(self: &Arc<Self>, identity: Identity) -> Result<Call, Stopped> {
        let call = self.call(identity)?;
        tokio::task::yield_now().await;
        Ok(call)
    }

    /// Returns the result that the guest's next call had before a restart, if that was this one and has ended; otherwise
    /// no call is made. This is for calls that are only numbered if they fail.
    pub(crate) fn failed_before<T: DeserializeOwned>(
        self: &Arc<Self>,
        identity: &Identity,
    ) -> Result<Option<T>, Stopped> {
        let is_next = {
            let inner = self.lock();
            let is_of_host = |number: u32| inner.recorded.get(&number).is_some_and(Recorded::is_of_host);
            let next = inner.recorded.get(&inner.numbers.clone().take(is_of_host));
            next.is_some_and(|next| next.identity.as_ref() == Some(identity) && next.result.is_some())
        };
        if !is_next {
            return Ok(None);
        }
        let mut call = self.call(identity.clone())?;
        Ok(self.recorded(&mut call)?.map(|(result, _place)| result))
    }

    /// Returns whether the guest has not repeated all calls that it made before a restart.
    pub(crate) fn is_replaying(&self) -> bool {
        !self.lock().recorded.is_empty()
    }

    /// Makes a call that is answered immediately, by `make` or from the journal.
    pub(crate) fn immediate<T: Serialize + DeserializeOwned>(
        self: &Arc<Self>,
        identity: Identity,
        make: impl FnOnce() -> T,
    ) -> Result<T, Stopped> {
        let mut call = self.call(identity)?;
        if let Some((result, _place)) = self.recorded(&mut call)? {
            return Ok(result);
        }
        let made = make();
        self.ended(&call, &made, Vec::new());
        Ok(made)
    }

    /// Returns the result that the call had before a restart, with its position among the results.
    pub(crate) fn recorded<T: DeserializeOwned>(
        &self,
        call: &mut Call,
    ) -> Result<Option<(T, ReplayPosition)>, Stopped> {
        match std::mem::replace(&mut call.recorded, RecordedCall::None) {
            RecordedCall::Finished { result, position } => match result.read() {
                Ok(result) => Ok(Some((result, position))),
                Err(error) => {
                    let name = &call.identity.name;
                    let message =
                        format!("the result of {name} in the turn's journal is unreadable: {error}");
                    self.fail(RuntimeError::Internal { message });
                    Err(Stopped)
                }
            },
            recorded => {
                call.recorded = recorded;
                Ok(None)
            }
        }
    }
}
