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
use crate::constraint::spelled_schema;
use crate::{Constraint, Engine, EngineError};

/// Calls in one answer where parallel calls are allowed.
const MAX_CALLS: usize = 16;

/// The parameter that an error names where the form of the answer is wrong.
const OUTPUT: &str = "output";

/// What constrains the answer, if anything does.
pub(super) fn constraint(
    options: &ChatOptions,
    tokenizer: &Tokenizer,
) -> Result<Option<Constraint>, EngineError> {
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
        let schema = spelled_schema(&object_schema(&tool.parameters))
            .map_err(|error| of_tool(error, tool, options))?;
        writeln!(grammar, "call_{index}: {head} arguments_{index} {tail}\narguments_{index}: %json {schema}")
            .expect("writing to a string");
    }
    Ok(Some(Constraint::Lark(grammar)))
}

/// Whether the tokenizer has the opening marker as a special token, which text does not contain unless it is kept.
pub(super) fn marker_is_special(tokenizer: &Tokenizer) -> bool {
    tokenizer.token_id(OPEN).is_some_and(|id| tokenizer.is_special(id))
}

/// Names what was given with the options and is why the answer's constraint was refused.
pub(super) fn explain(error: EngineError, engine: &Engine, options: &ChatOptions) -> EngineError {
    let EngineError::Constraint { message, .. } = error else { return error };
    if options.calls_tools() {
        for tool in &options.tools {
            let alone = Constraint::JsonSchema(object_schema(&tool.parameters));
            if let Err(error @ EngineError::Constraint { .. }) = engine.validate_constraint(&alone) {
                return of_tool(error, tool, options);
            }
        }
    }
    let parameter = if options.output.is_some() { OUTPUT } else { "tools" };
    EngineError::Constraint { parameter: parameter.into(), message }
}

fn of_tool(error: EngineError, tool: &ToolSpec, options: &ChatOptions) -> EngineError {
    match error {
        EngineError::Constraint { message, .. } => EngineError::Constraint {
            parameter: match options.tools.iter().position(|other| other.name == tool.name) {
                Some(index) => format!("tools[{index}].parameters"),
                None => "tools".into(),
            },
            message: format!("the parameters of the tool `{}`: {message}", tool.name),
        },
        error => error,
    }
}

fn of_output(error: EngineError) -> EngineError {
    match error {
        EngineError::Constraint { message, .. } => {
            EngineError::Constraint { parameter: OUTPUT.into(), message }
        }
        error => error,
    }
}

