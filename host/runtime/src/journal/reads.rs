//! The guest's reads of a text as it arrives: how much per read, and their order among the results
//! of its calls. A rerun of the guest repeats the same reads, chunk by chunk; new text is read only
//! after everything that was recorded.

use super::{
    Call, Identity, Journal,
    record::Record,
    replay::{Read, ReplayPosition},
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
    /// Reads recorded before a restart, the next one first.
    recorded: VecDeque<(usize, Arc<ReplayPosition>)>,
    /// Whether reads are neither recorded nor replayed.
    is_free: bool,
    /// Resolves when the next read may be made.
    wait: Option<Wait>,
}

type Wait = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The next read that the guest may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextRead {
    /// This many bytes, as before a restart; 0 is the end of the text.
    Again(usize),
    /// Whatever is available.
    New,
}

impl Reads {
    /// Returns the reads of a call. Must be called at most once per call.
    pub(crate) fn of(journal: &Arc<Journal>, call: &mut Call) -> Self {
        let position = |Read { bytes, order, made }| (bytes, Arc::new(journal.order.position(order, made)));
        let recorded = std::mem::take(&mut call.reads).into_iter().map(position).collect();
        let (journal, identity) = (journal.clone(), call.identity.clone());
        let is_free = call.reads_freely;
        let mut reads = Reads { journal, call: call.number, identity, recorded, is_free, wait: None };
        reads.wait = (!is_free).then(|| reads.next_wait());
        reads
    }

    /// Returns what the guest may read next, once it may. Repeated calls return the same until
    /// [`Reads::made`].
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<NextRead> {
        if let Some(wait) = &mut self.wait {
            ready!(wait.as_mut().poll(cx));
            self.wait = None;
        }
        Poll::Ready(self.recorded.front().map_or(NextRead::New, |(bytes, _)| NextRead::Again(*bytes)))
    }

    /// Records that the guest read this many bytes, as allowed by [`Reads::poll_next`].
    pub(crate) fn made(&mut self, bytes: usize) {
        if self.is_free {
            return;
        }
        // Dropping the read's position lets later results through.
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
            Some((_, position)) => {
                let position = position.clone();
                Box::pin(async move { position.reached().await })
            }
            None => {
                let journal = self.journal.clone();
                Box::pin(async move { journal.caught_up().await })
            }
        }
    }
}
