//! Reads the pages of a prefix from the disk into the prefix tree, for a request that waits or ahead of one.

use std::time::{Duration, Instant};

use skep_cache::{Digest, PageRead, PageStream, metric};
use skep_model::{Executor, PAGE_TOKENS};
use tokio::sync::oneshot;

use super::warming::Warmed;
use crate::Affinity;
use crate::kv::SequencePages;
use crate::scheduler::Scheduler;
use crate::sequence_id::SequenceId;

/// Maximum wait for a page; commands are handled in between.
const WAIT: Duration = Duration::from_micros(500);
/// Maximum number of pages that are taken between two steps.
pub(super) const PAGES_AT_ONCE: usize = 8;

/// The one that the pages are read for.
pub(super) enum Reader {
    /// A waiting request, which is held meanwhile.
    Request(SequenceId),
    /// A caller that wants them in memory before a request needs them, with what was found.
    Warming { found: Warmed, done: oneshot::Sender<Warmed> },
}

pub(super) struct Promotion {
    reader: Reader,
    affinity: Affinity,
    tokens: Vec<u32>,
    names: Vec<Digest>,
    read: PageStream,
    /// A page that came while the loop waited.
    waited_for: Option<PageRead>,
    /// The pages in memory, from the first of the prefix on, which nobody may evict.
    held: SequencePages,
    /// The time at which the read is abandoned.
    deadline: Instant,
}

/// The state of a promotion.
pub(super) enum Progress {
    Waits,
    /// All pages have arrived, or no further one arrives in time.
    Ended,
}

impl Promotion {
    /// Starts with the `held` pages of the prefix, which are in memory, and the read of those after them. `names` are
    /// the pages of the read in order.
    pub fn new(
        reader: Reader,
        (affinity, tokens): (&Affinity, &[u32]),
        (names, read): (Vec<Digest>, PageStream),
        held: SequencePages,
        deadline: Instant,
    ) -> Self {
        let (affinity, tokens) = (affinity.clone(), tokens.to_vec());
        Promotion { reader, affinity, tokens, names, read, waited_for: None, held, deadline }
    }

    /// Returns the client for which pages are read before a request needs them.
    pub fn warmed_client(&self) -> Option<&Affinity> {
        matches!(self.reader, Reader::Warming { .. }).then_some(&self.affinity)
    }

    /// Bounds the wait of a request for pages that are read ahead.
    pub fn hurry(&mut self, deadline: Instant) {
        if matches!(self.reader, Reader::Warming { .. }) {
            self.deadline = self.deadline.min(deadline);
        }
    }

    /// Returns the pages in memory, which stay locked as long as the promotion exists.
    pub fn held(&self) -> &SequencePages {
        &self.held
    }

    /// Returns whether this page is among those that are read.
    pub fn reads(&self, name: Digest) -> bool {
        self.names.contains(&name)
    }

    /// Blocks the loop until the next page has arrived, but for at most half a millisecond. `advance` takes the page.
    pub fn wait(&mut self) {
        if self.waited_for.is_none() {
            self.waited_for = Some(self.read.next_within(WAIT));
        }
    }

    /// Takes the pages that have arrived.
    pub fn advance(&mut self, scheduler: &mut Scheduler, executor: &mut dyn Executor) -> Progress {
        let is_wanted = match &self.reader {
            Reader::Request(id) => scheduler.is_waiting(*id),
            Reader::Warming { done, .. } => !done.is_closed(),
        };
        if !is_wanted {
            return Progress::Ended;
        }
        for _ in 0..PAGES_AT_ONCE {
            match self.waited_for.take().unwrap_or_else(|| self.read.poll()) {
                PageRead::Page(bytes) => {
                    if !self.take(&bytes, scheduler, executor) {
                        return Progress::Ended;
                    }
                }
                PageRead::NotYet if Instant::now() < self.deadline => return Progress::Waits,
                PageRead::NotYet | PageRead::Ended => return Progress::Ended,
            }
        }
        Progress::Waits
    }

    /// Puts a page into the prefix tree. Returns false if that is not possible.
    fn take(&mut self, bytes: &[u8], scheduler: &mut Scheduler, executor: &mut dyn Executor) -> bool {
        let at = self.held.pages().len();
        let Some(page) = scheduler.grow_held(&mut self.held, at + 1) else { return false };
        if let Err(error) = executor.write_pages(&[page], bytes) {
            tracing::warn!(%error, "a KV page from the disk cannot be used");
            return false;
        }
        scheduler.share_held(&self.affinity.tenant, &mut self.held, &self.tokens[..(at + 1) * PAGE_TOKENS]);
        metrics::counter!(metric::PROMOTED_PAGES).increment(1);
        if matches!(self.reader, Reader::Warming { .. }) {
            metrics::counter!(metric::WARMED_PAGES).increment(1);
        }
        true
    }

    /// Releases the pages, and the request that waits for them.
    pub fn end(self, scheduler: &mut Scheduler) {
        self.release(scheduler, false);
    }

    /// Does the same after the client's pages were forgotten: nothing that was read ahead stays.
    pub fn end_forgotten(self, scheduler: &mut Scheduler) {
        self.release(scheduler, true);
    }

    fn release(self, scheduler: &mut Scheduler, is_forgotten: bool) {
        let pages = self.held.pages().len();
        let held = (self.held, &self.tokens[..pages * PAGE_TOKENS]);
        match self.reader {
            Reader::Request(id) => {
                scheduler.release_held(id, &self.affinity, held);
                scheduler.release_hold(id);
            }
            Reader::Warming { found, done } => {
                scheduler.release_warmed(&self.affinity, held, is_forgotten);
                // A caller that no longer waits does not need the answer.
                let _ = done.send(Warmed { read: pages.saturating_sub(found.in_memory), ..found });
            }
        }
    }
}
