//! Reads the body of `/v1/chat/completions`.

use super::{
    chat_message::{self, MessageBody},
    fields::Fields,
    parameters::Parameters,
    reasoning::{self, AskedReasoning},
    response_format::{self, Form},
    tools::{self, Choice, ToolBody},
};
use crate::ApiError;
use skep_engine::{
    Affinity, Constraint, Model, Sampling,
    chat::{ChatMessage, ChatOptions, Image, Role, ToolChoice},
};

/// The fields that are refused, each with what to do instead.
pub(crate) const UNSUPPORTED: &[(&str, &str)] = &[
    ("functions", "use tools"),
    ("function_call", "use tool_choice"),
    ("audio", "the only supported modalities are text, and images in messages"),
    ("web_search_options", "define a tool instead"),
    ("moderation", "moderate the messages and the answer yourself"),
];
/// The fields of messages and tools that are read, or refused by name.
const OF_MESSAGES: [&str; 10] = [
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "refusal",
    "audio",
    "function_call",
    "reasoning_content",
    "reasoning",
];
/// Arguments always satisfy the schema of a tool, whatever `strict` says.
const OF_FUNCTIONS: [&str; 6] = ["type", "function", "name", "description", "parameters", "strict"];
const MAX_TOP_LOGPROBS: u32 = 20;
const CONTINUES: &str = "continue_final_message";
const OPENS: &str = "add_generation_prompt";
/// Fields of a model's answer, which an agent decides itself.
const NOT_OF_AGENTS: [&str; 22] = [
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "reasoning",
    "thinking",
    "enable_thinking",
    "chat_template_kwargs",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "seed",
    "ignore_eos",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "top_logprobs",
    "prompt_cache_key",
];

#[derive(Debug)]
pub(crate) struct ChatBody {
    messages: Vec<MessageBody>,
    tools: Vec<ToolBody>,
    tool_choice: Choice,
    parallel_tool_calls: bool,
    /// Whether the last message is the beginning of the answer.
    continues: bool,
    reasoning: AskedReasoning,
    output: Option<Form>,
    logprobs: bool,
    top_logprobs: Option<u32>,
    max_tokens: Option<u32>,
    pub parameters: Parameters,
    /// Names of the fields that change nothing here.
    pub ignored: Vec<String>,
    /// Names of the given fields that change nothing with an agent as the model.
    ignored_by_agents: Vec<String>,
}

impl ChatBody {
    /// Reads the fields of a body. Unknown fields are ignored and named, because most are harmless and clients send many.
    pub(crate) fn read(mut fields: Fields) -> Result<Self, ApiError> {
        fields.refuse(UNSUPPORTED)?;
        let not_of_agents = NOT_OF_AGENTS.into_iter().filter(|name| fields.has(name));
        let ignored_by_agents = not_of_agents.map(str::to_owned).collect();
        let modalities: Vec<String> = fields.take("modalities")?.unwrap_or_default();
        if modalities.iter().any(|modality| modality != "text") {
            return Err(ApiError::parameter("modalities", "the only supported modality is text"));
        }
        fields.note_unknown_in_items("messages", &[], &OF_MESSAGES);
        fields.note_unknown_in_items("tools", &[], &OF_FUNCTIONS);
        fields.note_unknown_in_items("tools", &["function"], &OF_FUNCTIONS);
        let continues = fields.take("continue_final_message")?.unwrap_or(false);
        // The two fields exclude each other, so clients send both.
        if continues && fields.take("add_generation_prompt")?.unwrap_or(false) {
            return Err(ApiError::parameter(
                OPENS,
                format!("{OPENS} must be false where {CONTINUES} is true"),
            ));
        }
        let max_completion_tokens = fields.take("max_completion_tokens")?;
        let parameters = Parameters::take(&mut fields)?;
        let tool_choice = tools::choice(fields.take("tool_choice")?)?;
        // If calls are forced, parallel calls are off by default, because small models repeat calls up to their token
        // limit.
        let parallel_tool_calls =
            fields.take("parallel_tool_calls")?.unwrap_or(tool_choice.choice == ToolChoice::Auto);
        Ok(ChatBody {
            messages: fields.take_required("messages")?,
            tools: fields.take("tools")?.unwrap_or_default(),
            tool_choice,
            parallel_tool_calls,
            continues,
            reasoning: reasoning::take(&mut fields)?,
            output: response_format::take(&mut fields)?,
            logprobs: fields.take("logprobs")?.unwrap_or(false),
            top_logprobs: fields.take("top_logprobs")?,
            max_tokens: max_completion_tokens.or(parameters.max_tokens),
            parameters,
            ignored: fields.into_ignored(),
            ignored_by_agents,
        })
    }

