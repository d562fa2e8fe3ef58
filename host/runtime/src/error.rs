//! Errors of the runtime, from an invocation to its outcome.
//!
//! Every variant's message names what is wrong, where, and how to fix it. [`RuntimeError::code`] is a stable identifier for
//! programs.

use skep_engine::EngineError;
use skep_store::StoreError;
use std::fmt::Display;

const DAY_MS: u64 = 24 * 3_600 * 1_000;
/// Retry delay reported to a caller whose session belongs to another host.
const ELSEWHERE_RETRY_MS: u32 = 1_000;

/// An error of the runtime. A turn that fails with one has changed nothing but the agent's log.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("agent {name:?} is not deployed{}", known_names(.known))]
    AgentNotFound { name: String, known: Vec<String> },
    #[error("agent {agent:?} has no session {session:?}")]
    SessionNotFound { agent: String, session: String },
    #[error("agent {agent:?} already has a session {session:?}; delete it first, or choose another name")]
    SessionExists { agent: String, session: String },
    #[error("the session cannot be imported: {message}")]
    InvalidSession { message: String },
    #[error("session {agent}/{session} has no conversation {name:?}; it has: {}", list(.known))]
    ConversationNotFound { agent: String, session: String, name: String, known: Vec<String> },
    #[error(
        "agent {agent:?} has no {}; version {active} is active, and the known versions are: {}", wanted_version(.wanted), list(.known)
    )]
    VersionNotFound { agent: String, wanted: Option<u64>, active: u64, known: Vec<u64> },
    #[error("session {agent}/{session} has no turn {turn:?}; finished turns are kept for at most a day")]
    TurnNotFound { agent: String, session: String, turn: String },
    #[error("there is no batch {id:?}; the results of a batch are kept for {hours} h after it finishes")]
    BatchNotFound { id: String, hours: u64 },
    #[error("there is no response {id:?}; it was not stored, or it was deleted or has expired")]
    ResponseNotFound { id: String },
    #[error(
        "the chain of previous responses is too long: at most {most} responses of {most_mb} MiB in total can be continued; start a new chain and send the relevant parts as `input`"
    )]
    ResponseChainTooLong { most: u64, most_mb: u64 },
    #[error("the response cannot be stored because the limit of {} MiB of stored responses is reached; delete some, send `store: false`, or raise `max_stored_mb` under [responses] in skep.toml", .most >> 20)]
    ResponsesFull { most: u64 },
    #[error("there is no file {id:?}; GET /v1/files lists the files")]
    FileNotFound { id: String },
    #[error("{message}")]
    InvalidBatch { message: String },
    #[error("{message}; try again in {retry_after_ms} ms")]
    QueueFull { message: String, retry_after_ms: u32 },
    #[error("there is no API key with the id {id:?}; `skep key list` shows the existing keys")]
    KeyNotFound { id: String },
    #[error(
        "there is no tenant {name:?}: it has no keys, sessions or other data; `skep tenant list` shows the tenants"
    )]
    TenantNotFound { name: String },
    #[error(
        "tenant {name:?} cannot be deleted completely yet, because its sessions are still used; its keys are gone, so delete it again in a moment"
    )]
    TenantInUse { name: String },
    #[error("the API key cannot be created: {message}")]
    InvalidKey { message: String },
    #[error("no write has completed for {waited_s} s; the database's disk is slow or its file is locked")]
    StoreStalled { waited_s: u64 },
    #[error("the API key is not accepted: {reason}")]
    KeyRefused { reason: &'static str },
    /// A failed turn, as it is reported to everyone except the caller that started it.
    #[error("{message}")]
    TurnFailed { code: &'static str, message: String },
    /// The guest, replayed after a restart, did not repeat the calls that it made before.
    #[error(
        "the turn cannot be resumed: its call {call} was {expected} before the restart, but on replay the agent made {made}; \
         an agent's calls must depend only on its message, its state and the host's answers"
    )]
    Divergence { call: u32, expected: String, made: String },
    #[error("{kind} {value:?} is not valid: {rule}")]
    InvalidName { kind: &'static str, value: String, rule: &'static str },
    #[error("agent.toml: {message}")]
    Manifest { message: String },
    #[error("the component of agent {agent:?} cannot be deployed: {message}")]
    Component { agent: String, message: String },
    #[error("the secret {name:?} cannot be set: {message}")]
    InvalidSecret { name: String, message: String },
    #[error("secret {name:?} is not set{}; `skep secret list` shows the secrets that are", of_agent(.agent))]
    SecretNotFound { name: String, agent: Option<String> },
    #[error("route {route:?} of agent {agent:?} {message}")]
    Route { agent: String, route: String, message: String },
    #[error("model {name:?} is not loaded; loaded models: {}", list(.known))]
    ModelUnknown { name: String, known: Vec<String> },
    #[error(
        "agent.toml of agent {agent:?} sets model = {model:?}, which this host no longer serves; it serves: {}; serve the model \
         again, or deploy the agent with another `model`, or without one to use the host's default", list(.known)
    )]
    ModelGone { agent: String, model: String, known: Vec<String> },
    /// A tenant may not use the model of its request.
    #[error("{message}")]
    ModelNotGranted { message: String },
    #[error("{message}; try again in {retry_after_ms} ms")]
    MailboxFull { message: String, retry_after_ms: u32 },
    #[error("{message}; try again in {retry_after_ms} ms")]
    IntakeFull { message: String, retry_after_ms: u32 },
    #[error(
        "{limit} turns of agent {agent:?}{whose} are already running or waiting; try again in {retry_after_ms} ms, or raise \
         `concurrent_turns` under [limits] in agent.toml, up to the operator's ceiling in skep.toml"
    )]
    TooManyTurns { agent: String, whose: &'static str, limit: u32, retry_after_ms: u32 },
    #[error(transparent)]
    BudgetUsedUp(#[from] BudgetUsedUp),
    #[error(transparent)]
    PriceUnknown(#[from] PriceUnknown),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("the agent failed: {message}")]
    AgentFailed { message: String },
    /// The error that a tool returned to its caller.
    #[error("{message}")]
    ToolFailed { message: String },
    /// A person denied a tool call, or nobody decided in time.
    #[error("{message}")]
    CallRefused { message: String },
    #[error("there is no approval {id:?}; it may have belonged to a turn that was removed")]
    ApprovalNotFound { id: String },
    /// An approval is decided only once.
    #[error("approval {id} {how}")]
    ApprovalDecided { id: String, how: &'static str },
    #[error(
        "a turn of the session is waiting for approval {approval}: decide it with `skep approval approve` or `skep approval \
         deny`, or cancel the turn; a message that is sent with `?detach=true` or with an idempotency key is queued behind it"
    )]
    WaitingForApproval { approval: String },
    #[error("the report would have more than {limit} rows; hint: use a later `since` or another `by`")]
    UsageTooLong { limit: u32 },
    #[error("{message}")]
    InvalidMessage { message: String },
    #[error("{message}")]
    InvalidEvent { message: String },
    #[error(
        "agent {agent:?} has no schedule {id:?} that allows this; list the schedules with `skep schedule list`"
    )]
    ScheduleNotFound { agent: String, id: String },
    #[error(
        "{limit} event deliveries{whose} are already waiting; check `skep webhook dead-letters` and the agents that receive \
         them, and try again in {retry_after_ms} ms"
    )]
    OutboxFull { whose: &'static str, limit: usize, retry_after_ms: u32 },
    #[error("{message}")]
    InvalidWebhook { message: String },
    #[error("there is no webhook {id:?}; list them with `skep webhook list`")]
    WebhookNotFound { id: String },
    #[error(
        "there is no dead letter {id} that can be delivered again; list them with `skep webhook dead-letters`"
    )]
    DeadLetterNotFound { id: i64 },
    /// `limit` names the setting in `agent.toml`, or the host's own bound.
    #[error("limit {limit} exceeded: {message}")]
    LimitExceeded { limit: &'static str, message: String },
    /// The host has as many of something as it may have.
    #[error("{message}")]
    HostFull { message: String },
    #[error(
        "session {agent}/{session} has {bytes} bytes; a session of at most {limit} bytes can be exported, so delete state or \
         conversations that are not needed"
    )]
    SessionTooLarge { agent: String, session: String, bytes: u64, limit: u64 },
    #[error(
        "the turn did not finish before its deadline; `turn_ms` under [limits] in agent.toml sets the agent's deadline, and \
         the `timeout_ms` of a tool that of a call by a client"
    )]
    DeadlineExceeded,
    #[error(
        "turn {turn} failed permanently: the host died or failed {losses} times while running it without further progress, so \
         the turn may be the cause; check the host's log and the agent's limits, and send the message again under a new key"
    )]
    TurnLost { turn: String, losses: u32 },
    #[error(
        "session {agent}/{session} is held: the host was restored from a backup, and a turn of the session may have finished \
         after the backup was taken; the operator decides about it with `skep held resume` or `skep held drop`"
    )]
    HeldSinceRestore { agent: String, session: String },
    #[error(
        "turn {turn} was open when a backup of the host was taken, and was dropped after the backup was restored; it may have \
         done its work in between: check whether it did, and send the message again under a new key if necessary"
    )]
    TurnDropped { turn: String },
    #[error(
        "nothing is held: the host was not restored from a backup, or what it held was already resumed or dropped"
    )]
    NothingHeld,
    #[error(
        "this host keeps no KV pages on disk; set `disk_gb` under [kv] in skep.toml, and start it with a data folder"
    )]
    KvDiskOff,
    /// Requests for the session go to another host of the cluster. `host` is 0 if it is not known to which.
    #[error(
        "session {agent}/{session} belongs to {}, which did not take the request yet; try again", host_name(.host)
    )]
    SessionElsewhere { agent: String, session: String, host: i64 },
    /// A refusal of another host of the cluster, in its words.
    #[error("{message}")]
    RefusedElsewhere { code: &'static str, message: String, status: u16, retry_after_ms: Option<u32> },
    #[error("the turn was cancelled")]
    Cancelled,
    #[error("the agent trapped: {message}")]
    Trap { message: String },
    #[error("the host is shutting down")]
    ShuttingDown,
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("internal error: {message}")]
    Internal { message: String },
}

