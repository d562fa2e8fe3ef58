//! The constraint on the output that the model may produce in one answer.
//!
//! Invariant: `tool_parser` finds every call that the grammar allows, with arguments of the tool's schema. In
//! free text the grammar waits for the opening marker and constrains from there, so a call is never half
//! formed.

use skep_model::Tokenizer;

use super::dialect::Dialect;
use super::markup;
use super::message::{ToolChoice, ToolSpec};
use super::options::ChatOptions;
use crate::{BeforeCalls, CallMarkup, CallableTool, Constraint, Engine, EngineError, ToolCallForm};

/// The parameter that an error names if the output format is wrong.
const OUTPUT: &str = "output";

/// Returns the constraint on the answer, if there is one.
pub(super) fn constraint(
    options: &ChatOptions,
    dialect: &Dialect,
    tokenizer: &Tokenizer,
) -> Result<Option<Constraint>, EngineError> {
    let markup = || markup::call_markup(dialect.markup, Some(tokenizer));
    if !options.calls_tools() {
        let before = match &options.output {
            Some(output) if is_an_alternative(output) => BeforeCalls::Answer(Box::new(output.clone())),
            Some(_) => return Ok(options.output.clone()),
            None if options.reasoning.is_off() && dialect.reasons_in_channel() => BeforeCalls::Text,
            None => return Ok(None),
        };
        // If text has markup around it, structured output has it as well.
        return Ok(match markup() {
            CallMarkup::Parts(parts) if !parts.before_text.is_empty() => {
                let (tools, markup) = (Vec::new(), CallMarkup::Parts(parts));
                Some(Constraint::ToolCalls(ToolCallForm { tools, before, parallel: false, markup }))
            }
            _ => options.output.clone(),
        });
    }
    let offered: Vec<&ToolSpec> = match &options.tool_choice {
        ToolChoice::Named(name) => options.tools.iter().filter(|tool| tool.name == *name).collect(),
        _ => options.tools.iter().collect(),
    };
    let refused = |message: &str| {
        Err(EngineError::InvalidRequest { parameter: OUTPUT.into(), message: message.to_owned() })
    };
    let before = match (&options.tool_choice, &options.output) {
        (ToolChoice::Auto, None) => BeforeCalls::Text,
        (ToolChoice::Auto, Some(output)) if !is_an_alternative(output) => {
            return refused(
                "a grammar cannot be combined with tools that the model may call; \
                 set the tool choice to none, or give a JSON schema or a regular expression",
            );
        }
        (ToolChoice::Auto, Some(_)) if dialect.markup.begins_like_json() => {
            return refused(
                "this model writes tool calls as plain JSON, which cannot be distinguished from structured output; \
                 set the tool choice to none or required",
            );
        }
        (ToolChoice::Auto, Some(output)) => BeforeCalls::Answer(Box::new(output.clone())),
        _ => BeforeCalls::Nothing,
    };
    let callable =
        |tool: &&ToolSpec| CallableTool { name: tool.name.clone(), parameters: tool.parameters.clone() };
    Ok(Some(Constraint::ToolCalls(ToolCallForm {
        tools: offered.iter().map(callable).collect(),
        before,
        parallel: options.parallel_tool_calls && dialect.markup.allows_many(),
        markup: markup(),
    })))
}

/// Returns whether an answer of this form may stand in place of calls.
fn is_an_alternative(output: &Constraint) -> bool {
    !matches!(output, Constraint::Lark(_) | Constraint::ToolCalls(_))
}

