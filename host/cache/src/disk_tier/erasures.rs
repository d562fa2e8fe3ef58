//! Erasures, which overtake the pages that wait to be written.
//!
//! Invariant: a page that was queued before an erasure that includes it is not written after it. Each queued command has
//! a ticket, and an erasure counts for the tickets before its own.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::Sender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Shared;
use super::index::{EraseFilter, PageKey};
use super::unfinished::UnfinishedErasures;
use crate::{Digest, Owner, TenantTag};

/// The erasures that are requested, those that commands in the queue still have to respect, and those that the disk did not take.
#[derive(Default)]
pub(super) struct Erasures {
    state: Mutex<State>,
    arrived: Condvar,
    /// The list in the folder. Only the writer locks it, while it waits for the disk.
    unfinished: Mutex<UnfinishedErasures>,
}

#[derive(Default)]
struct State {
    last_ticket: u64,
    /// The last ticket of a command that was queued, and of one that the writer took.
    queued: u64,
    taken: u64,
    wanted: VecDeque<Erasure>,
    /// Filters of finished erasures, with the tickets before which they count.
    done: Vec<(EraseFilter, u64)>,
}

/// Pages that were erased, as the holder of copies is notified of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ErasedPages {
    All,
    /// The layouts and the names of the pages.
    Pages(Vec<(Digest, Digest)>),
}

/// The callback of a holder of copies of pages.
pub(super) type ErasureListener = Box<dyn Fn(ErasedPages) + Send + Sync>;

impl Shared {
    /// Tells the listener about pages that were erased. It must not wait.
    pub(super) fn tell_erased(&self, which: EraseFilter, pages: Vec<PageKey>) {
        let Some(listener) = self.erasure_listener.get() else { return };
        match which {
            EraseFilter::All => return listener(ErasedPages::All),
            EraseFilter::AllHere => return,
            EraseFilter::Tenant(_) | EraseFilter::Agent(_) | EraseFilter::Session(_) => {}
        }
        let layouts: Vec<Digest> =
            self.state().layouts.iter().map(|layout| layout.files.head.layout).collect();
        let named = pages.into_iter().filter_map(|key| Some((*layouts.get(key.layout.0)?, key.prefix)));
        listener(ErasedPages::Pages(named.collect()));
    }
}

/// Pages to erase.
pub(super) struct Erasure {
    pub which: EraseFilter,
    pub answer: Sender<io::Result<u64>>,
    ticket: u64,
}

impl Erasures {
    /// Creates the erasures of a folder in which earlier ones are unfinished.
    pub fn after(unfinished: UnfinishedErasures) -> Self {
        Erasures { unfinished: Mutex::new(unfinished), ..Erasures::default() }
    }

    /// Locks the erasures that the disk did not take. The caller may wait for the disk.
    pub fn unfinished(&self) -> MutexGuard<'_, UnfinishedErasures> {
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a command with its ticket. `send` must not wait, and returns whether the command was queued.
    pub fn queue(&self, send: impl FnOnce(u64) -> bool) -> bool {
        let mut state = self.lock();
        state.last_ticket += 1;
        let ticket = state.last_ticket;
        let sent = send(ticket);
        if sent {
            state.queued = ticket;
        }
        sent
    }

    /// Asks for an erasure, and wakes the writer if it waits for its pace.
    pub fn want(&self, which: EraseFilter, answer: Sender<io::Result<u64>>) {
        let mut state = self.lock();
        state.last_ticket += 1;
        let ticket = state.last_ticket;
        state.wanted.push_back(Erasure { which, answer, ticket });
        drop(state);
        self.arrived.notify_all();
    }

    /// Takes the next erasure. From now on it counts for the commands that were queued before it.
    pub fn take(&self) -> Option<Erasure> {
        let mut state = self.lock();
        let erasure = state.wanted.pop_front()?;
        if state.taken < state.queued {
            state.done.push((erasure.which, erasure.ticket));
        }
        Some(erasure)
    }

    /// Takes a command from the queue, and returns whether its pages were erased after it was queued.
    pub fn includes(&self, ticket: u64, owner: Owner, tenant: Option<TenantTag>) -> bool {
        let mut state = self.lock();
        state.taken = ticket;
        state.done.retain(|(_, until)| ticket < *until);
        state.done.iter().any(|(which, _)| which.includes(owner, tenant))
    }

    /// Waits for `time`, or until an erasure is wanted.
    pub fn wait(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut state = self.lock();
        while state.wanted.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            (state, _) = self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
