//! The scheduler's part of the way of pages to the disk and back: it remembers the sequences that gave back their pages, holds
//! back those whose prefix is being read, and keeps the pages of reads. It also forgets the pages of deleted sessions.
//!
//! Invariant: a sequence of a client whose pages were forgotten while it ran or waited leaves no page behind, in memory or
//! for the disk.

use std::collections::{HashMap, HashSet};

use skep_model::{PAGE_TOKENS, PageId};

use super::{HeadStart, Scheduler};
use crate::kv::{PrefixOwner, SequencePages};
use crate::page_peers::Prefilled;
use crate::sequence::Sequence;
use crate::sequence_id::SequenceId;
use crate::{Affinity, Priority};

/// The fraction of the pages, as a divisor, that reads leave to sequences.
const KEPT_PAGES: usize = 8;

/// The sequences that matter to the disk.
#[derive(Default)]
pub(super) struct DiskView {
    /// Whether prefixes are recorded when sequences give back their pages.
    is_on: bool,
    /// Waiting sequences whose prefix is being read.
    pub held: HashSet<SequenceId>,
    /// Sequences whose client's pages were forgotten since they were submitted.
    pub forgotten: HashSet<SequenceId>,
    /// The parts of prompts that another host has computed for waiting sequences.
    pub prefilled: HashMap<SequenceId, Prefilled>,
    /// Sequences that are not admitted yet, and compute the beginning of their prompt while pages after it are read.
    pub head_starts: HashMap<SequenceId, HeadStart>,
    ended: Vec<EndedPrefix>,
}

/// Tokens whose pages are in the prefix tree, where they may be evicted: those of a sequence that has ended or was preempted, or
/// those of pages that another host has given.
pub(crate) struct EndedPrefix {
    pub affinity: Affinity,
    pub tokens: Vec<u32>,
}

impl DiskView {
    /// Records the computed tokens of a sequence that ends or is preempted, if the disk is in use and its client was not
    /// forgotten.
    pub fn record_end(&mut self, sequence: &Sequence) {
        if !self.forgotten.contains(&sequence.id) {
            self.record(&sequence.request.affinity, &sequence.tokens[..sequence.settled()]);
        }
    }

    /// Records tokens whose pages may be evicted from now on, if the disk is in use.
    fn record(&mut self, affinity: &Affinity, tokens: &[u32]) {
        if self.is_on {
            self.ended.push(EndedPrefix { affinity: affinity.clone(), tokens: tokens.to_vec() });
        }
    }
}

impl Scheduler {
    /// Begins to record prefixes whose pages sequences give back.
    pub fn record_ended(&mut self) {
        self.disk.is_on = true;
    }

    /// Returns the prefixes that were recorded since the last call.
    pub fn take_ended(&mut self) -> Vec<EndedPrefix> {
        std::mem::take(&mut self.disk.ended)
    }

    /// Returns the number of cached pages that the next step may evict at most.
    pub fn evictable_by_next_step(&self) -> usize {
        let tokens = match self.waiting.len() {
            0 => self.running.iter().map(Sequence::pending).sum::<usize>().min(self.limits.tokens),
            _ => self.limits.tokens,
        };
        (tokens.div_ceil(PAGE_TOKENS) + self.running.len()).saturating_sub(self.kv.free_pages())
    }

    /// Frees the cached pages that only the matching clients have. Their sequences that run or wait leave none behind.
    pub fn forget(&mut self, matches: impl Fn(&PrefixOwner) -> bool) {
        let live: HashSet<SequenceId> =
            self.running.iter().chain(self.waiting.iter()).map(|sequence| sequence.id).collect();
        self.disk.forgotten.retain(|id| live.contains(id));
        let of_client = |sequence: &&Sequence| matches(&PrefixOwner::of(&sequence.request.affinity));
        let forgotten = self.running.iter().chain(self.waiting.iter()).filter(of_client);
        self.disk.forgotten.extend(forgotten.map(|sequence| sequence.id));
        let pages = self.kv.forget(matches);
        tracing::debug!(pages, "forgot cached pages");
    }

