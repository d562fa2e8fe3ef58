//! The metrics of upstreams and routes.

use metrics::Unit;
use skep_engine::metric::{MetricKind, MetricSpec, SECONDS};

pub(crate) const ATTEMPTS: &str = "skep_upstream_attempts_total";
pub(crate) const TOKENS: &str = "skep_upstream_tokens_total";
pub(crate) const FIRST_TOKEN: &str = "skep_upstream_first_token_seconds";
pub(crate) const FORM_ERRORS: &str = "skep_upstream_form_errors_total";
pub(crate) const BREAKER: &str = "skep_upstream_breaker_state";
pub(crate) const ROUTE_ANSWERS: &str = "skep_route_answers_total";
pub(crate) const FAIL_OVERS: &str = "skep_route_fail_overs_total";

/// All metrics of upstreams and routes.
pub const METRICS: &[MetricSpec] = &[
    counter(ATTEMPTS, "Requests sent to upstreams, by outcome: ok, or the fault"),
    counter(
        TOKENS,
        "Tokens that upstreams counted, by kind: prompt (cached ones included), cached, completion",
    ),
    MetricSpec {
        name: FIRST_TOKEN,
        kind: MetricKind::Histogram(SECONDS),
        unit: Unit::Seconds,
        help: "Time from sending a request to the first part of its answer",
    },
    counter(FORM_ERRORS, "Answers of upstreams that did not match the requested schema"),
    MetricSpec {
        name: BREAKER,
        kind: MetricKind::Gauge,
        unit: Unit::Count,
        help: "State of the upstream's circuit breaker: 0 closed, 1 half-open, 2 open",
    },
    counter(ROUTE_ANSWERS, "Answers of routes, by the model that gave them"),
    counter(FAIL_OVERS, "Fallbacks of routes to another model, by the error code of the model that failed"),
];

const fn counter(name: &'static str, help: &'static str) -> MetricSpec {
    MetricSpec { name, kind: MetricKind::Counter, unit: Unit::Count, help }
}
