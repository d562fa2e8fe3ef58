//! Reads the body of `/v1/messages` and `/v1/messages/count_tokens`.

use super::content::{Content, Turn};
use crate::{
    ApiError,
    body::FromFields,
    openai::{
        fields::Fields,
        image,
        parameters::{top_p, within},
        reasoning::{self, AskedReasoning},
        tools,
    },
};
use serde::Deserialize;
use serde_json::Value;
use skep_engine::{
    Affinity, Constraint, Model, Sampling,
    chat::{ChatMessage, ChatOptions, Reasoning, SamplingOverrides, ToolChoice, ToolSpec},
};
use utoipa::ToSchema;

/// The fields that are refused, each with what to do instead.
pub(crate) const UNSUPPORTED: &[(&str, &str)] = &[
    ("mcp_servers", "declare the servers in the host's configuration, for agents"),
    ("container", "remove it"),
    ("context_management", "remove it"),
    ("compaction", "ask for a summary in a message"),
    ("thread", "send all messages"),
];
/// Fields that change no answer of this host.
const WITHOUT_EFFECT: [&str; 3] = ["service_tier", "inference_geo", "cache_control"];
/// The fields that are read inside of others.
const KNOWN_INSIDE: [(&str, &[&str]); 3] = [
    ("output_config", &["format", "effort"]),
    ("metadata", &["user_id"]),
    ("tool_choice", &["type", "name", "disable_parallel_tool_use"]),
];
/// The fields of tools that are read. Their input always satisfies the schema, whatever `strict` says, and every prefix is
/// cached.
const OF_TOOLS: [&str; 6] = ["type", "name", "description", "input_schema", "strict", "cache_control"];
/// Longest user id that names a session for affinity.
const MAX_SESSION_BYTES: usize = 256;

/// A request for a message, or for the number of its tokens.
#[derive(Debug, ToSchema)]
#[schema(as = AnthropicMessageRequest)]
pub(crate) struct MessageRequest {
    /// Name of a model.
    pub model: String,
    messages: Vec<Turn>,
    /// The system prompt.
    system: Option<Content>,
    /// Maximum number of tokens of the answer. Counting tokens does not need it.
    #[schema(minimum = 1)]
    max_tokens: Option<u32>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<Choice>,
    stop_sequences: Option<Vec<String>>,
    /// Whether the answer is a stream of events.
    stream: Option<bool>,
    #[schema(minimum = 0, maximum = 1)]
    temperature: Option<f32>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    top_p: Option<f32>,
    top_k: Option<u32>,
    /// The form of the answer: `{"format": {"type": "json_schema", "schema": …}}`.
    output_config: Option<OutputConfig>,
    metadata: Option<Metadata>,
    /// Whether the model reasons before it answers, and the most tokens of it: `{"type": "enabled", "budget_tokens": …}`.
    #[schema(value_type = Option<Value>)]
    thinking: AskedReasoning,
    /// Names of fields that the host does not know, and those that change nothing here.
    #[schema(ignore)]
    pub ignored: Vec<String>,
}

/// A tool that the model may use.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicTool)]
pub(crate) struct Tool {
    /// `custom`; the tools of Anthropic's own servers are not supported.
    #[serde(default, rename = "type")]
    kind: Option<String>,
    name: String,
    #[serde(default)]
    description: Option<String>,
    /// JSON Schema of the arguments.
    #[serde(default)]
    input_schema: Option<Value>,
}

/// Whether the model uses tools.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicToolChoice)]
struct Choice {
    /// `auto`, `any`, `tool` or `none`.
    #[serde(rename = "type")]
    kind: String,
    /// The tool, with `tool`.
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    disable_parallel_tool_use: Option<bool>,
}

/// Settings of the answer.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicOutputConfig)]
struct OutputConfig {
    #[serde(default)]
    format: Option<OutputFormat>,
    /// `low`, `medium`, `high` or `max`: the reasoning effort, if the model's template supports it.
    #[serde(default)]
    effort: Option<String>,
}

