//! Responses in the shape of OpenAI's Responses API.

use crate::{TokenLogprob, marker, words::words};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A response of a model or an agent.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Response {
    pub id: String,
    #[schema(inline)]
    pub object: marker::Response,
    /// Unix time in seconds.
    pub created_at: u64,
    /// Unix time in seconds; `null` unless the response is complete.
    #[schema(required)]
    pub completed_at: Option<u64>,
    pub status: ResponseStatus,
    /// Whether the response is produced in the background.
    pub background: bool,
    #[schema(required)]
    pub error: Option<ResponseError>,
    #[schema(required)]
    pub incomplete_details: Option<IncompleteDetails>,
    pub model: String,
    pub output: Vec<ResponseItem>,
    #[schema(required)]
    pub previous_response_id: Option<String>,
    /// `null` until the response has ended.
    #[schema(required)]
    pub usage: Option<ResponseUsage>,
    #[serde(flatten)]
    pub settings: ResponseSettings,
    #[serde(flatten)]
    pub caller: ResponseCaller,
}

words! {
    /// The state of a response.
    pub enum ResponseStatus {
        Queued = "queued",
        InProgress = "in_progress",
        Completed = "completed",
        /// A limit ended the answer.
        Incomplete = "incomplete",
        Failed = "failed",
        Cancelled = "cancelled",
    }
}

/// The reason why a response failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ResponseError {
    pub code: String,
    pub message: String,
}

/// The reason why a response is incomplete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IncompleteDetails {
    /// `max_output_tokens`.
    pub reason: String,
}

/// The settings of the request, with the values that applied.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ResponseSettings {
    #[schema(required)]
    pub instructions: Option<String>,
    #[schema(required)]
    pub max_output_tokens: Option<u32>,
    #[schema(required)]
    pub max_tool_calls: Option<u32>,
    pub metadata: BTreeMap<String, String>,
    pub parallel_tool_calls: bool,
    pub reasoning: ResponseReasoning,
    pub service_tier: String,
    pub store: bool,
    /// `null` if an agent responds.
    #[schema(required)]
    pub temperature: Option<f32>,
    #[schema(required)]
    pub top_p: Option<f32>,
    pub text: Value,
    pub tool_choice: Value,
    pub tools: Vec<Value>,
    pub top_logprobs: u32,
    pub truncation: String,
}

/// The reasoning that a request asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ResponseReasoning {
    #[schema(required)]
    pub effort: Option<String>,
    #[schema(required)]
    pub summary: Option<String>,
}

/// The names that a request gives of its sender.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ResponseCaller {
    #[schema(required)]
    pub prompt_cache_key: Option<String>,
    #[schema(required)]
    pub safety_identifier: Option<String>,
    #[schema(required)]
    pub user: Option<String>,
}

/// Token counts of a response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ResponseUsage {
    pub input_tokens: u64,
    pub input_tokens_details: InputTokens,
    pub output_tokens: u64,
    pub output_tokens_details: OutputTokens,
    pub total_tokens: u64,
}

/// Tokens of the input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InputTokens {
    /// Tokens that were in the cache.
    pub cached_tokens: u64,
}

/// Tokens of the output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OutputTokens {
    /// Tokens of the reasoning.
    pub reasoning_tokens: u64,
}

/// An item of a response's output.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponseItem {
    Reasoning {
        id: String,
        /// It is always empty, because the whole reasoning is in `content`.
        summary: Vec<Value>,
        content: Vec<ReasoningPart>,
        /// The reasoning for a client that stores no responses, once the item has ended: it sends the item back, and the
        /// host reads the reasoning from this text. Only if the request has `reasoning.encrypted_content` in `include`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        encrypted_content: Option<String>,
        status: ResponseStatus,
    },
    Message {
        id: String,
        #[schema(inline)]
        role: marker::Assistant,
        content: Vec<ResponsePart>,
        status: ResponseStatus,
    },
    FunctionCall {
        id: String,
        /// The id by which the call's output refers to it.
        call_id: String,
        name: String,
        /// JSON as text.
        arguments: String,
        status: ResponseStatus,
    },
}

/// A part of a message.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsePart {
    OutputText {
        text: String,
        /// It is always empty.
        annotations: Vec<Value>,
        /// Log-probabilities of the tokens, if the request includes them. Stored responses lack them.
        logprobs: Vec<TokenLogprob>,
    },
    /// A part of reasoning, in the events of a stream.
    ReasoningText { text: String },
}

