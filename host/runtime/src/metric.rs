//! Metrics of agents' turns and of the components that run them. The label `agent` is the name of a deployed agent.

use metrics::Unit;
use skep_engine::metric::{MetricKind, MetricSpec, SECONDS};

pub(crate) const TURNS: &str = "skep_turns_total";
pub(crate) const TURN_TIME: &str = "skep_turn_seconds";
pub(crate) const TOOL_CALLS: &str = "skep_tool_calls_total";
pub(crate) const TOOL_TIME: &str = "skep_tool_seconds";
pub(crate) const INSTANCES: &str = "skep_instances";
pub(crate) const BATCH_WAITING: &str = "skep_batch_waiting";
pub(crate) const BATCH_OLDEST: &str = "skep_batch_oldest_seconds";
pub(crate) const BATCH_ITEMS: &str = "skep_batch_items_total";
pub(crate) const BATCH_WAIT: &str = "skep_batch_wait_seconds";
pub(crate) const FETCHES: &str = "skep_fetches_total";
pub(crate) const FETCH_TIME: &str = "skep_fetch_seconds";
pub(crate) const ARTIFACT_LOADS: &str = "skep_artifact_loads_total";
pub(crate) const DELIVERIES: &str = "skep_deliveries_total";
pub(crate) const ALARM_DELAY: &str = "skep_alarm_delay_seconds";
pub(crate) const COMMIT_TIME: &str = skep_store::COMMIT_TIME;
pub(crate) const EVENTS: &str = "skep_events_total";
pub(crate) const WAITING_BYTES: &str = "skep_waiting_message_bytes";
pub(crate) const PLACEMENTS: &str = "skep_cluster_placements_total";
pub(crate) const REQUESTS_DROPPED: &str = "skep_requests_log_dropped_total";

/// Histogram buckets from an idle host to a day-long queue.
const BATCH_SECONDS: &[f64] = &[0.01, 0.1, 1.0, 10.0, 60.0, 300.0, 1_800.0, 3_600.0, 14_400.0, 86_400.0];

/// Histogram buckets from an in-memory commit to a badly overloaded disk.
const COMMIT_SECONDS: &[f64] =
    &[0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 10.0];

/// All metrics of this crate, and those of the store.
pub const METRICS: &[MetricSpec] = &[
    MetricSpec {
        name: TURNS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Finished turns, by outcome: ok, or the error code",
    },
    MetricSpec {
        name: TURN_TIME,
        kind: MetricKind::Histogram(SECONDS),
        unit: Unit::Seconds,
        help: "Time from the start of a turn to its commit",
    },
    MetricSpec {
        name: TOOL_CALLS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Calls of external tools, by source (agent, mcp, host) and outcome: ok, or the error code",
    },
    MetricSpec {
        name: TOOL_TIME,
        kind: MetricKind::Histogram(SECONDS),
        unit: Unit::Seconds,
        help: "Time from the call of an external tool to its result, by source",
    },
    MetricSpec {
        name: WAITING_BYTES,
        kind: MetricKind::Gauge,
        unit: Unit::Bytes,
        help: "Bytes of messages that are waiting or whose turns are running",
    },
    MetricSpec {
        name: INSTANCES,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Running guest instances",
    },
    MetricSpec {
        name: PLACEMENTS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Sessions without an owner, by where they begin and why",
    },
    MetricSpec {
        name: REQUESTS_DROPPED,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Records of requests that the log dropped, by reason",
    },
    MetricSpec {
        name: BATCH_WAITING,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "Waiting batch items",
    },
    MetricSpec {
        name: BATCH_OLDEST,
        kind: MetricKind::Gauge,
        unit: Unit::Seconds,
        help: "Age of the oldest batch with a waiting item",
    },
    MetricSpec {
        name: BATCH_ITEMS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Batch items that ran, by outcome",
    },
    MetricSpec {
        name: BATCH_WAIT,
        kind: MetricKind::Histogram(BATCH_SECONDS),
        unit: Unit::Seconds,
        help: "Time from the storing of a batch to the start of an item",
    },
    MetricSpec {
        name: FETCHES,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "HTTP requests of agents, by outcome: the status class of the response, or the error code",
    },
    MetricSpec {
        name: FETCH_TIME,
        kind: MetricKind::Histogram(SECONDS),
        unit: Unit::Seconds,
        help: "Time from an agent's HTTP request to the end of its response, including redirects",
    },
    MetricSpec {
        name: ARTIFACT_LOADS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Lookups of compiled components, by outcome",
    },
    MetricSpec {
        name: DELIVERIES,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Delivery attempts, by kind (alarm, event, webhook) and outcome (ok, retried, failed)",
    },
    MetricSpec {
        name: ALARM_DELAY,
        kind: MetricKind::Histogram(SECONDS),
        unit: Unit::Seconds,
        help: "Time from when a schedule was due until its turn was requested",
    },
    MetricSpec {
        name: COMMIT_TIME,
        kind: MetricKind::Histogram(COMMIT_SECONDS),
        unit: Unit::Seconds,
        help: "Duration of transactions that write turns, from begin to commit",
    },
    MetricSpec {
        name: EVENTS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Written events, by source (client, agent, host)",
    },
];
