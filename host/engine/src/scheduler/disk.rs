//! The scheduler's part of the way of pages to the disk and back: it remembers the sequences that ended, holds back
//! those whose prefix is being read, and keeps the pages of reads.

use std::collections::HashSet;

use skep_model::PageId;

use super::Scheduler;
use crate::Affinity;
use crate::kv::SequencePages;
use crate::sequence::Sequence;
use crate::sequence_id::SequenceId;

/// The fraction of the pages, as a divisor, that reads leave to sequences.
const KEPT_PAGES: usize = 8;

/// The sequences that matter to the disk.
#[derive(Default)]
pub(super) struct DiskView {
    /// Whether ended sequences are recorded.
    is_on: bool,
    /// Waiting sequences whose prefix is being read.
    pub held: HashSet<SequenceId>,
    ended: Vec<EndedPrefix>,
}

/// The computed tokens of a sequence that has ended, whose pages are in the prefix tree.
pub(crate) struct EndedPrefix {
    pub affinity: Affinity,
    pub tokens: Vec<u32>,
}

impl DiskView {
    pub fn record_end(&mut self, sequence: &Sequence) {
        if self.is_on {
            let tokens = sequence.tokens[..sequence.settled()].to_vec();
            self.ended.push(EndedPrefix { affinity: sequence.request.affinity.clone(), tokens });
        }
    }
}

impl Scheduler {
    /// Begins to record sequences that end.
    pub fn record_ended(&mut self) {
        self.disk.is_on = true;
    }

    pub fn take_ended(&mut self) -> Vec<EndedPrefix> {
        std::mem::take(&mut self.disk.ended)
    }

    /// Keeps a waiting sequence from being admitted.
    pub fn hold(&mut self, id: SequenceId) {
        self.disk.held.insert(id);
    }

    pub fn release_hold(&mut self, id: SequenceId) {
        self.disk.held.remove(&id);
    }

    pub fn is_waiting(&self, id: SequenceId) -> bool {
        self.waiting.next(|sequence| sequence.id != id).is_some()
    }

    /// Returns the tenant and the tokens of a waiting sequence for which a cached prefix may be used.
    pub fn waiting_prefix(&self, id: SequenceId) -> Option<(String, Vec<u32>)> {
        let sequence = self.waiting.next(|sequence| sequence.id != id)?;
        Some((sequence.request.affinity.tenant.clone(), sequence.reusable_tokens().to_vec()))
    }

    /// Returns the number of pages that reads may take.
    pub fn spare_pages(&self) -> usize {
        let kept = self.promised_pages() + self.running.len() + self.limits.page_count / KEPT_PAGES;
        self.kv.available_pages().saturating_sub(kept)
    }

    /// Returns whether running sequences may need the pages that reads hold.
    pub fn is_short_of_pages(&self) -> bool {
        self.kv.available_pages() <= self.promised_pages() + self.running.len()
    }

    /// Returns the pages of the longest cached prefix.
    pub fn cached_prefix(&mut self, tenant: &str, tokens: &[u32]) -> Vec<PageId> {
        self.kv.cached_prefix(tenant, tokens)
    }

    /// Borrows the first `pages` pages of a prefix, which are cached.
    pub fn borrow_pages(&mut self, tenant: &str, tokens: &[u32], pages: usize) -> SequencePages {
        self.kv.borrow_pages(tenant, tokens, pages)
    }

    /// Adds a page to those of a read.
    pub fn grow_held(&mut self, held: &mut SequencePages, page_count: usize) -> Option<PageId> {
        self.kv.grow(held, page_count).then(|| held.pages()[page_count - 1])
    }

    /// Moves the pages of a read into the prefix tree, and keeps them from being evicted.
    pub fn share_held(&mut self, tenant: &str, held: &mut SequencePages, tokens: &[u32]) {
        self.kv.share(tenant, held, tokens);
    }

    /// Releases the pages held by a read. Pages that were read stay cached.
    pub fn release_held(&mut self, tenant: &str, held: SequencePages) {
        self.kv.release(tenant, held, &[]);
    }
}
