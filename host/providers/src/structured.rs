//! Validates structured output: servers promise an answer that matches its schema, and some do not keep the promise.

use serde_json::{Map, Value};
use skep_engine::{
    Constraint, Dialect, EngineError, SchemaValidator,
    chat::{ChatFinish, ChatMessage, ChatOptions, ToolCall, ToolChoice},
};

use crate::{
    assembly::AssembledAnswer,
    failure::shortened,
    question::{AnswerTool, calls_tools, must_call},
};

/// The compiled schemas of an answer.
pub(crate) struct Checks {
    output: Option<Output>,
    tools: Vec<(String, SchemaValidator)>,
    choice: ToolChoice,
    parallel: bool,
    /// Whether a stop string may have cut off the answer.
    has_stop: bool,
    enabled: bool,
}

enum Output {
    Object,
    Schema(SchemaValidator),
}

/// The reason that an answer does not match its schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Misfit {
    pub place: String,
    pub reason: String,
}

/// An answer that was validated.
#[derive(Debug)]
pub(crate) struct Checked {
    pub answer: AssembledAnswer,
    /// Whether a limit cut off something that had to be whole.
    pub cut_off: bool,
}

/// An answer that does not match its schema, and the reason.
#[derive(Debug)]
pub(crate) struct Refused {
    pub answer: AssembledAnswer,
    pub misfit: Misfit,
}

impl Checks {
    /// Compiles the schemas of the output and of the tools. This takes a while, so it must not run on a thread that
    /// serves others.
    pub(crate) fn compile(options: &ChatOptions) -> Result<Self, EngineError> {
        let compile = |parameter: String, schema: &Value| {
            SchemaValidator::compile(schema, Dialect::Backtracking)
                .map_err(|message| EngineError::Constraint { parameter, message })
        };
        let output = match options.output.as_ref().filter(|_| !must_call(options)) {
            Some(Constraint::JsonSchema(schema)) => {
                Some(Output::Schema(compile("output".to_owned(), schema)?))
            }
            Some(_) => Some(Output::Object),
            None => None,
        };
        let tools = options.tools.iter().enumerate().map(|(index, tool)| {
            let validator = compile(format!("tools[{index}].parameters"), &tool.parameters)?;
            Ok((tool.name.clone(), validator))
        });
        Ok(Checks {
            output,
            tools: tools.collect::<Result<_, EngineError>>()?,
            choice: if calls_tools(options) { options.tool_choice.clone() } else { ToolChoice::None },
            parallel: options.parallel_tool_calls,
            has_stop: !options.stop.is_empty(),
            enabled: !options.unconstrained,
        })
    }

    /// Returns whether text is held back until the answer was checked.
    pub(crate) fn holds_text(&self) -> bool {
        self.enabled && self.output.is_some()
    }

    /// Checks a whole answer. A call of `answer_tool` becomes the text.
    pub(crate) fn check(
        &self,
        mut answer: AssembledAnswer,
        answer_tool: Option<&AnswerTool>,
    ) -> Result<Checked, Box<Refused>> {
        if let Some(tool) = answer_tool
            && let Some(at) = answer.calls.iter().position(|call| call.name == tool.name)
        {
            answer.text = tool.answer(&answer.calls[at].arguments).into_owned();
            answer.calls.retain(|call| call.name != tool.name);
            if answer.calls.is_empty() && answer.finish == ChatFinish::ToolCalls {
                answer.finish = ChatFinish::Stop;
            }
        }
        if !self.enabled {
            return Ok(Checked { answer, cut_off: false });
        }
        match self.misfit(&answer) {
            None => {
                // Text beside calls matches no schema, so it is not sent if one was requested.
                if self.holds_text() && !answer.calls.is_empty() {
                    answer.text.clear();
                }
                Ok(Checked { answer, cut_off: false })
            }
            Some(_) if answer.finish == ChatFinish::Length => Ok(self.cut_off(answer)),
            Some(_)
                if self.has_stop
                    && answer.calls.is_empty()
                    && !is_json(&answer.text)
                    && self.holds_text() =>
            {
                answer.finish = ChatFinish::Length;
                Ok(Checked { answer, cut_off: true })
            }
            Some(misfit) => Err(Box::new(Refused { answer, misfit })),
        }
    }

