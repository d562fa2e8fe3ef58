//! Upstream models: models that other servers compute, behind the same interface as the models of this process.
//!
//! A request takes this path: [`Upstream`] turns the messages into a body of the server's wire format (`openai`,
//! `anthropic`, `workers_ai`) → `limits` waits for a free slot → `breaker` refuses if the server fails all the time →
//! `http` sends it, and `sse` splits the response into events → the wire format decodes them into deltas →
//! `assembly` collects the answer → `structured` validates the parts that must match a schema → `event_sink` passes
//! the events on. A failure before anything reached the caller is retried; a later one is reported as an error. A
//! [`Route`] chooses among several models and tries the next one under the same condition.
//!
//! The crate knows the wire formats of other servers. It knows nothing of agents, sessions or the store, and reads
//! no files and no environment variables.
#![forbid(unsafe_code)]

mod answer;
mod anthropic;
mod assembly;
mod attempt;
mod breaker;
mod delta;
mod event_sink;
mod failure;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod http;
mod key;
mod limits;
mod metric;
mod openai;
mod options;
mod question;
mod retry;
mod route;
mod shared;
mod span;
mod sse;
mod structured;
#[cfg(test)]
mod tests;
mod upstream;
mod wire;
mod workers_ai;

pub use key::{FixedKey, Key, KeySource};
pub use metric::METRICS;
pub use options::{
    AnswerBounds, BreakerOptions, Capabilities, LimitOptions, OptionsError, ReasoningControl, RetryOptions,
    StructuredOutput, Timeouts, UpstreamKind, UpstreamModelOptions, UpstreamOptions,
};
pub use route::{Choice, Conditions, CostEstimate, Member, Route, RouteOptions};
pub use upstream::{Upstream, UpstreamModel};
