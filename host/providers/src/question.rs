//! One request to a model, before it is written in a wire format.

use std::borrow::Cow;

use serde_json::{Map, Value, json};
use skep_engine::{
    Constraint, EngineError,
    chat::{
        ChatMessage, ChatOptions, Image, ImageSource, Input, Reasoning, Role, SamplingOverrides, ToolChoice,
        refusal, refuse_images,
    },
};

use crate::options::{ReasoningControl, StructuredOutput, UpstreamKind, UpstreamModelOptions};

/// Name of the tool whose arguments are the answer. It is made longer if a tool of the caller has it.
const ANSWER_TOOL: &str = "answer";
/// Property of the tool's arguments that holds an answer that is not an object.
const ANSWER: &str = "answer";

/// Smallest number of tokens that Anthropic allows for reasoning, and the number for each effort.
const LEAST_THINKING: usize = 1024;
const THINKING: [(&str, usize); 3] = [("low", 2048), ("medium", 8192), ("high", 16_384)];

/// One request to a model.
#[derive(Debug)]
pub(crate) struct Question<'a> {
    pub model: &'a UpstreamModelOptions,
    pub input: &'a Input,
    pub options: &'a ChatOptions,
    pub form: Form,
}

/// The way in which the answer is held to its schema.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Form {
    /// The answer is free, or consists of calls.
    Free,
    /// The schema is sent to the server.
    Schema(Value),
    /// The server is asked for JSON.
    Json,
    Tool(AnswerTool),
}

/// A tool whose arguments are the answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AnswerTool {
    pub name: String,
    pub schema: Value,
    /// Whether the answer is a property of the arguments, because it is not an object itself.
    wrapped: bool,
}

impl<'a> Question<'a> {
    /// Returns the seed as a number that every reader of JSON has exactly.
    pub(crate) fn seed(&self) -> Option<u64> {
        const NUMBERS: u64 = 1 << 53;
        self.options.seed.map(|seed| seed % NUMBERS)
    }

    pub(crate) fn new(
        kind: UpstreamKind,
        model: &'a UpstreamModelOptions,
        input: &'a Input,
        options: &'a ChatOptions,
    ) -> Result<Self, EngineError> {
        check(kind, model, options)?;
        accepts(kind, model, input)?;
        Ok(Question { model, input, options, form: Form::of(kind, model, options) })
    }

    /// Returns the messages in the order in which the model sees them: the examples follow the system messages.
    pub(crate) fn history(&self) -> impl Iterator<Item = &'a ChatMessage> {
        let messages = self.input.messages();
        let system = messages.iter().take_while(|message| message.role == Role::System).count();
        let (opening, rest) = messages.split_at(system);
        opening.iter().chain(&self.options.examples).chain(rest)
    }

    /// Returns the maximum number of output tokens, if one is set.
    pub(crate) fn max_tokens(&self) -> Option<usize> {
        match (self.options.max_tokens, self.model.max_output) {
            (Some(asked), Some(most)) => Some(asked.min(most)),
            (asked, _) => asked,
        }
    }

    /// Returns the number of tokens for Anthropic's thinking within an answer of at most `most` tokens, if the request
    /// asks for reasoning and the answer has room for it.
    pub(crate) fn thinking_budget(&self, most: usize) -> Option<usize> {
        thinking_budget(self.options, most)
    }

    /// Returns the body's fields for the sampling parameters that the request chose. The server has its own defaults for
    /// the others.
    pub(crate) fn sampling(&self, kind: UpstreamKind) -> Map<String, Value> {
        let chosen = self.options.chosen_sampling();
        let mut fields = Map::new();
        for knob in Knob::of(kind) {
            if let Some(value) = knob.value(&chosen) {
                fields.insert(knob.name().to_owned(), as_written(value));
            }
        }
        if let Some(top_k) = chosen.top_k {
            fields.insert("top_k".to_owned(), top_k.into());
        }
        fields
    }
}

/// A sampling parameter that is a number with a fraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Knob {
    Temperature,
    TopP,
    MinP,
    Frequency,
    Presence,
    Repetition,
}

impl Knob {
    const ALL: [Knob; 6] =
        [Knob::Temperature, Knob::TopP, Knob::MinP, Knob::Frequency, Knob::Presence, Knob::Repetition];

