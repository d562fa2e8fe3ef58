//! Messages for templates that write calls themselves, and the spelling of the model's own answers in what they write.
//!
//! Invariant: an answer keeps the text that the model gave it as long as everything before it is what the model saw. From
//! the first difference on, the template's spelling is kept.

use serde_json::{Map, Value, json};

use super::dialect::Dialect;
use super::guard::Guard;
use super::message::{ChatMessage, Role, ToolCall};
use super::render::Rendering;

/// The messages of a conversation as a template gets them.
pub(super) struct NativeMessages {
    pub(super) json: Vec<Value>,
    /// Answers of the model, each after its reasoning, in the order of the numbers of their marks.
    answers: Vec<String>,
}

/// The form in which a template gets the arguments of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arguments {
    Object,
    /// JSON as a text, for templates that put texts together.
    Text,
}

/// Prepares messages. `declared` is a description of the tools for the system message.
pub(super) fn messages(
    messages: &[&ChatMessage],
    dialect: &Dialect,
    declared: Option<String>,
    arguments: Arguments,
    guard: &mut Guard,
) -> NativeMessages {
    let single = if dialect.markup.allows_many() { Vec::new() } else { single_calls(messages) };
    let messages: Vec<&ChatMessage> =
        if dialect.markup.allows_many() { messages.to_vec() } else { single.iter().collect() };
    let ids = dialect.markup.ids.of(&messages);
    let mut native = NativeMessages { json: Vec::with_capacity(messages.len() + 1), answers: Vec::new() };
    let mut declared = declared;
    if let Some(text) = declared.take_if(|_| messages.first().is_none_or(|first| first.role != Role::System))
    {
        native.json.push(json!({"role": "system", "content": text}));
    }
    for (at, message) in messages.iter().enumerate() {
        let mut content = guard.protect(&message.content).into_owned();
        if let Some(text) = declared.take() {
            content = format!("{content}\n\n{text}");
        }
        if let Some(answer) = message.raw.as_deref().and_then(|raw| dialect.answer_of(raw)) {
            content = format!("{}{content}", guard.mark(native.answers.len()));
            native.answers.push(answer.to_owned());
        }
        let mut json = json!({"role": message.role.as_str(), "content": content});
        if let Some(name) = &message.name {
            json["name"] = guard.protect(name).into();
        }
        if let Some(id) = ids.answer(at).or(message.tool_call_id.as_deref()) {
            json["tool_call_id"] = guard.protect(id).into();
        }
        if let Some(reasoning) = &message.reasoning {
            json[dialect.markup.reasoning_field] = guard.protect(reasoning).into();
        }
        if !message.tool_calls.is_empty() {
            let calls = message.tool_calls.iter().enumerate();
            let calls = calls.map(|(index, call)| tool_call(call, ids.call(at, index), arguments, guard));
            json["tool_calls"] = calls.collect();
        }
        native.json.push(json);
    }
    native
}

fn tool_call(call: &ToolCall, id: &str, form: Arguments, guard: &mut Guard) -> Value {
    let mut arguments = Value::Object(call.arguments_object());
    if form == Arguments::Text {
        let is_object = serde_json::from_str::<Map<String, Value>>(&call.arguments).is_ok();
        arguments = if is_object { call.arguments.clone() } else { arguments.to_string() }.into();
    }
    guard.protect_json(&mut arguments);
    let name = guard.protect(&call.name);
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// Divides messages with several calls, each call before its results, for templates that know one call in a message.
fn single_calls(messages: &[&ChatMessage]) -> Vec<ChatMessage> {
    let mut out: Vec<ChatMessage> = Vec::with_capacity(messages.len());
    let mut at = 0;
    while let Some(message) = messages.get(at) {
        at += 1;
        if message.tool_calls.len() < 2 {
            out.push((*message).clone());
            continue;
        }
        let results = messages[at..].iter().take_while(|message| message.role == Role::Tool).count();
        let results = &messages[at..at + results];
        at += results.len();
        let answers =
            |call: &ToolCall, result: &&&ChatMessage| result.tool_call_id.as_ref() == Some(&call.id);
        for (index, call) in message.tool_calls.iter().enumerate() {
            let first = index == 0;
            out.push(ChatMessage {
                tool_calls: vec![call.clone()],
                content: if first { message.content.clone() } else { String::new() },
                reasoning: message.reasoning.clone().filter(|_| first),
                raw: None,
                ..(*message).clone()
            });
            out.extend(results.iter().filter(|result| answers(call, result)).map(|result| (*result).clone()));
        }
        let is_stray = |result: &&&ChatMessage| !message.tool_calls.iter().any(|call| answers(call, result));
        out.extend(results.iter().filter(is_stray).map(|result| (*result).clone()));
    }
    out
}

impl NativeMessages {
    /// Returns the text of a template with the answers as the model spelled them. An answer ends with the first of
    /// `ends` after its mark; messages contain none of these texts, because the guard has replaced them.
    pub(super) fn spliced(&self, text: &str, guard: &Guard, ends: &[&str], known: &str) -> Rendering {
        let mut out = Rendering { text: String::with_capacity(text.len()), literals: Vec::new() };
        let mut rest = text;
        for (number, answer) in self.answers.iter().enumerate() {
            let mark = guard.mark(number);
            // A template may leave a message out, or its text.
            let Some((before, after)) = rest.split_once(&mark) else { continue };
            out.push(guard.restore(before));
            let end = ends.iter().filter_map(|end| after.find(end)).min();
            let (spelled, behind) = after.split_at(end.unwrap_or(0));
            let is_known = known.get(..out.text.len()) == Some(&out.text)
                && known[out.text.len()..].starts_with(answer.as_str());
            match is_known && end.is_some() {
                true => out.text.push_str(answer),
                false => out.push(guard.restore(spelled)),
            }
            rest = behind;
        }
        out.push(guard.restore(rest));
        out
    }
}

impl Rendering {
    fn push(&mut self, more: Rendering) {
        let offset = self.text.len();
        self.text.push_str(&more.text);
        self.literals.extend(more.literals.into_iter().map(|range| range.start + offset..range.end + offset));
    }
}
