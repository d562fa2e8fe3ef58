//! Agents: WebAssembly components that Skep deploys, gives sessions, and calls once per turn.
//!
//! A turn takes these steps:
//!
//! 1. [`AgentHost::invoke`] admits it.
//! 2. The session's actor (`session`) takes it once the previous turn has finished, and makes it
//!    durable.
//! 3. A fresh, bounded store (`guest`) calls the guest.
//! 4. The guest calls back (`capability`), and the results of its calls are journaled (`journal`).
//! 5. Everything the turn changed is committed in one transaction.
//! 6. Only then does the caller receive [`RunEvent::Done`] (`feed`).
//!
//! A turn that a crash interrupts is rerun from its journal when the host starts.
//!
//! WIT types and wasmtime never leave this crate. The crate knows nothing about HTTP or SQL.
// The only module that is allowed unsafe code is `component/artifact`, which loads compiled code.
#![deny(unsafe_code)]

mod access;
mod admission;
mod agent;
mod agent_host;
mod agent_log;
mod approvals;
mod batch;
mod bindings;
mod capability;
mod clock;
mod cluster;
mod component;
mod compute;
mod courier;
mod deadline;
mod deployment;
mod disk_pages;
mod dispatch;
mod egress;
mod error;
mod event;
mod feed;
mod follower;
mod grant;
mod guest;
mod invocation;
mod journal;
mod json;
mod limits;
mod manifest;
mod mcp_offer;
mod measure;
pub mod metric;
mod models;
mod name;
mod options;
pub mod placement;
mod portable;
mod requests;
mod route;
mod said;
mod schedule;
mod session;
mod session_changes;
mod session_policy;
mod shutdown;
mod summary;
mod tenancy;
mod tenant_tokens;
#[cfg(test)]
mod tests;
mod text;
mod token_budget;
mod toml_text;
mod tool;
mod turn_client;
mod turn_timeline;
mod usage;
mod use_queue;
mod vault;
mod warming;
mod webhook;

pub use access::{ApiKey, KeyRing, NewApiKey, Role};
pub use agent_host::{
    AgentHost, ClientFile, DeletedTenant, FoundMessage, FoundSession, FoundSessions, HostLoad, HostParts,
    LimitUse, ModelMismatch, NewClientFile, SecretReader, StatePage, TenantLoad, TenantUsage,
};
pub use agent_log::LogFollower;
pub use approvals::Approval;
pub use batch::response::{
    MAX_CHAIN, NewResponse, ResponseEnd, ResponsePhase, ResponseTurn, StoredResponse, response_id,
};
pub use batch::{
    AGENT_MODEL, BatchAnswer, BatchItem, BatchOutcome, BatchPhase, BatchPrompt, BatchRequest, BatchResult,
    BatchResults, BatchStatus, BatchTerms, ItemCounts, LiveAnswer, NewBatch, PartialAnswer, ScoredToken,
};
pub use clock::Clock;
pub use cluster::{
    ClusterHost, GenerationEvent, GenerationEvents, GenerationFailure, HostRole, Member, OtherHosts,
    PeerError, PeerGeneration, PeerInvocation, Peers, RemoteEvent, RemoteEvents, RemoteRun, SessionPlace,
    SharedCounts, TokensInFlight, TurnAddress, WorkingHost,
};
pub use compute::{Compute, QUICK_BYTES};
pub use error::{BudgetUsedUp, PriceUnknown, RuntimeError};
pub use event::{
    DeadLetter, DeadLetterTarget, Event, EventSummary, EventTrigger, HOST_SOURCE, NewWebhook, PublishedEvent,
    SessionTemplate, TopicPattern, WebhookTry, unix_ms,
};
pub use feed::RunHandle;
pub use grant::{ModelGrant, SecretGrant, ToolGrant};
pub use invocation::{
    AlarmOrigin, EventOrigin, HttpOrigin, Invocation, Origin, Outcome, RunEvent, ToolOrigin,
};
pub use json::Json;
pub use limits::{Limits, LimitsToml, RecentTurns, TurnLimit};
pub use manifest::{Build, CutOffMode, Grants, HttpTrigger, InferenceToml, Manifest, ToolToml, Triggers};
pub use mcp_offer::{HOST_SCHEME, McpToml, PromptToml, ResourceToml, UriTemplate};
pub use measure::HeldInstance;
pub use name::{AgentName, SecretName, SessionId, Tenant, plain_session, tenant_of};
pub use options::{BatchOptions, ResponseOptions, RuntimeOptions, WaitingBytes};
pub use portable::{PortableConversation, PortableSession};
pub use requests::{
    LoggedAttempt, LoggedBody, LoggedCall, LoggedCost, LoggedMessage, LoggedPage, LoggedRequest, LoggedUsage,
    RequestDetails, RequestFollower, RequestLog, RequestLogMode, RequestLogOptions, RequestOrigin, Surface,
};
pub use route::{Route, RouteMatch};
pub use said::SearchWords;
pub use schedule::{ManifestSchedule, ScheduleState, ScheduleSummary, ScheduleTiming};
pub use session_changes::SessionChange;
pub use session_policy::{CompactionMode, SessionsToml};
pub use skep_engine::{ModelSet, Timing, Usage};
pub use skep_outbound::Origins;
pub use skep_outbound::{ServedTool, ToolHints, ToolServer, ToolServerError};
pub use skep_store::{
    CLUSTER_PROTOCOL, DataPlace, DiskUse, Held, HostVersions, ListedSession, LogFilter, McpSessionKey,
    OpenWork, QueuedWork, RequestFilter, RequestRange, SessionCursor, SessionSearch, TakenMcpSession,
    TenantRow, TenantRows, speak_with,
};
pub use summary::{
    AgentDetail, AgentSummary, AgentVersion, ConversationSummary, FailedAgent, LogLine, MessagePage,
    SessionDetail, SessionSummary, ToolDefinition, TurnDetail, TurnMessage, TurnPhase,
};
pub use tenancy::TENANT_SHARE;
pub use tenant_tokens::{TenantBudget, TenantTokens};
pub use text::{did_you_mean, excerpt, for_terminal, nearest_name};
pub use toml_text::parse_toml;
pub use turn_client::{Asked, ClientError, ClientQuestion, TurnClient, TurnProgress};
pub use turn_timeline::{CallSpan, GenerationProgress, GenerationSpan, TurnTimeline};
pub use usage::{
    Amount, Bill, Currency, Money, Price, PriceList, Rate, Unpriced, UsageBy, UsageCounts, UsageDay,
    UsageLine, UsageQuery, UsageReport, WorstCase,
};
pub use vault::{Resealed, Sealed, SealingKey, SecretSummary, check_sealed, reseal};
pub use warming::WarmedConversation;
pub use webhook::{WebhookState, WebhookSummary, WebhookTest};
