//! Reads the pages of a prefix from the disk or another host into the prefix tree, for a request that waits or ahead of one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use skep_cache::{Digest, PageRead, PageStream, metric};
use skep_model::{Executor, PAGE_TOKENS};
use tokio::sync::oneshot;

use super::warming::Warmed;
use crate::kv::SequencePages;
use crate::scheduler::Scheduler;
use crate::sequence_id::SequenceId;
use crate::{Affinity, PrefillReport};

/// Maximum wait for a page; commands are handled in between.
const WAIT: Duration = Duration::from_micros(500);
/// Maximum number of pages that are taken between two steps.
pub(super) const PAGES_AT_ONCE: usize = 8;

/// The one that the pages are read for.
pub(super) enum Reader {
    /// A waiting request, which is held meanwhile.
    Request(SequenceId),
    /// A request that computes the first `first` pages meanwhile, each of which is expected to take `page_time`. At most `ahead`
    /// pages are taken between two steps.
    HeadStart { id: SequenceId, first: usize, ahead: usize, page_time: Duration },
    /// A caller that wants them in memory before a request needs them, with what was found.
    Warming { found: Warmed, done: oneshot::Sender<Warmed> },
}

/// The place that pages come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Disk,
    Peers,
}

/// Pages that are being read.
pub(super) struct Reading {
    pub source: Source,
    /// The pages in order.
    pub names: Vec<Digest>,
    pub pages: PageStream,
    /// The report of the host that computes the pages for this one, if one does.
    pub report: Option<Arc<PrefillReport>>,
}

pub(super) struct Promotion {
    reader: Reader,
    affinity: Affinity,
    tokens: Vec<u32>,
    reading: Reading,
    /// Number of pages in memory before those that are read, without a head start.
    found: usize,
    /// A page that came while the loop waited.
    waited_for: Option<PageRead>,
    /// The pages in memory, from the first of the prefix on, which nobody may evict. During a head start, they are those alone that
    /// were read, which are not in the prefix tree.
    held: SequencePages,
    /// The time at which the read is abandoned.
    deadline: Instant,
    /// Whether no further page comes, in time or at all.
    is_over: bool,
}

/// The state of a promotion.
pub(super) enum Progress {
    Waits,
    /// All pages have arrived, or no further one arrives in time.
    Ended,
}

impl Promotion {
    /// Starts with the `held` pages of the prefix, which are in memory, and the read of those after them.
    pub fn new(
        reader: Reader,
        (affinity, tokens): (&Affinity, &[u32]),
        reading: Reading,
        held: SequencePages,
        deadline: Instant,
    ) -> Self {
        let (affinity, tokens) = (affinity.clone(), tokens.to_vec());
        let found = held.pages().len();
        let (waited_for, is_over) = (None, false);
        Promotion { reader, affinity, tokens, reading, found, waited_for, held, deadline, is_over }
    }

    /// Returns the request that got all pages that it wanted from the disk. Other hosts may have those after them. A request
    /// whose read took too long does not wait again.
    pub fn request_of_disk(&self) -> Option<SequenceId> {
        let has_all = self.held.pages().len() - self.found == self.reading.names.len();
        match self.reader {
            Reader::Request(id) if has_all && self.reading.source == Source::Disk => Some(id),
            Reader::Request(_) | Reader::HeadStart { .. } | Reader::Warming { .. } => None,
        }
    }

    /// Returns the first page that no other host has given, if that is certain.
    pub fn missed(&self) -> Option<Digest> {
        let was_asked_for =
            self.is_over && self.reading.source == Source::Peers && self.reading.report.is_none();
        let given = self.held.pages().len() - self.found;
        self.reading.names.get(given).filter(|_| was_asked_for).copied()
    }

    /// Returns the client for which pages are read before a request needs them.
    pub fn warmed_client(&self) -> Option<&Affinity> {
        matches!(self.reader, Reader::Warming { .. }).then_some(&self.affinity)
    }

