//! What can go wrong between an invocation and its outcome.
//!
//! Every variant says what was wrong, where, and what would fix it; [`RuntimeError::code`] is stable and for machines.

use crate::TokensUsedUp;
use skep_engine::EngineError;
use skep_store::StoreError;
use std::fmt::Display;

/// An error of the runtime. A turn that ends in one has changed nothing but the agent's log.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("no agent {name:?} is deployed{}", known_names(.known))]
    AgentNotFound { name: String, known: Vec<String> },
    #[error("agent {agent:?} has no session {session:?}")]
    SessionNotFound { agent: String, session: String },
    #[error("agent {agent:?} has a session {session:?} already; delete it first, or take another name")]
    SessionExists { agent: String, session: String },
    #[error("the session cannot be imported: {message}")]
    InvalidSession { message: String },
    #[error("session {agent}/{session} has no conversation {name:?}; there {}", one_of(.known))]
    ConversationNotFound { agent: String, session: String, name: String, known: Vec<String> },
    #[error(
        "agent {agent:?} has no {}; version {in_force} is in force, and there {}", wanted_version(.wanted), one_of(.known)
    )]
    VersionNotFound { agent: String, wanted: Option<u64>, in_force: u64, known: Vec<u64> },
    #[error("session {agent}/{session} has no turn {turn:?}; ended turns are kept for a day at most")]
    TurnNotFound { agent: String, session: String, turn: String },
    #[error("no batch {id:?} is known; the results of a batch are kept for {hours} h after its end")]
    BatchNotFound { id: String, hours: u64 },
    #[error("{message}")]
    InvalidBatch { message: String },
    #[error("{message}; try again in {retry_after_ms} ms")]
    QueueFull { message: String, retry_after_ms: u32 },
    #[error("no API key has the id {id:?}; `skep key list` shows those that there are")]
    KeyNotFound { id: String },
    #[error("the API key cannot be made: {message}")]
    InvalidKey { message: String },
    #[error(
        "the database has written nothing for {waited_s} s; its disk is slow, or something holds its file"
    )]
    StoreStalled { waited_s: u64 },
    #[error("the API key is not accepted: {reason}")]
    KeyRefused { reason: &'static str },
    /// What others than its caller are told of a turn that failed.
    #[error("{message}")]
    TurnFailed { code: &'static str, message: String },
    /// The guest, run again after a restart, did not make the calls that it made before.
    #[error(
        "the turn cannot be continued: its call {call} was {expected} before the restart, and now the agent made {made}; \
         an agent must act on nothing but its message, its state and what the host answers"
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
    #[error("no secret {name:?} is set{}; `skep secret list` shows those that are", of_agent(.agent))]
    SecretNotFound { name: String, agent: Option<String> },
    #[error("route {route:?} of agent {agent:?} {message}")]
    Route { agent: String, route: String, message: String },
    #[error("no model {name:?} is loaded; there {}", one_of(.known))]
    ModelUnknown { name: String, known: Vec<String> },
    #[error(
        "the agent.toml of agent {agent:?} says model = {model:?}, which this host does not serve any more; there {}; serve it, \
         or deploy the agent with another `model`, or with none for the host's default", one_of(.known)
    )]
    ModelGone { agent: String, model: String, known: Vec<String> },
    #[error("{message}; try again in {retry_after_ms} ms")]
    MailboxFull { message: String, retry_after_ms: u32 },
    #[error("{message}; try again in {retry_after_ms} ms")]
    IntakeFull { message: String, retry_after_ms: u32 },
    #[error(
        "{limit} turns of agent {agent:?}{whose} run or wait already; try again in {retry_after_ms} ms, or allow more with \
         `concurrent_turns` under [limits] in agent.toml, up to the operator's ceiling in skep.toml"
    )]
    TooManyTurns { agent: String, whose: &'static str, limit: u32, retry_after_ms: u32 },
    #[error(transparent)]
    TokensUsedUp(#[from] TokensUsedUp),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("the agent failed: {message}")]
    AgentFailed { message: String },
    /// What a tool told its caller.
    #[error("{message}")]
    ToolFailed { message: String },
    /// A person said no to a call of a tool, or nobody decided in time.
    #[error("{message}")]
    CallRefused { message: String },
    #[error("no approval {id:?} is asked for; it may belong to a turn that was removed")]
    ApprovalNotFound { id: String },
    /// It is decided once.
    #[error("approval {id} {how}")]
    ApprovalDecided { id: String, how: &'static str },
    #[error(
        "a turn of the session waits for a person's word, approval {approval}: `skep approval approve` or `deny` decides about \
         it, and cancelling the turn ends it; a message that is sent with `?detach=true` or with an idempotency key waits \
         for its turn"
    )]
    WaitingForApproval { approval: String },
    #[error("{message}")]
    InvalidMessage { message: String },
    #[error("{message}")]
    InvalidEvent { message: String },
    #[error(
        "agent {agent:?} has no schedule {id:?} that this is possible for; list them with `skep schedule list`"
    )]
    ScheduleNotFound { agent: String, id: String },
    #[error(
        "{limit} deliveries of events{whose} wait already; look at `skep webhook dead-letters` and at the agents that take them, \
         and try again in {retry_after_ms} ms"
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
    /// `limit` is the name of the line in `agent.toml` or of the bound of the host.
    #[error("limit {limit} exceeded: {message}")]
    LimitExceeded { limit: &'static str, message: String },
    #[error(
        "the turn did not end before its deadline; `turn_ms` under [limits] in agent.toml sets the agent's own"
    )]
    DeadlineExceeded,
    #[error(
        "turn {turn} is given up: the host died or failed {losses} times while it ran and got no further, so it may be the \
         reason; see the host's log and the limits of its agent, and send the message again under a new key"
    )]
    TurnLost { turn: String, losses: u32 },
    #[error(
        "session {agent}/{session} takes nothing yet: the host was restored from a backup, and a turn of the session may have \
         ended after it; the operator decides about it with `skep held resume` or `skep held drop`"
    )]
    HeldSinceRestore { agent: String, session: String },
    #[error(
        "turn {turn} was open when a backup of the host was taken, and was dropped after that was restored; it may have done \
         its work in between: look at that, and send the message again under a new key if need be"
    )]
    TurnDropped { turn: String },
    #[error("nothing is held: the host was not restored from a backup, or it was decided about already")]
    NothingHeld,
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
    /// A stable name for machines.
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
            Self::InvalidBatch { .. } => "invalid_batch",
            Self::QueueFull { .. } => "queue_full",
            Self::KeyNotFound { .. } => "key_not_found",
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
            Self::MailboxFull { .. } => "mailbox_full",
            Self::IntakeFull { .. } => "intake_full",
            Self::TooManyTurns { .. } => "too_many_turns",
            Self::TokensUsedUp(_) => "tokens_used_up",
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
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::TurnLost { .. } => "turn_lost",
            Self::HeldSinceRestore { .. } => "held_since_restore",
            Self::TurnDropped { .. } => "turn_dropped",
            Self::NothingHeld => "nothing_held",
            Self::Cancelled => "cancelled",
            Self::Trap { .. } => "agent_trapped",
            Self::StoreStalled { .. } => "store_stalled",
            Self::ShuttingDown => "shutting_down",
            Self::Store(error) if error.is_full() => "store_full",
            Self::Store(_) => "store_failed",
            Self::Internal { .. } => "internal",
        }
    }
}

