//! What a metric is, for those who describe metrics, and the engine's own.
//!
//! Labels: `model` everywhere; `agent` where a request is known, and then it is the name of a deployed agent or empty.
//! What one step or one cache does for all agents together has a `replica` instead.

use metrics::Unit;

/// One metric: enough for an exporter to describe it and to choose buckets.
#[derive(Debug, Clone, Copy)]
pub struct MetricSpec {
    pub name: &'static str,
    pub kind: MetricKind,
    pub unit: Unit,
    pub help: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MetricKind {
    Counter,
    Gauge,
    /// With the upper bounds of its buckets, in its unit.
    Histogram(&'static [f64]),
}

/// From a step of a small model to a long turn.
pub const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
/// From a decode out of caches to a step that a long prefill shares.
const STEP_SECONDS: &[f64] =
    &[0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];
const BATCH_TOKENS: &[f64] =
    &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 8192.0];
const BATCH_SEQUENCES: &[f64] =
    &[1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0];
const PAGES: &[f64] = &[1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0];

pub(crate) const REQUESTS: &str = "skep_engine_requests_total";
pub(crate) const TOKENS: &str = "skep_engine_tokens_total";
pub(crate) const TAKEN_BACK: &str = "skep_engine_taken_back_tokens_total";
pub(crate) const PREEMPTIONS: &str = "skep_engine_preemptions_total";
pub(crate) const ROUTED: &str = "skep_engine_routed_total";
pub(crate) const QUEUE: &str = "skep_engine_queue_seconds";
pub(crate) const FIRST_TOKEN: &str = "skep_engine_first_token_seconds";
pub(crate) const INTER_TOKEN: &str = "skep_engine_inter_token_seconds";
pub(crate) const REQUEST_PAGES: &str = "skep_engine_request_kv_pages";
pub(crate) const BATCH_TOKEN_COUNT: &str = "skep_engine_batch_tokens";
pub(crate) const BATCH_SEQUENCE_COUNT: &str = "skep_engine_batch_sequences";
pub(crate) const RUNNING: &str = "skep_engine_running";
pub(crate) const WAITING: &str = "skep_engine_waiting";
pub(crate) const PAGES_TOTAL: &str = "skep_engine_kv_pages_total";
pub(crate) const PAGES_USED: &str = "skep_engine_kv_pages_used";
pub(crate) const PAGES_CACHED: &str = "skep_engine_kv_pages_cached";

/// All metrics of the engine.
pub const METRICS: &[MetricSpec] = &[
    counter(REQUESTS, "Requests that ended, by outcome; busy is a refusal by the full queue"),
    counter(
        TOKENS,
        "Tokens by kind: prompt (cached ones included), cached, sampled (accepted ones included), forced, accepted, rejected",
    ),
    counter(
        TAKEN_BACK,
        "Tokens that were produced and taken back, because a value did not satisfy its schema",
    ),
    counter(PREEMPTIONS, "Sequences that gave up their KV pages to older ones and went on later"),
    counter(ROUTED, "Requests that the router placed, by replica and reason"),
    histogram(QUEUE, Unit::Seconds, SECONDS, "From submission to admission"),
    histogram(FIRST_TOKEN, Unit::Seconds, SECONDS, "From submission to the first sampled token"),
    histogram(INTER_TOKEN, Unit::Seconds, STEP_SECONDS, "Between sampled tokens of one sequence"),
    histogram(REQUEST_PAGES, Unit::Count, PAGES, "KV pages that a request held when it ended"),
    histogram(BATCH_TOKEN_COUNT, Unit::Count, BATCH_TOKENS, "Tokens of a step"),
    histogram(BATCH_SEQUENCE_COUNT, Unit::Count, BATCH_SEQUENCES, "Sequences of a step"),
    gauge(RUNNING, "Sequences that run"),
    gauge(WAITING, "Requests that wait"),
    gauge(PAGES_TOTAL, "KV pages that there are"),
    gauge(PAGES_USED, "KV pages that running sequences hold"),
    gauge(PAGES_CACHED, "KV pages in the prefix tree, held or not"),
];

const fn counter(name: &'static str, help: &'static str) -> MetricSpec {
    MetricSpec { name, kind: MetricKind::Counter, unit: Unit::Count, help }
}

const fn gauge(name: &'static str, help: &'static str) -> MetricSpec {
    MetricSpec { name, kind: MetricKind::Gauge, unit: Unit::Count, help }
}

const fn histogram(name: &'static str, unit: Unit, bounds: &'static [f64], help: &'static str) -> MetricSpec {
    MetricSpec { name, kind: MetricKind::Histogram(bounds), unit, help }
}