fn output_rule(output: &Constraint) -> Result<String, EngineError> {
    Ok(match output {
        Constraint::JsonSchema(schema) => {
            format!("%json {}", spelled_schema(schema).map_err(of_output)?)
        }
        Constraint::JsonObject => format!("%json {}", spelled_schema(&json!({"type": "object"}))?),
        Constraint::Regex(regex) => format!("/{}/", slashes_escaped(regex)),
        Constraint::Lark(_) => {
            return Err(EngineError::InvalidRequest {
                parameter: OUTPUT.into(),
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
        let says_nothing = !["type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"]
            .iter()
            .any(|k| map.contains_key(*k));
        if says_nothing {
            map.insert("type".into(), "object".into());
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::fixture;
    use crate::chat::markup;
    use crate::chat::{ChatMessage, ChatOutcome, ToolCall, chat};
    use skep_model::ChatTemplate;

    fn tools() -> Vec<ToolSpec> {
        let tool = |name: &str, parameters: Value| ToolSpec {
            name: name.into(),
            description: "…".into(),
            parameters,
        };
        vec![
            tool(
                "weather",
                json!({"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
                                   "required": ["city"], "additionalProperties": false}),
            ),
            tool("now", json!({"properties": {}, "additionalProperties": false})),
        ]
    }

    async fn says(script: &str, options: ChatOptions) -> ChatOutcome {
        let engine = fixture::engine(ChatTemplate::chatml_default(), &[script]);
        chat(&engine, &[ChatMessage::user("hi")], options).unwrap().outcome().await.unwrap()
    }

    fn calls(outcome: &ChatOutcome) -> Vec<(&str, &str)> {
        outcome.tool_calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect()
    }

    fn call(name: &str, arguments: &str) -> String {
        let call = ToolCall { id: String::new(), name: name.into(), arguments: arguments.into() };
        markup::assistant("", &[call])
    }

    #[tokio::test]
    async fn free_text_stays_free() {
        let text = "No call: a < b, <tool, {\"x\"}\n";
        let outcome = says(text, ChatOptions { tools: tools(), ..Default::default() }).await;
        assert_eq!((outcome.text.as_str(), calls(&outcome)), (text, vec![]));
        assert_eq!(outcome.finish, crate::chat::ChatFinish::Stop);
    }

    #[tokio::test]
    async fn a_call_in_free_text_is_found() {
        let script = format!("Let me look.\n{}", call("weather", "{\"city\": \"Porto\"}"));
        let outcome = says(&script, ChatOptions { tools: tools(), ..Default::default() }).await;
        assert_eq!(outcome.text, "Let me look.");
        assert_eq!(calls(&outcome), [("weather", "{\"city\": \"Porto\"}")]);
        assert_eq!(outcome.finish, crate::chat::ChatFinish::ToolCalls);
        assert_eq!(outcome.raw, script);
        assert!(outcome.usage.forced_tokens > 20, "the envelope is forced: {:?}", outcome.usage);
    }

    #[tokio::test]
    async fn a_call_that_begins_in_free_text_is_forced_into_form() {
        for script in [
            "<tool_call>nonsense",
            "I <tool_call>{\"name\": \"rm\", \"arguments\": [",
            "<tool_call></tool_call>",
        ] {
            let outcome =
                says(script, ChatOptions { tools: tools(), max_tokens: Some(200), ..Default::default() })
                    .await;
            assert_eq!(outcome.tool_calls.len(), 1, "{script:?} became {:?}", outcome.raw);
        }
    }

    #[tokio::test]
    async fn required_and_named_choices_call_at_once() {
        for (choice, names) in [
            (ToolChoice::Required, vec!["weather", "now"]),
            (ToolChoice::Named("now".into()), vec!["now"]),
            (ToolChoice::Named("weather".into()), vec!["weather"]),
        ] {
            let options = ChatOptions {
                tools: tools(),
                tool_choice: choice,
                parallel_tool_calls: false,
                ..Default::default()
            };
            let outcome = says("I would rather talk.", options).await;
            assert_eq!(outcome.text, "");
            assert_eq!(outcome.tool_calls.len(), 1, "{}", outcome.raw);
            assert!(names.contains(&outcome.tool_calls[0].name.as_str()));
            assert!(serde_json::from_str::<Value>(&outcome.tool_calls[0].arguments).unwrap().is_object());
        }
    }

    #[tokio::test]
    async fn parallel_calls_are_all_made_or_only_the_first() {
        let script = format!("{}\n{}", call("now", "{}"), call("weather", "{\"city\": \"Ulm\"}"));
        for (parallel_tool_calls, expected) in [(true, 2), (false, 1)] {
            for tool_choice in [ToolChoice::Auto, ToolChoice::Required] {
                let options =
                    ChatOptions { tools: tools(), tool_choice, parallel_tool_calls, ..Default::default() };
                let outcome = says(&script, options).await;
                assert_eq!(outcome.tool_calls.len(), expected, "{}", outcome.raw);
                let ids: std::collections::HashSet<_> =
                    outcome.tool_calls.iter().map(|call| &call.id).collect();
                assert_eq!(ids.len(), expected);
            }
        }
    }

    #[tokio::test]
    async fn an_output_form_and_calls_go_together() {
        let output =
            Some(Constraint::JsonSchema(json!({"type": "object", "properties": {"ok": {"type": "boolean"}},
                                                        "required": ["ok"], "additionalProperties": false})));
        let options = ChatOptions { tools: tools(), output, ..Default::default() };
        let outcome = says("{\"ok\": true}", options.clone()).await;
        assert_eq!((outcome.text.as_str(), outcome.tool_calls.len()), ("{\"ok\": true}", 0));
        let outcome = says(&call("now", "{}"), options).await;
        assert_eq!(calls(&outcome), [("now", "{}")]);
        let regex = ChatOptions {
            tools: tools(),
            output: Some(Constraint::Regex("a/b\\/c".into())),
            ..Default::default()
        };
        assert_eq!(says("a/b/c", regex).await.text, "a/b/c");
        let lark = ChatOptions {
            tools: tools(),
            output: Some(Constraint::Lark("start: \"a\"".into())),
            ..Default::default()
        };
        let engine = fixture::engine(ChatTemplate::chatml_default(), &[]);
        let error = chat(&engine, &[ChatMessage::user("hi")], lark).err().unwrap();
        assert!(matches!(error, EngineError::InvalidRequest { .. }), "{error}");
    }

    #[tokio::test]
    async fn no_choice_means_no_calls() {
        let script = call("now", "{}");
        let options = ChatOptions { tools: tools(), tool_choice: ToolChoice::None, ..Default::default() };
        let outcome = says(&script, options).await;
        assert_eq!((outcome.text.as_str(), outcome.tool_calls.len()), (script.as_str(), 0));
    }

    #[tokio::test]
    async fn a_call_cut_off_by_a_limit_is_no_call() {
        let script = call("weather", "{\"city\": \"Porto\"}");
        let options = ChatOptions {
            tools: tools(),
            tool_choice: ToolChoice::Named("weather".into()),
            max_tokens: Some(script.len() - 36),
            ..Default::default()
        };
        let outcome = says(&script, ChatOptions { max_tokens: Some(40), ..options }).await;
        assert_eq!(outcome.finish, crate::chat::ChatFinish::Length);
        assert_eq!((outcome.text.as_str(), outcome.tool_calls.len()), ("", 0), "{}", outcome.raw);
    }

    #[tokio::test]
    async fn whatever_cuts_off_what_must_be_whole_says_length() {
        let script = call("weather", "{\"city\": \"Porto\"}");
        let output = Constraint::JsonSchema(json!({"const": {"key": "value"}}));
        let formed = ChatOptions { output: Some(output), ..Default::default() };
        let calling = ChatOptions { tools: tools(), ..Default::default() };
        let stop = |stop: &str| vec![stop.to_string()];
        let cases = [
            ("", ChatOptions { stop: stop("val"), ..formed.clone() }, true),
            ("", ChatOptions { max_tokens: Some(3), ..formed }, true),
            // In the head of a call, in its name, in its arguments, after them.
            (&script, ChatOptions { max_tokens: Some(13), ..calling.clone() }, true),
            (&script, ChatOptions { stop: stop("weath"), ..calling.clone() }, true),
            (&script, ChatOptions { stop: stop("Port"), ..calling.clone() }, true),
            ("Say STOP here.", ChatOptions { stop: stop("STOP"), ..calling.clone() }, false),
        ];
        for (script, options, cut_off) in cases {
            let shown = format!("{:?} {:?}", options.stop, options.max_tokens);
            let outcome = says(script, options).await;
            let finish =
                if cut_off { crate::chat::ChatFinish::Length } else { crate::chat::ChatFinish::Stop };
            assert_eq!((outcome.cut_off, outcome.finish), (cut_off, finish), "{shown}: {:?}", outcome.raw);
            assert_eq!(outcome.tool_calls, [], "{shown}");
        }
        let outcome =
            says(&format!("{script}\n"), ChatOptions { stop: stop("tool_call>\n"), ..calling }).await;
        assert!(!outcome.cut_off || outcome.tool_calls.is_empty(), "{:?}", outcome.raw);
    }

    #[test]
    fn a_schema_that_cannot_be_enforced_names_the_tool() {
        let engine = fixture::engine(ChatTemplate::chatml_default(), &[]);
        for (parameters, keyword) in [
            (
                json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}}),
                "uniqueItems",
            ),
            (json!({"type": "object", "minProperties": 1_000_000}), "minProperties"),
            (json!({"type": "object", "x-guidance": {"lenient": true}}), "x-guidance"),
        ] {
            let tools = vec![
                tools().remove(1),
                ToolSpec { name: "odd".into(), description: String::new(), parameters },
            ];
            let options = ChatOptions { tools, ..Default::default() };
            let error = chat(&engine, &[ChatMessage::user("hi")], options).err().unwrap();
            let EngineError::Constraint { parameter, message } = error else { panic!("{error}") };
            assert_eq!(parameter, "tools[1].parameters");
            assert!(message.contains("`odd`") && message.contains(keyword), "{message}");
        }
    }

    #[test]
    fn tools_that_make_no_sense_are_refused() {
        let engine = fixture::engine(ChatTemplate::chatml_default(), &[]);
        let two_of_one_name = vec![tools().remove(0), tools().remove(0)];
        let nameless = vec![ToolSpec { name: "a b".into(), ..tools().remove(0) }];
        for options in [
            ChatOptions { tools: two_of_one_name, ..Default::default() },
            ChatOptions { tools: nameless, ..Default::default() },
            ChatOptions { tool_choice: ToolChoice::Required, ..Default::default() },
            ChatOptions { tools: tools(), tool_choice: ToolChoice::Named("rm".into()), ..Default::default() },
        ] {
            let error = chat(&engine, &[ChatMessage::user("hi")], options).err().unwrap();
            assert!(matches!(error, EngineError::InvalidRequest { .. }), "{error}");
        }
    }
}
