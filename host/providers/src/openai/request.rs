//! The body of a request. Parameters with their default value are left out, because servers differ in what they
//! accept.

use serde_json::{Map, Value, json};
use skep_engine::chat::{ChatMessage, ContentPart, Image, Reasoning, Role, ToolCall, ToolChoice, ToolSpec};

use super::strict::is_strict;
use crate::{
    options::{ReasoningControl, UpstreamKind},
    question::{AnswerTool, Form, Question},
};

/// Name of the schema of an answer; OpenAI requires one.
const SCHEMA_NAME: &str = "answer";
/// OpenAI refuses its JSON mode if no message mentions JSON.
const ASK_FOR_JSON: &str = "Answer with a JSON object.";

/// Writes the body. `host` is the server's name: OpenAI itself calls one parameter differently.
pub(crate) fn body(question: &Question<'_>, host: &str) -> Value {
    let options = question.options;
    let mut body = Map::new();
    let mut set = |name: &str, value: Value| {
        body.insert(name.to_owned(), value);
    };
    set("model", question.model.remote_name().into());
    set("messages", messages(question));
    set("stream", true.into());
    set("stream_options", json!({"include_usage": true}));
    let answer_tool = match &question.form {
        Form::Tool(tool) => Some(tool),
        _ => None,
    };
    if !options.tools.is_empty() || answer_tool.is_some() {
        set("tools", tools(&options.tools, answer_tool));
        if let Some(choice) = tool_choice(&options.tool_choice, answer_tool, options.tools.is_empty()) {
            set("tool_choice", choice);
        }
        if !options.parallel_tool_calls || answer_tool.is_some() {
            set("parallel_tool_calls", false.into());
        }
    }
    match &question.form {
        Form::Schema(schema) => {
            let strict = is_strict(schema);
            let schema = json!({"name": SCHEMA_NAME, "strict": strict, "schema": schema});
            set("response_format", json!({"type": "json_schema", "json_schema": schema}));
        }
        Form::Json => set("response_format", json!({"type": "json_object"})),
        Form::Free | Form::Tool(_) => {}
    }
    set_parameters(&mut body, question);
    set_reasoning(&mut body, question);
    if let Some(most) = question.max_tokens() {
        let is_openai = host == "api.openai.com";
        let name = if is_openai { "max_completion_tokens" } else { "max_tokens" };
        body.insert(name.to_owned(), most.into());
    }
    Value::Object(body)
}

/// Writes the body of a text completion.
pub(crate) fn text_body(question: &Question<'_>, text: &str) -> Value {
    let mut body = Map::new();
    body.insert("model".to_owned(), question.model.remote_name().into());
    body.insert("prompt".to_owned(), text.into());
    body.insert("stream".to_owned(), true.into());
    body.insert("stream_options".to_owned(), json!({"include_usage": true}));
    set_parameters(&mut body, question);
    if let Some(most) = question.max_tokens() {
        body.insert("max_tokens".to_owned(), most.into());
    }
    Value::Object(body)
}

/// Writes how much the model reasons.
fn set_reasoning(body: &mut Map<String, Value>, question: &Question<'_>) {
    let Reasoning { enabled, effort, variables, .. } = &question.options.reasoning;
    match question.model.reasoning_control {
        ReasoningControl::Effort => {
            // The largest effort of the format is `xhigh`.
            let effort = match effort.as_deref() {
                _ if *enabled == Some(false) => Some("none"),
                Some("max") => Some("xhigh"),
                effort => effort,
            };
            effort.map(|effort| body.insert("reasoning_effort".to_owned(), effort.into()));
        }
        ReasoningControl::Template => {
            let mut variables = variables.clone();
            enabled.map(|enabled| variables.insert("enable_thinking".to_owned(), enabled.into()));
            if !variables.is_empty() {
                body.insert("chat_template_kwargs".to_owned(), variables.into());
            }
        }
        ReasoningControl::None | ReasoningControl::Budget => {}
    }
}