    /// Ends a read ahead of requests with the pages that have arrived, because a request computes those that are late.
    pub fn end_if_ahead(&mut self) {
        if matches!(self.reader, Reader::Warming { .. }) {
            self.deadline = self.deadline.min(Instant::now());
        }
    }

    /// Returns the time until which a request waits for pages that another host computes, if one does.
    pub fn prefill_deadline(&self) -> Option<Instant> {
        self.reading.report.as_ref().map(|_| self.deadline)
    }

    /// Returns the pages in memory, which stay locked as long as the promotion exists.
    pub fn held(&self) -> &SequencePages {
        &self.held
    }

    /// Returns the number of pages that the read will still take.
    pub fn pages_left(&self) -> usize {
        (self.found + self.reading.names.len()).saturating_sub(self.held.pages().len())
    }

    /// Returns the number of pages of the prefix before those that are read.
    fn start(&self) -> usize {
        match self.reader {
            Reader::HeadStart { first, .. } => first,
            Reader::Request(_) | Reader::Warming { .. } => self.found,
        }
    }

    /// Returns the number of pages of a tenant's prefix up to the last one that the read brings. `None` if the page after the first
    /// `in_memory` ones is neither among those that are read nor among those that the request computes meanwhile.
    pub fn brings_up_to(&self, (tenant, names): (&str, &[Digest]), in_memory: usize) -> Option<usize> {
        let from = match self.reader {
            // The name of a page covers the ones before it, so those that are computed are the same, too.
            Reader::HeadStart { first, .. } => in_memory.max(first),
            Reader::Request(_) | Reader::Warming { .. } => in_memory,
        };
        let read = self.reading.names.get(from.checked_sub(self.start())?..)?;
        let wanted = names.get(from..).filter(|_| self.affinity.tenant == tenant)?;
        let count = wanted.iter().zip(read).take_while(|(wanted, read)| wanted == read).count();
        (count > 0).then_some(from + count)
    }

    /// Returns whether the read brings the last one of the first `pages` pages of a tenant's prefix, and it is not yet in the prefix
    /// tree.
    pub fn still_brings(&self, tenant: &str, (pages, last): (usize, &Digest)) -> bool {
        let in_tree = match self.reader {
            Reader::HeadStart { .. } => 0,
            Reader::Request(_) | Reader::Warming { .. } => self.held.pages().len(),
        };
        let at = pages.checked_sub(self.start() + 1);
        let is_read = at.and_then(|at| self.reading.names.get(at)) == Some(last);
        is_read && pages > in_tree && self.affinity.tenant == tenant
    }

    /// Blocks the loop until the next page has arrived, but for at most half a millisecond. `advance` takes the page.
    pub fn wait(&mut self) {
        if self.waited_for.is_none() {
            self.waited_for = Some(self.reading.pages.next_within(WAIT));
        }
    }

    /// Takes the pages that have arrived.
    pub fn advance(&mut self, scheduler: &mut Scheduler, executor: &mut dyn Executor) -> Progress {
        let is_wanted = match &self.reader {
            Reader::Request(id) => scheduler.is_waiting(*id),
            Reader::HeadStart { id, .. } => scheduler.head_start_progress(*id).is_some(),
            Reader::Warming { done, .. } => !done.is_closed(),
        };
        if !is_wanted {
            return Progress::Ended;
        }
        let before = self.held.pages().len();
        let (count, progress) = self.take_arrived(scheduler, executor);
        if let Reader::HeadStart { id, first, page_time, .. } = self.reader {
            return self.end_head_start((id, first, page_time), progress, scheduler);
        }
        if count > 0 {
            let tokens = &self.tokens[..(before + count) * PAGE_TOKENS];
            scheduler.share_held(&self.affinity.tenant, &mut self.held, tokens);
        }
        progress
    }

