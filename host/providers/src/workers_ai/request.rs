//! The body of a request.

use serde_json::{Map, Value, json};
use skep_engine::chat::{ChatMessage, Role, ToolChoice};

use crate::{
    openai,
    options::UpstreamKind,
    question::{Form, Question},
};

/// The maximum number of output tokens where neither the request nor the operator sets one. The server's own default
/// is 256, which cuts off most answers.
const DEFAULT_MAX_TOKENS: usize = 4096;

pub(crate) fn body(question: &Question<'_>) -> Value {
    let options = question.options;
    let mut body = Map::new();
    let mut set = |name: &str, value: Value| {
        body.insert(name.to_owned(), value);
    };
    set("messages", question.history().map(message).collect());
    // JSON mode cannot be streamed there.
    let streams = !matches!(question.form, Form::Schema(_) | Form::Json);
    set("stream", streams.into());
    match &question.form {
        Form::Schema(schema) => set("response_format", json!({"type": "json_schema", "json_schema": schema})),
        Form::Json => set("response_format", json!({"type": "json_object"})),
        Form::Free | Form::Tool(_) => {}
    }
    let answer_tool = match &question.form {
        Form::Tool(tool) => Some(tool),
        _ => None,
    };
    if !options.tools.is_empty() || answer_tool.is_some() {
        set("tools", openai::tools(&options.tools, answer_tool));
    }
    match (&options.tool_choice, answer_tool) {
        (_, Some(_)) | (ToolChoice::Required, _) => set("tool_choice", "required".into()),
        (ToolChoice::Named(name), _) => {
            set("tool_choice", json!({"type": "function", "function": {"name": name}}));
        }
        (ToolChoice::None, None) if !options.tools.is_empty() => set("tool_choice", "none".into()),
        (ToolChoice::Auto | ToolChoice::None, None) => {}
    }
    for (name, value) in question.sampling(UpstreamKind::WorkersAi) {
        set(&name, value);
    }
    if let Some(seed) = question.seed() {
        set("seed", seed.into());
    }
    if !options.stop.is_empty() {
        set("stop", json!(options.stop));
    }
    let most = question.max_tokens().or(question.model.max_output).unwrap_or(DEFAULT_MAX_TOKENS);
    set("max_tokens", most.into());
    Value::Object(body)
}

fn message(message: &ChatMessage) -> Value {
    let mut fields = Map::new();
    fields.insert("role".to_owned(), message.role.as_str().into());
    fields.insert("content".to_owned(), openai::content(message));
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(openai::call);
        fields.insert("tool_calls".to_owned(), calls.collect());
    }
    if let (Role::Tool, Some(id)) = (message.role, &message.tool_call_id) {
        fields.insert("tool_call_id".to_owned(), id.as_str().into());
    }
    if let (Role::Tool, Some(name)) = (message.role, &message.name) {
        fields.insert("name".to_owned(), name.as_str().into());
    }
    Value::Object(fields)
}
