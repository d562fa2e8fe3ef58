//! The grammar of calls that are a sequence of parts: names, arguments and the markup around them.
//!
//! Invariant: the grammar accepts exactly the markup's way of writing calls. Only gaps and the JSON of arguments may
//! be spelled differently. A string that is written as it is contains no text that ends it.

use std::fmt::Write;

use serde_json::{Map, Value};

use super::canonical::standing_alone;
use super::form::{MAX_CALLS, answer_grammar, literal, nested, regex_literal, slashes_escaped, text_without};
use super::relaxed::RelaxedSchema;
use super::spelling::AcceptedSpelling;
use super::written_value::{
    MAX_COUNTED, WrittenValue, anchored, bounds_text, followed, listed_texts, text_format,
};
use crate::request::{BeforeCalls, CallPart, ParameterMarkup, PartsMarkup, ToolCallForm};

/// Returns the grammar of an answer with calls.
pub(super) fn calls(
    form: &ToolCallForm,
    markup: &PartsMarkup,
    parts: &[RelaxedSchema],
    written: AcceptedSpelling,
) -> String {
    let mut grammar =
        Writer { rules: String::from("%llguidance {}\n"), written, count: 0, named: Vec::new() };
    grammar.start(form, markup, parts);
    if written == AcceptedSpelling::Any {
        grammar.rules.push_str(&written.rules());
    }
    grammar.rules
}

struct Writer {
    rules: String,
    written: AcceptedSpelling,
    /// Number of rules that were named by their number.
    count: usize,
    /// Terminals that the grammar has already.
    named: Vec<&'static str>,
}

impl Writer {
    fn start(&mut self, form: &ToolCallForm, markup: &PartsMarkup, parts: &[RelaxedSchema]) {
        let gap = self.written.gap();
        let opening = self.sequence(&markup.before_text);
        let has_calls = !form.tools.is_empty();
        let calls = |writer: &mut Self, skipped: usize| {
            let before = writer.sequence(&markup.before[skipped.min(markup.before.len())..]);
            let skipped = skipped.saturating_sub(markup.before.len());
            let (between, after) = (writer.sequence(&markup.between), writer.sequence(&markup.after));
            let first = if skipped > 0 { "call_rest" } else { "call" };
            let more = match form.parallel {
                true => format!(" ({between}call){{0,{}}}", MAX_CALLS - 1),
                false => String::new(),
            };
            format!("{before}{first}{more} {after}")
        };
        match &form.before {
            _ if !has_calls => {}
            BeforeCalls::Text if markup.only_first => {
                let calls = calls(self, 0);
                let opener = markup.call.iter().find_map(text_of).unwrap_or_default();
                let opener = regex_literal(opener);
                self.line(&format!("start: {opening}TEXT | {calls}{gap}"));
                let text = text_without(markup.reserved.iter().map(String::as_str));
                self.line(&format!("{text} & ~/[ \\t\\r\\n]*{opener}(\\n|.)*/"));
                self.call(form, markup, parts, 0);
            }
            BeforeCalls::Text => {
                let mut all = markup.before.iter().chain(&markup.call);
                let (first, second) = (all.next(), all.next());
                let text = text_without(markup.reserved.iter().map(String::as_str));
                match first {
                    // The text before a special token ends free text.
                    Some(CallPart::Text(open))
                        if markup.before_text.is_empty() && matches!(second, Some(CallPart::Token(..))) =>
                    {
                        let open = regex_literal(open);
                        let calls = calls(self, 1);
                        let lead = text.replacen("TEXT", "LEAD", 1);
                        self.line(&format!(
                            "start: TEXT | LEAD {calls}{gap}\n{text}\n{lead} & /(\\n|.)*{open}/"
                        ));
                    }
                    // The lazy rule ends with the first opening text, whatever follows it in the same token.
                    Some(CallPart::Text(open)) if markup.before_text.is_empty() => {
                        let open = literal(open);
                        let calls = calls(self, 1);
                        self.line(&format!(
                            "start: TEXT | lead {calls}{gap}\nlead[lazy]: TEXT {open}\n{text}"
                        ));
                    }
                    _ if markup.before_text.is_empty() => {
                        let calls = calls(self, 0);
                        self.line(&format!("start: TEXT | TEXT {calls}{gap}\n{text}"));
                    }
                    _ => {
                        let calls = calls(self, 0);
                        self.line(&format!("start: {opening}TEXT | {calls}{gap}\n{text}"));
                    }
                }
                let skipped = usize::from(
                    markup.before_text.is_empty()
                        && markup.before.is_empty()
                        && matches!(first, Some(CallPart::Text(_))),
                );
                self.call(form, markup, parts, skipped);
            }
            BeforeCalls::Nothing => {
                let calls = calls(self, 0);
                self.line(&format!("start: {gap}{calls}{gap}"));
                self.call(form, markup, parts, 0);
            }
            BeforeCalls::Answer(_) => {
                let calls = calls(self, 0);
                self.line(&format!("start: {gap}{calls}{gap} | {opening}{gap}answer {gap}"));
                self.call(form, markup, parts, 0);
            }
        }
        if let BeforeCalls::Answer(answer) = &form.before {
            if !has_calls {
                self.line(&format!("start: {opening}{gap}answer {gap}"));
            }
            let answer = answer_grammar(answer, parts.last(), self.written);
            self.line(&format!("answer: {answer}"));
        } else if !has_calls {
            let text = text_without(markup.reserved.iter().map(String::as_str));
            self.line(&format!("start: {opening}TEXT\n{text}"));
        }
    }

