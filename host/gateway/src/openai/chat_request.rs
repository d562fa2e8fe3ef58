//! Reads the body of `/v1/chat/completions`.

use super::{
    fields::Fields,
    image,
    parameters::Parameters,
    reasoning,
    response_format::{self, Form},
};
use crate::ApiError;
use serde::Deserialize;
use serde_json::Value;
use skep_engine::{
    Affinity, Constraint, Sampling,
    chat::{ChatMessage, ChatOptions, Image, Reasoning, Role, ToolCall, ToolChoice, ToolSpec},
};
use utoipa::ToSchema;

const UNSUPPORTED: &[(&str, &str)] = &[
    ("functions", "use tools"),
    ("function_call", "use tool_choice"),
    ("audio", "the only supported modalities are text, and images in messages"),
    ("prediction", "remove it"),
    ("web_search_options", "define a tool instead"),
];
const MAX_TOP_LOGPROBS: u32 = 20;

#[derive(Debug)]
pub(crate) struct ChatBody {
    messages: Vec<MessageBody>,
    tools: Vec<ToolBody>,
    tool_choice: ToolChoice,
    parallel_tool_calls: bool,
    reasoning: Reasoning,
    output: Option<Form>,
    logprobs: bool,
    top_logprobs: Option<u32>,
    max_tokens: Option<u32>,
    pub parameters: Parameters,
}

/// A message of a chat.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatMessage)]
pub(super) struct MessageBody {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    role: String,
    #[serde(default)]
    content: Option<Content>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<ToolCallBody>>,
    #[serde(default)]
    tool_call_id: Option<String>,
    /// The reasoning before an assistant message. Models see it as far as their template shows it.
    #[serde(default, alias = "reasoning")]
    reasoning_content: Option<String>,
}

/// A text, or parts of type `text` and, for models that see, `image_url`.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatContent)]
#[serde(
    untagged,
    expecting = "the content must be a string or a list of parts such as {\"type\": \"text\", \"text\": …}"
)]
enum Content {
    Text(String),
    Parts(Vec<Value>),
}

/// A call that the model made.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatToolCall)]
struct ToolCallBody {
    id: String,
    function: FunctionCallBody,
}

/// The function of a call.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatFunctionCall)]
struct FunctionCallBody {
    name: String,
    /// JSON as text.
    arguments: String,
}

/// A tool as OpenAI's `{type, function}`, or as the bare function.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatTool)]
#[serde(
    untagged,
    expecting = "a tool must be {\"type\": \"function\", \"function\": {\"name\": …, \"description\": …, \"parameters\": …}}"
)]
pub(super) enum ToolBody {
    Wrapped { function: FunctionBody },
    Bare(FunctionBody),
}

/// A function that the model may call.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatFunction)]
pub(super) struct FunctionBody {
    name: String,
    #[serde(default)]
    description: Option<String>,
    /// JSON Schema of the arguments; without one, the function has none.
    #[serde(default)]
    parameters: Option<Value>,
}

impl ChatBody {
    /// Reads the fields of a body. Unknown fields are ignored, because most are harmless and clients send many.
    pub(crate) fn read(mut fields: Fields) -> Result<Self, ApiError> {
        fields.refuse(UNSUPPORTED)?;
        let modalities: Vec<String> = fields.take("modalities")?.unwrap_or_default();
        if modalities.iter().any(|modality| modality != "text") {
            return Err(ApiError::parameter("modalities", "the only supported modality is text"));
        }
        let max_completion_tokens = fields.take("max_completion_tokens")?;
        let parameters = Parameters::take(&mut fields)?;
        let tool_choice = tool_choice(fields.take("tool_choice")?)?;
        // If calls are forced, parallel calls are off by default, because small models repeat calls up to their token
        // limit.
        let parallel_tool_calls =
            fields.take("parallel_tool_calls")?.unwrap_or(tool_choice == ToolChoice::Auto);
        Ok(ChatBody {
            messages: fields.take_required("messages")?,
            tools: fields.take("tools")?.unwrap_or_default(),
            tool_choice,
            parallel_tool_calls,
            reasoning: reasoning::take(&mut fields)?,
            output: response_format::take(&mut fields)?,
            logprobs: fields.take("logprobs")?.unwrap_or(false),
            top_logprobs: fields.take("top_logprobs")?,
            max_tokens: max_completion_tokens.or(parameters.max_tokens),
            parameters,
        })
    }

