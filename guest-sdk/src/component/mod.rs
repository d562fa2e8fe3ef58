//! The agent as a component: the generated bindings, the implementation of the host traits over them, and the
//! exports.
//!
//! Only this file and its submodules know the bindings of `skep:agent`. JSON is text on the interface and a parsed value in
//! the SDK; the conversion happens here.

#[doc(hidden)]
pub mod bindings {
    #![allow(missing_docs, rust_2018_idioms, clippy::all)]

    wit_bindgen::generate!({
        path: "../wit/skep-agent",
        world: "full-agent",
        pub_export_macro: true,
        export_macro_name: "export_agent",
    });
}

mod http;
mod schedule;
mod tools;

use std::rc::Rc;
use std::sync::Once;

use serde_json::Value;

use self::bindings::exports::skep::agent::{alarm_handler, event_handler, handler, tool_handler};
use self::bindings::skep::agent::{inference as wit, log, state, timer, types};
use crate::context::TurnInfo;
use crate::example;
use crate::host::{Host, HostConversation, HostStream, Level, ScheduleOptions, Task, When};
use crate::{
    Agent, AgentError, Alarm, CompactOptions, Compaction, CompactionPolicy, EmitError, Entry, Event,
    FetchRequest, Finish, GenerateOptions, Generation, HostToolError, HostToolInfo, HttpError, HttpRequest,
    HttpResponse, InferenceError, Message, ModelInfo, Origin, Output, ScheduleError, Scheduled, StateError,
    Timing, ToolCall, ToolChoice, ToolHints, Usage,
};

pub use self::bindings::export_agent as export;

/// Source of the agent for the exports. `#[agent]` implements it.
pub trait AgentSource {
    /// Returns the agent.
    fn agent() -> Agent;
}

impl<S: AgentSource> handler::Guest for S {
    fn describe() -> handler::Description {
        let agent = S::agent();
        let tools = agent.tools().into_iter().map(|mut tool| {
            example::annotate_input(&mut tool.input_schema, &tool.examples);
            types::ToolDefinition {
                name: tool.name,
                description: tool.description,
                input_schema: tool.input_schema.to_string(),
                output_schema: Some(tool.output_schema.to_string()),
                hints: hints_to(tool.hints),
                timeout_ms: tool.timeout_ms,
                retries: tool.retries,
                needs_approval: tool.needs_approval,
            }
        });
        handler::Description { description: agent.description().to_owned(), tools: tools.collect() }
    }

    async fn on_message(message: handler::Message) -> Result<handler::Reply, types::AgentError> {
        log_panics();
        let message = message_from(message).map_err(agent_error_to)?;
        let reply = S::agent().run_turn(Rc::new(Bindings), message).await.map_err(agent_error_to)?;
        Ok(handler::Reply { text: reply.text, data: reply.data.map(|data| data.to_string()) })
    }
}

impl<S: AgentSource> alarm_handler::Guest for S {
    async fn on_alarm(alarm: alarm_handler::Alarm) -> Result<(), types::AgentError> {
        log_panics();
        let alarm_handler::Alarm { id, name, session, turn, due_at_ms, received_at_ms, .. } = alarm;
        let data = data_from(alarm.data).map_err(agent_error_to)?;
        let (attempt, missed) = (alarm.attempt, alarm.missed);
        let alarm = Alarm { id, name, data, session, turn, due_at_ms, received_at_ms, attempt, missed };
        S::agent().run_alarm(Rc::new(Bindings), alarm).await.map_err(agent_error_to)
    }
}

impl<S: AgentSource> event_handler::Guest for S {
    async fn on_event(event: event_handler::Event) -> Result<(), types::AgentError> {
        log_panics();
        let event_handler::Event { id, topic, session, turn, at_ms, received_at_ms, attempt, data } = event;
        let data = data_from(data).map_err(agent_error_to)?;
        let event = Event { id, topic, data, session, turn, at_ms, received_at_ms, attempt };
        S::agent().run_event(Rc::new(Bindings), event).await.map_err(agent_error_to)
    }
}

impl<S: AgentSource> tool_handler::Guest for S {
    async fn call_tool(invocation: tool_handler::Invocation) -> Result<String, String> {
        log_panics();
        let tool_handler::Invocation { name, arguments, session, turn, received_at_ms } = invocation;
        let arguments = serde_json::from_str(&arguments).map_err(|error| error.to_string())?;
        let info = TurnInfo::new(&session, turn, received_at_ms);
        let result = S::agent().call_tool(Rc::new(Bindings), info, &name, arguments).await;
        result.map(|value| value.to_string()).map_err(|error| error.message().to_owned())
    }
}

