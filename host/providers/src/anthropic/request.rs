//! The body of a request.
//!
//! System messages have their own field, roles alternate, and a message is a list of blocks. Cache markers are set
//! on the system text, the last tool and the last message, so that the next request of the conversation finds its
//! prefix. Earlier reasoning is not sent: Anthropic accepts it only with a signature, which messages do not have. So the
//! model does not reason while it reads the results of its calls.

use serde_json::{Map, Value, json};
use skep_engine::chat::{
    ChatMessage, ContentPart, ImageSource, Reasoning, Role, ToolCall, ToolChoice, ToolSpec,
};

use crate::{
    options::{ReasoningControl, UpstreamKind},
    question::{AnswerTool, Form, Question},
};

/// The maximum number of output tokens where neither the request nor the operator sets one; it is required.
pub(crate) const DEFAULT_MAX_TOKENS: usize = 4096;

pub(crate) fn body(question: &Question<'_>) -> Value {
    let options = question.options;
    let mut body = Map::new();
    let mut set = |name: &str, value: Value| {
        body.insert(name.to_owned(), value);
    };
    set("model", question.model.remote_name().into());
    let most = question.max_tokens().or(question.model.max_output).unwrap_or(DEFAULT_MAX_TOKENS);
    set("max_tokens", most.into());
    set("stream", true.into());
    let (system, messages) = messages(question);
    if !system.is_empty() {
        set("system", json!([{"type": "text", "text": system, "cache_control": cache_mark()}]));
    }
    let follows_calls = messages.last().is_some_and(has_results);
    set("messages", messages.into());
    let answer_tool = match &question.form {
        Form::Tool(tool) => Some(tool),
        _ => None,
    };
    if !options.tools.is_empty() || answer_tool.is_some() {
        set("tools", tools(&options.tools, answer_tool).into());
        if let Some(choice) = tool_choice(question, answer_tool) {
            set("tool_choice", choice);
        }
    }
    for (name, value) in question.sampling(UpstreamKind::Anthropic) {
        set(&name, value);
    }
    let Reasoning { enabled, effort, .. } = &options.reasoning;
    match question.model.reasoning_control {
        // The message that called the tools would have to begin with its reasoning.
        ReasoningControl::Budget if follows_calls => {}
        ReasoningControl::Budget => match question.thinking_budget(most) {
            Some(budget) => set("thinking", json!({"type": "enabled", "budget_tokens": budget})),
            None if *enabled == Some(false) => set("thinking", json!({"type": "disabled"})),
            None => {}
        },
        ReasoningControl::Effort => {
            // The smallest effort of the format is `low`.
            let effort = effort.as_deref().map(|effort| if effort == "minimal" { "low" } else { effort });
            effort.iter().for_each(|effort| set("output_config", json!({"effort": effort})));
        }
        ReasoningControl::None | ReasoningControl::Template => {}
    }
    if !options.stop.is_empty() {
        set("stop_sequences", json!(options.stop));
    }
    Value::Object(body)
}

fn cache_mark() -> Value {
    json!({"type": "ephemeral"})
}

/// Returns the system text and the messages with alternating roles.
fn messages(question: &Question<'_>) -> (String, Vec<Value>) {
    let mut system = Vec::new();
    let mut merged: Vec<(&str, Vec<Value>)> = Vec::new();
    for message in question.history() {
        let (role, blocks) = match message.role {
            Role::System => {
                system.push(message.content.as_str());
                continue;
            }
            Role::User => ("user", blocks(message)),
            Role::Tool => ("user", vec![tool_result(message)]),
            Role::Assistant => {
                let calls = message.tool_calls.iter().map(tool_use);
                ("assistant", text_blocks(&message.content).into_iter().chain(calls).collect())
            }
        };
        match merged.last_mut() {
            Some((last, all)) if *last == role => all.extend(blocks),
            _ => merged.push((role, blocks)),
        }
    }
    // The results of calls come before other blocks of their message, as the format requires.
    for (_, blocks) in &mut merged {
        let (results, others): (Vec<Value>, Vec<Value>) =
            std::mem::take(blocks).into_iter().partition(|block| block["type"] == "tool_result");
        blocks.extend(results.into_iter().chain(others));
    }
    merged.retain(|(_, blocks)| !blocks.is_empty());
    if let Some(Value::Object(last)) = merged.last_mut().and_then(|(_, blocks)| blocks.last_mut()) {
        last.insert("cache_control".to_owned(), cache_mark());
    }
    let messages = merged.into_iter().map(|(role, content)| json!({"role": role, "content": content}));
    (system.join("\n\n"), messages.collect())
}

