//! A record as it is stored and read.

use super::has_body;
use serde::{Deserialize, Serialize};
use skep_store::{RequestBody, RequestRange, RequestRow};

/// A page of records.
#[derive(Clone, Debug)]
pub struct LoggedPage {
    pub requests: Vec<LoggedRequest>,
    /// The range of the next page, unless there is nothing more.
    pub next: Option<RequestRange>,
}

/// The record of one request to a model.
#[derive(Clone, Debug)]
pub struct LoggedRequest {
    /// The position in the log, which grows with each record.
    pub key: i64,
    pub id: String,
    pub at_ms: u64,
    pub tenant: String,
    /// Id of the key that sent the request.
    pub api_key: Option<String>,
    pub agent: Option<String>,
    /// The host's id of the session.
    pub session: Option<String>,
    /// The model that was asked for, and the one that answered.
    pub asked: String,
    pub model: String,
    /// The word `ok`, `failed` or `cancelled`.
    pub status: String,
    /// Code of the error.
    pub error: Option<String>,
    pub details: RequestDetails,
    pub has_body: bool,
    /// The prompt and the answer, if they were read.
    pub body: Option<LoggedBody>,
}

/// The part of a record that is not searched.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestDetails {
    pub surface: String,
    /// Id of the turn, for a request of an agent.
    pub turn: Option<String>,
    pub streamed: Option<bool>,
    pub finish_reason: Option<String>,
    /// Time until a local model began. Upstreams do not report it.
    pub queue_ms: Option<u64>,
    /// Time until the first part of the answer.
    pub first_token_ms: Option<u64>,
    pub total_ms: u64,
    /// `None` if the model never began.
    pub usage: Option<LoggedUsage>,
    /// `None` if it is unknown, because the model has no price, or none for what was written to a cache.
    pub cost: Option<LoggedCost>,
    pub attempts: Vec<LoggedAttempt>,
}

/// The tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedUsage {
    pub prompt_tokens: u64,
    /// The part of `prompt_tokens` that came from a cache.
    pub cached_tokens: u64,
    /// Tokens of the prompt that were written to the cache of another server.
    #[serde(default)]
    pub cache_write_tokens: u64,
    pub completion_tokens: u64,
    /// Whether the tokens are an estimate, because the request was cut off.
    pub estimated: bool,
}

/// The cost of a request by the prices in the settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedCost {
    /// An exact decimal number.
    pub amount: String,
    /// Code of the currency in ISO 4217, such as `USD`.
    pub currency: String,
}

/// A request to an upstream, or to a model of this process that a route tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedAttempt {
    pub upstream: Option<String>,
    pub model: String,
    /// The word `ok`, `cancelled`, or the name of the fault.
    pub outcome: String,
    /// The status of the upstream's response, if there was one.
    pub status: Option<u16>,
    pub ms: u64,
}

/// The prompt and the answer of a request, without secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoggedBody {
    /// The messages in their order, or the newest of them.
    pub messages: Vec<LoggedMessage>,
    /// Number of older messages that were left out, because the request was too large.
    #[serde(skip_serializing_if = "is_zero")]
    pub omitted_messages: u64,
    /// Whether the text of the first of `messages` was cut.
    #[serde(skip_serializing_if = "is_false")]
    pub request_truncated: bool,
    /// The answer, or as much of it as there was.
    pub answer: LoggedMessage,
    #[serde(skip_serializing_if = "is_false")]
    pub answer_truncated: bool,
    /// The error's message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A message of a prompt, or an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoggedMessage {
    /// The speaker, or `prompt` for a text to continue.
    pub role: String,
    pub text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The name of the tool that answers, or of the speaker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The call that the message of a tool answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_id: Option<String>,
    /// The calls that the model made in this message.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<LoggedCall>,
}

/// A call of a tool that the model made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoggedCall {
    pub id: String,
    pub name: String,
    /// JSON, as the model wrote it.
    pub arguments: String,
}

impl LoggedRequest {
    pub(super) fn read(row: RequestRow) -> Self {
        let has_body = has_body(&row.body);
        let body = match row.body {
            RequestBody::Text(text) => decoded(&row.id, &text),
            RequestBody::None | RequestBody::Unread => None,
        };
        LoggedRequest {
            key: row.key,
            details: decoded(&row.id, &row.details).unwrap_or_default(),
            id: row.id,
            at_ms: row.at_ms,
            tenant: row.tenant,
            api_key: row.api_key,
            agent: row.agent,
            session: row.session,
            asked: row.asked,
            model: row.model,
            status: row.status,
            error: row.error,
            has_body,
            body,
        }
    }

    /// Returns whether a message or the answer contains this text. Letters of ASCII match in either case.
    pub(super) fn says(&self, text: &str) -> bool {
        let text = text.to_ascii_lowercase();
        self.body.as_ref().is_some_and(|body| {
            let messages = body.messages.iter().chain([&body.answer]);
            messages.flat_map(LoggedMessage::texts).any(|said| said.to_ascii_lowercase().contains(&text))
        })
    }
}

impl LoggedMessage {
    /// Returns everything that was said, in the order in which it is recorded.
    pub(super) fn texts_mut(&mut self) -> impl DoubleEndedIterator<Item = &mut String> {
        let calls = self.calls.iter_mut().map(|call| &mut call.arguments);
        let texts =
            [Some(&mut self.text), self.reasoning.as_mut(), self.name.as_mut(), self.call_id.as_mut()];
        texts.into_iter().flatten().chain(calls)
    }

    fn texts(&self) -> impl Iterator<Item = &String> {
        let calls = self.calls.iter().map(|call| &call.arguments);
        [&self.text].into_iter().chain(&self.reasoning).chain(&self.name).chain(calls)
    }
}

/// Returns a text as it is within the JSON of a body.
pub(super) fn encoded(text: &str) -> String {
    let quoted = serde_json::to_string(text).expect("a text always serializes");
    quoted[1..quoted.len() - 1].to_owned()
}

fn decoded<T: for<'de> Deserialize<'de>>(id: &str, json: &str) -> Option<T> {
    let read = serde_json::from_str(json);
    read.inspect_err(|error| tracing::error!(id, "a record of a request cannot be read: {error}")).ok()
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

fn is_false(flag: &bool) -> bool {
    !flag
}