/// Logs panics. A component has no standard error, so without this hook a panic would leave no message.
fn log_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        std::panic::set_hook(Box::new(|panic| log::write(log::Level::Error, &panic.to_string())));
    });
}

struct Bindings;

impl Host for Bindings {
    fn open(&self, name: &str, model: Option<&str>) -> Result<Rc<dyn HostConversation>, InferenceError> {
        let conversation = wit::Conversation::open(name, model).map_err(error_from)?;
        Ok(Rc::new(conversation))
    }

    fn complete<'a>(
        &'a self,
        model: Option<&'a str>,
        prompt: &'a str,
        options: GenerateOptions,
    ) -> Task<'a, Result<Generation, InferenceError>> {
        Box::pin(async move {
            let model = model.map(str::to_owned);
            let generation = wit::complete(model, prompt.to_owned(), options_to(options)).await;
            generation_from(generation.map_err(error_from)?)
        })
    }

    fn models(&self) -> Vec<ModelInfo> {
        let models = wit::models().into_iter();
        models
            .map(|model| ModelInfo {
                name: model.name,
                context_length: model.context_length,
                is_default: model.is_default,
            })
            .collect()
    }

    fn state_get(&self, key: &str) -> Option<Vec<u8>> {
        state::get(key)
    }

    fn state_set(&self, key: &str, value: &[u8]) -> Result<(), StateError> {
        state::set(key, value).map_err(state_error_from)
    }

    fn state_delete(&self, key: &str) -> bool {
        state::delete(key)
    }

    fn state_keys(&self, prefix: &str, after: Option<&str>, limit: u32) -> Vec<String> {
        state::keys(prefix, after, limit)
    }

    fn state_compare_and_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        value: &[u8],
    ) -> Result<bool, StateError> {
        state::compare_and_set(key, expected, value).map_err(state_error_from)
    }

    fn sleep(&self, ms: u32) -> Task<'_, ()> {
        Box::pin(timer::sleep(ms))
    }

    fn tools(&self) -> Task<'_, Vec<HostToolInfo>> {
        Box::pin(tools::list())
    }

    fn approve<'a>(&'a self, call_id: &'a str) -> Task<'a, Result<(), String>> {
        Box::pin(tools::approve(call_id))
    }

    fn call_tool<'a>(
        &'a self,
        name: &'a str,
        arguments: &'a Value,
        timeout_ms: Option<u32>,
    ) -> Task<'a, Result<Value, HostToolError>> {
        Box::pin(tools::call(name, arguments, timeout_ms))
    }

    fn secret(&self, name: &str) -> Result<String, HttpError> {
        http::secret(name)
    }

    fn fetch(&self, request: FetchRequest) -> Task<'_, Result<HttpResponse, HttpError>> {
        Box::pin(http::fetch(request))
    }

    fn schedule_set(
        &self,
        name: &str,
        when: &When<'_>,
        options: ScheduleOptions,
    ) -> Result<(), ScheduleError> {
        schedule::set(name, when, options)
    }

    fn schedule_cancel(&self, name: &str) -> bool {
        schedule::cancel(name)
    }

    fn schedule_list(&self) -> Vec<Scheduled> {
        schedule::list()
    }

    fn emit(&self, topic: &str, data: Option<Value>) -> Result<(), EmitError> {
        schedule::emit(topic, data)
    }

    fn log(&self, level: Level, message: &str) {
        let level = match level {
            Level::Debug => log::Level::Debug,
            Level::Info => log::Level::Info,
            Level::Warn => log::Level::Warn,
            Level::Error => log::Level::Error,
        };
        log::write(level, message);
    }
}

impl HostConversation for wit::Conversation {
    fn set_system(&self, text: &str) -> Result<(), InferenceError> {
        wit::Conversation::set_system(self, text).map_err(error_from)
    }

    fn append_user(&self, text: &str) -> Result<(), InferenceError> {
        wit::Conversation::append_user(self, text).map_err(error_from)
    }

    fn append_tool_result(
        &self,
        call_id: &str,
        outcome: &Result<Value, String>,
    ) -> Result<(), InferenceError> {
        let outcome = outcome.as_ref().map(Value::to_string).map_err(String::clone);
        let result = types::ToolResult { call_id: call_id.to_owned(), outcome };
        wit::Conversation::append_tool_result(self, &result).map_err(error_from)
    }

    fn messages(&self) -> Vec<Entry> {
        wit::Conversation::messages(self).into_iter().map(entry_from).collect()
    }