/// A code that was stored. One that this version does not know is still a failure.
pub(crate) fn known_code(code: &str) -> &'static str {
    const CODES: &[&str] = &[
        "agent_failed",
        "agent_not_found",
        "agent_trapped",
        "busy",
        "call_refused",
        "cancelled",
        "context_overflow",
        "deadline_exceeded",
        "divergence",
        "engine_failed",
        "intake_full",
        "internal",
        "invalid_message",
        "invalid_name",
        "invalid_request",
        "limit_exceeded",
        "mailbox_full",
        "model_gone",
        "model_unknown",
        "outbox_full",
        "schema_invalid",
        "shutting_down",
        "store_failed",
        "store_full",
        "tokens_used_up",
        "tool_failed",
        "truncated",
        "turn_dropped",
        "turn_lost",
    ];
    CODES.iter().find(|known| **known == code).copied().unwrap_or("turn_failed")
}

fn known_names(known: &[String]) -> String {
    match known {
        [] => "; deploy one with `skep deploy DIR`".to_owned(),
        known => format!("; there {}", one_of(known)),
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

fn one_of<T: Display>(known: &[T]) -> String {
    match known {
        [] => "is none".to_owned(),
        [one] => format!("is only {one}"),
        many => format!("are {}", many.iter().map(T::to_string).collect::<Vec<_>>().join(", ")),
    }
}