    /// Returns the parameters that servers of this kind have.
    fn of(kind: UpstreamKind) -> &'static [Knob] {
        match kind {
            UpstreamKind::OpenAi => &Knob::ALL,
            UpstreamKind::Anthropic => &[Knob::Temperature, Knob::TopP],
            UpstreamKind::WorkersAi => {
                &[Knob::Temperature, Knob::TopP, Knob::Frequency, Knob::Presence, Knob::Repetition]
            }
        }
    }

    /// Returns the name of the parameter in requests and in bodies.
    fn name(self) -> &'static str {
        match self {
            Knob::Temperature => "temperature",
            Knob::TopP => "top_p",
            Knob::MinP => "min_p",
            Knob::Frequency => "frequency_penalty",
            Knob::Presence => "presence_penalty",
            Knob::Repetition => "repetition_penalty",
        }
    }

    fn value(self, chosen: &SamplingOverrides) -> Option<f32> {
        match self {
            Knob::Temperature => chosen.temperature,
            Knob::TopP => chosen.top_p,
            Knob::MinP => chosen.min_p,
            Knob::Frequency => chosen.frequency_penalty,
            Knob::Presence => chosen.presence_penalty,
            Knob::Repetition => chosen.repetition_penalty,
        }
    }

    /// Returns the value that changes nothing.
    fn neutral(self) -> f32 {
        match self {
            Knob::Temperature | Knob::TopP | Knob::Repetition => 1.0,
            Knob::MinP | Knob::Frequency | Knob::Presence => 0.0,
        }
    }
}

pub(crate) fn thinking_budget(options: &ChatOptions, most: usize) -> Option<usize> {
    let Reasoning { enabled, budget, .. } = &options.reasoning;
    let wanted = match (enabled, budget) {
        (Some(false), _) | (None, None) => return None,
        (_, Some(budget)) => *budget,
        (Some(true), None) => {
            let effort = options.reasoning.template_effort().unwrap_or("medium");
            THINKING.iter().find(|(name, _)| *name == effort).map_or(LEAST_THINKING, |(_, tokens)| *tokens)
        }
    };
    // The tokens of the reasoning are part of the answer's, and some have to be left.
    Some(wanted.max(LEAST_THINKING))
        .map(|budget| budget.min(most.saturating_sub(1)))
        .filter(|budget| *budget >= LEAST_THINKING)
}

/// Refuses what no server of this kind, or not this model, can do.
pub(crate) fn check(
    kind: UpstreamKind,
    model: &UpstreamModelOptions,
    options: &ChatOptions,
) -> Result<(), EngineError> {
    let invalid = |parameter: &str, message: String| {
        Err(EngineError::InvalidRequest { parameter: parameter.to_owned(), message })
    };
    let name = &model.name;
    if calls_tools(options) && !model.capabilities.tools {
        return invalid("tools", format!("the upstream model {name} cannot call tools"));
    }
    // Anthropic's models continue a last message of the assistant without being asked.
    if options.continues_answer && kind != UpstreamKind::Anthropic {
        let message = format!(
            "the server of the upstream model {name} decides itself how an answer begins; ask it to continue"
        );
        return invalid("continue_final_message", message);
    }
    if options.top_logprobs.is_some() {
        let message = format!("the upstream model {name} does not support logprobs");
        return invalid("top_logprobs", message);
    }
    if options.ignore_eos {
        return invalid("ignore_eos", format!("the upstream model {name} does not support ignore_eos"));
    }
    if !options.sampling.logit_bias.is_empty() && kind != UpstreamKind::OpenAi {
        return invalid("logit_bias", format!("the upstream model {name} does not support logit_bias"));
    }
    if let Some(parameter) = unsupported_sampling(kind, &options.chosen_sampling()) {
        return invalid(parameter, format!("the upstream model {name} does not support {parameter}"));
    }
    if model.reasoning_control == ReasoningControl::Budget
        && thinking_budget(options, usize::MAX).is_some()
        && (must_call(options) || (options.output.is_some() && !options.unconstrained))
    {
        let message = format!(
            "the upstream model {name} cannot reason before an answer that must be a call or match a schema; turn one of \
             them off"
        );
        return invalid("reasoning", message);
    }
    match &options.output {
        Some(Constraint::Regex(_) | Constraint::Lark(_) | Constraint::ToolCalls(_)) => {
            let message = format!(
                "the upstream model {name} cannot be constrained to a regular expression or a grammar; use a JSON Schema, or a \
                 model of this host"
            );
            invalid("output", message)
        }
        Some(_) if model.capabilities.structured == StructuredOutput::None && !options.unconstrained => {
            invalid("output", format!("the upstream model {name} does not support structured output"))
        }
        _ => Ok(()),
    }
}