/// The form of the answer.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicOutputFormat)]
struct OutputFormat {
    /// `json_schema`.
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    schema: Option<Value>,
}

/// Notes about the request.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicMetadata)]
struct Metadata {
    /// The host looks for the cached prefix where it answered this user last, unless a header names the session.
    #[serde(default)]
    user_id: Option<String>,
}

impl FromFields for MessageRequest {
    fn read(mut fields: Fields) -> Result<Self, ApiError> {
        fields.refuse(UNSUPPORTED)?;
        for (name, known) in KNOWN_INSIDE {
            fields.note_unknown_inside(name, known);
        }
        fields.note_unknown_in_items("messages", &[], &["role", "content"]);
        fields.note_unknown_in_items("tools", &[], &OF_TOOLS);
        let mut request = MessageRequest {
            model: fields.take_required("model")?,
            messages: fields.take_required("messages")?,
            system: fields.take("system")?,
            max_tokens: fields.take("max_tokens")?,
            tools: fields.take("tools")?,
            tool_choice: fields.take("tool_choice")?,
            stop_sequences: fields.take("stop_sequences")?,
            stream: fields.take("stream")?,
            temperature: fields.take("temperature")?,
            top_p: fields.take("top_p")?,
            top_k: fields.take("top_k")?,
            output_config: fields.take("output_config")?,
            metadata: fields.take("metadata")?,
            thinking: reasoning::take(&mut fields)?,
            ignored: Vec::new(),
        };
        // Earlier clients send the form of the answer by itself.
        if let Some(format) = fields.take("output_format")? {
            let effort = request.output_config.take().and_then(|config| config.effort);
            request.output_config = Some(OutputConfig { format: Some(format), effort });
        }
        let effort = request.output_config.as_ref().and_then(|config| config.effort.as_deref());
        if let Some(effort) = effort {
            request.thinking.put_effort("output_config.effort", effort)?;
        }
        request.ignored =
            fields.names().filter(|name| !WITHOUT_EFFECT.contains(name)).map(str::to_owned).collect();
        Ok(request)
    }
}