    fn messages_page(&self, skip: u32, limit: u32) -> Vec<Entry> {
        wit::Conversation::messages_page(self, skip, limit).into_iter().map(entry_from).collect()
    }

    fn reasoning(&self) -> Option<String> {
        wit::Conversation::reasoning(self, None)
    }

    fn set_compaction(&self, policy: &CompactionPolicy) {
        let policy = match policy {
            CompactionPolicy::Auto => wit::CompactionPolicy::Auto,
            CompactionPolicy::Off => wit::CompactionPolicy::Off,
            CompactionPolicy::Summary(text) => wit::CompactionPolicy::Summary(text.clone()),
        };
        wit::Conversation::set_compaction(self, &policy);
    }

    fn compact(&self, options: CompactOptions) -> Task<'_, Result<Compaction, InferenceError>> {
        let CompactOptions { keep_recent, summary, max_tokens } = options;
        Box::pin(async move {
            let options = wit::CompactOptions { keep_recent, summary, max_tokens };
            let wit::Compaction { dropped, summary } =
                wit::Conversation::compact(self, options).await.map_err(error_from)?;
            Ok(Compaction { dropped, summary })
        })
    }

    fn generate(&self, options: GenerateOptions) -> Task<'_, Result<Generation, InferenceError>> {
        Box::pin(async move {
            let generation = wit::Conversation::generate(self, options_to(options)).await;
            generation_from(generation.map_err(error_from)?)
        })
    }

    fn stream(&self, options: GenerateOptions) -> Task<'_, Result<Box<dyn HostStream>, InferenceError>> {
        Box::pin(async move {
            let (text, end) =
                wit::Conversation::stream(self, options_to(options)).await.map_err(error_from)?;
            Ok(Box::new(ComponentStream { text, end }) as Box<dyn HostStream>)
        })
    }

    fn fork(&self, name: &str) -> Result<Rc<dyn HostConversation>, InferenceError> {
        Ok(Rc::new(wit::Conversation::fork(self, name).map_err(error_from)?))
    }

    fn clear(&self) {
        wit::Conversation::clear(self);
    }

    fn usage(&self) -> Usage {
        usage_from(wit::Conversation::usage(self))
    }
}

struct ComponentStream {
    text: wit_bindgen::StreamReader<String>,
    end: wit_bindgen::FutureReader<Result<wit::Generation, types::Error>>,
}

impl HostStream for ComponentStream {
    fn next(&mut self) -> Task<'_, Option<String>> {
        Box::pin(self.text.next())
    }

    fn finish(self: Box<Self>) -> Task<'static, Result<Generation, InferenceError>> {
        Box::pin(async move { generation_from(self.end.await.map_err(error_from)?) })
    }
}

fn message_from(message: handler::Message) -> Result<Message, AgentError> {
    let data = data_from(message.data)?;
    let origin = match message.origin {
        handler::Origin::Direct => Origin::Direct,
        handler::Origin::Chat => Origin::Chat,
        handler::Origin::Http(request) => Origin::Http(HttpRequest {
            method: request.method,
            path: request.path,
            query: request.query,
            parameters: request.parameters,
            content_type: request.content_type,
        }),
    };
    Ok(Message {
        text: message.text,
        data,
        session: message.session,
        turn: message.turn,
        received_at_ms: message.received_at_ms,
        origin,
    })
}

fn data_from(data: Option<String>) -> Result<Option<Value>, AgentError> {
    let data = data.map(|data| serde_json::from_str(&data)).transpose();
    data.map_err(|error| AgentError::InvalidMessage(format!("its data is not JSON: {error}")))
}

fn agent_error_to(error: AgentError) -> types::AgentError {
    match error {
        AgentError::InvalidMessage(why) => types::AgentError::InvalidMessage(why),
        AgentError::Inference(error) => types::AgentError::Inference(error_to(error)),
        other => types::AgentError::Failed(other.to_string()),
    }
}

fn options_to(options: GenerateOptions) -> wit::GenerateOptions {
    let GenerateOptions { sampling, max_tokens, stop, tools, tool_choice, output, examples, visible } =
        options;
    wit::GenerateOptions {
        sampling: wit::Sampling {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            frequency_penalty: sampling.frequency_penalty,
            presence_penalty: sampling.presence_penalty,
            repetition_penalty: sampling.repetition_penalty,
            seed: sampling.seed,
        },
        max_tokens,
        stop,
        tools,
        tool_choice: match tool_choice {
            ToolChoice::Auto => wit::ToolChoice::Auto,
            ToolChoice::None => wit::ToolChoice::None,
            ToolChoice::Required => wit::ToolChoice::Required,
            ToolChoice::Named(name) => wit::ToolChoice::Named(name),
        },
        output: match output {
            Output::Text => wit::OutputFormat::Text,
            Output::JsonSchema(mut schema) => {
                example::annotate_output(&mut schema, &examples);
                wit::OutputFormat::JsonSchema(schema.to_string())
            }
            Output::Regex(regex) => wit::OutputFormat::Regex(regex),
            Output::Grammar(grammar) => wit::OutputFormat::Grammar(grammar),
        },
        visible,
    }
}