    /// Keeps the calls that were complete before a limit ended the answer.
    fn cut_off(&self, mut answer: AssembledAnswer) -> Checked {
        if let Some(broken) = answer.calls.iter().position(|call| self.call_misfit(call).is_some()) {
            answer.calls.truncate(broken);
        }
        Checked { answer, cut_off: true }
    }

    fn misfit(&self, answer: &AssembledAnswer) -> Option<Misfit> {
        let misfit = |place: &str, reason: String| Some(Misfit { place: place.to_owned(), reason });
        if answer.calls.is_empty() {
            return match (&self.choice, &self.output) {
                (ToolChoice::Required | ToolChoice::Named(_), _) => {
                    misfit("the answer", "the model was required to call a tool and did not".to_owned())
                }
                (_, Some(output)) => output.misfit(&answer.text),
                (_, None) => None,
            };
        }
        if self.choice == ToolChoice::None {
            return misfit("the answer", "it calls a tool, which was not allowed".to_owned());
        }
        if !self.parallel && answer.calls.len() > 1 {
            let calls = answer.calls.len();
            return misfit("the answer", format!("it makes {calls} calls; one was allowed"));
        }
        answer.calls.iter().find_map(|call| self.call_misfit(call))
    }

    fn call_misfit(&self, call: &ToolCall) -> Option<Misfit> {
        let name = &call.name;
        let in_call = |reason: String| Some(Misfit { place: format!("the call of {name:?}"), reason });
        match &self.choice {
            ToolChoice::Named(wanted) if wanted != name => {
                return in_call(format!("only {wanted:?} was allowed"));
            }
            _ => {}
        }
        let Some((_, validator)) = self.tools.iter().find(|(tool, _)| tool == name) else {
            return in_call("no tool has this name".to_owned());
        };
        let place = format!("the arguments of the call of {name:?}");
        match serde_json::from_str::<Map<String, Value>>(&call.arguments) {
            Err(error) => Some(Misfit { place, reason: format!("they are not a JSON object: {error}") }),
            Ok(arguments) => {
                reason(validator, &Value::Object(arguments)).map(|reason| Misfit { place, reason })
            }
        }
    }
}

impl Output {
    fn misfit(&self, text: &str) -> Option<Misfit> {
        let reason = match (self, serde_json::from_str::<Value>(text)) {
            (_, Err(error)) => format!("it is not JSON: {error}"),
            (Output::Object, Ok(Value::Object(_))) => return None,
            (Output::Object, Ok(_)) => "it is not a JSON object".to_owned(),
            (Output::Schema(validator), Ok(value)) => reason(validator, &value)?,
        };
        Some(Misfit { place: "the answer".to_owned(), reason })
    }
}

