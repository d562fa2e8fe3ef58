//! The shapes of Workers AI: an envelope around every answer, the native answer, and batches.

use crate::{ChatCompletion, Usage, page::with_own, words::words};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{
        Ref, RefOr, Schema,
        schema::{ArrayBuilder, ObjectBuilder, Type},
    },
};

/// The envelope around an answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AiEnvelope<T> {
    pub result: T,
    pub success: bool,
    #[serde(default)]
    pub errors: Vec<AiError>,
    #[serde(default)]
    pub messages: Vec<Value>,
}

// The OpenAPI document names a schema after the type that a route mentions, so each envelope has a name of its own.
/// An answer to one request.
pub type AiAnswerEnvelope = AiEnvelope<AiAnswer>;
/// The answers of a batch.
pub type AiBatchAnswersEnvelope = AiEnvelope<AiBatchAnswers>;
/// The state of a batch.
pub type BatchStatusEnvelope = AiEnvelope<BatchStatus>;
/// An answer in the shape of a chat completion.
pub type ChatCompletionEnvelope = AiEnvelope<ChatCompletion>;
/// A batch that was accepted.
pub type QueuedBatchEnvelope = AiEnvelope<QueuedBatch>;

impl<T> AiEnvelope<T> {
    /// Wraps a result.
    pub fn success(result: T) -> Self {
        AiEnvelope { result, success: true, errors: Vec::new(), messages: Vec::new() }
    }
}

// A derived schema would repeat the schema of `T` instead of referring to it.
impl<T: ToSchema> PartialSchema for AiEnvelope<T> {
    fn schema() -> RefOr<Schema> {
        let success = ObjectBuilder::new().schema_type(Type::Boolean);
        let errors = ArrayBuilder::new().items(Ref::from_schema_name(AiError::name()));
        let envelope = ObjectBuilder::new()
            .property("result", Ref::from_schema_name(T::name()))
            .property("success", success)
            .property("errors", errors)
            .property("messages", ArrayBuilder::new());
        let fields = ["result", "success", "errors", "messages"];
        let envelope = fields.into_iter().fold(envelope, ObjectBuilder::required);
        RefOr::T(Schema::Object(envelope.description(Some("The envelope around an answer.")).build()))
    }
}

impl<T: ToSchema> ToSchema for AiEnvelope<T> {
    fn name() -> Cow<'static, str> {
        format!("{}Envelope", T::name()).into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        with_own(schemas, AiError::name(), AiError::schema(), AiError::schemas);
        with_own(schemas, T::name(), T::schema(), T::schemas);
    }
}

/// The envelope around an error; `success` is false and `result` is `null`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AiFailure {
    #[schema(value_type = Value)]
    pub result: (),
    pub success: bool,
    pub errors: Vec<AiError>,
    pub messages: Vec<Value>,
}

/// An error of Workers AI. An error without a code of its own has its HTTP status as its code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AiError {
    pub code: u32,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub source: Option<AiErrorSource>,
}

/// The field that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AiErrorSource {
    pub pointer: String,
}

/// A whole answer in the native schema.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AiAnswer {
    /// The text, or the JSON value if JSON was requested.
    pub response: Value,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<AiToolCall>,
    pub usage: Usage,
    /// The data of an agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Value, required = false)]
    pub data: Option<Value>,
}

/// A call with its arguments as JSON.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AiToolCall {
    pub id: String,
    pub name: String,
    pub arguments: Value,
}

/// A piece of a streamed answer: text; or at the end the calls and the usage, with an empty text; or the error that breaks the
/// stream off. `data: [DONE]` follows the last piece of a stream that does not break off.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct AiChunk {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub response: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<AiToolCall>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub usage: Option<Usage>,
    /// False in a piece with errors, and missing in the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub success: Option<bool>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<AiError>,
}

/// A batch that was accepted and is not done.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct QueuedBatch {
    pub status: BatchPhase,
    /// The id of the batch.
    pub request_id: String,
    pub model: String,
}

/// State of a batch.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct BatchStatus {
    pub status: BatchPhase,
    /// The id of the batch.
    pub request_id: String,
    pub model: String,
    pub created_at_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub ended_at_ms: Option<u64>,
    pub items: BatchItems,
}

/// Numbers of the items of a batch.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
pub struct BatchItems {
    pub total: u64,
    pub waiting: u64,
    pub running: u64,
    pub done: u64,
    pub failed: u64,
    pub cancelled: u64,
}

words! {
    /// State of a batch.
    pub enum BatchPhase {
        Queued = "queued",
        Running = "running",
        Complete = "complete",
        Cancelled = "cancelled",
    }
}

/// The answers of a batch that is done, in the order of its requests.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AiBatchAnswers {
    pub responses: Vec<AiBatchAnswer>,
    /// Sum over all answers.
    pub usage: Usage,
}

/// The answer to one request of a batch: `result` or `error`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AiBatchAnswer {
    /// Position of the request in its batch, starting at 0.
    pub id: u64,
    pub success: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub external_reference: Option<String>,
    /// An answer in the native schema or in OpenAI's, as the request was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Value, required = false)]
    pub result: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub error: Option<AiError>,
}
