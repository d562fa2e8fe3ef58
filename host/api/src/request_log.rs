//! The log of requests to models.

use crate::{marker, words::words};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

words! {
    /// How a request ended. A request whose client went away is `cancelled`.
    pub enum RequestStatus {
        Ok = "ok",
        Failed = "failed",
        Cancelled = "cancelled",
    }
}

words! {
    /// The way by which a request came. `agent` is a message to an agent, `agent-chat` a chat completion that an agent answers,
    /// and `agent-route` an agent's own route; `mcp` and `tool` are calls of an agent's tools, by a client and by another agent.
    pub enum RequestSurface {
        Chat = "chat",
        Completions = "completions",
        Messages = "messages",
        Responses = "responses",
        AiRun = "ai-run",
        Batch = "batch",
        Agent = "agent",
        AgentChat = "agent-chat",
        AgentRoute = "agent-route",
        Schedule = "schedule",
        Event = "event",
        Mcp = "mcp",
        Tool = "tool",
    }
}

/// The record of one request to a model. Each call of an agent's model is a request, and so is each choice of a completion.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ModelRequest {
    #[schema(inline)]
    pub object: marker::ModelRequest,
    pub id: String,
    pub at_ms: u64,
    pub tenant: String,
    /// Id of the API key that sent the request.
    #[schema(required)]
    pub key: Option<String>,
    /// The agent that asked; `null` for a request that names a model directly.
    #[schema(required)]
    pub agent: Option<RequestAgent>,
    pub surface: RequestSurface,
    pub model: RequestModel,
    pub result: RequestResult,
    pub timing: RequestTiming,
    /// Missing if the model never began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub usage: Option<RequestUsage>,
    /// The cost by the prices of the day, or `null` if it is unknown. It is a log and not the accounting.
    #[schema(required)]
    pub cost: Option<RequestCost>,
    /// The requests to upstreams, and the models of this host that a route tried. It is empty for other requests to models of
    /// this host.
    pub attempts: Vec<RequestAttempt>,
    /// Whether the prompt and the answer are stored.
    pub has_body: bool,
    /// The prompt and the answer. They are missing if they are not stored, were not requested, or the key may not read them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub body: Option<RequestTexts>,
}

/// The agent that asked a model.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RequestAgent {
    pub name: String,
    pub session: String,
    /// Id of the turn.
    pub turn: String,
}

/// The model of a request.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RequestModel {
    /// The name that was asked for: a model, an alias or a route.
    pub asked: String,
    /// The model that answered, or that was asked last.
    pub answered: String,
}

/// The end of a request.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RequestResult {
    pub status: RequestStatus,
    /// Code of the error.
    #[schema(required)]
    pub error: Option<String>,
    /// The words `stop`, `length` or `tool_calls`.
    #[schema(required)]
    pub finish_reason: Option<String>,
    /// Whether the client read the answer as it was made; `null` for a request of an agent.
    #[schema(required)]
    pub streamed: Option<bool>,
}

/// The times of a request, in milliseconds from its beginning.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RequestTiming {
    /// Time in the queue of a model of this host; `null` for upstreams, which do not report it.
    #[schema(required)]
    pub queue_ms: Option<u64>,
    /// Time until the first part of the answer; `null` if there was none.
    #[schema(required)]
    pub first_token_ms: Option<u64>,
    pub total_ms: u64,
}

/// The tokens of a request.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RequestUsage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// Tokens of the prompt that an upstream wrote to its cache.
    #[serde(default)]
    #[schema(required)]
    pub cache_write_tokens: u64,
    pub completion_tokens: u64,
    /// Whether the tokens are an estimate, because the request was cut off.
    pub estimated: bool,
}

/// The cost of a request.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RequestCost {
    /// An exact decimal number, as a string.
    pub amount: String,
    /// The currency's code, such as `USD`.
    pub currency: String,
}

/// One attempt to get an answer.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RequestAttempt {
    /// The upstream; `null` for a model of this host.
    #[schema(required)]
    pub upstream: Option<String>,
    pub model: String,
    /// The word `ok`, `cancelled`, or the name of the fault.
    pub outcome: String,
    /// The status of the upstream's response; `null` if there was none.
    #[schema(required)]
    pub status: Option<u16>,
    pub ms: u64,
}

/// The prompt and the answer of a request. Secrets are replaced.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RequestTexts {
    /// The messages in their order, or the newest of them.
    pub messages: Vec<RequestMessage>,
    /// Number of older messages that were left out, because the request was too large.
    pub omitted_messages: u64,
    /// Whether the first of `messages` was cut.
    pub request_truncated: bool,
    /// The answer, or as much of it as there was.
    pub answer: RequestMessage,
    pub answer_truncated: bool,
    /// The error's message.
    #[schema(required)]
    pub error: Option<String>,
}

/// A message, or the text that a completion continues.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RequestMessage {
    /// The speaker, or `prompt` for a text to continue.
    pub role: String,
    pub text: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub reasoning: Option<String>,
    /// The name of the tool that answers, or of the speaker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub name: Option<String>,
    /// The call that a tool answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub call_id: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<RequestCall>,
}

/// A call of a tool.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RequestCall {
    pub id: String,
    pub name: String,
    /// JSON, as the model wrote it.
    pub arguments: String,
}

/// A page of the log, the newest record first.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ModelRequestPage {
    #[schema(inline)]
    pub object: marker::List,
    pub data: Vec<ModelRequest>,
    /// The `cursor` of the next page, or `null` after the last one. A page may end before it has `limit` records.
    #[schema(required)]
    pub next: Option<String>,
}
