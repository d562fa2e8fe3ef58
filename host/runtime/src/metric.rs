//! The metrics of agents' turns and of what runs them. The label `agent` is the name of a deployed agent.

use metrics::Unit;
use skep_engine::metric::{MetricKind, MetricSpec, SECONDS};

pub(crate) const TURNS: &str = "skep_turns_total";
pub(crate) const TURN_TIME: &str = "skep_turn_seconds";
pub(crate) const TOOL_CALLS: &str = "skep_tool_calls_total";
pub(crate) const TOOL_TIME: &str = "skep_tool_seconds";
pub(crate) const INSTANCES: &str = "skep_instances";
pub(crate) const ARTIFACT_LOADS: &str = "skep_artifact_loads_total";
pub(crate) const DELIVERIES: &str = "skep_deliveries_total";
pub(crate) const ALARM_DELAY: &str = "skep_alarm_delay_seconds";
pub(crate) const EVENTS: &str = "skep_events_total";

/// All metrics of this crate.
pub const METRICS: &[MetricSpec] = &[
    MetricSpec {
        name: TURNS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Turns that ended, by outcome: ok, or the code of the error",
    },
    MetricSpec {
        name: TURN_TIME,
        kind: MetricKind::Histogram(SECONDS),
        unit: Unit::Seconds,
        help: "From the start of a turn to its commit",
    },
    MetricSpec {
        name: TOOL_CALLS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Calls that the host made of tools of others, by source (agent, mcp, host) and outcome: ok, or the code of \
               the error",
    },
    MetricSpec {
        name: TOOL_TIME,
        kind: MetricKind::Histogram(SECONDS),
        unit: Unit::Seconds,
        help: "From a call of a tool of others to its result, by source",
    },
    MetricSpec { name: INSTANCES, kind: MetricKind::Gauge, unit: Unit::Count, help: "Guests that run" },
    MetricSpec {
        name: ARTIFACT_LOADS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Components whose compiled code was looked for, by outcome",
    },
    MetricSpec {
        name: DELIVERIES,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Tries to deliver, by kind (alarm, event, webhook) and outcome (ok, retried, failed)",
    },
    MetricSpec {
        name: ALARM_DELAY,
        kind: MetricKind::Histogram(SECONDS),
        unit: Unit::Seconds,
        help: "From the time at which a schedule was due until its turn was asked for",
    },
    MetricSpec {
        name: EVENTS,
        kind: MetricKind::Counter,
        unit: Unit::Count,
        help: "Events that were written, by source (client, agent, host)",
    },
];
