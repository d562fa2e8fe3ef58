//! The cases: their questions, examples and right answers.
//!
//! Invariant: a case contains everything that a server is sent. The engine here and a peer get the same
//! messages, which are made in one place; examples are earlier turns, written in the spelling of the case.

use std::io;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::ser::{Formatter, Serializer};
use serde_json::{Value, json};
use skep_engine::chat::{ChatMessage, ToolCall, ToolChoice, ToolSpec};

/// The kind of answer that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Turn a text into an object that matches a schema
    Extraction,
    /// Call one of five tools
    Choice,
    /// Call a tool whose arguments contain objects and lists
    Nested,
    /// Make several calls in one answer
    Parallel,
    /// Call no tool, because none fits
    Refusals,
}

impl Group {
    /// All groups, in the order of the table.
    pub const ALL: [Group; 5] =
        [Group::Extraction, Group::Choice, Group::Nested, Group::Parallel, Group::Refusals];

    /// Returns the name of the group, as in a case's id.
    pub fn name(self) -> &'static str {
        match self {
            Group::Extraction => "extraction",
            Group::Choice => "choice",
            Group::Nested => "nested",
            Group::Parallel => "parallel",
            Group::Refusals => "refusals",
        }
    }

    fn source(self) -> &'static str {
        match self {
            Group::Extraction => include_str!("extraction.json"),
            Group::Choice => include_str!("choice.json"),
            Group::Nested => include_str!("nested.json"),
            Group::Parallel => include_str!("parallel.json"),
            Group::Refusals => include_str!("refusals.json"),
        }
    }

    fn families(self) -> Result<Vec<Family>> {
        serde_json::from_str(self.source())
            .with_context(|| format!("the cases of {} cannot be read", self.name()))
    }
}

/// Format of the JSON in the examples of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Spelling {
    /// `{"a":1,"b":2}`
    Compact,
    /// `{"a": 1, "b": 2}`
    Spaced,
    /// One line per property, indented by two.
    Pretty,
}

/// The spelling in which the cases are asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AskedSpelling {
    /// Each case in the spelling that it names: a third of them in each
    Own,
    Compact,
    Spaced,
    Pretty,
    /// Each case in every spelling: three times as many cases
    Every,
}

impl AskedSpelling {
    fn includes(self, spelling: Spelling, own: Spelling) -> bool {
        match self {
            AskedSpelling::Own => spelling == own,
            AskedSpelling::Compact => spelling == Spelling::Compact,
            AskedSpelling::Spaced => spelling == Spelling::Spaced,
            AskedSpelling::Pretty => spelling == Spelling::Pretty,
            AskedSpelling::Every => true,
        }
    }
}

impl Spelling {
    /// All spellings.
    pub const ALL: [Spelling; 3] = [Spelling::Compact, Spelling::Spaced, Spelling::Pretty];

    /// Returns the name of the spelling, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Spelling::Compact => "compact",
            Spelling::Spaced => "spaced",
            Spelling::Pretty => "pretty",
        }
    }

    /// Writes a value in this spelling.
    pub fn write(self, value: &Value) -> String {
        match self {
            Spelling::Compact => value.to_string(),
            Spelling::Spaced => {
                let mut out = Vec::new();
                let mut serializer = Serializer::with_formatter(&mut out, SpacedFormatter);
                value.serialize(&mut serializer).expect("a JSON value is written to memory");
                String::from_utf8(out).expect("JSON is UTF-8")
            }
            Spelling::Pretty => format!("{value:#}"),
        }
    }
}

struct SpacedFormatter;

impl SpacedFormatter {
    fn comma<W: ?Sized + io::Write>(writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }
}

impl Formatter for SpacedFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        Self::comma(writer, first)
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        Self::comma(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Whether the tools of a family may or must be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Choice {
    Auto,
    Required,
}

/// The parts that cases of one kind have in common.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Family {
    name: String,
    system: String,
    /// Schema of the answer, if it is an object.
    #[serde(default)]
    pub schema: Option<Value>,
    #[serde(default)]
    pub tools: Vec<ToolSpec>,
    #[serde(default)]
    tool_choice: Option<Choice>,
    examples: Vec<Example>,
    cases: Vec<Asked>,
}

