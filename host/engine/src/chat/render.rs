//! From messages to the text of the model's chat template.
//!
//! Invariant: the text is what the template makes of the messages; beside it stand the places where something that was
//! said has the text of a special token, so that it can be encoded as mere text.
//!
//! A template that knows tools and writes our markup gets them as they are. Any other is told of them in the system
//! message, and gets results as user messages.

use std::borrow::Cow;
use std::ops::Range;

use serde_json::{Value, json};
use skep_model::{ChatTemplate, Tokenizer};
use uuid::Uuid;

use super::markup::{self, CLOSE, OPEN, RESPONSE_CLOSE, RESPONSE_OPEN};
use super::message::{ChatMessage, Role, ToolSpec};
use crate::EngineError;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rendering {
    pub(super) text: String,
    /// Byte ranges of `text`, in order, that are never special tokens.
    pub(super) literals: Vec<Range<usize>>,
}

/// Renders the conversation and the opening of the assistant's next message.
pub(super) fn render(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    messages: &[ChatMessage],
    tools: &[ToolSpec],
) -> Result<Rendering, EngineError> {
    let invalid = |message: String| EngineError::InvalidRequest { parameter: "messages".into(), message };
    if messages.is_empty() {
        return Err(invalid("there are none; give at least one".into()));
    }
    let mut guard = Guard::new(tokenizer);
    let native = template.knows_tools() && template.source().contains(OPEN);
    let described = (!tools.is_empty()).then(|| describe(tools, &mut guard));
    let (json, tools) = if native {
        (native_messages(messages, &mut guard), described.map(Value::Array))
    } else {
        (plain_messages(messages, described, &mut guard), None)
    };
    let text = template.render(&json, tools.as_ref(), true).map_err(|error| invalid(error.to_string()))?;
    Ok(guard.restore(text))
}

/// Tools in OpenAI's form, which templates expect.
fn describe(tools: &[ToolSpec], guard: &mut Guard) -> Vec<Value> {
    let describe = |tool: &ToolSpec| {
        let mut parameters = tool.parameters.clone();
        guard.protect_json(&mut parameters);
        let description = guard.protect(&tool.description);
        json!({"type": "function", "function": {"name": tool.name, "description": description, "parameters": parameters}})
    };
    tools.iter().map(describe).collect()
}

fn native_messages(messages: &[ChatMessage], guard: &mut Guard) -> Vec<Value> {
    let native = |message: &ChatMessage| {
        let mut json = json!({"role": message.role.as_str(), "content": said(message, guard)});
        for (key, value) in [("tool_call_id", &message.tool_call_id), ("name", &message.name)] {
            if let Some(value) = value {
                json[key] = guard.protect(value).into();
            }
        }
        json
    };
    messages.iter().map(native).collect()
}

fn plain_messages(messages: &[ChatMessage], tools: Option<Vec<Value>>, guard: &mut Guard) -> Vec<Value> {
    let mut out: Vec<Value> = Vec::with_capacity(messages.len() + 1);
    let mut results: Vec<String> = Vec::new();
    let mut instructions = tools.map(|tools| instructions(&tools));
    if let Some(text) = instructions.take_if(|_| messages[0].role != Role::System) {
        out.push(json!({"role": "system", "content": text}));
    }
    for message in messages {
        if message.role == Role::Tool {
            results.push(format!("{RESPONSE_OPEN}\n{}\n{RESPONSE_CLOSE}", guard.protect(&message.content)));
            continue;
        }
        flush_results(&mut results, &mut out);
        let mut content = said(message, guard);
        if let Some(text) = instructions.take() {
            content = format!("{content}\n\n{text}");
        }
        out.push(json!({"role": message.role.as_str(), "content": content}));
    }
    flush_results(&mut results, &mut out);
    out
}

/// Results that answer one assistant message come in one user message: many templates want the roles to alternate.
fn flush_results(results: &mut Vec<String>, out: &mut Vec<Value>) {
    if !results.is_empty() {
        out.push(json!({"role": "user", "content": std::mem::take(results).join("\n")}));
    }
}

fn said(message: &ChatMessage, guard: &mut Guard) -> String {
    if message.role != Role::Assistant {
        return guard.protect(&message.content).into_owned();
    }
    match &message.raw {
        Some(raw) => guard.protect(raw).into_owned(),
        None => guard.protect(&markup::assistant(&message.content, &message.tool_calls)).into_owned(),
    }
}