    /// Returns the names of the fields that change nothing with an agent as the model.
    pub(crate) fn ignored_by_agent(&self) -> Vec<String> {
        self.ignored.iter().chain(&self.ignored_by_agents).cloned().collect()
    }

    /// Returns the names of the fields that change nothing with this model.
    pub(crate) fn ignored_by(&self, model: &Model) -> Vec<String> {
        let of_reasoning = self.reasoning.without_effect(model);
        self.ignored.iter().cloned().chain(of_reasoning).collect()
    }

    pub(crate) fn messages(&self) -> Result<Vec<ChatMessage>, ApiError> {
        chat_message::read_all(&self.messages, self.parameters.choices()?)
    }

    /// Returns the text of the last user message, which is the message to an agent.
    pub(crate) fn last_user_text(&self) -> Result<String, ApiError> {
        let mut messages = self.messages()?.into_iter().enumerate();
        let Some((index, message)) = messages.rfind(|(_, message)| message.role == Role::User) else {
            return Err(ApiError::parameter("messages", "an agent requires a message with the role user"));
        };
        match message.images.first() {
            None => Ok(message.content),
            Some(Image { part, .. }) => {
                let at = format!("messages[{index}].content[{part}]");
                Err(ApiError::parameter(at, "an agent takes only text; send the image to a model"))
            }
        }
    }

    /// Returns the options of one choice, with the model's sampling parameters where the request sets none.
    pub(crate) fn options(
        &self,
        choice: usize,
        affinity: &Affinity,
        defaults: &Sampling,
    ) -> Result<ChatOptions, ApiError> {
        if self.max_tokens == Some(0) {
            return Err(ApiError::parameter("max_tokens", "max_tokens is 0; request at least one token"));
        }
        let mut tools = tools::read(&self.tools)?;
        self.tool_choice.narrow(&mut tools);
        Ok(ChatOptions {
            tools,
            tool_choice: self.tool_choice.choice.clone(),
            parallel_tool_calls: self.parallel_tool_calls,
            continues_answer: self.continues,
            reasoning: self.reasoning.wanted.clone(),
            output: self.output.as_ref().map(|form| form.constraint.clone()),
            sampling: self.parameters.sampling(defaults)?,
            sampling_overrides: self.parameters.sampling_overrides()?,
            seed: self.parameters.seed_of(choice),
            max_tokens: self.max_tokens.map(|tokens| tokens as usize),
            stop: self.parameters.stops(),
            ignore_eos: self.parameters.ignore_eos.unwrap_or(false),
            top_logprobs: self.top_logprobs()?,
            affinity: affinity.clone(),
            ..ChatOptions::default()
        })
    }

    /// Returns whether a constraint is compiled for the response.
    pub(crate) fn is_constrained(&self) -> bool {
        self.output.is_some() || !self.tools.is_empty()
    }

    /// Returns whether the response must be JSON.
    pub(crate) fn wants_json(&self) -> bool {
        let constraint = self.output.as_ref().map(|form| &form.constraint);
        matches!(constraint, Some(Constraint::JsonSchema(_) | Constraint::JsonObject))
    }