impl RuntimeError {
    /// Returns the error's stable code, for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::AgentNotFound { .. } => "agent_not_found",
            Self::SessionNotFound { .. } => "session_not_found",
            Self::SessionExists { .. } => "session_exists",
            Self::InvalidSession { .. } => "invalid_session",
            Self::ConversationNotFound { .. } => "conversation_not_found",
            Self::VersionNotFound { .. } => "version_not_found",
            Self::TurnNotFound { .. } => "turn_not_found",
            Self::BatchNotFound { .. } => "batch_not_found",
            Self::ResponseNotFound { .. } => "response_not_found",
            Self::ResponseChainTooLong { .. } => "response_chain_too_long",
            Self::ResponsesFull { .. } => "responses_full",
            Self::FileNotFound { .. } => "file_not_found",
            Self::InvalidBatch { .. } => "invalid_batch",
            Self::QueueFull { .. } => "queue_full",
            Self::KeyNotFound { .. } => "key_not_found",
            Self::TenantNotFound { .. } => "tenant_not_found",
            Self::TenantInUse { .. } => "tenant_in_use",
            Self::InvalidKey { .. } => "invalid_key",
            Self::KeyRefused { .. } => "invalid_api_key",
            Self::TurnFailed { code, .. } => code,
            Self::Divergence { .. } => "divergence",
            Self::InvalidName { .. } => "invalid_name",
            Self::Manifest { .. } => "invalid_manifest",
            Self::Component { .. } => "invalid_component",
            Self::InvalidSecret { .. } => "invalid_secret",
            Self::SecretNotFound { .. } => "secret_not_found",
            Self::Route { .. } => "invalid_route",
            Self::ModelUnknown { .. } => "model_unknown",
            Self::ModelGone { .. } => "model_gone",
            Self::ModelNotGranted { .. } => "model_not_granted",
            Self::MailboxFull { .. } => "mailbox_full",
            Self::IntakeFull { .. } => "intake_full",
            Self::TooManyTurns { .. } => "too_many_turns",
            Self::BudgetUsedUp(BudgetUsedUp { budget: Budget::Tokens, .. }) => "tokens_used_up",
            Self::BudgetUsedUp(BudgetUsedUp { budget: Budget::Money, .. }) => "money_used_up",
            Self::PriceUnknown(_) => "price_unknown",
            Self::UsageTooLong { .. } => "usage_too_long",
            Self::Engine(error) => error.code(),
            Self::AgentFailed { .. } => "agent_failed",
            Self::ToolFailed { .. } => "tool_failed",
            Self::CallRefused { .. } => "call_refused",
            Self::ApprovalNotFound { .. } => "approval_not_found",
            Self::ApprovalDecided { .. } => "approval_decided",
            Self::WaitingForApproval { .. } => "waiting_for_approval",
            Self::InvalidMessage { .. } => "invalid_message",
            Self::InvalidEvent { .. } => "invalid_event",
            Self::ScheduleNotFound { .. } => "schedule_not_found",
            Self::InvalidWebhook { .. } => "invalid_webhook",
            Self::WebhookNotFound { .. } => "webhook_not_found",
            Self::DeadLetterNotFound { .. } => "dead_letter_not_found",
            Self::OutboxFull { .. } => "outbox_full",
            Self::LimitExceeded { .. } => "limit_exceeded",
            Self::HostFull { .. } => "host_full",
            Self::SessionTooLarge { .. } => "session_too_large",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::TurnLost { .. } => "turn_lost",
            Self::HeldSinceRestore { .. } => "held_since_restore",
            Self::TurnDropped { .. } => "turn_dropped",
            Self::NothingHeld => "nothing_held",
            Self::KvDiskOff => "kv_disk_off",
            Self::SessionElsewhere { .. } => "session_elsewhere",
            Self::RefusedElsewhere { code, .. } => code,
            Self::Cancelled => "cancelled",
            Self::Trap { .. } => "agent_trapped",
            Self::StoreStalled { .. } => "store_stalled",
            Self::ShuttingDown => "shutting_down",
            Self::Store(error) if error.is_full() => "store_full",
            Self::Store(error) if error.is_away() => "store_away",
            Self::Store(error) if error.is_fenced() => "host_replaced",
            Self::Store(_) => "store_failed",
            Self::Internal { .. } => "internal",
        }
    }
}