    /// Takes the pages that have arrived, but not too many between two steps. Returns their number.
    fn take_arrived(&mut self, scheduler: &mut Scheduler, executor: &mut dyn Executor) -> (usize, Progress) {
        let most = match self.reader {
            Reader::HeadStart { ahead, .. } => ahead,
            Reader::Request(_) | Reader::Warming { .. } => PAGES_AT_ONCE,
        };
        for count in 0..most {
            match self.waited_for.take().unwrap_or_else(|| self.reading.pages.poll()) {
                PageRead::Page(bytes) => {
                    if !self.take(&bytes, scheduler, executor) {
                        return (count, Progress::Ended);
                    }
                }
                PageRead::NotYet if Instant::now() < self.deadline => return (count, Progress::Waits),
                PageRead::NotYet | PageRead::Ended => {
                    self.is_over = true;
                    return (count, Progress::Ended);
                }
            }
        }
        (most, Progress::Waits)
    }

    /// Puts the pages that have been read behind those that the request has computed, once it has computed all `first` ones. From
    /// then on it waits for the others, but no longer than computing them would take. A read that has given nothing ends, and so
    /// does one of which a page could not be taken, because no further page has its place then.
    fn end_head_start(
        &mut self,
        (id, first, page_time): (SequenceId, usize, Duration),
        progress: Progress,
        scheduler: &mut Scheduler,
    ) -> Progress {
        let read = self.held.pages().len();
        if matches!(progress, Progress::Ended) && (read == 0 || !self.is_over) {
            return Progress::Ended;
        }
        let head = &self.tokens[..first * PAGE_TOKENS];
        if scheduler.head_start_progress(id).is_none_or(|computed| computed < head.len()) {
            return if Instant::now() < self.deadline { Progress::Waits } else { Progress::Ended };
        }
        let tenant = self.affinity.tenant.as_str();
        let Some(head) = scheduler.take_head(id, (tenant, head)) else { return Progress::Ended };
        let read_pages = std::mem::replace(&mut self.held, head);
        self.held.append(read_pages);
        scheduler.share_held(tenant, &mut self.held, &self.tokens[..(first + read) * PAGE_TOKENS]);
        metrics::counter!(metric::PROMOTED_PAGES).increment(read as u64);
        metrics::counter!(metric::HEAD_START_PAGES).increment(read as u64);
        (self.reader, self.found) = (Reader::Request(id), first);
        self.deadline = Instant::now() + page_time.mul_f64(self.pages_left() as f64);
        progress
    }

    /// Copies a page to the executor. Returns false if that is not possible, or running sequences may need the page.
    fn take(&mut self, bytes: &[u8], scheduler: &mut Scheduler, executor: &mut dyn Executor) -> bool {
        if scheduler.is_short_of_pages() {
            return false;
        }
        let at = self.held.pages().len();
        let Some(page) = scheduler.grow_held(&mut self.held, at + 1) else { return false };
        if let Err(error) = executor.write_pages(&[page], bytes) {
            tracing::warn!(%error, "a KV page from the disk or another host cannot be used");
            return false;
        }
        // Those of a head start count once they are used.
        if self.reading.source == Source::Disk && !matches!(self.reader, Reader::HeadStart { .. }) {
            metrics::counter!(metric::PROMOTED_PAGES).increment(1);
        }
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
        let is_given = self.reading.source == Source::Peers && pages > self.found;
        match self.reader {
            Reader::Request(id) => {
                if let Some(report) = &self.reading.report {
                    let tokens = self.found * PAGE_TOKENS..pages * PAGE_TOKENS;
                    scheduler.record_prefilled(id, report.of(tokens));
                }
                scheduler.release_held(id, &self.affinity, held, is_given);
                scheduler.release_hold(id);
            }
            Reader::HeadStart { id, .. } => {
                scheduler.drop_read(held.0);
                scheduler.end_head_start(id);
            }
            Reader::Warming { found, done } => {
                scheduler.release_warmed(&self.affinity, held, (is_given, is_forgotten));
                // A caller that no longer waits does not need the answer.
                let _ = done.send(Warmed { read: pages.saturating_sub(found.in_memory), ..found });
            }
        }
    }
}