#[derive(Debug, Deserialize)]
struct Example {
    user: String,
    #[serde(flatten)]
    answer: Right,
}

#[derive(Debug, Deserialize)]
struct Asked {
    user: String,
    spelling: Spelling,
    #[serde(flatten)]
    answer: Right,
}

/// The right answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Right {
    Json(Value),
    /// In any order; empty if no tool fits.
    Calls(Vec<Call>),
    Text(String),
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Call {
    pub name: String,
    pub arguments: Value,
}

/// One question.
#[derive(Debug, Clone)]
pub struct Case {
    pub group: Group,
    pub family: Arc<Family>,
    pub spelling: Spelling,
    pub user: String,
    pub right: Right,
    /// `group/family/number`
    pub id: String,
}

/// Returns the cases of a group in the requested spelling; `limit` of them, spread evenly.
pub fn of_group(group: Group, limit: usize, asked_spelling: AskedSpelling) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for family in group.families()? {
        let family = Arc::new(family);
        // Cases with the same examples follow each other, because a peer may keep only its last prompt.
        for spelling in Spelling::ALL {
            let asked = family.cases.iter().zip(1..);
            let asked = asked.filter(|(asked, _)| asked_spelling.includes(spelling, asked.spelling));
            cases.extend(asked.map(|(asked, number)| Case {
                group,
                family: family.clone(),
                spelling,
                user: asked.user.clone(),
                right: asked.answer.clone(),
                id: format!("{}/{}/{number}", group.name(), family.name),
            }));
        }
    }
    let all = cases.len();
    let kept = cases.into_iter().enumerate().filter(|(index, _)| {
        // Takes some of all families and spellings.
        limit >= all || index * limit % all < limit
    });
    Ok(kept.map(|(_, case)| case).collect())
}

impl Case {
    /// Returns the messages of the case: the system prompt, the examples and the question.
    pub fn messages(&self) -> Vec<ChatMessage> {
        let mut messages = vec![ChatMessage::system(&self.family.system)];
        let mut made = 0;
        for example in &self.family.examples {
            messages.push(ChatMessage::user(&example.user));
            messages.push(match &example.answer {
                Right::Json(value) => ChatMessage::assistant(self.spelling.write(value)),
                Right::Text(text) => ChatMessage::assistant(text),
                Right::Calls(calls) => {
                    let calls = calls.iter().map(|call| {
                        made += 1;
                        ToolCall {
                            id: format!("call_{made}"),
                            name: call.name.clone(),
                            arguments: self.spelling.write(&call.arguments),
                        }
                    });
                    ChatMessage { tool_calls: calls.collect(), ..ChatMessage::assistant("") }
                }
            });
        }
        messages.push(ChatMessage::user(&self.user));
        messages
    }

    /// Returns the tool choice of the request.
    pub fn tool_choice(&self) -> ToolChoice {
        if self.must_call() { ToolChoice::Required } else { ToolChoice::Auto }
    }

    /// Returns whether only a call can be right.
    pub fn must_call(&self) -> bool {
        self.family.tool_choice == Some(Choice::Required)
    }

    /// Returns the body of a chat completion for any server that speaks OpenAI's protocol.
    pub fn request(&self, model: &str, max_tokens: usize) -> Value {
        let messages: Vec<Value> = self.messages().iter().map(message_json).collect();
        let mut body =
            json!({"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens});
        if let Some(schema) = &self.family.schema {
            let form = json!({"name": "answer", "strict": true, "schema": schema});
            body["response_format"] = json!({"type": "json_schema", "json_schema": form});
        }
        if !self.family.tools.is_empty() {
            let tools = self.family.tools.iter().map(|tool| json!({"type": "function", "function": tool}));
            body["tools"] = tools.collect();
            body["tool_choice"] = if self.must_call() { "required" } else { "auto" }.into();
            body["parallel_tool_calls"] = true.into();
        }
        body
    }
}

fn message_json(message: &ChatMessage) -> Value {
    let mut json = json!({"role": message.role.as_str(), "content": message.content});
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(|call| {
            let function = json!({"name": call.name, "arguments": call.arguments});
            json!({"id": call.id, "type": "function", "function": function})
        });
        json["content"] = Value::Null;
        json["tool_calls"] = calls.collect();
    }
    json
}

#[cfg(test)]
mod tests {
    use super::super::conforms::conforms;
    use super::*;