/// Returns a sampling parameter that changes the answer and that servers of this kind do not have.
fn unsupported_sampling(kind: UpstreamKind, chosen: &SamplingOverrides) -> Option<&'static str> {
    let changes = |knob: &Knob| knob.value(chosen).is_some_and(|value| value != knob.neutral());
    let lacks = |knob: &Knob| !Knob::of(kind).contains(knob);
    Knob::ALL.into_iter().find(|knob| lacks(knob) && changes(knob)).map(Knob::name)
}

/// Refuses an input that no server of this kind, or not this model, reads.
pub(crate) fn accepts(
    kind: UpstreamKind,
    model: &UpstreamModelOptions,
    input: &Input,
) -> Result<(), EngineError> {
    let name = &model.name;
    if matches!(input, Input::Text(_)) && kind != UpstreamKind::OpenAi {
        let message = format!(
            "the upstream model {name} does not support text completion, because its server is of kind {}\n  \
             hint: use /v1/chat/completions, or a model of an upstream of the kind openai",
            kind.as_str()
        );
        return Err(EngineError::InvalidRequest { parameter: "model".to_owned(), message });
    }
    if !model.capabilities.images {
        return refuse_images(input.messages(), name);
    }
    let is_fetched = |image: &Image| matches!(image.source, ImageSource::Url(_));
    match input.images().find(|(_, image)| is_fetched(image)) {
        Some((message, image)) if kind == UpstreamKind::WorkersAi => {
            Err(refusal(message, image, "Workers AI fetches no images; send it as a data: URL"))
        }
        _ => Ok(()),
    }
}

/// Returns whether the answer may call tools.
pub(crate) fn calls_tools(options: &ChatOptions) -> bool {
    !options.tools.is_empty() && options.tool_choice != ToolChoice::None
}

/// Returns whether the answer must be a call.
pub(crate) fn must_call(options: &ChatOptions) -> bool {
    calls_tools(options) && matches!(options.tool_choice, ToolChoice::Required | ToolChoice::Named(_))
}

impl Form {
    fn of(kind: UpstreamKind, model: &UpstreamModelOptions, options: &ChatOptions) -> Form {
        // An answer that must be a call never has to match the schema of a text.
        let output = options.output.as_ref().filter(|_| !options.unconstrained && !must_call(options));
        let needs_tool =
            kind == UpstreamKind::Anthropic || model.capabilities.structured == StructuredOutput::Tool;
        match output {
            Some(Constraint::JsonSchema(schema)) if needs_tool => {
                Form::Tool(AnswerTool::new(schema, options))
            }
            Some(Constraint::JsonObject) if needs_tool => {
                Form::Tool(AnswerTool::new(&json!({"type": "object"}), options))
            }
            Some(Constraint::JsonSchema(schema)) => Form::Schema(schema.clone()),
            Some(Constraint::JsonObject) => Form::Json,
            _ => Form::Free,
        }
    }
}

impl AnswerTool {
    /// The model reads this.
    pub(crate) const DESCRIPTION: &str = "Gives the final answer. Call it once, with the whole answer.";

    fn new(schema: &Value, options: &ChatOptions) -> Self {
        let mut name = ANSWER_TOOL.to_owned();
        while options.tools.iter().any(|tool| tool.name == name) {
            name.push('_');
        }
        let wrapped = schema.get("type").and_then(Value::as_str) != Some("object");
        let schema = match (wrapped, schema) {
            (false, schema) => schema.clone(),
            (true, schema) => wrap(schema),
        };
        AnswerTool { name, schema, wrapped }
    }

    /// Returns the answer that a call of this tool contains. Arguments that cannot be read are the answer as they
    /// are, which the validation refuses.
    pub(crate) fn answer<'b>(&self, arguments: &'b str) -> Cow<'b, str> {
        if !self.wrapped {
            return Cow::Borrowed(arguments);
        }
        match serde_json::from_str::<Map<String, Value>>(arguments) {
            Ok(mut fields) => match fields.remove(ANSWER) {
                Some(answer) => Cow::Owned(answer.to_string()),
                None => Cow::Borrowed(arguments),
            },
            Err(_) => Cow::Borrowed(arguments),
        }
    }
}

