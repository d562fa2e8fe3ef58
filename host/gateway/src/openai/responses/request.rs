//! Reads the body of `/v1/responses`.

use super::{
    Input,
    text_format::{self, TextFormat},
    tools::{self, Tools},
};
use crate::{
    ApiError,
    openai::{
        fields::Fields,
        metadata::{self, Metadata},
        parameters::Parameters,
        reasoning::{self, AskedReasoning},
    },
};
use serde_json::Value;
use skep_api::{ResponseCaller, ResponseReasoning, ResponseSettings};
use skep_engine::{Affinity, Model, Sampling, chat::ChatOptions};

pub(crate) use super::text_format::FIELD as FORM_FIELD;

/// The fields that are refused, each with what to do instead.
pub(crate) const UNSUPPORTED: &[(&str, &str)] = &[
    ("prompt", "write the prompt into `instructions` and `input`"),
    ("conversation", "continue a response with `previous_response_id`"),
    ("context_management", "remove it"),
    ("moderation", "moderate the input and the answer yourself"),
    ("background_options", "use `background`"),
    ("image", "the host makes no images"),
    ("messages", "send `input`, or use /v1/chat/completions"),
    ("response_format", "use `text.format`"),
    ("max_tokens", "use `max_output_tokens`"),
    ("max_completion_tokens", "use `max_output_tokens`"),
    ("n", "send the request several times"),
    ("best_of", "send the request several times"),
];
/// The parts that a response may include in addition. All but the first two are there anyway, or never.
const INCLUDABLE: [&str; 8] = [
    LOGPROBS,
    CARRIED_REASONING,
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
];
/// The fields of items and tools that are read, or that the host has sent itself.
const OF_ITEMS: [&str; 11] = [
    "type",
    "role",
    "content",
    "id",
    "status",
    "call_id",
    "name",
    "arguments",
    "output",
    "summary",
    "encrypted_content",
];
/// Arguments always satisfy the schema of a tool, whatever `strict` says.
const OF_TOOLS: [&str; 5] = ["type", "name", "description", "parameters", "strict"];
const CARRIED_REASONING: &str = "reasoning.encrypted_content";
const LOGPROBS: &str = "message.output_text.logprobs";
const MAX_TOP_LOGPROBS: u32 = 20;
/// The value of `truncation` that drops the oldest items of an input that is too long.
const AUTO: &str = "auto";
/// Maximum length of a name that a client gives: of a session, a user, or a cache key.
const MAX_NAME_BYTES: usize = 256;

#[derive(Debug)]
pub(crate) struct ResponseRequest {
    pub input: Input,
    pub instructions: Option<String>,
    pub previous: Option<String>,
    pub is_stored: bool,
    pub is_background: bool,
    pub caller: ResponseCaller,
    /// Names of fields that the host does not know.
    pub ignored: Vec<String>,
    pub parameters: Parameters,
    max_output_tokens: Option<u32>,
    max_tool_calls: Option<u32>,
    metadata: Metadata,
    /// Whether the oldest items are dropped if the input is too long.
    pub truncates: bool,
    pub reasoning: RequestedReasoning,
    format: TextFormat,
    tools: Tools,
    top_logprobs: Option<u32>,
}

/// The part of a request that concerns reasoning.
#[derive(Debug)]
pub(crate) struct RequestedReasoning {
    asked: AskedReasoning,
    /// The values that the response repeats.
    shown: ResponseReasoning,
    /// Whether the client carries the reasoning to later requests itself.
    pub is_carried: bool,
}