/// A part of reasoning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ReasoningPart {
    ReasoningText { text: String },
}

/// An event of a streamed response. The event's name is its `type`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type")]
pub enum ResponseEvent {
    #[serde(rename = "response.created")]
    Created { response: Box<Response> },
    #[serde(rename = "response.queued")]
    Queued { response: Box<Response> },
    #[serde(rename = "response.in_progress")]
    InProgress { response: Box<Response> },
    #[serde(rename = "response.output_item.added")]
    ItemAdded { output_index: u32, item: ResponseItem },
    #[serde(rename = "response.output_item.done")]
    ItemDone { output_index: u32, item: ResponseItem },
    #[serde(rename = "response.content_part.added")]
    PartAdded { item_id: String, output_index: u32, content_index: u32, part: ResponsePart },
    #[serde(rename = "response.content_part.done")]
    PartDone { item_id: String, output_index: u32, content_index: u32, part: ResponsePart },
    #[serde(rename = "response.output_text.delta")]
    TextDelta {
        item_id: String,
        output_index: u32,
        content_index: u32,
        delta: String,
        logprobs: Vec<TokenLogprob>,
    },
    #[serde(rename = "response.output_text.done")]
    TextDone {
        item_id: String,
        output_index: u32,
        content_index: u32,
        text: String,
        logprobs: Vec<TokenLogprob>,
    },
    #[serde(rename = "response.reasoning_text.delta")]
    ReasoningDelta { item_id: String, output_index: u32, content_index: u32, delta: String },
    #[serde(rename = "response.reasoning_text.done")]
    ReasoningDone { item_id: String, output_index: u32, content_index: u32, text: String },
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta { item_id: String, output_index: u32, delta: String },
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone { item_id: String, output_index: u32, name: String, arguments: String },
    #[serde(rename = "response.completed")]
    Completed { response: Box<Response> },
    #[serde(rename = "response.incomplete")]
    Incomplete { response: Box<Response> },
    /// The response failed, or was cancelled while a client followed it.
    #[serde(rename = "response.failed")]
    Failed { response: Box<Response> },
}

impl ResponseEvent {
    /// Returns the name of the event, which is also its `type`.
    pub fn name(&self) -> &'static str {
        match self {
            ResponseEvent::Created { .. } => "response.created",
            ResponseEvent::Queued { .. } => "response.queued",
            ResponseEvent::InProgress { .. } => "response.in_progress",
            ResponseEvent::ItemAdded { .. } => "response.output_item.added",
            ResponseEvent::ItemDone { .. } => "response.output_item.done",
            ResponseEvent::PartAdded { .. } => "response.content_part.added",
            ResponseEvent::PartDone { .. } => "response.content_part.done",
            ResponseEvent::TextDelta { .. } => "response.output_text.delta",
            ResponseEvent::TextDone { .. } => "response.output_text.done",
            ResponseEvent::ReasoningDelta { .. } => "response.reasoning_text.delta",
            ResponseEvent::ReasoningDone { .. } => "response.reasoning_text.done",
            ResponseEvent::ArgumentsDelta { .. } => "response.function_call_arguments.delta",
            ResponseEvent::ArgumentsDone { .. } => "response.function_call_arguments.done",
            ResponseEvent::Completed { .. } => "response.completed",
            ResponseEvent::Incomplete { .. } => "response.incomplete",
            ResponseEvent::Failed { .. } => "response.failed",
        }
    }
}

/// An event of a streamed response with its number. Numbers begin at 0 and have no gaps.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NumberedResponseEvent {
    #[serde(flatten)]
    pub event: ResponseEvent,
    pub sequence_number: u64,
}

/// A page of the items of a response's input, the last one first unless `order` is `asc`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ResponseInputPage {
    #[schema(inline)]
    pub object: marker::List,
    pub data: Vec<Value>,
    #[schema(required)]
    pub first_id: Option<String>,
    #[schema(required)]
    pub last_id: Option<String>,
    pub has_more: bool,
}

/// A response that was deleted.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct DeletedResponse {
    pub id: String,
    #[schema(inline)]
    pub object: marker::Response,
    pub deleted: bool,
}
