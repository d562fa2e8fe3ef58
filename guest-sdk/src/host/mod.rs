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

pub trait Host {
    fn open(&self, name: &str, model: Option<&str>) -> Result<Rc<dyn HostConversation>, InferenceError>;
    fn complete<'a>(
        &'a self,
        model: Option<&'a str>,
        prompt: &'a str,
        options: GenerateOptions,
    ) -> Task<'a, Result<Generation, InferenceError>>;
    fn models(&self) -> Vec<ModelInfo>;
    fn state_get(&self, key: &str) -> Option<Vec<u8>>;
    fn state_set(&self, key: &str, value: &[u8]) -> Result<(), StateError>;
    fn state_delete(&self, key: &str) -> bool;
    fn state_keys(&self, prefix: &str, after: Option<&str>, limit: u32) -> Vec<String>;
    fn state_compare_and_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        value: &[u8],
    ) -> Result<bool, StateError>;
    fn sleep(&self, ms: u32) -> Task<'_, ()>;
    fn tools(&self) -> Task<'_, Vec<HostToolInfo>>;
    fn approve<'a>(&'a self, call_id: &'a str) -> Task<'a, Result<(), String>>;
    fn call_tool<'a>(
        &'a self,
        name: &'a str,
        arguments: &'a Value,
        timeout_ms: Option<u32>,
    ) -> Task<'a, Result<Value, HostToolError>>;
    fn secret(&self, name: &str) -> Result<String, HttpError>;
    fn fetch(&self, request: FetchRequest) -> Task<'_, Result<HttpResponse, HttpError>>;
    fn schedule_set(
        &self,
        name: &str,
        when: &When<'_>,
        options: ScheduleOptions,
    ) -> Result<(), ScheduleError>;
    fn schedule_cancel(&self, name: &str) -> bool;
    fn schedule_list(&self) -> Vec<Scheduled>;
    fn emit(&self, topic: &str, data: Option<Value>) -> Result<(), EmitError>;
    #[cfg(not(target_arch = "wasm32"))]
    fn random(&self) -> u64;
    fn log(&self, level: Level, message: &str);
}

pub trait HostConversation {
    fn set_system(&self, text: &str) -> Result<(), InferenceError>;
    fn append_user(&self, text: &str) -> Result<(), InferenceError>;
    fn append_tool_result(
        &self,
        call_id: &str,
        outcome: &Result<Value, String>,
    ) -> Result<(), InferenceError>;
    fn messages(&self) -> Vec<Entry>;
    fn messages_page(&self, skip: u32, limit: u32) -> Vec<Entry>;
    /// Returns the reasoning of the last assistant message.
    fn reasoning(&self) -> Option<String>;
    fn set_compaction(&self, policy: &CompactionPolicy);
    fn compact(&self, options: CompactOptions) -> Task<'_, Result<Compaction, InferenceError>>;
    /// Generates the next message. The generation's reasoning is not filled in.
    fn generate(&self, options: GenerateOptions) -> Task<'_, Result<Generation, InferenceError>>;
    fn stream(&self, options: GenerateOptions) -> Task<'_, Result<Box<dyn HostStream>, InferenceError>>;
    fn fork(&self, name: &str) -> Result<Rc<dyn HostConversation>, InferenceError>;
    fn clear(&self);
    fn usage(&self) -> Usage;
}

pub trait HostStream {
    fn next(&mut self) -> Task<'_, Option<String>>;
    fn finish(self: Box<Self>) -> Task<'static, Result<Generation, InferenceError>>;
}
