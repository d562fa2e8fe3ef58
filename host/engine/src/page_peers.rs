//! The interface to other hosts, or to a cache that they share: they may have pages that this host lacks, compute pages for
//! it, or get pages of this host.
//!
//! This module does not know how they are asked. They are asked only for pages that are neither in memory nor on the disk of
//! this host, and their pages are imported like those of the disk.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use skep_cache::{Digest, PageNamer, PageQuestion, PageStream};

use crate::{Affinity, Priority};

/// Gets KV pages from other hosts. An engine's loop calls it, so it must be quick and must not wait.
pub trait PagePeers: fmt::Debug + Send + Sync + 'static {
    /// Returns whether there is a host that can be asked now.
    fn are_there(&self) -> bool;

    /// Estimates the time until `bytes` bytes of pages have arrived, from recent fetches.
    fn fetch_time(&self, bytes: u64) -> Duration;

    /// Begins to ask all hosts for pages, and to fetch those that one of them has, in order and from the first on. The stream
    /// ends with the last one, or before the first one that is missing, late or invalid; dropping it ends the fetch. Returns
    /// `None` if too much is being fetched.
    fn fetch(&self, question: PageQuestion) -> Option<PageStream>;

    /// Learns that a request has ended whose pages follow each other under these names. They are on the disk, or are queued for
    /// it, as far as it takes them.
    fn keep(&self, _layout: Digest, _payload_bytes: usize, _names: &[Digest]) {}

    /// Returns the names under which all hosts know pages, for an engine without a disk. Without names, it asks nobody.
    fn names(&self) -> Option<&PageNamer> {
        None
    }

    /// Returns the hosts that compute prompts of this model for others, as they are now. `None` if there are none, or if this
    /// host computes its prompts itself.
    fn prefill_view(&self, _model: &str) -> Option<PrefillView> {
        None
    }

    /// Begins to have the pages of a prompt computed by another host, and to fetch them as they become ready. The stream ends
    /// as that of [`PagePeers::fetch`] does, and no later than the order says. Returns `None` if too much is being fetched.
    fn prefill(&self, _order: PrefillOrder) -> Option<PrefilledPages> {
        None
    }
}

/// The hosts that compute prompts for others, as one of them would serve the next prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillView {
    /// Prompts with fewer tokens to compute are never sent there.
    pub min_tokens: usize,
    /// Tokens that the least busy one has to compute before.
    pub tokens_ahead: usize,
    /// The tokens that such a host computes in a second, if it was measured.
    pub tokens_per_s: Option<f64>,
}

/// A prompt whose pages another host is to compute.
#[derive(Debug, Clone)]
pub struct PrefillOrder {
    pub model: String,
    pub affinity: Affinity,
    pub priority: Priority,
    /// The tokens of whole pages, from the first one on.
    pub tokens: Vec<u32>,
    /// The names of these pages.
    pub names: Vec<Digest>,
    /// Number of pages, from the first one on, that are here.
    pub first: usize,
    /// The question for the pages after these.
    pub question: PageQuestion,
    /// The time after which nobody waits for them anymore.
    pub within: Duration,
}

/// The pages that another host computes.
#[derive(Debug)]
pub struct PrefilledPages {
    pub pages: PageStream,
    pub report: Arc<PrefillReport>,
}

/// The report of a host about a prompt that it computes for another one.
#[derive(Debug)]
pub struct PrefillReport {
    /// Tokens of the prompt, from the first one on, that it did not have to compute.
    reused_tokens: AtomicUsize,
    spent_us: AtomicU64,
}

impl Default for PrefillReport {
    /// Returns the report of a host that has computed nothing.
    fn default() -> Self {
        PrefillReport { reused_tokens: AtomicUsize::new(usize::MAX), spent_us: AtomicU64::new(0) }
    }
}

impl PrefillReport {
    /// Records how many tokens of the prompt, from the first one on, were there before the host began to compute.
    pub fn set_reused(&self, tokens: usize) {
        self.reused_tokens.store(tokens, Relaxed);
    }

    /// Records for how long the host computed.
    pub fn set_spent(&self, time: Duration) {
        self.spent_us.store(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }

    /// Returns what the host has computed of the tokens in a range of the prompt.
    pub(crate) fn of(&self, tokens: std::ops::Range<usize>) -> Prefilled {
        let first = self.reused_tokens.load(Relaxed).max(tokens.start);
        let spent = Duration::from_micros(self.spent_us.load(Relaxed));
        Prefilled { tokens: tokens.end.saturating_sub(first), spent }
    }
}

/// The part of a prompt that another host has computed for its sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Prefilled {
    pub tokens: usize,
    pub spent: Duration,
}

/// Gets the pages of a prompt as they are computed. An engine's loop calls it, so it must be quick and must not wait.
pub trait PageSink: fmt::Debug + Send + Sync + 'static {
    /// Returns the number of the first page that is wanted.
    fn first_page(&self) -> usize;

    /// Takes the page with this number, in the form of the executor. Pages come in order. Returns false if no further one is
    /// wanted.
    fn put(&self, page: usize, bytes: Vec<u8>) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_other_host_computed_counts_as_computed_there() {
        let report = PrefillReport::default();
        assert_eq!(report.of(0..160), Prefilled::default(), "it has not begun");
        report.set_reused(48);
        report.set_spent(Duration::from_millis(5));
        let spent = Duration::from_millis(5);
        assert_eq!(report.of(0..160), Prefilled { tokens: 112, spent });
        assert_eq!(
            report.of(64..160),
            Prefilled { tokens: 96, spent },
            "pages that were here are not counted"
        );
        assert_eq!(report.of(0..32).tokens, 0);
    }
}