fn reason(validator: &SchemaValidator, value: &Value) -> Option<String> {
    validator.check(value).err().map(|invalid| shortened(invalid.to_string()))
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

/// Returns the messages that ask for the answer again: the refused one, and the reason. Calls are shown as text,
/// because a call without a result, or one whose arguments cannot be read, is not accepted in a history.
pub(crate) fn complaint(Refused { answer, misfit }: &Refused) -> [ChatMessage; 2] {
    let mut shown = answer.text.clone();
    for ToolCall { name, arguments, .. } in &answer.calls {
        shown.push_str(&format!("\n(call of {name} with the arguments {arguments})"));
    }
    let shown = match shown.trim() {
        "" => "(no answer)".to_owned(),
        _ => shown,
    };
    let Misfit { place, reason } = misfit;
    let complaint = format!(
        "This was refused, and nothing of it was used: {place} does not have the required form: {reason}. Answer \
         again, in the required form and without an apology."
    );
    [ChatMessage::assistant(shown), ChatMessage::user(complaint)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use skep_engine::{Usage, chat::ToolSpec};

    fn answer(text: &str, calls: &[(&str, &str)], finish: ChatFinish) -> AssembledAnswer {
        let call = |(name, arguments): &(&str, &str)| ToolCall {
            id: "c".into(),
            name: (*name).into(),
            arguments: (*arguments).into(),
        };
        AssembledAnswer {
            text: text.into(),
            reasoning: String::new(),
            calls: calls.iter().map(call).collect(),
            finish,
            stopped_by: None,
            usage: Usage::default(),
        }
    }

    fn tool(name: &str) -> ToolSpec {
        let parameters =
            json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
        ToolSpec { name: name.into(), description: String::new(), parameters }
    }

    fn checked(options: &ChatOptions, answer: AssembledAnswer) -> Result<Checked, String> {
        let checks = Checks::compile(options).expect("valid schemas");
        checks
            .check(answer, None)
            .map_err(|refused| format!("{}: {}", refused.misfit.place, refused.misfit.reason))
    }

    #[test]
    fn answers_and_calls_without_their_form_are_refused() {
        let output = ChatOptions {
            output: Some(Constraint::JsonSchema(json!({"type": "object", "required": ["a"]}))),
            ..ChatOptions::default()
        };
        let tools = ChatOptions { tools: vec![tool("f")], ..ChatOptions::default() };
        let choose = |choice| ChatOptions { tool_choice: choice, ..tools.clone() };
        let single = ChatOptions { parallel_tool_calls: false, ..tools.clone() };
        let good = ("f", "{\"n\": 1}");
        for (options, text, calls, why) in [
            (&output, "{\"a\": 1", &[][..], "the answer: it is not JSON"),
            (&output, "{}", &[], "the answer: \"a\" is a required property"),
            (&tools, "", &[("g", "{}")], "the call of \"g\": no tool has this name"),
            (&tools, "", &[("f", "{\"n\": \"x\"}")], "the arguments of the call of \"f\": at \"/n\""),
            (&tools, "", &[("f", "[1]")], "they are not a JSON object"),
            (&single, "", &[good, good], "it makes 2 calls; one was allowed"),
            (&choose(ToolChoice::Required), "hi", &[], "the model was required to call a tool"),
            (&choose(ToolChoice::None), "", &[good], "it calls a tool, which was not allowed"),
            (&choose(ToolChoice::Named("g".into())), "", &[good], "only \"g\" was allowed"),
        ] {
            let error = checked(options, answer(text, calls, ChatFinish::Stop)).expect_err(why);
            assert!(error.contains(why), "{error}");
            let free = ChatOptions { unconstrained: true, ..options.clone() };
            checked(&free, answer(text, calls, ChatFinish::Stop)).expect("nothing is checked");
        }
        checked(&output, answer("{\"a\": 1}", &[], ChatFinish::Stop)).expect("valid");
        checked(&tools, answer("", &[good, good], ChatFinish::ToolCalls)).expect("valid");
    }

    #[test]
    fn an_answer_that_a_limit_cut_off_keeps_its_whole_calls() {
        let tools = ChatOptions { tools: vec![tool("f")], ..ChatOptions::default() };
        let calls = [("f", "{\"n\": 1}"), ("f", "{\"n\"")];
        let cut = checked(&tools, answer("", &calls, ChatFinish::Length)).expect("cut off");
        assert!(cut.cut_off && cut.answer.calls.len() == 1);
        let plain = checked(&tools, answer("text", &[], ChatFinish::Length)).expect("cut off");
        assert!(!plain.cut_off, "free text need not be whole");
    }

    #[test]
    fn a_call_of_the_answer_tool_becomes_the_text() {
        let schema = Constraint::JsonSchema(json!({"type": "array"}));
        let options = ChatOptions { output: Some(schema), ..ChatOptions::default() };
        let mut model = crate::UpstreamModelOptions::new("m");
        model.capabilities.structured = crate::StructuredOutput::Tool;
        let nothing = Vec::new().into();
        let question =
            crate::question::Question::new(crate::UpstreamKind::OpenAi, &model, &nothing, &options);
        let crate::question::Form::Tool(tool) = question.expect("valid").form else { panic!("not a tool") };
        let checks = Checks::compile(&options).expect("valid");
        let called = answer("", &[("answer", "{\"answer\": [1]}")], ChatFinish::ToolCalls);
        let checked = checks.check(called, Some(&tool)).expect("valid");
        assert_eq!((checked.answer.text.as_str(), checked.answer.finish), ("[1]", ChatFinish::Stop));
        assert!(checked.answer.calls.is_empty());
    }
}
