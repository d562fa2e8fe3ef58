//! What a guest reads of a text as it comes: how much at a time, and when among the results of its calls. When the guest is run
//! again it reads the same, piece by piece; what is new it reads only after everything that was recorded.

use super::{
    Call, Identity, Journal,
    record::Record,
    replay::{Place, Read},
};
use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

/// The reads of one text.
pub(crate) struct Reads {
    journal: Arc<Journal>,
    call: u32,
    identity: Identity,
    /// From before a restart, the next one first.
    recorded: VecDeque<(usize, Arc<Place>)>,
    /// They are neither recorded nor replayed.
    is_free: bool,
    /// Resolves when the next one may be made.
    wait: Option<Wait>,
}

type Wait = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What the guest may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextRead {
    /// So many bytes, as before a restart; 0 is the end of the text.
    Again(usize),
    /// Whatever there is.
    New,
}

impl Reads {
    /// Those of a call, which must not have been taken before.
    pub(crate) fn of(journal: &Arc<Journal>, call: &mut Call) -> Self {
        let place = |Read { bytes, order, made }| (bytes, Arc::new(journal.order.place(order, made)));
        let recorded = std::mem::take(&mut call.reads).into_iter().map(place).collect();
        let (journal, identity) = (journal.clone(), call.identity.clone());
        let is_free = call.reads_freely;
        let mut reads = Reads { journal, call: call.number, identity, recorded, is_free, wait: None };
        reads.wait = (!is_free).then(|| reads.next_wait());
        reads
    }

    /// What the guest may read next, as soon as it may. It stays so until [`Reads::made`].
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<NextRead> {
        if let Some(wait) = &mut self.wait {
            ready!(wait.as_mut().poll(cx));
            self.wait = None;
        }
        Poll::Ready(self.recorded.front().map_or(NextRead::New, |(bytes, _)| NextRead::Again(*bytes)))
    }

    /// The guest reads so many bytes, which it was allowed to.
    pub(crate) fn made(&mut self, bytes: usize) {
        if self.is_free {
            return;
        }
        // Dropping its place lets through what came after it.
        if self.recorded.pop_front().is_some() {
            self.wait = Some(self.next_wait());
            return;
        }
        let mut inner = self.journal.lock();
        let record = Record::Read { call: self.identity.clone(), bytes, made: inner.numbers.made() };
        self.journal.append(&mut inner, self.call, [record]);
    }

    fn next_wait(&self) -> Wait {
        match self.recorded.front() {
            Some((_, place)) => {
                let place = place.clone();
                Box::pin(async move { place.reached().await })
            }
            None => {
                let journal = self.journal.clone();
                Box::pin(async move { journal.caught_up().await })
            }
        }
    }
}