    #[test]
    fn every_group_has_forty_cases_and_the_spellings_are_spread_evenly() {
        let mut spelled = [0; 3];
        let mut asked = std::collections::HashSet::new();
        for group in Group::ALL {
            let cases = of_group(group, usize::MAX, AskedSpelling::Own).expect("the cases can be read");
            assert_eq!(cases.len(), 40, "{}", group.name());
            for case in cases {
                spelled[case.spelling as usize] += 1;
                assert!((4..=6).contains(&case.family.examples.len()), "{}", case.id);
                assert!(asked.insert((case.group, case.user.clone())), "{} is asked twice", case.id);
                let shown = case.family.examples.iter().any(|example| example.user == case.user);
                assert!(!shown, "{} is among its examples", case.id);
            }
            assert_eq!(
                of_group(group, usize::MAX, AskedSpelling::Every).expect("the cases can be read").len(),
                120
            );
            let some = of_group(group, 7, AskedSpelling::Own).expect("the cases can be read");
            let families: std::collections::HashSet<_> = some.iter().map(|case| &case.family.name).collect();
            assert_eq!((some.len(), families.len()), (7, 4), "{}", group.name());
        }
        assert!(spelled.iter().all(|&count| (66..=67).contains(&count)), "{spelled:?}");
    }

    #[test]
    fn right_answers_and_examples_match_their_schemas() {
        for case in Group::ALL
            .into_iter()
            .flat_map(|group| of_group(group, usize::MAX, AskedSpelling::Own).expect("cases"))
        {
            let examples = case.family.examples.iter().map(|example| &example.answer);
            for answer in examples.chain([&case.right]) {
                match answer {
                    Right::Json(value) => {
                        let schema = case.family.schema.as_ref().expect("a schema for an object");
                        assert!(conforms(value, schema), "{}: {value}", case.id);
                    }
                    Right::Calls(calls) => {
                        assert!(!calls.is_empty() || case.group == Group::Refusals, "{}", case.id);
                        for call in calls {
                            let tool = case.family.tools.iter().find(|tool| tool.name == call.name);
                            let tool = tool.unwrap_or_else(|| panic!("{}: no tool {}", case.id, call.name));
                            assert!(conforms(&call.arguments, &tool.parameters), "{}: {call:?}", case.id);
                        }
                    }
                    Right::Text(text) => {
                        assert!(case.group == Group::Refusals && !text.is_empty(), "{}", case.id)
                    }
                }
            }
            let enough = match (&case.right, case.group) {
                (Right::Calls(calls), Group::Parallel) => calls.len() >= 2,
                (Right::Calls(calls), Group::Refusals) => calls.is_empty() && !case.must_call(),
                (Right::Calls(calls), Group::Choice) => calls.len() == 1 && case.family.tools.len() == 5,
                (Right::Calls(calls), Group::Nested) => calls.len() == 1,
                (Right::Json(_), Group::Extraction) => true,
                _ => false,
            };
            assert!(enough, "{}: {:?}", case.id, case.right);
        }
    }

    #[test]
    fn spellings_differ_only_in_white_space() {
        let value = json!({"a": [1, {"b": "x: y, z"}], "c": {}});
        assert_eq!(Spelling::Compact.write(&value), r#"{"a":[1,{"b":"x: y, z"}],"c":{}}"#);
        assert_eq!(Spelling::Spaced.write(&value), r#"{"a": [1, {"b": "x: y, z"}], "c": {}}"#);
        let pretty = "{\n  \"a\": [\n    1,\n    {\n      \"b\": \"x: y, z\"\n    }\n  ],\n  \"c\": {}\n}";
        assert_eq!(Spelling::Pretty.write(&value), pretty);
    }
}