    /// Writes the rules of a call, and those of a call whose first `skipped` parts stand before it.
    fn call(&mut self, form: &ToolCallForm, markup: &PartsMarkup, parts: &[RelaxedSchema], skipped: usize) {
        let name = markup.call.iter().position(|part| *part == CallPart::Name).unwrap_or(0);
        let tools =
            (0..form.tools.len()).map(|index| format!("call_{index}")).collect::<Vec<_>>().join(" | ");
        let head = self.sequence(&markup.call[..name]);
        if skipped == 0 || form.parallel {
            self.line(&format!("call: {head}({tools})"));
        }
        if skipped > 0 {
            let head = self.sequence(&markup.call[skipped.min(name)..name]);
            self.line(&format!("call_rest: {head}({tools})"));
        }
        for (index, (tool, part)) in form.tools.iter().zip(parts).enumerate() {
            let mut body = String::new();
            for piece in &markup.call[name + 1..] {
                match piece {
                    CallPart::Arguments => {
                        let arguments = nested(part, self.written);
                        self.line(&format!("arguments_{index}: {arguments}"));
                        write!(body, "arguments_{index} ").expect("writing to a string");
                    }
                    CallPart::Parameters(parameters) => {
                        let rule = self.parameters(index, part, parameters);
                        write!(body, "{rule} ").expect("writing to a string");
                    }
                    piece => body.push_str(&self.sequence(std::slice::from_ref(piece))),
                }
            }
            self.line(&format!("call_{index}: {} {body}", literal(&tool.name)));
        }
    }

    /// Returns the parts as they stand in a rule, followed by a blank if there are any.
    fn sequence(&mut self, parts: &[CallPart]) -> String {
        let mut out = String::new();
        for part in parts {
            let written = match part {
                CallPart::Text(text) => literal(text),
                CallPart::Token(id, _) => format!("<[{id}]>"),
                CallPart::Gap(text) => match self.written {
                    AcceptedSpelling::Any => "GAP?".to_string(),
                    AcceptedSpelling::Single(_) if text.is_empty() => continue,
                    AcceptedSpelling::Single(_) => literal(text),
                },
                CallPart::Number => self.terminal("NUMBER", "/0|[1-9][0-9]{0,4}/"),
                CallPart::Id => self.terminal("CALL_ID", "/[a-zA-Z0-9]{9}/"),
                // These depend on the tool.
                CallPart::Name | CallPart::Arguments | CallPart::Parameters(_) => continue,
            };
            out.push_str(&written);
            out.push(' ');
        }
        out
    }

    fn terminal(&mut self, name: &'static str, pattern: &str) -> String {
        if !self.named.contains(&name) {
            self.named.push(name);
            self.line(&format!("{name}: {pattern}"));
        }
        name.to_string()
    }

    /// Writes the rule of a tool's arguments one by one, in the order of its schema, and returns its name.
    fn parameters(&mut self, tool: usize, part: &RelaxedSchema, markup: &ParameterMarkup) -> String {
        let document = &part.schema;
        let members = document.as_object();
        let described = members.and_then(|members| members.get("properties")).and_then(Value::as_object);
        let required: Vec<&str> = members
            .and_then(|members| members.get("required"))
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let anything = Value::Object(Map::new());
        let mut body = String::new();
        for (name, schema) in described.into_iter().flatten() {
            if *schema == Value::Bool(false) {
                continue;
            }
            let parameter = self.parameter(Some(name), schema, part, markup);
            let optional = if required.contains(&name.as_str()) { "" } else { "?" };
            write!(body, "{parameter}{optional} ").expect("writing to a string");
        }
        for name in &required {
            if described.is_none_or(|described| !described.contains_key(*name)) {
                let parameter = self.parameter(Some(name), &anything, part, markup);
                write!(body, "{parameter} ").expect("writing to a string");
            }
        }
        let is_closed =
            members.and_then(|members| members.get("additionalProperties")) == Some(&Value::Bool(false));
        if body.is_empty() && !is_closed {
            let schema =
                members.and_then(|members| members.get("additionalProperties")).filter(|s| s.is_object());
            let parameter = self.parameter(None, schema.unwrap_or(&anything), part, markup);
            write!(body, "{parameter}*").expect("writing to a string");
        }
        if body.is_empty() {
            body.push_str("\"\"");
        }
        self.line(&format!("parameters_{tool}: {body}"));
        format!("parameters_{tool}")
    }