    pub(crate) fn messages(&self) -> Result<Vec<ChatMessage>, ApiError> {
        if self.messages.is_empty() {
            return Err(ApiError::parameter("messages", "messages is empty; send at least one message"));
        }
        let messages = self.messages.iter().enumerate().map(|(index, message)| message.read(index));
        let messages: Vec<ChatMessage> = messages.collect::<Result<_, _>>()?;
        image::check_all(&messages, self.parameters.choices()?)?;
        Ok(messages)
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
        Ok(ChatOptions {
            tools: self.tools.iter().map(ToolBody::read).collect(),
            tool_choice: self.tool_choice.clone(),
            parallel_tool_calls: self.parallel_tool_calls,
            reasoning: self.reasoning.clone(),
            output: self.output.as_ref().map(|form| form.constraint.clone()),
            sampling: self.parameters.sampling(defaults)?,
            seed: self.parameters.seed_of(choice),
            max_tokens: self.max_tokens.map(|tokens| tokens as usize),
            stop: self.parameters.stops(),
            ignore_eos: self.parameters.ignore_eos.unwrap_or(false),
            top_logprobs: self.top_logprobs()?,
            affinity: affinity.clone(),
            ..ChatOptions::default()
        })
    }

    /// Whether a constraint is compiled for the response.
    pub(crate) fn is_constrained(&self) -> bool {
        self.output.is_some() || !self.tools.is_empty()
    }

    /// Whether the response must be JSON.
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

fn tool_choice(choice: Option<Value>) -> Result<ToolChoice, ApiError> {
    let Some(choice) = choice else { return Ok(ToolChoice::Auto) };
    let name = choice["function"]["name"].as_str().or_else(|| choice["name"].as_str());
    match (choice.as_str(), name) {
        (Some("auto"), _) => Ok(ToolChoice::Auto),
        (Some("none"), _) => Ok(ToolChoice::None),
        (Some("required" | "any"), _) => Ok(ToolChoice::Required),
        (None, Some(name)) => Ok(ToolChoice::Named(name.to_owned())),
        _ => Err(ApiError::parameter(
            "tool_choice",
            "tool_choice must be \"auto\", \"none\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": …}}",
        )),
    }
}

impl MessageBody {
    fn text_bytes(&self) -> usize {
        let parts = |parts: &[Value]| parts.iter().map(part_bytes).sum();
        let content = match &self.content {
            None => 0,
            Some(Content::Text(text)) => text.len(),
            Some(Content::Parts(list)) => parts(list),
        };
        let reasoning = self.reasoning_content.as_ref().map_or(0, String::len);
        content
            + reasoning
            + self.tool_calls.iter().flatten().map(|call| call.function.arguments.len()).sum::<usize>()
    }

    fn read(&self, index: usize) -> Result<ChatMessage, ApiError> {
        let at = |field: &str| format!("messages[{index}].{field}");
        let (content, images) = match &self.content {
            None => Default::default(),
            Some(Content::Text(text)) => (text.clone(), Vec::new()),
            Some(Content::Parts(parts)) => read_parts(parts, &at("content"))?,
        };
        if let Some(Image { part, .. }) = images.first().filter(|_| self.role != "user") {
            let message = "only a message with the role user may have images";
            return Err(ApiError::parameter(at(&format!("content[{part}]")), message));
        }
        let message = match self.role.as_str() {
            "system" | "developer" => ChatMessage::system(content),
            "user" => ChatMessage::user(content),
            "assistant" => {
                let calls = self.tool_calls.iter().flatten().map(|call| ToolCall {
                    id: call.id.clone(),
                    name: call.function.name.clone(),
                    arguments: call.function.arguments.clone(),
                });
                let reasoning = self.reasoning_content.clone().filter(|text| !text.is_empty());
                ChatMessage { tool_calls: calls.collect(), reasoning, ..ChatMessage::assistant(content) }
            }
            "tool" => {
                let id = self.tool_call_id.as_deref();
                let id = id.ok_or_else(|| {
                    ApiError::parameter(
                        at("tool_call_id"),
                        "a message with the role tool must name the call that it answers",
                    )
                })?;
                ChatMessage::tool(id, content)
            }
            role => {
                let message = format!(
                    "{role:?} is not a role; the roles are system, developer, user, assistant and tool"
                );
                return Err(ApiError::parameter(at("role"), message));
            }
        };
        if content_is_missing(self) {
            return Err(ApiError::parameter(at("content"), "the content is missing"));
        }
        Ok(ChatMessage { images, name: self.name.clone(), ..message })
    }
}

