//! Reads the pages of a prefix from the disk into the prefix tree.

use std::time::{Duration, Instant};

use skep_cache::{Digest, PageRead, PageStream, metric};
use skep_model::{Executor, PAGE_TOKENS};

use crate::Affinity;
use crate::kv::SequencePages;
use crate::scheduler::Scheduler;
use crate::sequence_id::SequenceId;

/// Maximum wait for a page; commands are handled in between.
const WAIT: Duration = Duration::from_micros(500);
/// Maximum number of pages that are taken between two steps.
pub(super) const PAGES_AT_ONCE: usize = 8;

pub(super) struct Promotion {
    id: SequenceId,
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
        id: SequenceId,
        (affinity, tokens): (&Affinity, &[u32]),
        (names, read): (Vec<Digest>, PageStream),
        held: SequencePages,
        deadline: Instant,
    ) -> Self {
        let (affinity, tokens) = (affinity.clone(), tokens.to_vec());
        Promotion { id, affinity, tokens, names, read, waited_for: None, held, deadline }
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
        if !scheduler.is_waiting(self.id) {
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
        true
    }

    /// Releases the pages and the request.
    pub fn end(self, scheduler: &mut Scheduler) {
        let read = &self.tokens[..self.held.pages().len() * PAGE_TOKENS];
        scheduler.release_held(self.id, &self.affinity, (self.held, read));
        scheduler.release_hold(self.id);
    }
}
