//! Counts of what was fetched and given, for metrics and for `/v1/kv`.

use crate::metrics::{
    KV_FETCH_TIME, KV_FETCHED_BYTES, KV_FETCHED_PAGES, KV_FETCHES, KV_GIVEN_BYTES, KV_GIVEN_PAGES,
    KV_LANE_BYTES, KV_LANE_ERRORS, KV_LANE_TIME,
};
use skep_engine::FetchEnding;
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// Pages that went from host to host since this one started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageFigures {
    /// Number of times that the other hosts were asked.
    pub questions: u64,
    /// Number of these after which not all pages came.
    pub missed: u64,
    pub fetched_pages: u64,
    pub fetched_bytes: u64,
    pub given_pages: u64,
    pub given_bytes: u64,
}

/// The way that pages take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// The body of an answer.
    Http,
    /// A READ of the other host's memory.
    Nixl,
}

impl Lane {
    const ALL: [Lane; 2] = [Lane::Http, Lane::Nixl];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Lane::Http => "http",
            Lane::Nixl => "nixl",
        }
    }

    /// Counts pages that took this lane in one transfer.
    pub(super) fn record(self, bytes: u64, took: Duration) {
        metrics::counter!(KV_LANE_BYTES, "lane" => self.as_str()).increment(bytes);
        metrics::histogram!(KV_LANE_TIME, "lane" => self.as_str()).record(took.as_secs_f64());
    }

    /// Counts a transfer that has failed, if this ending is a failure.
    pub(super) fn record_ending(self, ending: FetchEnding) {
        if matches!(ending, FetchEnding::Late | FetchEnding::Broken | FetchEnding::Rejected) {
            self.record_error();
        }
    }

    /// Counts a transfer that failed.
    pub(super) fn record_error(self) {
        metrics::counter!(KV_LANE_ERRORS, "lane" => self.as_str()).increment(1);
    }
}

#[derive(Default)]
pub(super) struct Figures {
    questions: AtomicU64,
    missed: AtomicU64,
    fetched_pages: AtomicU64,
    fetched_bytes: AtomicU64,
    given_pages: AtomicU64,
    given_bytes: AtomicU64,
}

impl Figures {
    pub(super) fn now(&self) -> PageFigures {
        PageFigures {
            questions: self.questions.load(Relaxed),
            missed: self.missed.load(Relaxed),
            fetched_pages: self.fetched_pages.load(Relaxed),
            fetched_bytes: self.fetched_bytes.load(Relaxed),
            given_pages: self.given_pages.load(Relaxed),
            given_bytes: self.given_bytes.load(Relaxed),
        }
    }

    pub(super) fn record_end(&self, ending: FetchEnding, took: Duration) {
        self.questions.fetch_add(1, Relaxed);
        if ending != FetchEnding::Fetched {
            self.missed.fetch_add(1, Relaxed);
        }
        metrics::counter!(KV_FETCHES, "outcome" => ending.as_str()).increment(1);
        metrics::histogram!(KV_FETCH_TIME).record(took.as_secs_f64());
    }

    pub(super) fn record_fetched(&self, bytes: u64) {
        self.fetched_pages.fetch_add(1, Relaxed);
        self.fetched_bytes.fetch_add(bytes, Relaxed);
        metrics::counter!(KV_FETCHED_PAGES).increment(1);
        metrics::counter!(KV_FETCHED_BYTES).increment(bytes);
    }

    pub(super) fn record_given(&self, bytes: u64) {
        self.given_pages.fetch_add(1, Relaxed);
        self.given_bytes.fetch_add(bytes, Relaxed);
        metrics::counter!(KV_GIVEN_PAGES).increment(1);
        metrics::counter!(KV_GIVEN_BYTES).increment(bytes);
    }
}

/// Makes all counters visible before anything has happened.
pub(super) fn begin() {
    for name in [KV_FETCHED_PAGES, KV_FETCHED_BYTES, KV_GIVEN_PAGES, KV_GIVEN_BYTES] {
        metrics::counter!(name).increment(0);
    }
    for ending in FetchEnding::ALL {
        metrics::counter!(KV_FETCHES, "outcome" => ending.as_str()).increment(0);
    }
    let _ = metrics::histogram!(KV_FETCH_TIME);
    for lane in Lane::ALL {
        metrics::counter!(KV_LANE_BYTES, "lane" => lane.as_str()).increment(0);
        metrics::counter!(KV_LANE_ERRORS, "lane" => lane.as_str()).increment(0);
        let _ = metrics::histogram!(KV_LANE_TIME, "lane" => lane.as_str());
    }
}
