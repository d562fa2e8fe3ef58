//! What the model may produce in one answer, as a grammar.
//!
//! Invariant: a call that the grammar lets through is one that `tool_parser` finds, with arguments of the tool's schema.
//! In free text the grammar waits for the opening marker and constrains from there, so a call is never half formed.

use std::fmt::Write;

use serde_json::{Value, json};
use skep_model::Tokenizer;

use super::markup::{self, OPEN};
use super::message::{ToolChoice, ToolSpec};
use super::options::ChatOptions;
use crate::{Constraint, Engine, EngineError};

/// Calls in one answer where parallel calls are allowed.
const MAX_CALLS: usize = 16;

/// What constrains the answer, if anything does.
pub(super) fn constraint(options: &ChatOptions, tokenizer: &Tokenizer) -> Result<Option<Constraint>, EngineError> {
    if !options.calls_tools() {
        return Ok(options.output.clone());
    }
    let offered: Vec<&ToolSpec> = match &options.tool_choice {
        ToolChoice::Named(name) => options.tools.iter().filter(|tool| tool.name == *name).collect(),
        _ => options.tools.iter().collect(),
    };
    let mut grammar = String::from("%llguidance {}\n");
    let (more, many) = if options.parallel_tool_calls {
        (format!(" ({} opened){{0,{}}}", literal(markup::BETWEEN), MAX_CALLS - 1), true)
    } else {
        (String::new(), false)
    };
    let free = match (&options.tool_choice, &options.output) {
        (ToolChoice::Auto, None) => Some(None),
        (ToolChoice::Auto, Some(output)) => Some(Some(output)),
        _ => None,
    };
    match free {
        None => writeln!(grammar, "start: opened{more}"),
        Some(Some(output)) => {
            writeln!(grammar, "start: opened{more} | answer\nanswer: {}", output_rule(output)?)
        }
        Some(None) if marker_is_special(tokenizer) => {
            writeln!(grammar, "start: TEXT | TEXT opened{more}\nTEXT: /(\\n|.)*/")
        }
        // The lazy rule ends with the first opening marker, whatever comes after it in the same token.
        Some(None) => writeln!(
            grammar,
            "start: TEXT | lead body{more}\nlead[lazy]: TEXT {}\nTEXT: /(\\n|.)*/",
            literal(OPEN)
        ),
    }
    .expect("writing to a string");
    if many || !matches!(free, Some(None)) || marker_is_special(tokenizer) {
        let open = if marker_is_special(tokenizer) { OPEN.to_owned() } else { literal(OPEN) };
        writeln!(grammar, "opened: {open} body").expect("writing to a string");
    }
    let names = (0..offered.len()).map(|index| format!("call_{index}")).collect::<Vec<_>>().join(" | ");
    writeln!(grammar, "body: {names}").expect("writing to a string");
    for (index, tool) in offered.iter().enumerate() {
        let head = markup::head(&tool.name);
        let head = literal(&head[OPEN.len()..]);
        let tail = literal(&markup::tail());
        let schema = schema_rule(&tool.parameters);
        writeln!(grammar, "call_{index}: {head} arguments_{index} {tail}\narguments_{index}: %json {schema}")
            .expect("writing to a string");
    }
    Ok(Some(Constraint::Lark(grammar)))
}

/// Whether the tokenizer has the opening marker as a special token, which text does not contain unless it is kept.
pub(super) fn marker_is_special(tokenizer: &Tokenizer) -> bool {
    tokenizer.token_id(OPEN).is_some_and(|id| tokenizer.is_special(id))
}

/// Names the tool whose schema is why the whole grammar was refused.
pub(super) fn explain(error: EngineError, engine: &Engine, options: &ChatOptions) -> EngineError {
    let EngineError::Constraint { message } = error else { return error };
    if !options.calls_tools() {
        return EngineError::Constraint { message };
    }
    for tool in &options.tools {
        let alone = Constraint::JsonSchema(object_schema(&tool.parameters));
        if let Err(EngineError::Constraint { message }) = engine.validate_constraint(&alone) {
            return EngineError::Constraint {
                message: format!("the parameters of the tool `{}`: {message}", tool.name),
            };
        }
    }
    EngineError::Constraint { message }
}

fn output_rule(output: &Constraint) -> Result<String, EngineError> {
    Ok(match output {
        Constraint::JsonSchema(schema) => format!("%json {}", schema_rule(schema)),
        Constraint::JsonObject => format!("%json {}", schema_rule(&json!({"type": "object"}))),
        Constraint::Regex(regex) => format!("/{}/", slashes_escaped(regex)),
        Constraint::Lark(_) => {
            return Err(EngineError::InvalidRequest {
                parameter: "output".into(),
                message: "a grammar cannot be combined with tools that the model may call; \
                          set the tool choice to none, or give a JSON schema or a regular expression"
                    .into(),
            });
        }
    })
}

/// Arguments are an object even where the schema does not say so.
fn object_schema(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Value::Object(map) = &mut schema {
        let says_nothing = !["type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"].iter().any(|k| map.contains_key(*k));
        if says_nothing {
            map.insert("type".into(), "object".into());
        }
    }
    schema
}

/// One spelling of JSON: forced punctuation costs no sampling, and a model cannot spend its tokens on white space.
fn schema_rule(schema: &Value) -> Value {
    let mut schema = object_schema(schema);
    if let Value::Object(map) = &mut schema {
        let spelling = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        map.insert("x-guidance".into(), spelling);
    }
    schema
}

fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// A regular expression between slashes: those within it are escaped, those that are already are left.
fn slashes_escaped(regex: &str) -> String {
    let mut out = String::with_capacity(regex.len());
    let mut escaped = false;
    for c in regex.chars() {
        match c {
            '/' if !escaped => out.push_str("\\/"),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
        escaped = c == '\\' && !escaped;
    }
    out
}
