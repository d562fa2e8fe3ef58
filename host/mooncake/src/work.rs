//! The pages that wait to be put into the cluster cache or to be removed from it.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use skep_cache::{Digest, ErasedPages};

/// Maximum number of pages that wait to be put.
const MAX_WAITING_PAGES: usize = 1 << 18;
/// Maximum number of pages that wait to be removed. Further ones stay, sealed, until the store evicts them.
const MAX_WAITING_REMOVALS: usize = 1 << 20;
/// Time after which the removal of a page that was in use is tried again.
const USE_TIME: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 1_000 });
/// Number of pages that are removed before other work gets a turn.
const REMOVED_AT_ONCE: usize = 256;

/// The pages that wait for the thread.
#[derive(Default)]
pub(crate) struct Work {
    waiting: Mutex<Waiting>,
    arrived: Condvar,
}

#[derive(Default)]
struct Waiting {
    puts: VecDeque<KeptPages>,
    put_pages: usize,
    /// Layouts and names of pages.
    removals: VecDeque<(Digest, Digest)>,
    /// Pages that somebody used when they were to be removed, and since when they wait.
    in_use: Vec<(Digest, Digest)>,
    in_use_since: Option<Instant>,
    /// Whether all pages have to be removed.
    removes_all: bool,
}

/// Pages that follow each other.
pub(crate) struct KeptPages {
    pub layout: Digest,
    pub payload_bytes: usize,
    pub names: Vec<Digest>,
    pub asked: Instant,
}

/// The next thing to do.
pub(crate) enum Task {
    Put(KeptPages),
    Remove(Vec<(Digest, Digest)>),
    RemoveAll,
}

impl Work {
    /// Wakes the thread.
    pub fn wake(&self) {
        self.arrived.notify_all();
    }

    /// Queues the removal of pages.
    pub fn remove(&self, erased: ErasedPages) {
        let mut waiting = self.lock();
        match erased {
            ErasedPages::All => {
                waiting.removes_all = true;
                waiting.removals.clear();
            }
            ErasedPages::Pages(pages) => waiting.remove(pages),
        }
        drop(waiting);
        self.wake();
    }

    /// Queues pages. Returns how many queued pages were dropped for them.
    pub fn put(&self, pages: KeptPages) -> usize {
        let mut waiting = self.lock();
        let mut dropped = 0;
        while waiting.put_pages + pages.names.len() > MAX_WAITING_PAGES {
            let Some(oldest) = waiting.puts.pop_front() else { return dropped + pages.names.len() };
            waiting.put_pages -= oldest.names.len();
            dropped += oldest.names.len();
        }
        waiting.put_pages += pages.names.len();
        waiting.puts.push_back(pages);
        drop(waiting);
        self.wake();
        dropped
    }

    /// Waits for something to do for at most `time`.
    pub fn next(&self, time: Duration) -> Option<Task> {
        let mut waiting = self.lock();
        if waiting.in_use_since.is_some_and(|since| since.elapsed() >= USE_TIME) {
            waiting.in_use_since = None;
            let pages = std::mem::take(&mut waiting.in_use);
            waiting.remove(pages);
        }
        if waiting.is_empty() {
            (waiting, _) = self.arrived.wait_timeout(waiting, time).unwrap_or_else(PoisonError::into_inner);
        }
        if std::mem::take(&mut waiting.removes_all) {
            return Some(Task::RemoveAll);
        }
        if !waiting.removals.is_empty() {
            let count = waiting.removals.len().min(REMOVED_AT_ONCE);
            return Some(Task::Remove(waiting.removals.drain(..count).collect()));
        }
        let pages = waiting.puts.pop_front()?;
        waiting.put_pages -= pages.names.len();
        Some(Task::Put(pages))
    }

    /// Returns whether pages wait to be removed.
    pub fn has_removals(&self) -> bool {
        let waiting = self.lock();
        waiting.removes_all || !waiting.removals.is_empty() || !waiting.in_use.is_empty()
    }

    /// Forgets what waits, and logs which removals are not made.
    pub fn abandon(&self) {
        let Waiting { removals, in_use, removes_all, .. } = std::mem::take(&mut *self.lock());
        let pages = removals.len() + in_use.len();
        if removes_all {
            tracing::warn!(
                "a purge does not reach the cluster cache, which keeps its pages, sealed, until it evicts them"
            );
        } else if pages > 0 {
            tracing::warn!(pages, "erased KV pages stay sealed in the cluster cache until it evicts them");
        }
    }

    /// Puts a removal back that could not be made.
    pub fn remove_later(&self, task: Task) {
        let mut waiting = self.lock();
        match task {
            Task::RemoveAll => waiting.removes_all = true,
            Task::Remove(pages) => pages.into_iter().rev().for_each(|page| waiting.removals.push_front(page)),
            Task::Put(_) => {}
        }
    }

    /// Queues the removal of pages that somebody uses at this moment. Other work has its turn before.
    pub fn remove_after_use(&self, pages: Vec<(Digest, Digest)>) {
        if !pages.is_empty() {
            let mut waiting = self.lock();
            waiting.in_use.extend(pages);
            waiting.in_use_since.get_or_insert_with(Instant::now);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn remove(&mut self, pages: Vec<(Digest, Digest)>) {
        let room = MAX_WAITING_REMOVALS.saturating_sub(self.removals.len());
        if room < pages.len() {
            let pages = pages.len() - room;
            tracing::warn!(pages, "erased KV pages stay sealed in the cluster cache until it evicts them");
        }
        self.removals.extend(pages.into_iter().take(room));
    }

    fn is_empty(&self) -> bool {
        self.puts.is_empty() && self.removals.is_empty() && !self.removes_all
    }
}
