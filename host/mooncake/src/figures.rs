//! Counts of what was fetched and put, for metrics and for `/v1/kv`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use skep_cache::{FetchEnding, metric};

/// The state of the cluster cache, and what went to and came from it since the host started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheStatus {
    /// Whether it can be used now.
    pub is_up: bool,
    /// The reason that it cannot be used, if it is known.
    pub problem: Option<String>,
    /// Number of times that it was asked for the pages of a prompt.
    pub questions: u64,
    /// Number of these after which not all pages came.
    pub missed: u64,
    pub fetched_pages: u64,
    pub fetched_bytes: u64,
    pub put_pages: u64,
    pub put_bytes: u64,
    /// Pages that the cache lacks, or may lack, and that were not put.
    pub dropped_pages: u64,
    /// Pages that were removed because this host erased them, or because they were damaged.
    pub removed_pages: u64,
}

#[derive(Default)]
pub(crate) struct Figures {
    questions: AtomicU64,
    missed: AtomicU64,
    fetched_pages: AtomicU64,
    fetched_bytes: AtomicU64,
    put_pages: AtomicU64,
    put_bytes: AtomicU64,
    dropped_pages: AtomicU64,
    removed_pages: AtomicU64,
}

impl Figures {
    /// Returns the counts so far, of a cache in this state.
    pub fn now(&self, problem: Option<String>, is_up: bool) -> CacheStatus {
        CacheStatus {
            is_up,
            problem,
            questions: self.questions.load(Relaxed),
            missed: self.missed.load(Relaxed),
            fetched_pages: self.fetched_pages.load(Relaxed),
            fetched_bytes: self.fetched_bytes.load(Relaxed),
            put_pages: self.put_pages.load(Relaxed),
            put_bytes: self.put_bytes.load(Relaxed),
            dropped_pages: self.dropped_pages.load(Relaxed),
            removed_pages: self.removed_pages.load(Relaxed),
        }
    }

    /// Counts a question.
    pub fn record_end(&self, ending: FetchEnding, took: Duration) {
        self.questions.fetch_add(1, Relaxed);
        if ending != FetchEnding::Fetched {
            self.missed.fetch_add(1, Relaxed);
        }
        metrics::counter!(metric::CLUSTER_FETCHES, "outcome" => ending.as_str()).increment(1);
        metrics::histogram!(metric::CLUSTER_FETCH_TIME).record(took.as_secs_f64());
    }

    /// Counts a page that was fetched.
    pub fn record_fetched(&self, bytes: u64) {
        self.fetched_pages.fetch_add(1, Relaxed);
        self.fetched_bytes.fetch_add(bytes, Relaxed);
        metrics::counter!(metric::CLUSTER_FETCHED_PAGES).increment(1);
        metrics::counter!(metric::CLUSTER_FETCHED_BYTES).increment(bytes);
    }

    /// Counts pages that were put.
    pub fn record_put(&self, pages: u64, bytes: u64) {
        self.put_pages.fetch_add(pages, Relaxed);
        self.put_bytes.fetch_add(bytes, Relaxed);
        metrics::counter!(metric::CLUSTER_PUT_PAGES).increment(pages);
        metrics::counter!(metric::CLUSTER_PUT_BYTES).increment(bytes);
    }

    /// Counts pages that were not put.
    pub fn record_dropped(&self, pages: u64) {
        self.dropped_pages.fetch_add(pages, Relaxed);
        metrics::counter!(metric::CLUSTER_DROPPED_PAGES).increment(pages);
    }

    /// Counts pages that were removed.
    pub fn record_removed(&self, pages: u64) {
        self.removed_pages.fetch_add(pages, Relaxed);
        metrics::counter!(metric::CLUSTER_REMOVED_PAGES).increment(pages);
    }
}

/// Makes all metrics visible before anything has happened.
pub(crate) fn begin() {
    let counters = [
        metric::CLUSTER_FETCHED_PAGES,
        metric::CLUSTER_FETCHED_BYTES,
        metric::CLUSTER_PUT_PAGES,
        metric::CLUSTER_PUT_BYTES,
        metric::CLUSTER_DROPPED_PAGES,
        metric::CLUSTER_REMOVED_PAGES,
    ];
    for name in counters {
        metrics::counter!(name).increment(0);
    }
    for ending in FetchEnding::ALL {
        metrics::counter!(metric::CLUSTER_FETCHES, "outcome" => ending.as_str()).increment(0);
    }
    let _ = metrics::histogram!(metric::CLUSTER_FETCH_TIME);
    metrics::gauge!(metric::CLUSTER_UP).set(0.0);
}
