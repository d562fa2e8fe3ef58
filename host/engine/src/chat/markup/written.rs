//! The text of calls, for templates that do not write calls themselves.

use serde_json::Value;
use skep_model::spelled_json;

use super::{CallForm, Markup, Parameters, Part, hermes};
use crate::chat::message::ToolCall;

impl Markup {
    /// Returns the text of an assistant message with its calls.
    pub fn assistant(&self, content: &str, calls: &[ToolCall]) -> String {
        let CallForm::Parts(parts) = &self.call else { return hermes::assistant(content, calls) };
        let mut text = content.to_owned();
        if calls.is_empty() {
            return text;
        }
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        write(&mut text, parts.before, None);
        for (index, call) in calls.iter().enumerate() {
            if index > 0 {
                write(&mut text, parts.between, None);
            }
            write(&mut text, parts.call, Some((index, call)));
        }
        write(&mut text, parts.after, None);
        text
    }
}

fn write(text: &mut String, parts: &[Part], call: Option<(usize, &ToolCall)>) {
    for part in parts {
        match (part, call) {
            (Part::Text(part) | Part::Gap(part), _) => text.push_str(part),
            (Part::Name, Some((_, call))) => text.push_str(&call.name),
            (Part::Number, Some((index, _))) => text.push_str(&index.to_string()),
            (Part::Id, Some((index, _))) => text.push_str(&format!("{index:09}")),
            (Part::Arguments, Some((_, call))) => {
                text.push_str(if call.arguments.trim().is_empty() { "{}" } else { &call.arguments });
            }
            (Part::Parameters(parameters), Some((_, call))) => write_parameters(text, parameters, call),
            (_, None) => {}
        }
    }
}

fn write_parameters(text: &mut String, parameters: &Parameters, call: &ToolCall) {
    let Parameters { before_name, before_string, before_json, close, space } = parameters;
    for (name, value) in call.arguments_object() {
        text.push_str(before_name);
        text.push_str(&name);
        match &value {
            Value::String(value) => {
                text.push_str(before_string);
                text.push_str(value);
            }
            value => {
                text.push_str(before_json);
                text.push_str(&spelled_json(value));
            }
        }
        text.push_str(space.0);
        text.push_str(close);
        text.push_str(space.1);
    }
}