/// Makes a schema that is not one of an object a property of one. Its definitions stay where references find them.
fn wrap(schema: &Value) -> Value {
    let mut inner = schema.clone();
    let mut outer = Map::new();
    outer.insert("type".to_owned(), json!("object"));
    if let Value::Object(fields) = &mut inner {
        for definitions in ["$defs", "definitions"] {
            if let Some(moved) = fields.remove(definitions) {
                outer.insert(definitions.to_owned(), moved);
            }
        }
    }
    outer.insert("properties".to_owned(), json!({ ANSWER: inner }));
    outer.insert("required".to_owned(), json!([ANSWER]));
    outer.insert("additionalProperties".to_owned(), json!(false));
    Value::Object(outer)
}

/// Returns the number that a client wrote: 0.7, not the 0.699999988079071 that is nearest to it in 32 bits.
fn as_written(value: f32) -> Value {
    json!(value.to_string().parse::<f64>().unwrap_or_else(|_| value.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_engine::{Sampling, chat::ToolSpec};

    #[test]
    fn an_answer_that_is_not_an_object_is_wrapped_and_unwrapped() {
        let schema =
            json!({"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "integer"}}});
        let tool = AnswerTool::new(&schema, &ChatOptions::default());
        assert_eq!(
            tool.schema["properties"]["answer"],
            json!({"type": "array", "items": {"$ref": "#/$defs/x"}})
        );
        assert_eq!(tool.schema["$defs"], schema["$defs"]);
        assert_eq!(tool.answer("{\"answer\": [1, 2]}"), "[1,2]");
        assert_eq!(tool.answer("[1"), "[1");
        let object = AnswerTool::new(&json!({"type": "object"}), &ChatOptions::default());
        assert_eq!(object.answer("{\"answer\": 1}"), "{\"answer\": 1}");
    }

    #[test]
    fn the_answer_tool_never_has_the_name_of_another() {
        let tool = ToolSpec { name: "answer".into(), description: String::new(), parameters: json!({}) };
        let options = ChatOptions { tools: vec![tool], ..ChatOptions::default() };
        assert_eq!(AnswerTool::new(&json!({"type": "object"}), &options).name, "answer_");
    }

    #[test]
    fn unsupported_upstream_features_are_refused() {
        let model = UpstreamModelOptions::new("m");
        for (options, parameter) in [
            (ChatOptions { output: Some(Constraint::Regex("a".into())), ..ChatOptions::default() }, "output"),
            (ChatOptions { top_logprobs: Some(1), ..ChatOptions::default() }, "top_logprobs"),
            (ChatOptions { ignore_eos: true, ..ChatOptions::default() }, "ignore_eos"),
        ] {
            let error = Question::new(UpstreamKind::OpenAi, &model, &Vec::new().into(), &options)
                .expect_err(parameter);
            assert!(error.to_string().starts_with(&format!("`{parameter}`: ")), "{error}");
        }
    }

    #[test]
    fn sampling_that_a_server_does_not_have_is_refused_unless_it_changes_nothing() {
        let model = UpstreamModelOptions::new("m");
        let checked = |kind, sampling: Sampling| {
            let options = ChatOptions { sampling, ..ChatOptions::default() };
            check(kind, &model, &options).map_err(|error| error.to_string())
        };
        let usual = Sampling::default;
        for (kind, sampling, parameter) in [
            (UpstreamKind::Anthropic, Sampling { frequency_penalty: 1.0, ..usual() }, "frequency_penalty"),
            (UpstreamKind::Anthropic, Sampling { presence_penalty: -1.0, ..usual() }, "presence_penalty"),
            (UpstreamKind::Anthropic, Sampling { repetition_penalty: 1.3, ..usual() }, "repetition_penalty"),
            (UpstreamKind::Anthropic, Sampling { min_p: 0.1, ..usual() }, "min_p"),
            (UpstreamKind::WorkersAi, Sampling { min_p: 0.1, ..usual() }, "min_p"),
        ] {
            let error = checked(kind, sampling.clone()).expect_err(parameter);
            assert!(error.starts_with(&format!("`{parameter}`: ")), "{error}");
            assert_eq!(checked(UpstreamKind::OpenAi, sampling), Ok(()));
        }
        let zeros = SamplingOverrides {
            min_p: Some(0.0),
            frequency_penalty: Some(0.0),
            presence_penalty: Some(0.0),
            repetition_penalty: Some(1.0),
            ..SamplingOverrides::default()
        };
        assert_eq!(unsupported_sampling(UpstreamKind::Anthropic, &zeros), None);
        assert_eq!(checked(UpstreamKind::Anthropic, Sampling { temperature: 0.3, ..usual() }), Ok(()));
    }
}