impl ResponseRequest {
    pub(crate) fn read(mut fields: Fields) -> Result<Self, ApiError> {
        fields.refuse(UNSUPPORTED)?;
        let truncates = match fields.take::<String>("truncation")?.as_deref() {
            None | Some("disabled") => false,
            Some(AUTO) => true,
            Some(other) => {
                let message = format!("truncation is {other:?}; it must be \"auto\" or \"disabled\"");
                return Err(ApiError::parameter("truncation", message));
            }
        };
        let include: Vec<String> = fields.take("include")?.unwrap_or_default();
        if let Some(unknown) = include.iter().find(|name| !INCLUDABLE.contains(&name.as_str())) {
            let message = format!(
                "{unknown:?} is not a valid value of include; the valid values are {}",
                INCLUDABLE.join(", ")
            );
            return Err(ApiError::parameter("include", message));
        }
        let shown_reasoning = fields.take::<Value>("reasoning")?;
        let said = |name: &str| Some(shown_reasoning.as_ref()?[name].as_str()?.to_owned());
        let shown = ResponseReasoning { effort: said("effort"), summary: said("summary") };
        if let Some(reasoning) = shown_reasoning {
            fields.put("reasoning", reasoning);
        }
        fields.note_unknown_in_items("input", &[], &OF_ITEMS);
        fields.note_unknown_in_items("tools", &[], &OF_TOOLS);
        let top_logprobs = fields.take::<u32>("top_logprobs")?;
        if top_logprobs.is_some_and(|top| top > MAX_TOP_LOGPROBS) {
            let message = format!("top_logprobs must be at most {MAX_TOP_LOGPROBS}");
            return Err(ApiError::parameter("top_logprobs", message));
        }
        let includes_logprobs = include.iter().any(|name| name == LOGPROBS);
        // Other APIs store nothing, so that they do not read this field.
        let is_stored = fields.take("store")?.unwrap_or(true);
        let parameters = Parameters::take(&mut fields)?;
        let caller = ResponseCaller {
            prompt_cache_key: parameters.prompt_cache_key.clone(),
            safety_identifier: fields.take("safety_identifier")?,
            user: parameters.user.clone(),
        };
        for (name, value) in [("safety_identifier", &caller.safety_identifier), ("user", &caller.user)] {
            if value.as_ref().is_some_and(|value| value.len() > MAX_NAME_BYTES) {
                let message = format!("{name} is longer than {MAX_NAME_BYTES} bytes");
                return Err(ApiError::parameter(name, message));
            }
        }
        fields.note_unknown_inside("text", &["format"]);
        let format = text_format::read(fields.take("text")?)?;
        let mut request = ResponseRequest {
            input: fields.take_required("input")?,
            instructions: fields.take("instructions")?,
            previous: fields.take("previous_response_id")?,
            is_stored,
            is_background: fields.take("background")?.unwrap_or(false),
            caller,
            max_output_tokens: fields.take("max_output_tokens")?,
            max_tool_calls: fields.take("max_tool_calls")?,
            metadata: metadata::checked(fields.take("metadata")?)?.unwrap_or_default(),
            truncates,
            reasoning: RequestedReasoning {
                asked: reasoning::take(&mut fields)?,
                shown,
                is_carried: include.iter().any(|name| name == CARRIED_REASONING),
            },
            format,
            tools: tools::read(
                fields.take("tools")?.unwrap_or_default(),
                fields.take("tool_choice")?,
                fields.take("parallel_tool_calls")?,
            )?,
            top_logprobs: includes_logprobs.then(|| top_logprobs.unwrap_or(0)).or(top_logprobs),
            ignored: Vec::new(),
            parameters,
        };
        if request.is_background && !request.is_stored {
            let message = "a response in the background is always stored; remove `store` or set it to true";
            return Err(ApiError::parameter("store", message));
        }
        if request.max_output_tokens == Some(0) {
            let message = "max_output_tokens is 0; request at least one token";
            return Err(ApiError::parameter("max_output_tokens", message));
        }
        request.ignored = fields.into_ignored();
        Ok(request)
    }

    /// Returns the names of the fields that change nothing with this model.
    pub(crate) fn ignored_by(&self, model: &Model) -> Vec<String> {
        self.ignored.iter().cloned().chain(self.reasoning.asked.without_effect(model)).collect()
    }

    /// Returns whether it takes long to begin: a constraint is compiled for the answer, or the input may have to be shortened.
    pub(crate) fn begins_slowly(&self) -> bool {
        self.format.constraint.is_some() || !self.tools.specs.is_empty() || self.truncates
    }

    /// Returns the size of the texts, which is a measure of the work to read them.
    pub(crate) fn text_bytes(&self) -> usize {
        self.instructions.as_ref().map_or(0, String::len) + self.input.bytes()
    }

    /// Returns the options of the answer, with the model's sampling parameters where the request sets none.
    pub(crate) fn options(&self, affinity: Affinity, defaults: &Sampling) -> Result<ChatOptions, ApiError> {
        Ok(ChatOptions {
            tools: self.tools.specs.clone(),
            tool_choice: self.tools.choice.clone(),
            parallel_tool_calls: self.tools.parallel,
            reasoning: self.reasoning.asked.wanted.clone(),
            output: self.format.constraint.clone(),
            sampling: self.parameters.sampling(defaults)?,
            sampling_overrides: self.parameters.sampling_overrides()?,
            seed: self.parameters.seed_of(0),
            max_tokens: self.max_output_tokens.map(|tokens| tokens as usize),
            stop: self.parameters.stops(),
            ignore_eos: self.parameters.ignore_eos.unwrap_or(false),
            top_logprobs: self.top_logprobs,
            drops_oldest: self.truncates,
            affinity,
            ..ChatOptions::default()
        })
    }