fn instructions(tools: &[Value]) -> String {
    let mut text = String::from(
        "You can call tools. Each line below describes one tool, with the JSON Schema of its arguments:\n<tools>\n",
    );
    for tool in tools {
        text.push_str(&tool["function"].to_string());
        text.push('\n');
    }
    text.push_str("</tools>\nTo call a tool, write its name and its arguments as JSON, in this form:\n");
    text.push_str(&format!("{OPEN}\n{{\"name\": \"NAME\", \"arguments\": {{…}}}}\n{CLOSE}\n"));
    text.push_str(&format!(
        "You are then given what it returned between {RESPONSE_OPEN} and {RESPONSE_CLOSE}. \
         Answer without a call when no tool helps."
    ));
    text
}

/// Replaces the text of special tokens in what was said by placeholders, which nobody can guess, and puts it back once
/// the template has made its text.
struct Guard {
    specials: Vec<String>,
    /// By first byte, whether any special token begins with it.
    first: [bool; 256],
    nonce: String,
    replaced: Vec<String>,
}

/// A private-use character: it stands in no vocabulary as a part of words, and no template looks for it.
const EDGE: char = '\u{F8F0}';

impl Guard {
    fn new(tokenizer: &Tokenizer) -> Self {
        let mut specials: Vec<String> = (0..tokenizer.vocabulary_size() as u32)
            .filter(|&id| tokenizer.is_special(id))
            .filter_map(|id| tokenizer.token_text(id))
            // Our own markers may be said: they are in every system message that describes tools.
            .filter(|text| !text.is_empty() && *text != OPEN && *text != CLOSE)
            .map(str::to_owned)
            .collect();
        // Of two that begin at one place the longer is the one that a tokenizer finds.
        specials.sort_by_key(|text| std::cmp::Reverse(text.len()));
        let mut first = [false; 256];
        for text in &specials {
            first[usize::from(text.as_bytes()[0])] = true;
        }
        Guard { specials, first, nonce: Uuid::now_v7().simple().to_string(), replaced: Vec::new() }
    }

    fn protect<'a>(&mut self, text: &'a str) -> Cow<'a, str> {
        let mut out = String::new();
        let (mut copied, mut at) = (0, 0);
        while at < text.len() {
            let found = self.first[usize::from(text.as_bytes()[at])]
                .then(|| {
                    self.specials.iter().find(|special| text.as_bytes()[at..].starts_with(special.as_bytes()))
                })
                .flatten();
            let Some(special) = found else {
                at += 1;
                continue;
            };
            out.push_str(&text[copied..at]);
            out.push_str(&format!("{EDGE}{}:{}{EDGE}", self.nonce, self.replaced.len()));
            at += special.len();
            copied = at;
            self.replaced.push(special.clone());
        }
        if copied == 0 {
            return Cow::Borrowed(text);
        }
        out.push_str(&text[copied..]);
        Cow::Owned(out)
    }

    fn protect_json(&mut self, value: &mut Value) {
        match value {
            Value::String(text) => {
                if let Cow::Owned(safe) = self.protect(text) {
                    *text = safe;
                }
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.protect_json(item)),
            Value::Object(map) => {
                let entries = std::mem::take(map);
                for (key, mut value) in entries {
                    self.protect_json(&mut value);
                    map.insert(self.protect(&key).into_owned(), value);
                }
            }
            _ => {}
        }
    }

    fn restore(&self, text: String) -> Rendering {
        if self.replaced.is_empty() {
            return Rendering { text, literals: Vec::new() };
        }
        let open = format!("{EDGE}{}:", self.nonce);
        let (mut out, mut literals) = (String::with_capacity(text.len()), Vec::new());
        let mut rest = text.as_str();
        while let Some(at) = rest.find(&open) {
            let (before, after) = rest.split_at(at);
            let after = &after[open.len()..];
            let Some(end) = after.find(EDGE) else { break };
            let special = after[..end].parse::<usize>().ok().and_then(|index| self.replaced.get(index));
            let Some(special) = special else { break };
            out.push_str(before);
            literals.push(out.len()..out.len() + special.len());
            out.push_str(special);
            rest = &after[end + EDGE.len_utf8()..];
        }
        out.push_str(rest);
        Rendering { text: out, literals }
    }
}