/// Writes the parameters that chats and text completions share.
fn set_parameters(body: &mut Map<String, Value>, question: &Question<'_>) {
    let options = question.options;
    let mut set = |name: &str, value: Value| {
        body.insert(name.to_owned(), value);
    };
    for (name, value) in question.sampling(UpstreamKind::OpenAi) {
        set(&name, value);
    }
    if !options.sampling.logit_bias.is_empty() {
        let biases = options.sampling.logit_bias.iter().map(|(id, bias)| (id.to_string(), json!(bias)));
        set("logit_bias", Value::Object(biases.collect()));
    }
    if let Some(seed) = question.seed() {
        set("seed", seed.into());
    }
    if !options.stop.is_empty() {
        set("stop", json!(options.stop));
    }
}

fn messages(question: &Question<'_>) -> Value {
    let mut messages: Vec<Value> =
        question.history().map(|sent| message(sent, question.model.capabilities.reasoning)).collect();
    let mentions_json = |message: &ChatMessage| message.content.to_ascii_lowercase().contains("json");
    if question.form == Form::Json && !question.history().any(mentions_json) {
        messages.insert(0, json!({"role": "system", "content": ASK_FOR_JSON}));
    }
    Value::Array(messages)
}

fn message(message: &ChatMessage, with_reasoning: bool) -> Value {
    let mut fields = Map::new();
    fields.insert("role".to_owned(), message.role.as_str().into());
    let content = match message.content.is_empty() && !message.tool_calls.is_empty() {
        true => Value::Null,
        false => content(message),
    };
    fields.insert("content".to_owned(), content);
    if let (Some(reasoning), Role::Assistant, true) = (&message.reasoning, message.role, with_reasoning) {
        fields.insert("reasoning_content".to_owned(), reasoning.as_str().into());
    }
    if !message.tool_calls.is_empty() {
        fields.insert("tool_calls".to_owned(), message.tool_calls.iter().map(call).collect());
    }
    if let Some(id) = &message.tool_call_id {
        fields.insert("tool_call_id".to_owned(), id.as_str().into());
    }
    // The name of a tool is in its call; here, a name is the speaker's.
    if let (Some(name), Role::User | Role::Assistant | Role::System) = (&message.name, message.role) {
        fields.insert("name".to_owned(), name.as_str().into());
    }
    Value::Object(fields)
}

/// Writes the content of a message: a text, or parts if it has images.
pub(crate) fn content(message: &ChatMessage) -> Value {
    if message.images.is_empty() {
        return message.content.as_str().into();
    }
    let part = |part: ContentPart<'_>| match part {
        ContentPart::Text(text) => json!({"type": "text", "text": text}),
        ContentPart::Image(Image { source, detail, .. }) => {
            let mut image = json!({"url": source.url()});
            if let Some(detail) = detail {
                image["detail"] = detail.as_str().into();
            }
            json!({"type": "image_url", "image_url": image})
        }
    };
    message.parts().into_iter().map(part).collect()
}

/// Writes a call in OpenAI's format.
pub(crate) fn call(call: &ToolCall) -> Value {
    let arguments = match call.arguments.trim() {
        "" => "{}",
        arguments => arguments,
    };
    json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
}

/// Writes the tools in OpenAI's format.
pub(crate) fn tools(tools: &[ToolSpec], answer: Option<&AnswerTool>) -> Value {
    let tool = |name: &str, description: &str, parameters: &Value| json!({"type": "function", "function": {"name": name, "description": description, "parameters": parameters}});
    let own = tools.iter().map(|spec| tool(&spec.name, &spec.description, &spec.parameters));
    let answer = answer.map(|answer| tool(&answer.name, AnswerTool::DESCRIPTION, &answer.schema));
    own.chain(answer).collect()
}

fn tool_choice(choice: &ToolChoice, answer: Option<&AnswerTool>, alone: bool) -> Option<Value> {
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    match (choice, answer) {
        (ToolChoice::Auto, Some(answer)) if alone => Some(named(&answer.name)),
        (ToolChoice::None, Some(answer)) => Some(named(&answer.name)),
        (ToolChoice::Auto, Some(_)) => Some("required".into()),
        (ToolChoice::Auto, None) => None,
        (ToolChoice::None, None) => Some("none".into()),
        (ToolChoice::Required, _) => Some("required".into()),
        (ToolChoice::Named(name), _) => Some(named(name)),
    }
}