    /// Writes the rule of one argument and returns its name. Without a name, it may have any.
    fn parameter(
        &mut self,
        name: Option<&str>,
        schema: &Value,
        part: &RelaxedSchema,
        markup: &ParameterMarkup,
    ) -> String {
        self.count += 1;
        let number = self.count;
        let schema = followed(schema, &part.schema);
        let before = self.sequence(&markup.before_name);
        let name = match name {
            Some(name) => literal(name),
            None => self.terminal("ANY_NAME", "/[a-zA-Z0-9_.\\-]{1,64}/"),
        };
        let (string, json) = (self.sequence(&markup.before_string), self.sequence(&markup.before_json));
        let after = self.sequence(&markup.after_value);
        let as_json = |writer: &Self, schema: &Value| {
            let alone = standing_alone(schema, &part.schema);
            format!("%json {}", writer.written.schema(&alone, part.unicode_escapes))
        };
        let is_told_apart = markup.before_string != markup.before_json;
        let value = match WrittenValue::of(schema, &part.schema) {
            WrittenValue { texts, json: Some(schema) } if texts.is_empty() => {
                format!("{json}value_{number} {after}\nvalue_{number}: {}", as_json(self, &schema))
            }
            WrittenValue { texts, json: schema } => {
                // If a text cannot be distinguished from JSON, a text without bounds may be anything.
                let schema = schema.filter(|_| is_told_apart || texts.iter().all(bounds_text));
                let texts: Vec<String> = texts.iter().map(|text| self.text(text, markup)).collect();
                let texts = format!("{string}({})", texts.join(" | "));
                match schema {
                    None => texts,
                    Some(schema) => {
                        let value = as_json(self, &schema);
                        format!("({texts} | {json}value_{number} {after})\nvalue_{number}: {value}")
                    }
                }
            }
        };
        self.line(&format!("parameter_{number}: {before}{name} {value}"));
        format!("parameter_{number}")
    }

    /// Writes the rule of a string that is written as it is, with the parts after it, and returns its name.
    fn text(&mut self, schema: &Value, markup: &ParameterMarkup) -> String {
        self.count += 1;
        let number = self.count;
        let after = self.sequence(&markup.after_value);
        let choices =
            listed_texts(schema).filter(|texts| texts.iter().all(|text| !text.contains(&markup.close)));
        if let Some(texts) = choices {
            let texts = texts.iter().map(|text| literal(text)).collect::<Vec<_>>().join(" | ");
            self.line(&format!("text_{number}: ({texts}) {after}"));
            return format!("text_{number}");
        }
        let bound = |key: &str| schema.get(key).and_then(Value::as_u64).filter(|count| *count <= MAX_COUNTED);
        let count = match (bound("minLength"), bound("maxLength")) {
            (None, None) => "*".to_string(),
            (least, None) => format!("{{{},}}", least.unwrap_or(0)),
            (least, Some(most)) => format!("{{{},{most}}}", least.unwrap_or(0).min(most)),
        };
        let mut text = format!("/(\\n|.){count}/ & ~/(\\n|.)*{}(\\n|.)*/", regex_literal(&markup.close));
        let pattern = schema.get("pattern").and_then(Value::as_str);
        if let Some(whole) = pattern.and_then(anchored) {
            write!(text, " & /{}/", slashes_escaped(&whole)).expect("writing to a string");
        }
        if let Some(format) = text_format(schema) {
            write!(text, " & /{}/", slashes_escaped(format)).expect("writing to a string");
        }
        self.line(&format!("RAW_{number}: {text}"));
        match markup.after_value.first() {
            Some(CallPart::Text(close)) => {
                let rest = self.sequence(&markup.after_value[1..]);
                self.line(&format!("raw_{number}[lazy]: RAW_{number} {}", literal(close)));
                self.line(&format!("text_{number}: raw_{number} {rest}"));
            }
            _ => self.line(&format!("text_{number}: RAW_{number} {after}")),
        }
        format!("text_{number}")
    }

    fn line(&mut self, text: &str) {
        self.rules.push_str(text);
        self.rules.push('\n');
    }
}

fn text_of(part: &CallPart) -> Option<&str> {
    match part {
        CallPart::Text(text) | CallPart::Token(_, text) => Some(text),
        _ => None,
    }
}