impl RuntimeError {
    /// Returns the delay after which another attempt may succeed, if it is known.
    pub fn retry_after_ms(&self) -> Option<u32> {
        match self {
            Self::MailboxFull { retry_after_ms, .. }
            | Self::IntakeFull { retry_after_ms, .. }
            | Self::TooManyTurns { retry_after_ms, .. }
            | Self::QueueFull { retry_after_ms, .. }
            | Self::OutboxFull { retry_after_ms, .. }
            | Self::BudgetUsedUp(BudgetUsedUp { retry_after_ms, .. })
            | Self::Engine(
                EngineError::Busy { retry_after_ms } | EngineError::ModelLoading { retry_after_ms, .. },
            ) => Some(*retry_after_ms),
            Self::RefusedElsewhere { retry_after_ms, .. } => *retry_after_ms,
            Self::SessionElsewhere { .. } => Some(ELSEWHERE_RETRY_MS),
            _ => None,
        }
    }
}

/// Returns the static form of a stored error code. A code that this version does not know becomes `turn_failed`.
pub(crate) fn known_code(code: &str) -> &'static str {
    const CODES: &[&str] = &[
        "agent_failed",
        "agent_not_found",
        "agent_trapped",
        "approval_decided",
        "approval_not_found",
        "batch_not_found",
        "busy",
        "call_refused",
        "cancelled",
        "cluster_versions_apart",
        "context_overflow",
        "conversation_not_found",
        "dead_letter_not_found",
        "deadline_exceeded",
        "divergence",
        "engine_failed",
        "file_not_found",
        "held_since_restore",
        "host_full",
        "host_gone",
        "host_replaced",
        "intake_full",
        "internal",
        "invalid_api_key",
        "invalid_batch",
        "invalid_component",
        "invalid_event",
        "invalid_key",
        "invalid_manifest",
        "invalid_message",
        "invalid_name",
        "invalid_request",
        "invalid_route",
        "invalid_secret",
        "invalid_session",
        "invalid_webhook",
        "key_not_found",
        "kv_disk_off",
        "limit_exceeded",
        "mailbox_full",
        "model_gone",
        "model_loading",
        "model_not_granted",
        "model_unknown",
        "model_unloaded",
        "money_used_up",
        "nothing_held",
        "outbox_full",
        "price_unknown",
        "queue_full",
        "response_chain_too_long",
        "response_not_found",
        "responses_full",
        "schedule_not_found",
        "schema_invalid",
        "schema_unsatisfied",
        "secret_not_found",
        "session_elsewhere",
        "session_exists",
        "session_not_found",
        "session_too_large",
        "shutting_down",
        "store_away",
        "store_failed",
        "store_full",
        "store_stalled",
        "tenant_in_use",
        "tenant_not_found",
        "tokens_used_up",
        "too_many_turns",
        "tool_failed",
        "truncated",
        "turn_dropped",
        "turn_lost",
        "turn_not_found",
        "upstream_cut_off",
        "upstream_malformed",
        "upstream_refused",
        "upstream_unavailable",
        "usage_too_long",
        "version_not_found",
        "waiting_for_approval",
        "webhook_not_found",
    ];
    CODES.iter().find(|known| **known == code).copied().unwrap_or("turn_failed")
}