    /// Returns the settings as the response shows them, with the sampling parameters that apply. An agent has
    /// none.
    pub(crate) fn settings(&self, sampling: Option<&Sampling>) -> ResponseSettings {
        ResponseSettings {
            instructions: self.instructions.clone(),
            max_output_tokens: self.max_output_tokens,
            max_tool_calls: self.max_tool_calls,
            metadata: self.metadata.clone(),
            parallel_tool_calls: self.tools.parallel,
            reasoning: self.reasoning.shown.clone(),
            service_tier: "default".to_owned(),
            store: self.is_stored,
            temperature: sampling.map(|sampling| sampling.temperature),
            top_p: sampling.map(|sampling| sampling.top_p),
            text: self.format.shown.clone(),
            tool_choice: self.tools.shown_choice.clone(),
            tools: self.tools.shown.clone(),
            top_logprobs: self.top_logprobs.unwrap_or(0),
            truncation: if self.truncates { AUTO } else { "disabled" }.to_owned(),
        }
    }

    /// Refuses fields that an agent determines itself, such as tools and the form of the output.
    pub(crate) fn refuse_for_agent(&self) -> Result<(), ApiError> {
        let refused = [
            ("instructions", self.instructions.is_some()),
            ("tools", !self.tools.shown.is_empty()),
            (FORM_FIELD, self.format.constraint.is_some()),
            ("top_logprobs", self.top_logprobs.is_some()),
            ("max_output_tokens", self.max_output_tokens.is_some()),
            ("truncation", self.truncates),
        ];
        match refused.iter().find(|(_, given)| *given) {
            Some((name, _)) => {
                Err(ApiError::parameter(*name, format!("{name} is not supported with an agent as the model")))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use skep_engine::{Constraint, chat::ToolChoice};

    fn read(extra: Value) -> Result<ResponseRequest, ApiError> {
        let mut body = json!({"model": "m", "input": "hi"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ResponseRequest::read(serde_json::from_value(body).unwrap())
    }

    #[test]
    fn options_and_settings_are_those_of_the_request() {
        let tool = json!({"type": "function", "name": "look", "parameters": {"type": "object"}});
        let request = read(json!({"tools": [tool], "tool_choice": "required", "temperature": 0.5,
            "max_output_tokens": 7, "metadata": {"a": "b"},
            "reasoning": {"effort": "low", "summary": "auto"}, "prompt_cache_key": "k", "service_tier": "flex", "store": false,
            "text": {"format": {"type": "json_object"}, "verbosity": "low"}, "include": ["message.output_text.logprobs"], "unheard_of": 1}))
        .unwrap();
        assert_eq!(request.ignored, ["service_tier", "unheard_of", "text.verbosity", "reasoning.summary"]);
        assert!(!request.is_stored);
        let defaults = Sampling { top_k: 20, ..Sampling::default() };
        let options = request.options(Affinity::default(), &defaults).unwrap();
        assert_eq!((options.tool_choice, options.max_tokens), (ToolChoice::Required, Some(7)));
        assert_eq!((options.sampling.temperature, options.sampling.top_k), (0.5, 20));
        assert_eq!((options.output, options.top_logprobs), (Some(Constraint::JsonObject), Some(0)));
        assert_eq!(options.reasoning.effort.as_deref(), Some("low"));
        assert_eq!(request.caller.prompt_cache_key.as_deref(), Some("k"));
        let settings = serde_json::to_value(request.settings(Some(&options.sampling))).unwrap();
        assert_eq!((&settings["temperature"], &settings["top_p"]), (&json!(0.5), &json!(1.0)));
        assert_eq!(settings["reasoning"], json!({"effort": "low", "summary": "auto"}));
        assert_eq!((&settings["tools"], &settings["store"]), (&json!([tool]), &json!(false)));
    }

    #[test]
    fn errors_name_the_invalid_field() {
        for (extra, param) in [
            (json!({"input": null}), "input"),
            (json!({"conversation": "c"}), "conversation"),
            (json!({"truncation": "oldest"}), "truncation"),
            (json!({"include": ["everything"]}), "include"),
            (json!({"background": true, "store": false}), "store"),
            (json!({"max_output_tokens": 0}), "max_output_tokens"),
            (json!({"top_logprobs": 21}), "top_logprobs"),
            (json!({"metadata": {"a": "b".repeat(513)}}), "metadata"),
            (json!({"prompt_cache_key": "k".repeat(257)}), "prompt_cache_key"),
            (json!({"reasoning": {"effort": "a lot"}}), "reasoning.effort"),
            (json!({"n": 2}), "n"),
        ] {
            let error = read(extra.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{extra}: {}", error.message);
        }
        let tools = json!({"tools": [{"type": "function", "name": "f"}]});
        for (extra, param) in [
            (tools, "tools"),
            (json!({"instructions": "x"}), "instructions"),
            (json!({"max_output_tokens": 1}), "max_output_tokens"),
            (json!({"truncation": "auto"}), "truncation"),
        ] {
            assert_eq!(read(extra).unwrap().refuse_for_agent().unwrap_err().param.as_deref(), Some(param));
        }
    }
}