fn generation_from(generation: wit::Generation) -> Result<Generation, InferenceError> {
    Ok(Generation {
        text: generation.text,
        reasoning: None,
        tool_calls: generation.tool_calls.into_iter().map(call_from).collect::<Result<_, _>>()?,
        finish: match generation.finish {
            wit::FinishReason::Stop => Finish::Stop,
            wit::FinishReason::Length => Finish::Length,
            wit::FinishReason::ToolCalls => Finish::ToolCalls,
        },
        usage: usage_from(generation.usage),
        timing: Timing {
            queue_us: generation.timing.queue_us,
            first_token_us: generation.timing.first_token_us,
            total_us: generation.timing.total_us,
        },
    })
}

fn call_from(call: types::ToolCall) -> Result<ToolCall, InferenceError> {
    let arguments = serde_json::from_str(&call.arguments).map_err(|error| {
        InferenceError::Internal(format!("the arguments of `{}` are not JSON: {error}", call.name))
    })?;
    Ok(ToolCall { id: call.id, name: call.name, arguments })
}

fn entry_from(entry: wit::Entry) -> Entry {
    match entry {
        wit::Entry::System(text) => Entry::System(text),
        wit::Entry::User(text) => Entry::User(text),
        wit::Entry::Assistant(entry) => Entry::Assistant {
            text: entry.text,
            tool_calls: entry.tool_calls.into_iter().filter_map(|call| call_from(call).ok()).collect(),
        },
        wit::Entry::Tool(result) => Entry::Tool {
            call_id: result.call_id,
            outcome: result.outcome.map(|json| serde_json::from_str(&json).unwrap_or(Value::String(json))),
        },
    }
}

fn hints_to(hints: ToolHints) -> types::ToolHints {
    let ToolHints { read_only, destructive, idempotent, open_world } = hints;
    types::ToolHints { read_only, destructive, idempotent, open_world }
}

fn usage_from(usage: types::Usage) -> Usage {
    Usage {
        prompt_tokens: usage.prompt_tokens,
        cached_tokens: usage.cached_tokens,
        completion_tokens: usage.completion_tokens,
    }
}

fn state_error_from(error: state::StateError) -> StateError {
    match error {
        state::StateError::InvalidKey(why) => StateError::InvalidKey(why),
        state::StateError::QuotaExceeded(why) => StateError::QuotaExceeded(why),
    }
}

fn error_from(error: types::Error) -> InferenceError {
    match error {
        types::Error::Busy(retry_after_ms) => InferenceError::Busy { retry_after_ms },
        types::Error::ContextOverflow(limit_tokens) => InferenceError::ContextOverflow { limit_tokens },
        types::Error::Truncated => InferenceError::Truncated,
        types::Error::SchemaInvalid(at) => InferenceError::SchemaInvalid(at),
        types::Error::ModelUnknown(known) => InferenceError::ModelUnknown(known),
        types::Error::Denied(why) => InferenceError::Denied(why),
        types::Error::InvalidArgument(what) => InferenceError::InvalidArgument(what),
        types::Error::Cancelled => InferenceError::Cancelled,
        types::Error::Internal(what) => InferenceError::Internal(what),
    }
}

fn error_to(error: InferenceError) -> types::Error {
    match error {
        InferenceError::Busy { retry_after_ms } => types::Error::Busy(retry_after_ms),
        InferenceError::ContextOverflow { limit_tokens } => types::Error::ContextOverflow(limit_tokens),
        InferenceError::Truncated => types::Error::Truncated,
        InferenceError::SchemaInvalid(at) => types::Error::SchemaInvalid(at),
        InferenceError::ModelUnknown(known) => types::Error::ModelUnknown(known),
        InferenceError::Denied(why) => types::Error::Denied(why),
        InferenceError::InvalidArgument(what) => types::Error::InvalidArgument(what),
        InferenceError::Cancelled => types::Error::Cancelled,
        InferenceError::Internal(what) => types::Error::Internal(what),
    }
}
