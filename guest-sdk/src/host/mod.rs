//! The interface between the SDK and its host: the bindings in a component, the harness in a test.
//!
//! It is object-safe and single-threaded, like a guest. The implementations know the SDK's types; the SDK
//! knows neither of them. The types that cross the interface are here or in modules that know nothing of it.

mod http;
mod schedule;
mod tools;

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use serde_json::Value;

use crate::compaction::{CompactOptions, Compaction, CompactionPolicy};
use crate::error::{EmitError, HostToolError, HttpError, InferenceError, ScheduleError, StateError};
use crate::generation::{Entry, GenerateOptions, Generation, ModelInfo, Usage};
pub use http::{FetchRequest, HttpResponse};
pub use schedule::{ScheduleOptions, ScheduleTiming, Scheduled, When};
pub use tools::{HostToolInfo, ToolHints};

/// A boxed future that stays on its thread.
pub type Task<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// The severity of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// A message for the author of the agent.
    Debug,
    /// A normal event.
    Info,
    /// Something that may need attention.
    Warn,
    /// An error.
    Error,
}

/// The imports of an agent, as the WIT interface declares them.
pub trait Host {
    /// Opens the session's conversation with this name, or starts it with `model`, by default the agent's own.
    fn open(&self, name: &str, model: Option<&str>) -> Result<Rc<dyn HostConversation>, InferenceError>;
    /// Continues a text without a conversation or a chat template.
    fn complete<'a>(
        &'a self,
        model: Option<&'a str>,
        prompt: &'a str,
        options: GenerateOptions,
    ) -> Task<'a, Result<Generation, InferenceError>>;
    /// Returns the models that the agent may use.
    fn models(&self) -> Vec<ModelInfo>;
    /// Returns the value of a key, or `None` if it is absent.
    fn state_get(&self, key: &str) -> Option<Vec<u8>>;
    /// Writes a value. Fails if the key is invalid or a quota is exceeded.
    fn state_set(&self, key: &str, value: &[u8]) -> Result<(), StateError>;
    /// Deletes a key. Returns whether it existed.
    fn state_delete(&self, key: &str) -> bool;
    /// Returns at most `limit` keys that begin with `prefix` and come after `after`, in order.
    fn state_keys(&self, prefix: &str, after: Option<&str>, limit: u32) -> Vec<String>;
    /// Writes a value if the current one is `expected`, where `None` means absent. Returns whether it was written.
    fn state_compare_and_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        value: &[u8],
    ) -> Result<bool, StateError>;
    /// Resolves after this time in milliseconds.
    fn sleep(&self, ms: u32) -> Task<'_, ()>;
    /// Lists the tools of others that the agent may call.
    fn tools(&self) -> Task<'_, Vec<HostToolInfo>>;
    /// Waits for a person's decision on a call of the model. The error is the message that the model gets.
    fn approve<'a>(&'a self, call_id: &'a str) -> Task<'a, Result<(), String>>;
    /// Calls a tool of others. Without `timeout_ms`, the tool's own time limit or the end of the turn applies.
    fn call_tool<'a>(
        &'a self,
        name: &'a str,
        arguments: &'a Value,
        timeout_ms: Option<u32>,
    ) -> Task<'a, Result<Value, HostToolError>>;
    /// Returns a placeholder, which the host replaces in requests to permitted origins.
    fn secret(&self, name: &str) -> Result<String, HttpError>;
    /// Sends an HTTP request within the limits of the agent.
    fn fetch(&self, request: FetchRequest) -> Task<'_, Result<HttpResponse, HttpError>>;
    /// Sets a schedule of the session, and replaces one with the same name when the turn is committed.
    fn schedule_set(
        &self,
        name: &str,
        when: &When<'_>,
        options: ScheduleOptions,
    ) -> Result<(), ScheduleError>;
    /// Cancels a schedule of the session. Returns whether there was one with this name.
    fn schedule_cancel(&self, name: &str) -> bool;
    /// Returns the schedules of the session.
    fn schedule_list(&self) -> Vec<Scheduled>;
    /// Emits an event, which is published when the turn is committed.
    fn emit(&self, topic: &str, data: Option<Value>) -> Result<(), EmitError>;
    /// Draws 64 random bits from the seed of a test. Components import the WASI interface instead.
    #[cfg(not(target_arch = "wasm32"))]
    fn random(&self) -> u64;
    /// Writes a line to the agent's log.
    fn log(&self, level: Level, message: &str);
}

/// A conversation of the session, which the host keeps.
pub trait HostConversation {
    /// Sets the system message. Setting the same text again changes nothing.
    fn set_system(&self, text: &str) -> Result<(), InferenceError>;
    fn append_user(&self, text: &str) -> Result<(), InferenceError>;
    /// Answers a tool call of the last assistant message, with a value or the message of an error.
    fn append_tool_result(
        &self,
        call_id: &str,
        outcome: &Result<Value, String>,
    ) -> Result<(), InferenceError>;
    /// Returns all messages so far, a system message first.
    fn messages(&self) -> Vec<Entry>;
    /// Returns the messages after the first `skip`, at most `limit` of them.
    fn messages_page(&self, skip: u32, limit: u32) -> Vec<Entry>;
    /// Returns the reasoning of the last assistant message.
    fn reasoning(&self) -> Option<String>;
    /// Sets what happens in this turn when the conversation outgrows the model's context.
    fn set_compaction(&self, policy: &CompactionPolicy);
    /// Replaces everything between the system message and the most recent messages with a summary.
    fn compact(&self, options: CompactOptions) -> Task<'_, Result<Compaction, InferenceError>>;
    /// Generates the next message. The generation's reasoning is not filled in.
    fn generate(&self, options: GenerateOptions) -> Task<'_, Result<Generation, InferenceError>>;
    /// Does the same as `generate`, but streams the text as it is generated.
    fn stream(&self, options: GenerateOptions) -> Task<'_, Result<Box<dyn HostStream>, InferenceError>>;
    /// Copies the conversation under another name. Both share their KV pages up to this point.
    fn fork(&self, name: &str) -> Result<Rc<dyn HostConversation>, InferenceError>;
    /// Removes all messages.
    fn clear(&self);
    /// Returns the sum over all generations of the conversation.
    fn usage(&self) -> Usage;
}

/// The text of a generation that is being generated.
pub trait HostStream {
    /// Returns the next part of the text, or `None` at its end, after which it must not be called.
    fn next(&mut self) -> Task<'_, Option<String>>;
    /// Resolves when the message has been appended.
    fn finish(self: Box<Self>) -> Task<'static, Result<Generation, InferenceError>>;
}