fn known_names(known: &[String]) -> String {
    match known {
        [] => "; deploy one with `skep deploy DIR`".to_owned(),
        known => format!("; deployed agents: {}", list(known)),
    }
}

fn host_name(host: &i64) -> String {
    match host {
        0 => "another host".to_owned(),
        number => format!("host {number}"),
    }
}

fn wanted_version(wanted: &Option<u64>) -> String {
    match wanted {
        Some(version) => format!("version {version}"),
        None => "earlier version".to_owned(),
    }
}

fn of_agent(agent: &Option<String>) -> String {
    match agent {
        Some(agent) => format!(" for agent {agent:?}"),
        None => " for all agents".to_owned(),
    }
}

fn list<T: Display>(known: &[T]) -> String {
    match known {
        [] => "none".to_owned(),
        known => known.iter().map(T::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// The kinds of daily budgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Budget {
    Tokens,
    Money,
}

/// A budget is used up until the day ends.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}; the next day starts at 00:00 UTC, in {} s", .retry_after_ms / 1_000)]
pub struct BudgetUsedUp {
    pub(crate) budget: Budget,
    pub(crate) message: String,
    pub retry_after_ms: u32,
}

/// A budget in money cannot pay for a model, because nobody knows what the model costs.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct PriceUnknown {
    pub(crate) message: String,
}

impl BudgetUsedUp {
    pub(crate) fn until_midnight(budget: Budget, message: String, now_ms: u64) -> Self {
        BudgetUsedUp { budget, message, retry_after_ms: (DAY_MS - now_ms % DAY_MS) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_code_and_one_of_another_host_stay_what_they_are() {
        let source = include_str!("error.rs");
        let begin = source.find("pub fn code(&self)").expect("the function with all codes");
        let function = source[begin..].split("\n    }\n").next().expect("its body");
        let codes: Vec<&str> = function.split('"').skip(1).step_by(2).collect();
        assert!(codes.len() > 60 && codes.contains(&"host_full"), "{codes:?}");
        for code in codes {
            assert_eq!(known_code(code), code);
        }
        assert_eq!(known_code("of_a_later_version"), "turn_failed");
    }
}