/// Returns whether a message contains the results of calls.
fn has_results(message: &Value) -> bool {
    let blocks = message["content"].as_array();
    blocks.is_some_and(|blocks| blocks.iter().any(|block| block["type"] == "tool_result"))
}

/// Returns the texts and the images of a message.
fn blocks(message: &ChatMessage) -> Vec<Value> {
    let block = |part| match part {
        ContentPart::Text(text) => text_blocks(text),
        ContentPart::Image(image) => {
            let source = match &image.source {
                ImageSource::Url(url) => json!({"type": "url", "url": url.as_str()}),
                ImageSource::Data { kind, base64 } => {
                    json!({"type": "base64", "media_type": kind.media_type(), "data": base64.as_str()})
                }
            };
            vec![json!({"type": "image", "source": source})]
        }
    };
    message.parts().into_iter().flat_map(block).collect()
}

/// Returns one block, or none for an empty text, which the format does not allow.
fn text_blocks(text: &str) -> Vec<Value> {
    match text.trim().is_empty() {
        true => Vec::new(),
        false => vec![json!({"type": "text", "text": text})],
    }
}

fn tool_use(call: &ToolCall) -> Value {
    let input: Option<Map<String, Value>> = serde_json::from_str(&call.arguments).ok();
    json!({"type": "tool_use", "id": call_id(&call.id), "name": call.name, "input": input.unwrap_or_default()})
}

fn tool_result(message: &ChatMessage) -> Value {
    let id = call_id(message.tool_call_id.as_deref().unwrap_or_default());
    json!({"type": "tool_result", "tool_use_id": id, "content": message.content})
}

/// Returns an id in the characters that the format allows; calls of other models may have others.
fn call_id(id: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    id.chars().map(allowed).collect()
}

fn tools(tools: &[ToolSpec], answer: Option<&AnswerTool>) -> Vec<Value> {
    let tool = |name: &str, description: &str, schema: &Value| {
        let mut schema = schema.clone();
        if let Value::Object(fields) = &mut schema {
            fields.entry("type").or_insert_with(|| "object".into());
        }
        json!({"name": name, "description": description, "input_schema": schema})
    };
    let own = tools.iter().map(|spec| tool(&spec.name, &spec.description, &spec.parameters));
    let answer = answer.map(|answer| tool(&answer.name, AnswerTool::DESCRIPTION, &answer.schema));
    let mut tools: Vec<Value> = own.chain(answer).collect();
    if let Some(Value::Object(last)) = tools.last_mut() {
        last.insert("cache_control".to_owned(), cache_mark());
    }
    tools
}

fn tool_choice(question: &Question<'_>, answer: Option<&AnswerTool>) -> Option<Value> {
    let options = question.options;
    let named = |name: &str| json!({"type": "tool", "name": name});
    let mut choice = match (&options.tool_choice, answer) {
        (ToolChoice::Auto, Some(answer)) if options.tools.is_empty() => named(&answer.name),
        (ToolChoice::None, Some(answer)) => named(&answer.name),
        (ToolChoice::Auto, Some(_)) | (ToolChoice::Required, _) => json!({"type": "any"}),
        (ToolChoice::Auto, None) if options.parallel_tool_calls => return None,
        (ToolChoice::Auto, None) => json!({"type": "auto"}),
        (ToolChoice::None, None) => return Some(json!({"type": "none"})),
        (ToolChoice::Named(name), _) => named(name),
    };
    if !options.parallel_tool_calls || answer.is_some() {
        choice["disable_parallel_tool_use"] = true.into();
    }
    Some(choice)
}
