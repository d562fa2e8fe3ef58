//! The description of a metric, for every crate that has metrics, and the engine's own metrics.
//!
//! Labels: every metric has `model`. A metric of a known request has `agent`, which is the name of a deployed
//! agent or empty. A metric of a step or a cache, which all agents share, has `replica` instead.

use metrics::Unit;
use skep_cache::metric as disk;

/// One metric, described well enough for an exporter to describe it and to choose buckets.
#[derive(Debug, Clone, Copy)]
pub struct MetricSpec {
    pub name: &'static str,
    pub kind: MetricKind,
    pub unit: Unit,
    pub help: &'static str,
}

/// The kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MetricKind {
    Counter,
    Gauge,
    /// Holds the upper bounds of the buckets, in the metric's unit.
    Histogram(&'static [f64]),
}

/// Bucket bounds from a step of a small model to a long turn.
pub const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
/// Bucket bounds from a decode out of caches to a step that shares a long prefill.
const STEP_SECONDS: &[f64] =
    &[0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];
const BATCH_TOKENS: &[f64] =
    &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 8192.0];
const BATCH_SEQUENCES: &[f64] =
    &[1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0];
const PAGES: &[f64] = &[1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0];

pub(crate) const REQUESTS: &str = "skep_engine_requests_total";
pub(crate) const TOKENS: &str = "skep_engine_tokens_total";
pub(crate) const ROLLED_BACK: &str = "skep_engine_taken_back_tokens_total";
pub(crate) const PREEMPTIONS: &str = "skep_engine_preemptions_total";
pub(crate) const CONTINUATIONS: &str = "skep_engine_continuations_total";
pub(crate) const AHEAD_STEPS: &str = "skep_engine_ahead_steps_total";
pub(crate) const AHEAD_ROWS: &str = "skep_engine_ahead_rows_total";
pub(crate) const ROUTED: &str = "skep_engine_routed_total";
pub(crate) const CONSTRAINTS: &str = "skep_engine_constraints_total";
pub(crate) const CONSTRAINT_COMPILE: &str = "skep_engine_constraint_compile_seconds";
pub(crate) const QUEUE: &str = "skep_engine_queue_seconds";
pub(crate) const FIRST_TOKEN: &str = "skep_engine_first_token_seconds";
pub(crate) const INTER_TOKEN: &str = "skep_engine_inter_token_seconds";
pub(crate) const REQUEST_PAGES: &str = "skep_engine_request_kv_pages";
pub(crate) const BATCH_TOKEN_COUNT: &str = "skep_engine_batch_tokens";
pub(crate) const BATCH_SEQUENCE_COUNT: &str = "skep_engine_batch_sequences";
pub(crate) const STEP: &str = "skep_engine_step_seconds";
pub(crate) const RUNNING: &str = "skep_engine_running";
pub(crate) const WAITING: &str = "skep_engine_waiting";
pub(crate) const PAGES_TOTAL: &str = "skep_engine_kv_pages_total";
pub(crate) const PAGES_USED: &str = "skep_engine_kv_pages_used";
pub(crate) const PAGES_CACHED: &str = "skep_engine_kv_pages_cached";