    /// Returns the field that specifies the form of the response.
    pub(crate) fn form_field(&self) -> Option<&'static str> {
        self.output.as_ref().map(|form| form.field)
    }

    fn top_logprobs(&self) -> Result<Option<u32>, ApiError> {
        match (self.logprobs, self.top_logprobs) {
            (false, None | Some(0)) => Ok(None),
            (false, Some(_)) => {
                Err(ApiError::parameter("top_logprobs", "top_logprobs requires logprobs: true"))
            }
            (true, top) if top.unwrap_or(0) <= MAX_TOP_LOGPROBS => Ok(Some(top.unwrap_or(0))),
            (true, _) => Err(ApiError::parameter(
                "top_logprobs",
                format!("top_logprobs must be at most {MAX_TOP_LOGPROBS}"),
            )),
        }
    }

    /// Refuses fields that an agent determines itself, such as tools and the form of the output.
    pub(crate) fn refuse_for_agent(&self) -> Result<(), ApiError> {
        let refused = [
            ("tools", !self.tools.is_empty()),
            ("response_format", self.output.is_some()),
            ("logprobs", self.logprobs),
            (CONTINUES, self.continues),
            ("n", self.parameters.choices()? != 1),
        ];
        match refused.iter().find(|(_, given)| *given) {
            Some((name, _)) => {
                Err(ApiError::parameter(*name, format!("{name} is not supported with an agent as the model")))
            }
            None => Ok(()),
        }
    }

    /// Returns the size of the message texts, which is a measure of the work to read them.
    pub(crate) fn text_bytes(&self) -> usize {
        self.messages.iter().map(MessageBody::text_bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn body(value: Value) -> ChatBody {
        ChatBody::read(serde_json::from_value(value).unwrap()).unwrap()
    }

    #[test]
    fn roles_parts_and_tool_messages_are_read() {
        let messages = body(json!({"messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
            {"role": "assistant", "content": null, "refusal": "No.", "audio": null}]}))
        .messages()
        .unwrap();
        assert_eq!(
            messages.iter().map(|m| m.role).collect::<Vec<_>>(),
            [Role::System, Role::User, Role::Assistant, Role::Tool, Role::Assistant]
        );
        assert_eq!(messages[4].content, "No.");
        assert_eq!(messages[1].content, "ab");
        assert!(messages[1].images.is_empty());
        assert_eq!(messages[2].tool_calls[0].name, "f");
    }

    #[test]
    fn reasoning_is_read_from_either_field_of_a_message() {
        for (fields, expected) in [
            (json!({"reasoning_content": "a", "reasoning": "b"}), Some("a")),
            (json!({"reasoning_content": null, "reasoning": "b"}), Some("b")),
            (json!({"reasoning_content": "", "reasoning": "b"}), Some("b")),
            (json!({"reasoning_content": "a", "reasoning": null}), Some("a")),
            (json!({"reasoning": ""}), None),
        ] {
            let mut message = json!({"role": "assistant", "content": "x"});
            message.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            let read = body(json!({"messages": [message]})).messages().unwrap();
            assert_eq!(read[0].reasoning.as_deref(), expected, "{fields}");
        }
    }

    #[test]
    fn images_keep_their_position_between_the_texts_of_a_message() {
        let part = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
        let text = |text: &str| json!({"type": "text", "text": text});
        let content = json!([text("é"), part("https://a/1"), text("b"), part("https://a/2")]);
        let body = body(json!({"messages": [{"role": "user", "content": content}]}));
        let message = body.messages().unwrap().remove(0);
        assert_eq!(message.content, "éb");
        let positions: Vec<_> = message.images.iter().map(|image| (image.at, image.part)).collect();
        assert_eq!(positions, [(2, 1), (3, 3)]);
        assert_eq!(body.last_user_text().unwrap_err().param.as_deref(), Some("messages[0].content[1]"));
    }

    #[test]
    fn errors_name_the_invalid_field() {
        for (value, param) in [
            (json!({"messages": []}), "messages"),
            (json!({"messages": [{"role": "wizard", "content": "x"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
                "messages[0].content[0]",
            ),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}]}),
                "messages[0].content[1]",
            ),
            (
                json!({"messages": [{"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "https://a/b"}}]}]}),
                "messages[0].content[0]",
            ),
            (json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].tool_call_id"),
            (
                json!({"messages": [{"role": "assistant", "content": null, "audio": {"id": "a"}}]}),
                "messages[0].audio",
            ),
            (
                json!({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]}),
                "messages[0].function_call",
            ),
        ] {
            assert_eq!(body(value).messages().unwrap_err().param.as_deref(), Some(param));
        }
        for (field, value) in [
            ("functions", json!([])),
            ("tool_choice", json!(7)),
            ("temperature", json!(3)),
            ("temperature", json!("hot")),
            ("max_tokens", json!(0)),
            ("max_tokens", json!(-1)),
            ("n", json!("2")),
            ("logit_bias", json!({"x": 1})),
            ("modalities", json!(["audio"])),
            ("audio", json!({"voice": "x"})),
            ("web_search_options", json!({})),
            ("function_call", json!("auto")),
            ("guided_choice", json!(["a"])),
            ("min_tokens", json!(1)),
            ("top_logprobs", json!(2)),
        ] {
            let mut request = json!({"messages": [{"role": "user", "content": "x"}]});
            request[field] = value;
            let read = ChatBody::read(serde_json::from_value(request).unwrap());
            let error = read
                .and_then(|body| body.options(0, &Affinity::default(), &Sampling::default()))
                .unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field));
        }
    }

    #[test]
    fn a_type_error_names_the_accepted_types() {
        for (request, param, rule) in [
            (
                json!({"messages": [{"role": "user", "content": 7}]}),
                "messages[0].content",
                "a string or a list",
            ),
            (json!({"messages": [], "stop": 7}), "stop", "a string or a list of strings"),
            (json!({"messages": [], "tools": [7]}), "tools[0]", "a tool must be {"),
        ] {
            let error = ChatBody::read(serde_json::from_value(request).unwrap()).unwrap_err();
            let message = error.message;
            assert_eq!(error.param.as_deref(), Some(param));
            assert!(message.contains(rule) && !message.contains("variant"), "{message}");
        }
    }

    #[test]
    fn fields_that_change_nothing_are_named_unless_they_ask_for_nothing() {
        let messages = json!([{"role": "user", "content": "x"}]);
        let quiet = json!({"messages": messages, "store": false, "service_tier": "auto", "seed": 1, "metadata": null,
            "stream_options": {"include_obfuscation": false}, "modalities": ["text"], "min_tokens": 0});
        assert!(body(quiet).ignored.is_empty());
        let ignored = json!({"messages": messages, "store": true, "metadata": {}, "service_tier": "flex", "verbosity": "low",
            "safety_identifier": "s", "prediction": {"type": "content", "content": "x"}, "prompt_cache_retention": "24h",
            "x_unknown": 1, "stream_options": {"continuous_usage_stats": true}, "reasoning": {"x": 1},
            "temperature": 0.5});
        let body = body(ignored);
        let named: std::collections::BTreeSet<&str> = body.ignored.iter().map(String::as_str).collect();
        let expected = [
            "metadata",
            "prediction",
            "prompt_cache_retention",
            "reasoning.x",
            "safety_identifier",
            "service_tier",
            "store",
            "stream_options.continuous_usage_stats",
            "verbosity",
            "x_unknown",
        ];
        assert_eq!(named, expected.into_iter().collect());
        let by_agent = body.ignored_by_agent();
        assert!(
            by_agent.iter().any(|name| name == "temperature") && by_agent.iter().any(|name| name == "store")
        );
    }

    #[test]
    fn fields_of_messages_and_tools_that_nobody_reads_are_named() {
        let function = json!({"name": "f", "strict": true, "defer": 1});
        let body =
            body(json!({"tools": [{"type": "function", "function": function, "cache": true}], "messages": [
            {"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}, "weight": 1},
            {"role": "assistant", "content": "y", "annotations": [], "audio": null, "weight": 2}]}));
        let expected =
            ["messages[].cache_control", "messages[].weight", "tools[].cache", "tools[].function.defer"];
        assert_eq!(body.ignored, expected);
    }

    #[test]
    fn a_cache_key_is_bounded_and_precedes_the_user() {
        let key = |more: Value| {
            let mut request = json!({"messages": [{"role": "user", "content": "x"}]});
            request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            ChatBody::read(serde_json::from_value(request).unwrap())
                .map(|body| body.parameters.cache_key().map(str::to_owned))
        };
        assert_eq!(key(json!({"prompt_cache_key": "k", "user": "u"})).unwrap().as_deref(), Some("k"));
        assert_eq!(key(json!({"user": "u"})).unwrap().as_deref(), Some("u"));
        assert_eq!(key(json!({"user": "u".repeat(257), "prompt_cache_key": ""})).unwrap(), None);
        let error = key(json!({"prompt_cache_key": "k".repeat(257)})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("prompt_cache_key"));
    }

    #[test]
    fn the_model_decides_only_what_the_request_leaves_open() {
        let recommended = Sampling { temperature: 0.2, top_p: 0.9, top_k: 20, ..Sampling::default() };
        let sampling = |more: Value| {
            let mut request = json!({"messages": [{"role": "user", "content": "x"}]});
            request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            body(request).options(0, &Affinity::default(), &recommended).unwrap().sampling
        };
        assert_eq!(sampling(json!({})), recommended);
        let given = Sampling { temperature: 1.0, top_k: 0, ..recommended.clone() };
        assert_eq!(sampling(json!({"temperature": 1, "top_k": -1})), given);
    }
}
