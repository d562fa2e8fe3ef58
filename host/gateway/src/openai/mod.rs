//! OpenAI's request and response shapes: the fields of requests, and the parts that responses share.

pub(crate) mod chat_message;
pub(crate) mod chat_request;
pub(crate) mod chat_response;
pub(crate) mod completion_request;
pub(crate) mod fields;
pub(crate) mod image;
pub(crate) mod logprobs;
pub(crate) mod metadata;
pub(crate) mod parameters;
pub(crate) mod prompt;
pub(crate) mod reasoning;
pub(crate) mod response_format;
pub(crate) mod responses;
pub(crate) mod schema;
pub(crate) mod tools;

use skep_api::{
    ChatChoice, ChatChunk, ChatCompletion, ChunkChoice, Completion, CompletionChoice, CompletionTokens,
    FunctionCall, FunctionToolCall, PromptTokens, marker,
};
use skep_engine::{Usage, chat::ToolCall};
use std::time::{SystemTime, UNIX_EPOCH};

pub(crate) fn usage(usage: &Usage) -> skep_api::Usage {
    let (prompt_tokens, completion_tokens) =
        (u64::from(usage.prompt_tokens), u64::from(usage.completion_tokens));
    skep_api::Usage {
        prompt_tokens,
        completion_tokens,
        total_tokens: prompt_tokens + completion_tokens,
        prompt_tokens_details: PromptTokens {
            cached_tokens: usage.cached_tokens.into(),
            cache_write_tokens: usage.cache_write_tokens.into(),
            prefilled_tokens: usage.prefilled_tokens.into(),
            prefill_ms: usage.prefill_ms.into(),
        },
        completion_tokens_details: CompletionTokens {
            reasoning_tokens: usage.reasoning_tokens.into(),
            accepted_prediction_tokens: usage.accepted_tokens.into(),
            rejected_prediction_tokens: usage.rejected_tokens.into(),
            taken_back_tokens: u64::from(usage.rolled_back_tokens) + u64::from(usage.refused_tokens),
        },
    }
}

pub(crate) fn tool_call(call: &ToolCall) -> FunctionToolCall {
    let function = FunctionCall { name: call.name.clone(), arguments: call.arguments.clone() };
    FunctionToolCall { id: call.id.clone(), kind: marker::Function, function }
}

/// Returns the part of an agent's reply that has not been streamed, or `None` if the reply is another text. Text that the
/// model generated before it called tools is not part of the reply, and an agent may reply with more than it let its model
/// stream.
pub(crate) fn rest_of_reply<'a>(streamed: &str, reply: &'a str) -> Option<&'a str> {
    let is_whole = || streamed.ends_with(reply).then_some("");
    reply.strip_prefix(streamed).or_else(is_whole)
}

/// Returns the Unix time in seconds.
pub(crate) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The fields that all responses to one request share.
#[derive(Clone)]
pub(crate) struct Envelope {
    id: String,
    created_s: u64,
    model: String,
}

impl Envelope {
    pub(crate) fn new(prefix: &str, model: &str) -> Self {
        let id = format!("{prefix}-{}", uuid::Uuid::now_v7().simple());
        Envelope { id, created_s: now_s(), model: model.to_owned() }
    }

    /// Returns the fields of a stored response, which are the same whenever it is read.
    pub(crate) fn stored(prefix: &str, id: &str, created_s: u64, model: &str) -> Self {
        Envelope { id: format!("{prefix}-{id}"), created_s, model: model.to_owned() }
    }

    /// Names the model that a route chose.
    pub(crate) fn set_model(&mut self, model: String) {
        self.model = model;
    }

    pub(crate) fn chat(&self, choices: Vec<ChatChoice>, tokens: &Usage) -> ChatCompletion {
        let Envelope { id, created_s: created, model } = self.clone();
        ChatCompletion { id, object: marker::ChatCompletion, created, model, choices, usage: usage(tokens) }
    }

    pub(crate) fn chunk(&self, choice: ChunkChoice) -> ChatChunk {
        ChatChunk { choices: vec![choice], usage: None, ..self.last_chunk(&Usage::default()) }
    }

    /// Returns the last chunk of a stream whose client requested the usage.
    pub(crate) fn last_chunk(&self, tokens: &Usage) -> ChatChunk {
        let Envelope { id, created_s: created, model } = self.clone();
        let usage = Some(usage(tokens));
        ChatChunk { id, object: marker::ChatChunk, created, model, choices: Vec::new(), usage }
    }

    /// Returns a text completion, or a piece of one. Only whole ones and the last piece have a usage.
    pub(crate) fn text(&self, choices: Vec<CompletionChoice>, tokens: Option<&Usage>) -> Completion {
        let Envelope { id, created_s: created, model } = self.clone();
        Completion { id, object: marker::TextCompletion, created, model, choices, usage: tokens.map(usage) }
    }
}