/// All metrics of the engine.
pub const METRICS: &[MetricSpec] = &[
    counter(
        REQUESTS,
        "Finished requests by outcome; busy means that the queue was full and refused the request",
    ),
    counter(
        TOKENS,
        "Tokens by kind: prompt (cached ones included), cached, sampled (accepted ones included), forced, accepted, rejected",
    ),
    counter(
        ROLLED_BACK,
        "Tokens that were produced and rolled back, because a value did not satisfy its schema",
    ),
    counter(PREEMPTIONS, "Sequences that gave up their KV pages to older ones and were resumed later"),
    counter(
        CONTINUATIONS,
        "Sequences that ended with a call of a tool or a form, by whether the next request came in time",
    ),
    counter(
        AHEAD_STEPS,
        "Steps that a device started before the tokens of the last step were known, by how much of them was used",
    ),
    counter(AHEAD_ROWS, "Sequences in steps that were started ahead, by whether they continued as expected"),
    counter(ROUTED, "Requests placed by the router, by replica and reason"),
    counter(CONSTRAINTS, "Constraints that requests asked for, by whether their compiled form was cached"),
    histogram(CONSTRAINT_COMPILE, Unit::Seconds, SECONDS, "Time to compile a constraint that was not cached"),
    histogram(QUEUE, Unit::Seconds, SECONDS, "Time from submission to admission"),
    histogram(FIRST_TOKEN, Unit::Seconds, SECONDS, "Time from submission to the first sampled token"),
    histogram(INTER_TOKEN, Unit::Seconds, STEP_SECONDS, "Time between sampled tokens of one sequence"),
    histogram(REQUEST_PAGES, Unit::Count, PAGES, "KV pages that a request held when it finished"),
    histogram(BATCH_TOKEN_COUNT, Unit::Count, BATCH_TOKENS, "Tokens in a step"),
    histogram(BATCH_SEQUENCE_COUNT, Unit::Count, BATCH_SEQUENCES, "Sequences in a step"),
    histogram(STEP, Unit::Seconds, STEP_SECONDS, "Time of a step: forward pass, masks and sampling"),
    gauge(RUNNING, "Running sequences"),
    gauge(WAITING, "Waiting requests"),
    gauge(PAGES_TOTAL, "Total KV pages"),
    gauge(PAGES_USED, "KV pages held by running sequences"),
    gauge(PAGES_CACHED, "KV pages in the prefix tree, whether or not sequences hold them"),
    counter(disk::WRITTEN_PAGES, "KV pages written to the disk"),
    counter(disk::WRITTEN_BYTES, "Bytes of KV pages written to the disk"),
    counter(disk::READ_BYTES, "Bytes of KV pages read from the disk"),
    counter(disk::PROMOTED_PAGES, "KV pages that came from the disk and were not computed"),
    counter(disk::WARMED_PAGES, "Promoted KV pages that were read before a request needed them"),
    counter(
        disk::HEAD_START_PAGES,
        "Promoted KV pages that were read while their request computed the pages before them",
    ),
    counter(disk::REMOVED_PAGES, "KV pages that left the disk, by reason"),
    counter(disk::DROPPED_PAGES, "KV pages that were not written, because the disk was full or too slow"),
    gauge(disk::DISK_BYTES, "Bytes of KV pages on the disk"),
    gauge(disk::DISK_PAGES, "KV pages on the disk"),
    gauge(disk::WRITTEN_TODAY_BYTES, "Bytes of KV pages written to the disk on the current UTC day"),
    counter(disk::CLUSTER_FETCHES, "Lookups of KV pages in the cluster cache, by outcome"),
    histogram(
        disk::CLUSTER_FETCH_TIME,
        Unit::Seconds,
        SECONDS,
        "Time from a lookup in the cluster cache to its last page, or to the miss",
    ),
    counter(disk::CLUSTER_FETCHED_PAGES, "KV pages that came from the cluster cache and were not computed"),
    counter(disk::CLUSTER_FETCHED_BYTES, "Bytes of KV pages that came from the cluster cache"),
    counter(disk::CLUSTER_PUT_PAGES, "KV pages that this host put into the cluster cache"),
    counter(disk::CLUSTER_PUT_BYTES, "Bytes of KV pages that this host put into the cluster cache"),
    counter(
        disk::CLUSTER_DROPPED_PAGES,
        "KV pages that the cluster cache lacks and that were not put, because it was away, full or slow, or the disk was slow",
    ),
    counter(
        disk::CLUSTER_REMOVED_PAGES,
        "KV pages that left the cluster cache because this host erased them, or because they were damaged",
    ),
    gauge(disk::CLUSTER_UP, "Whether the cluster cache can be used"),
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
