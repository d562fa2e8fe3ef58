//! Counts of prompts that one host computes for another one, for metrics.

use crate::metrics::{
    PREFILL_IN_FLIGHT, PREFILL_ORDERS, PREFILL_SERVED, PREFILL_SERVED_TOKENS, PREFILL_TIME, PREFILL_TOKENS,
};
use skep_engine::FetchEnding;
use std::time::Duration;

/// How an order of a prompt ended at the host that has made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// A prefill host has computed the pages, and all of them came.
    Used,
    /// Another host had the pages.
    Fetched,
    /// There was no prefill host to ask.
    Absent,
    /// The prefill hosts had enough to do.
    Full,
    /// The prefill host refused, for example because it has another model under the name.
    Refused,
    Unreached,
    /// The pages did not come in time.
    Late,
    /// The connection broke, or the host was silent.
    Broken,
    /// A page was not the one that was asked for.
    Rejected,
    /// The host ended the order early.
    Cut,
    /// The request ended, or did not wait longer.
    Unwanted,
    /// Too many pages are being fetched here.
    Busy,
}

impl Outcome {
    const ALL: [Outcome; 12] = [
        Outcome::Used,
        Outcome::Fetched,
        Outcome::Absent,
        Outcome::Full,
        Outcome::Refused,
        Outcome::Unreached,
        Outcome::Late,
        Outcome::Broken,
        Outcome::Rejected,
        Outcome::Cut,
        Outcome::Unwanted,
        Outcome::Busy,
    ];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Outcome::Used => "used",
            Outcome::Fetched => "fetched",
            Outcome::Absent => "absent",
            Outcome::Full => "full",
            Outcome::Refused => "refused",
            Outcome::Unreached => "unreached",
            Outcome::Late => "late",
            Outcome::Broken => "broken",
            Outcome::Rejected => "rejected",
            Outcome::Cut => "cut",
            Outcome::Unwanted => "unwanted",
            Outcome::Busy => "busy",
        }
    }

    /// Returns the outcome of an order whose pages ended in this way.
    pub(super) fn of(ending: FetchEnding) -> Outcome {
        match ending {
            FetchEnding::Fetched => Outcome::Used,
            FetchEnding::Absent => Outcome::Absent,
            FetchEnding::Busy => Outcome::Full,
            FetchEnding::Late => Outcome::Late,
            FetchEnding::Broken => Outcome::Broken,
            FetchEnding::Rejected => Outcome::Rejected,
            FetchEnding::Cut => Outcome::Cut,
            FetchEnding::Unwanted => Outcome::Unwanted,
        }
    }
}

pub(super) fn record_end(outcome: Outcome, took: Duration) {
    metrics::counter!(PREFILL_ORDERS, "outcome" => outcome.as_str()).increment(1);
    metrics::histogram!(PREFILL_TIME).record(took.as_secs_f64());
}

/// Counts the tokens of an order whose pages all came.
pub(super) fn record_used(computed: u64, reused: u64) {
    metrics::counter!(PREFILL_TOKENS, "kind" => "computed").increment(computed);
    metrics::counter!(PREFILL_TOKENS, "kind" => "cached").increment(reused);
}

/// Counts an order of another host, with the code of its refusal or `accepted`.
pub(super) fn record_order(outcome: &'static str) {
    metrics::counter!(PREFILL_SERVED, "outcome" => outcome).increment(1);
}

/// Counts tokens that were computed for another host.
pub(super) fn record_computed(tokens: u64) {
    metrics::counter!(PREFILL_SERVED_TOKENS).increment(tokens);
}

/// Adds tokens to those of all orders in work.
pub(super) fn add_in_flight(tokens: usize) {
    metrics::gauge!(PREFILL_IN_FLIGHT).increment(tokens as f64);
}

/// Takes tokens away from those of all orders in work.
pub(super) fn remove_in_flight(tokens: usize) {
    metrics::gauge!(PREFILL_IN_FLIGHT).decrement(tokens as f64);
}

/// Makes all counters visible before anything has happened.
pub(in crate::cluster::pages) fn begin() {
    for outcome in Outcome::ALL {
        metrics::counter!(PREFILL_ORDERS, "outcome" => outcome.as_str()).increment(0);
    }
    for kind in ["computed", "cached"] {
        metrics::counter!(PREFILL_TOKENS, "kind" => kind).increment(0);
    }
    metrics::counter!(PREFILL_SERVED, "outcome" => "accepted").increment(0);
    metrics::counter!(PREFILL_SERVED_TOKENS).increment(0);
    let _ = metrics::histogram!(PREFILL_TIME);
    add_in_flight(0);
}
