//! Agents: WebAssembly components that Skep deploys, gives sessions, and calls once for every turn.
//!
//! The way of a turn: [`AgentHost::invoke`] admits it → the session's actor (`session`) takes it when the turn before
//! it has ended, and makes it durable → a fresh, bounded store (`instance`) calls the guest → the guest calls back
//! (`capability`) and what it is answered is journalled (`journal`) → what the turn changed is committed in one
//! transaction → only then does the caller see [`RunEvent::Done`] (`feed`). A turn that a crash cut off is run again from
//! its journal when the host starts.
//!
//! WIT types and wasmtime stay in here. This crate knows nothing of HTTP and nothing of SQL.
// One place is allowed unsafe code: `component/artifact` loads compiled code.
#![deny(unsafe_code)]

mod access;
mod agent_host;
mod approvals;
mod batch;
mod bindings;
mod capability;
mod clock;
mod component;
mod compute;
mod courier;
mod egress;
mod engine;
mod error;
mod event;
mod examples;
mod exports;
mod feed;
mod host_tools;
mod instance;
mod intake;
mod invocation;
mod journal;
mod json;
mod limits;
mod log_follower;
mod manifest;
mod measure;
pub mod metric;
mod model_grant;
mod name;
mod options;
mod portable;
mod route;
mod schedule;
mod secret;
mod session;
mod session_policy;
mod store_retry;
mod summary;
mod tenancy;
mod tenant_tokens;
mod terminal_text;
#[cfg(test)]
mod tests;
mod token_budget;
mod toml_text;
mod tools;
mod vault;

pub use access::{ApiKey, KeyRing, NewApiKey, Role, Tenant, plain_session, tenant_of};
pub use agent_host::{AgentHost, ModelMismatch};
pub use approvals::Approval;
pub use batch::{
    AGENT_MODEL, BatchAnswer, BatchItem, BatchOptions, BatchOutcome, BatchPhase, BatchRequest, BatchResult,
    BatchResults, BatchStatus, ItemCounts, NewBatch,
};
pub use clock::Clock;
pub use compute::{Compute, QUICK_BYTES};
pub use error::RuntimeError;
pub use event::{
    DeadLetter, DeadLetterTarget, Event, EventSummary, EventTrigger, NewWebhook, PublishedEvent,
    SessionTemplate, TopicPattern, WebhookState, WebhookSummary, WebhookTest, WebhookTry, unix_ms,
};
pub use feed::RunHandle;
pub use host_tools::ToolGrant;
pub use intake::WaitingBytes;
pub use invocation::{
    AlarmOrigin, EventOrigin, HttpOrigin, Invocation, Origin, Outcome, RunEvent, ToolOrigin,
};
pub use json::Json;
pub use limits::{Limits, LimitsToml};
pub use log_follower::LogFollower;
pub use manifest::{Build, Grants, HttpTrigger, Manifest, ToolToml, Triggers};
pub use measure::HeldInstance;
pub use model_grant::ModelGrant;
pub use name::{AgentName, SessionId};
pub use options::RuntimeOptions;
pub use portable::{PortableConversation, PortableSession};
pub use route::{Route, RouteMatch};
pub use schedule::{ManifestSchedule, ScheduleState, ScheduleSummary, ScheduleTiming};
pub use secret::{SecretGrant, SecretName};
pub use session_policy::{CompactionMode, SessionsToml};
pub use skep_engine::{ModelSet, Timing, Usage};
pub use skep_outbound::Origins;
pub use skep_outbound::{ServedTool, ToolHints, ToolServer, ToolServerError};
pub use skep_store::{DiskUse, Held, LogFilter, OpenWork};
pub use summary::{
    AgentDetail, AgentSummary, AgentVersion, ConversationSummary, FailedAgent, LogLine, MessagePage,
    SessionDetail, SessionSummary, ToolDefinition, TurnDetail, TurnPhase,
};
pub use tenancy::TENANT_SHARE;
pub use tenant_tokens::{TenantBudget, TenantTokens};
pub use terminal_text::for_terminal;
pub use token_budget::TokensUsedUp;
pub use toml_text::parse_toml;
pub use vault::SecretSummary;