impl MessageRequest {
    pub(crate) fn streams(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// Returns the user, by whose last answer the cached prefix is found.
    pub(crate) fn user(&self) -> Option<&str> {
        let user = self.metadata.as_ref()?.user_id.as_deref()?;
        (1..=MAX_SESSION_BYTES).contains(&user.len()).then_some(user)
    }

    /// Returns whether a constraint is compiled for the response.
    pub(crate) fn is_constrained(&self) -> bool {
        self.tools.as_ref().is_some_and(|tools| !tools.is_empty()) || self.format().is_some()
    }

    /// Returns the size of the message texts, which is a measure of the work to read them.
    pub(crate) fn text_bytes(&self) -> usize {
        self.system.as_ref().map_or(0, Content::bytes) + self.messages.iter().map(Turn::bytes).sum::<usize>()
    }

    pub(crate) fn messages(&self) -> Result<Vec<ChatMessage>, ApiError> {
        let mut messages = Vec::with_capacity(self.messages.len() + 1);
        if let Some(system) = &self.system {
            messages.push(ChatMessage::system(system.text("system")?));
        }
        for (index, turn) in self.messages.iter().enumerate() {
            turn.read(index, &mut messages)?;
        }
        if self.messages.is_empty() {
            return Err(ApiError::parameter("messages", "messages is empty; send at least one message"));
        }
        image::check_all(&messages, 1)?;
        Ok(messages)
    }

    /// Returns whether the last message is the beginning of the answer.
    pub(crate) fn begins_answer(&self) -> bool {
        self.messages.last().is_some_and(Turn::is_of_assistant)
    }

    pub(crate) fn tools(&self) -> Result<Vec<ToolSpec>, ApiError> {
        let tools = self.tools.iter().flatten().enumerate();
        tools.map(|(index, tool)| tool.read(index)).collect()
    }

    pub(crate) fn reasoning(&self) -> &Reasoning {
        &self.thinking.wanted
    }

    /// Returns the names of the fields that change nothing with this model.
    pub(crate) fn ignored_by(&self, model: &Model) -> Vec<String> {
        self.ignored.iter().cloned().chain(self.thinking.without_effect(model)).collect()
    }

    /// Returns the options of the answer, with the model's sampling parameters where the request sets none.
    pub(crate) fn options(
        &self,
        affinity: Affinity,
        defaults: &Sampling,
        limit: usize,
    ) -> Result<ChatOptions, ApiError> {
        let max_tokens = match self.max_tokens {
            None => return Err(ApiError::parameter("max_tokens", "`max_tokens` is missing")),
            Some(0) => {
                return Err(ApiError::parameter("max_tokens", "max_tokens is 0; request at least one token"));
            }
            Some(most) => most as usize,
        };
        let tool_choice = self.tool_choice()?;
        let disables = self.tool_choice.as_ref().and_then(|choice| choice.disable_parallel_tool_use);
        // If calls are forced, parallel calls are off by default, because small models repeat calls up to their token
        // limit.
        let parallel_tool_calls = disables.map_or(tool_choice == ToolChoice::Auto, |disables| !disables);
        Ok(ChatOptions {
            tools: self.tools()?,
            tool_choice,
            parallel_tool_calls,
            continues_answer: self.begins_answer(),
            output: self.output()?,
            sampling: self.sampling()?.over(defaults),
            sampling_overrides: self.sampling()?,
            // Clients ask for as many tokens as any model can produce; a smaller context ends the answer earlier.
            max_tokens: (max_tokens < limit).then_some(max_tokens),
            stop: self.stop_sequences.clone().unwrap_or_default(),
            affinity,
            reasoning: self.thinking.wanted.clone(),
            ..ChatOptions::default()
        })
    }

    fn format(&self) -> Option<&OutputFormat> {
        self.output_config.as_ref()?.format.as_ref()
    }

    fn output(&self) -> Result<Option<Constraint>, ApiError> {
        let Some(OutputFormat { kind, schema }) = self.format() else { return Ok(None) };
        match (kind.as_str(), schema) {
            ("json_schema", Some(schema @ (Value::Object(_) | Value::Bool(_)))) => {
                Ok(Some(Constraint::JsonSchema(schema.clone())))
            }
            ("json_schema", _) => Err(ApiError::parameter(
                "output_config.format.schema",
                "the schema is missing; it must be an object",
            )),
            (other, _) => Err(ApiError::parameter(
                "output_config.format.type",
                format!("the type of the format is {other:?}; it must be \"json_schema\""),
            )),
        }
    }

    fn tool_choice(&self) -> Result<ToolChoice, ApiError> {
        let Some(Choice { kind, name, .. }) = &self.tool_choice else { return Ok(ToolChoice::Auto) };
        match (kind.as_str(), name) {
            ("auto", _) => Ok(ToolChoice::Auto),
            ("any", _) => Ok(ToolChoice::Required),
            ("none", _) => Ok(ToolChoice::None),
            ("tool", Some(name)) => Ok(ToolChoice::Named(name.clone())),
            ("tool", None) => Err(ApiError::parameter(
                "tool_choice.name",
                "tool_choice of type \"tool\" must name the tool",
            )),
            (other, _) => Err(ApiError::parameter(
                "tool_choice.type",
                format!("the type of tool_choice is {other:?}; it must be auto, any, tool or none"),
            )),
        }
    }

    fn sampling(&self) -> Result<SamplingOverrides, ApiError> {
        Ok(SamplingOverrides {
            temperature: within("temperature", self.temperature, 0.0..=1.0)?,
            top_p: top_p(self.top_p)?,
            top_k: self.top_k,
            ..SamplingOverrides::default()
        })
    }
}

impl Tool {
    fn read(&self, index: usize) -> Result<ToolSpec, ApiError> {
        if let Some(kind) = self.kind.as_deref().filter(|kind| *kind != "custom") {
            let message = format!(
                "the tool type {kind:?} belongs to Anthropic's servers and is not supported; define a tool with an \
                 input_schema"
            );
            return Err(ApiError::parameter(format!("tools[{index}].type"), message));
        }
        Ok(tools::spec(&self.name, self.description.as_deref(), self.input_schema.as_ref()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(extra: Value) -> Result<MessageRequest, ApiError> {
        let mut body =
            json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        MessageRequest::read(serde_json::from_value(body).unwrap())
    }

    fn options(extra: Value) -> Result<ChatOptions, ApiError> {
        read(extra)?.options(Affinity::default(), &Sampling::default(), 100)
    }

    #[test]
    fn options_are_those_of_the_request() {
        let tool = json!({"name": "look", "description": "Looks.", "input_schema": {"type": "object"}});
        let options =
            options(json!({"tools": [tool], "tool_choice": {"type": "tool", "name": "look"}, "top_k": 3,
            "temperature": 0.5, "stop_sequences": ["END"], "max_tokens": 50}))
            .unwrap();
        assert_eq!(options.tool_choice, ToolChoice::Named("look".into()));
        assert_eq!((options.max_tokens, options.stop.as_slice()), (Some(50), ["END".to_owned()].as_slice()));
        assert_eq!((options.sampling.top_k, options.sampling.temperature), (3, 0.5));
        assert!(!options.parallel_tool_calls);
        assert_eq!(
            self::options(json!({"max_tokens": 100})).unwrap().max_tokens,
            None,
            "the rest of the context"
        );
        let format = json!({"type": "json_schema", "schema": {"type": "object"}});
        for form in [json!({"output_config": {"format": format}}), json!({"output_format": format})] {
            assert_eq!(
                self::options(form).unwrap().output,
                Some(Constraint::JsonSchema(json!({"type": "object"})))
            );
        }
    }

    #[test]
    fn errors_name_the_invalid_field() {
        for (extra, param) in [
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"max_tokens": null}), "max_tokens"),
            (json!({"temperature": 1.5}), "temperature"),
            (json!({"top_p": 0}), "top_p"),
            (json!({"tool_choice": {"type": "tool"}}), "tool_choice.name"),
            (json!({"tool_choice": {"type": "maybe"}}), "tool_choice.type"),
            (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "tools[0].type"),
            (json!({"tools": [{"description": "nameless"}]}), "tools[0]"),
            (json!({"output_format": {"type": "json_schema"}}), "output_config.format.schema"),
            (json!({"mcp_servers": []}), "mcp_servers"),
            (json!({"output_config": {"effort": "a lot"}}), "output_config.effort"),
        ] {
            let error = options(extra.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{extra}: {}", error.message);
        }
    }

    #[test]
    fn a_last_message_of_the_assistant_begins_the_answer() {
        let user = json!({"role": "user", "content": "x"});
        let assistant = json!({"role": "assistant", "content": "y"});
        for (messages, begins) in [(json!([user, assistant]), true), (json!([user, assistant, user]), false)]
        {
            assert_eq!(options(json!({"messages": messages})).unwrap().continues_answer, begins);
        }
    }

    #[test]
    fn unknown_fields_are_named() {
        let request =
            read(json!({"betas": ["x"], "service_tier": "auto", "metadata": {"user_id": "u"}})).unwrap();
        assert_eq!(
            (request.ignored.as_slice(), request.user()),
            (["betas".to_owned()].as_slice(), Some("u"))
        );
        let request =
            read(json!({"output_config": {"effort": "max", "x": 1}, "metadata": {"y": 2}})).unwrap();
        assert_eq!(request.ignored, ["output_config.x", "metadata.y"]);
        let tool = json!({"name": "look", "input_schema": {}, "strict": true, "defer_loading": true});
        assert_eq!(read(json!({"tools": [tool]})).unwrap().ignored, ["tools[].defer_loading"]);
        assert_eq!(request.reasoning().effort.as_deref(), Some("max"));
    }
}