impl ToolBody {
    fn read(&self) -> ToolSpec {
        let (ToolBody::Wrapped { function } | ToolBody::Bare(function)) = self;
        let no_arguments =
            || serde_json::json!({"type": "object", "properties": {}, "additionalProperties": false});
        ToolSpec {
            name: function.name.clone(),
            description: function.description.clone().unwrap_or_default(),
            parameters: function.parameters.clone().unwrap_or_else(no_arguments),
        }
    }
}

/// Whether a message lacks content. Only an assistant message with tool calls may omit it.
fn content_is_missing(message: &MessageBody) -> bool {
    message.content.is_none() && !(message.role == "assistant" && message.tool_calls.is_some())
}

/// Returns the size of a part's text or image.
fn part_bytes(part: &Value) -> usize {
    let bytes = |value: &Value| value.as_str().map_or(0, str::len);
    bytes(&part["text"]) + bytes(&part["image_url"]["url"]) + bytes(&part["image_url"])
}

fn read_parts(parts: &[Value], at: &str) -> Result<(String, Vec<Image>), ApiError> {
    let (mut text, mut images) = (String::new(), Vec::new());
    for (index, part) in parts.iter().enumerate() {
        let invalid = |message: String| ApiError::parameter(format!("{at}[{index}]"), message);
        match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text" | "input_text"), Some(part)) => text.push_str(part),
            (Some("image_url"), _) => {
                images.push(image::read(&part["image_url"], text.len(), index).map_err(invalid)?);
            }
            (kind, _) => {
                let kind = kind.unwrap_or("?");
                return Err(invalid(format!(
                    "a part of type {kind:?} is not supported; send text or image_url"
                )));
            }
        }
    }
    Ok((text, images))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn body(value: Value) -> ChatBody {
        ChatBody::read(serde_json::from_value(value).unwrap()).unwrap()
    }

    #[test]
    fn roles_parts_and_tool_messages_are_read() {
        let messages = body(json!({"messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "1"}]}))
        .messages()
        .unwrap();
        assert_eq!(
            messages.iter().map(|m| m.role).collect::<Vec<_>>(),
            [Role::System, Role::User, Role::Assistant, Role::Tool]
        );
        assert_eq!(messages[1].content, "ab");
        assert!(messages[1].images.is_empty());
        assert_eq!(messages[2].tool_calls[0].name, "f");
    }

    #[test]
    fn images_stand_between_the_texts_of_their_message() {
        let part = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
        let text = |text: &str| json!({"type": "text", "text": text});
        let content = json!([text("é"), part("https://a/1"), text("b"), part("https://a/2")]);
        let body = body(json!({"messages": [{"role": "user", "content": content}]}));
        let message = body.messages().unwrap().remove(0);
        assert_eq!(message.content, "éb");
        let places: Vec<_> = message.images.iter().map(|image| (image.at, image.part)).collect();
        assert_eq!(places, [(2, 1), (3, 3)]);
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
    fn both_forms_of_tools_are_read() {
        let request = body(
            json!({"messages": [{"role": "user", "content": "x"}], "temperature": null, "tools": [
            {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}, {"name": "b"}]}),
        );
        let options = request.options(0, &Affinity::default(), &Sampling::default()).unwrap();
        assert_eq!(options.tools.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(options.sampling.temperature, 1.0);
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