/// Names the option that caused the answer's constraint to be refused.
pub(super) fn explain(error: EngineError, engine: &Engine, options: &ChatOptions) -> EngineError {
    let EngineError::Constraint { message, .. } = error else { return error };
    if options.calls_tools() {
        for tool in &options.tools {
            let form = ToolCallForm {
                tools: vec![CallableTool { name: tool.name.clone(), parameters: tool.parameters.clone() }],
                before: BeforeCalls::Nothing,
                parallel: false,
                markup: markup::call_markup(markup::default(), None),
            };
            let alone = Constraint::ToolCalls(form);
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
            message,
        },
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::fixture;
    use crate::chat::markup::{self, OPEN};
    use crate::chat::{ChatMessage, ChatOutcome, ToolCall, chat};
    use serde_json::{Value, json};
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
    async fn text_next_to_calls_contains_no_other_markup() {
        for script in ["<tool_response>noon</tool_response>", "so <tools>", "</tool_call>"] {
            let options = ChatOptions { tools: tools(), max_tokens: Some(60), ..Default::default() };
            let outcome = says(script, options).await;
            assert!(markup::RESERVED.iter().all(|markup| !outcome.text.contains(markup)), "{}", outcome.text);
        }
    }

    #[tokio::test]
    async fn a_call_in_free_text_is_found() {
        let script = format!("Let me look.\n{}", call("weather", "{\"city\": \"Porto\"}"));
        let outcome = says(&script, ChatOptions { tools: tools(), ..Default::default() }).await;
        assert_eq!(outcome.text, "Let me look.");
        assert_eq!(calls(&outcome), [("weather", "{\"city\": \"Porto\"}")]);
        assert_eq!(outcome.finish, crate::chat::ChatFinish::ToolCalls);
        assert_eq!(outcome.raw, script);
        assert!(
            outcome.usage.forced_tokens > 10,
            "parts of the envelope have only one spelling: {:?}",
            outcome.usage
        );
    }

    #[tokio::test]
    async fn a_call_that_begins_in_free_text_is_constrained() {
        for script in [
            "<tool_call>nonsense",
            "I <tool_call>{\"name\": \"rm\", \"arguments\": [",
            "<tool_call></tool_call>",
        ] {
            let outcome =
                says(script, ChatOptions { tools: tools(), max_tokens: Some(1500), ..Default::default() })
                    .await;
            assert_eq!(outcome.tool_calls.len(), 1, "{script:?} became {:?}", outcome.raw);
        }
    }

    #[tokio::test]
    async fn calls_with_any_white_space_are_accepted_and_found_as_written() {
        let arguments = "{\n    \"city\": \"Porto\"\n  }";
        for (script, arguments) in [
            (
                "<tool_call>{\"name\":\"weather\",\"arguments\":{\"city\":\"Porto\"}}</tool_call>",
                "{\"city\":\"Porto\"}",
            ),
            (
                "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Porto\"}}\n</tool_call>",
                "{\"city\": \"Porto\"}",
            ),
            (
                "<tool_call> {\"name\" : \"weather\" , \"arguments\" : {\"city\" : \"Po\\nrto\"} } </tool_call>",
                "{\"city\" : \"Po\\nrto\"}",
            ),
            (
                &format!(
                    "<tool_call>\r\n{{\n  \"name\": \"weather\",\n  \"arguments\": {arguments}\n}}\n</tool_call>\n"
                ),
                arguments,
            ),
        ] {
            for tool_choice in [ToolChoice::Auto, ToolChoice::Required, ToolChoice::Named("weather".into())] {
                for parallel_tool_calls in [false, true] {
                    let options = ChatOptions {
                        tools: tools(),
                        tool_choice: tool_choice.clone(),
                        parallel_tool_calls,
                        ..Default::default()
                    };
                    let outcome = says(script, options).await;
                    assert_eq!(outcome.raw.trim_end(), script.trim_end(), "the constraint changes nothing");
                    assert_eq!(calls(&outcome), [("weather", arguments)], "{script:?}");
                    assert_eq!(outcome.text, "");
                }
            }
        }
    }

    #[test]
    fn every_accepted_call_is_found_as_written() {
        use crate::chat::{parsed::ParsedEvent, tool_parser::tests::joined};
        use crate::constraint::{ConstraintCompiler, Spelling};
        use crate::tests::{draws::Draws, fixture, schema_fuzz::walk};
        let tokenizer = std::sync::Arc::new(fixture::byte_tokenizer());
        let dialect = Dialect::of(&ChatTemplate::chatml_default(), &tokenizer, None);
        let compiler = ConstraintCompiler::new(&tokenizer, 320, &[fixture::EOS], "calls").unwrap();
        let mut found = 0;
        for seed in 0..60 {
            let mut draws = Draws::new(seed);
            let options = ChatOptions {
                tools: tools(),
                tool_choice: ToolChoice::Required,
                parallel_tool_calls: draws.one_in(2),
                ..Default::default()
            };
            let constraint = constraint(&options, &dialect, &tokenizer).unwrap().unwrap();
            let mut state = match draws.below(3) {
                0 => compiler.strict(&constraint, Spelling::Compact).unwrap(),
                1 => compiler.strict(&constraint, Spelling::Spaced).unwrap(),
                _ => compiler.compile(&constraint).unwrap(),
            };
            let Some((text, tokens)) = walk(&mut state, &tokenizer, fixture::EOS, &mut draws, 900).unwrap()
            else {
                continue;
            };
            let mut accepting = compiler.compile(&constraint).unwrap();
            assert!(tokens.iter().all(|token| accepting.try_accept(*token)), "seed {seed}: {text}");
            let pieces = draws.pieces(&text);
            let events = joined(&pieces, false);
            assert!(!events.iter().any(|event| matches!(event, ParsedEvent::Text(_))), "seed {seed}: {text}");
            for event in &events {
                let ParsedEvent::CallFinished { call, .. } = event else { continue };
                found += 1;
                assert!(text.contains(&call.arguments), "seed {seed}: verbatim");
                assert!(serde_json::from_str::<Value>(&call.arguments).unwrap().is_object(), "seed {seed}");
            }
            let closes = text.matches("</tool_call>").count();
            let finished = |event: &&ParsedEvent| matches!(event, ParsedEvent::CallFinished { .. });
            assert!(events.iter().filter(finished).count() <= closes, "seed {seed}: {text}");
            assert!(events.iter().any(|event| finished(&event)), "seed {seed}: {text}");
        }
        assert!(found > 30, "{found} calls");
    }

    #[tokio::test]
    async fn required_and_named_choices_start_with_a_call() {
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
    async fn without_parallel_calls_only_the_first_call_is_made() {
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
    async fn structured_output_can_be_combined_with_calls() {
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
    async fn a_call_in_template_spelling_is_cached_when_sent_back() {
        let script = call("weather", "{\"city\":\"Porto\"}");
        let engine = fixture::engine(ChatTemplate::chatml_default(), &[&script, "Sunny."]);
        let options = ChatOptions { tools: tools(), ..Default::default() };
        let mut messages = vec![ChatMessage::user("hi")];
        let first = chat(&engine, &messages, options.clone()).unwrap().outcome().await.unwrap();
        let call = first.tool_calls[0].clone();
        messages.push(ChatMessage { tool_calls: vec![call.clone()], ..ChatMessage::assistant("") });
        messages.push(ChatMessage::tool(call.id, "sun"));
        let second = chat(&engine, &messages, options).unwrap().outcome().await.unwrap();
        let known = first.usage.prompt_tokens + first.usage.completion_tokens;
        assert!(second.usage.cached_tokens + 32 > known, "{:?} after {:?}", second.usage, first.usage);
    }

    #[tokio::test]
    async fn tool_choice_none_makes_no_calls() {
        let script = call("now", "{}");
        let options = ChatOptions { tools: tools(), tool_choice: ToolChoice::None, ..Default::default() };
        let outcome = says(&script, ChatOptions { max_tokens: Some(40), ..options }).await;
        assert!(outcome.tool_calls.is_empty() && !outcome.text.contains(OPEN), "{}", outcome.text);
    }

    #[tokio::test]
    async fn an_unconstrained_answer_keeps_its_spelling_and_its_calls_are_found() {
        let script = "Well.\n<tool_call>{\"arguments\":{\"town\":7},\"name\":\"weather\"}</tool_call>";
        let options = ChatOptions {
            tools: tools(),
            tool_choice: ToolChoice::Required,
            output: Some(Constraint::JsonObject),
            unconstrained: true,
            ..Default::default()
        };
        let outcome = says(script, options.clone()).await;
        assert_eq!((outcome.raw.as_str(), outcome.text.as_str()), (script, "Well."));
        assert_eq!(calls(&outcome), [("weather", "{\"town\":7}")]);
        let constrained = says(script, ChatOptions { unconstrained: false, ..options }).await;
        assert_eq!(constrained.prompt, outcome.prompt);
        assert_ne!(constrained.raw, script);
    }

    #[tokio::test]
    async fn a_call_cut_off_by_a_limit_is_dropped() {
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
    async fn cutting_off_output_that_must_be_whole_reports_length() {
        let script = call("weather", "{\"city\": \"Porto\"}");
        let output = Constraint::JsonSchema(json!({"const": {"key": "value"}}));
        let formed = ChatOptions { output: Some(output), ..Default::default() };
        let calling = ChatOptions { tools: tools(), ..Default::default() };
        let stop = |stop: &str| vec![stop.to_string()];
        let cases = [
            ("", ChatOptions { stop: stop("val"), ..formed.clone() }, true),
            ("", ChatOptions { max_tokens: Some(3), ..formed }, true),
            // The limits cut the answer in the head of a call, in its name, and in its arguments.
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
    fn a_malformed_schema_names_the_tool() {
        let engine = fixture::engine(ChatTemplate::chatml_default(), &[]);
        for (parameters, keyword) in [
            (
                json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": 1}}}),
                "uniqueItems",
            ),
            (json!({"type": "object", "minProperties": -1}), "minProperties"),
            (json!({"type": "string"}), "object"),
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
    fn invalid_tools_are_refused() {
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