    /// Records the owner of cached tokens that a sequence has computed or read, or drops them if its client's pages were
    /// forgotten.
    pub(super) fn settle_owner(&mut self, id: SequenceId, affinity: &Affinity, tokens: &[u32]) {
        match self.disk.forgotten.contains(&id) {
            true => self.kv.drop_unowned(&affinity.tenant, tokens),
            false => self.kv.own(&PrefixOwner::of(affinity), tokens),
        }
    }

    /// Keeps a waiting sequence from being admitted.
    pub fn hold(&mut self, id: SequenceId) {
        self.disk.held.insert(id);
    }

    /// Lets a held sequence be admitted again.
    pub fn release_hold(&mut self, id: SequenceId) {
        self.disk.held.remove(&id);
    }

    /// Records what another host has computed for a waiting sequence.
    pub fn record_prefilled(&mut self, id: SequenceId, prefilled: Prefilled) {
        if prefilled.tokens > 0 && self.is_waiting(id) {
            self.disk.prefilled.insert(id, prefilled);
        }
    }

    /// Returns whether any sequence runs.
    pub fn is_running(&self) -> bool {
        !self.running.is_empty()
    }

    /// Returns whether the sequence is still in the queue: neither admitted nor removed.
    pub fn is_waiting(&self, id: SequenceId) -> bool {
        self.waiting.next(|sequence| sequence.id != id).is_some()
    }

    /// Returns the client of a waiting sequence, its priority, and its tokens for which a cached prefix may be used.
    pub fn waiting_prefix(&self, id: SequenceId) -> Option<(Affinity, Priority, Vec<u32>)> {
        let sequence = self.waiting.next(|sequence| sequence.id != id)?;
        let request = &sequence.request;
        Some((request.affinity.clone(), request.priority, sequence.reusable_tokens().to_vec()))
    }

    /// Returns the number of pages that reads may take, those included that reads under way have not taken yet.
    pub fn spare_pages(&self) -> usize {
        let kept = self.promised_pages() + self.running.len() + self.limits.page_count / KEPT_PAGES;
        self.kv.available_pages().saturating_sub(kept)
    }

    /// Returns whether running sequences, or the next one to run, may need the pages that reads hold.
    pub fn is_short_of_pages(&self) -> bool {
        self.kv.available_pages() <= (self.promised_pages() + self.running.len()).max(1)
    }

    /// Returns the pages of the longest cached prefix.
    pub fn cached_prefix(&mut self, tenant: &str, tokens: &[u32]) -> Vec<PageId> {
        self.kv.cached_prefix(tenant, tokens)
    }

    /// Marks the longest cached prefix as used, and returns how many of its pages a sequence can continue from.
    pub fn usable_prefix(&mut self, tenant: &str, tokens: &[u32]) -> usize {
        self.kv.touch_prefix(tenant, tokens);
        self.kv.usable_prefix(tenant, tokens)
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
        self.kv.share(tenant, held, tokens, tokens.len());
    }

    /// Ends the ownership of a read for a waiting sequence; what it has read, which is `tokens`, stays cached. The disk lacks what
    /// another host has given.
    pub fn release_held(
        &mut self,
        id: SequenceId,
        affinity: &Affinity,
        (held, tokens): (SequencePages, &[u32]),
        is_given: bool,
    ) {
        self.kv.release(&affinity.tenant, held, &[]);
        self.settle_owner(id, affinity, tokens);
        if is_given && !self.disk.forgotten.contains(&id) {
            self.disk.record(affinity, tokens);
        }
    }

    /// Ends the ownership of a read that no sequence waits for. What it has read, which is `tokens`, stays cached, unless
    /// the pages of its client were forgotten. The disk lacks what another host has given.
    pub fn release_warmed(
        &mut self,
        affinity: &Affinity,
        (held, tokens): (SequencePages, &[u32]),
        (is_given, is_forgotten): (bool, bool),
    ) {
        self.kv.release(&affinity.tenant, held, &[]);
        if is_forgotten {
            self.kv.drop_unowned(&affinity.tenant, tokens);
            return;
        }
        self.kv.own(&PrefixOwner::of(affinity), tokens);
        if is_given {
            self.disk.record(affinity, tokens);
        }
    }
}
