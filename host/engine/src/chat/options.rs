//! The options of an answer.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use skep_model::Sampling;

use super::message::{ChatMessage, Role, ToolChoice, ToolSpec};
use super::sampling_overrides::SamplingOverrides;
use crate::{
    Affinity, Attempts, Cancel, Constraint, EngineError, Observer, Priority, RolledBack, Unreported,
};

/// Maximum number of tools. Each tool is text in the prompt and a rule in the grammar.
const MAX_TOOLS: usize = 128;
/// The parameter that an error names if an answer cannot be continued.
pub(super) const CONTINUES: &str = "continue_final_message";

/// The options of an answer. The serialized form records the request without its caller and its urgency.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChatOptions {
    pub tools: Vec<ToolSpec>,
    pub tool_choice: ToolChoice,
    /// Earlier turns that the model sees between the system message and the conversation's first message, as if
    /// they were part of the conversation. No conversation stores them, and no results are expected for their
    /// calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub examples: Vec<ChatMessage>,
    /// Whether one answer may make several calls.
    pub parallel_tool_calls: bool,
    #[serde(default, skip_serializing_if = "Reasoning::is_default")]
    pub reasoning: Reasoning,
    /// The form of the answer if it makes no call.
    pub output: Option<Constraint>,
    /// Whether the last message, which is the assistant's, is the beginning of the answer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub continues_answer: bool,
    /// Whether the oldest messages are dropped if the chat is too long for the model.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub drops_oldest: bool,
    /// Whether the model writes freely: calls are found, but neither they nor the output must have their form.
    /// The prompt stays the same, so this option shows what the constraint changes.
    #[serde(skip)]
    pub unconstrained: bool,
    pub sampling: Sampling,
    /// The part of `sampling` that the request sets itself.
    #[serde(default, skip_serializing_if = "SamplingOverrides::is_default")]
    pub sampling_overrides: SamplingOverrides,
    pub seed: Option<u64>,
    /// Maximum number of output tokens; `None` allows output up to the end of the context.
    pub max_tokens: Option<usize>,
    pub stop: Vec<String>,
    pub ignore_eos: bool,
    pub top_logprobs: Option<u32>,
    /// See [`crate::GenerateRequest::resume`].
    #[serde(skip)]
    pub resume: Vec<u32>,
    #[serde(skip)]
    pub resume_rolled_back: RolledBack,
    #[serde(skip)]
    pub affinity: Affinity,
    #[serde(skip)]
    pub priority: Priority,
    #[serde(skip)]
    pub deadline: Option<Instant>,
    /// Reports whether anyone still waits for the generation to start.
    #[serde(skip)]
    pub cancel: Cancel,
    /// Follows the request.
    #[serde(skip)]
    pub observer: Option<Arc<dyn Observer>>,
    /// Collects the attempts of remote models, for the observer.
    #[serde(skip)]
    pub attempts: Attempts,
    /// Collects what remote models used and no event reports. A model that asks another one passes it on.
    #[serde(skip)]
    pub unreported: Unreported,
}

impl Default for ChatOptions {
    fn default() -> Self {
        ChatOptions {
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            examples: Vec::new(),
            parallel_tool_calls: true,
            reasoning: Reasoning::default(),
            output: None,
            continues_answer: false,
            drops_oldest: false,
            unconstrained: false,
            sampling: Sampling::default(),
            sampling_overrides: SamplingOverrides::default(),
            seed: None,
            max_tokens: None,
            stop: Vec::new(),
            ignore_eos: false,
            top_logprobs: None,
            resume: Vec::new(),
            resume_rolled_back: RolledBack::default(),
            affinity: Affinity::default(),
            priority: Priority::Interactive,
            deadline: None,
            cancel: Cancel::default(),
            observer: None,
            attempts: Attempts::default(),
            unreported: Unreported::default(),
        }
    }
}

/// The reasoning that a request wants before the answer, with what it sets in the chat template. A model without reasoning
/// has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reasoning {
    /// Whether the model reasons; `None` leaves that to its template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// The effort in the words of the request: `minimal`, `low`, `medium`, `high`, `xhigh` or `max`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effort: Option<String>,
    /// Maximum number of tokens of the reasoning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<usize>,
    /// Further variables of the chat template, such as `preserve_thinking`. A template that does not read one renders the
    /// same without it. Strings in them are text, as messages are.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub variables: Map<String, Value>,
}

impl Reasoning {
    /// Returns whether the answer begins without any reasoning.
    pub(crate) fn is_off(&self) -> bool {
        self.enabled == Some(false) || self.budget == Some(0)
    }

    /// Returns the effort in the words of templates, which know three.
    pub fn template_effort(&self) -> Option<&str> {
        self.effort.as_deref().map(|effort| match effort {
            "minimal" => "low",
            "xhigh" | "max" => "high",
            effort => effort,
        })
    }

    fn is_default(&self) -> bool {
        *self == Reasoning::default()
    }
}

/// The part of a prompt before the first message of its conversation, besides the system message. It is the
/// same in every conversation with the same tools, so it is computed once.
#[derive(Clone, Copy, Debug, Default)]
pub struct Opening<'a> {
    pub tools: &'a [ToolSpec],
    /// See [`ChatOptions::examples`].
    pub examples: &'a [ChatMessage],
    /// Decides how the prompt ends.
    pub reasoning: Option<&'a Reasoning>,
}

impl ChatOptions {
    /// Returns the options that change the beginning of the prompt.
    pub fn opening(&self) -> Opening<'_> {
        Opening { tools: &self.tools, examples: &self.examples, reasoning: Some(&self.reasoning) }
    }

    /// Returns whether the output is searched for calls.
    pub(crate) fn calls_tools(&self) -> bool {
        !self.tools.is_empty() && self.tool_choice != ToolChoice::None
    }

    /// Returns whether the answer has to be a call.
    pub(crate) fn must_call(&self) -> bool {
        self.calls_tools() && matches!(self.tool_choice, ToolChoice::Required | ToolChoice::Named(_))
    }

    pub(crate) fn validate(&self) -> Result<(), EngineError> {
        let invalid =
            |parameter: String, message: String| Err(EngineError::InvalidRequest { parameter, message });
        if self.tools.len() > MAX_TOOLS {
            return invalid(
                "tools".into(),
                format!("{} tools are given; at most {MAX_TOOLS} are allowed", self.tools.len()),
            );
        }
        for (index, tool) in self.tools.iter().enumerate() {
            let name = &tool.name;
            if !is_tool_name(name) {
                let message = format!(
                    "{name:?} is not a valid tool name; use 1 to 64 of the characters a-z A-Z 0-9 _ - ."
                );
                return invalid(format!("tools[{index}].name"), message);
            }
            if self.tools[..index].iter().any(|other| other.name == *name) {
                return invalid(format!("tools[{index}].name"), format!("two tools are called {name:?}"));
            }
            if !tool.parameters.is_object() {
                let message =
                    format!("the parameters of the tool {name:?} must be a JSON Schema, which is an object");
                return invalid(format!("tools[{index}].parameters"), message);
            }
        }
        if self.examples.iter().any(|message| message.role == Role::System) {
            let message =
                "an example must be a message of a user, the assistant or a tool, not a system message"
                    .into();
            return invalid("examples".into(), message);
        }
        if self.continues_answer && (self.output.is_some() || self.must_call()) {
            let message = "an answer with an output format or a required call cannot be continued; remove the \
                 format or the requirement";
            return invalid(CONTINUES.into(), message.into());
        }
        match &self.tool_choice {
            ToolChoice::Named(name) if !self.tools.iter().any(|tool| tool.name == *name) => {
                let known = self.tools.iter().map(|t| t.name.as_str()).collect::<Vec<_>>().join(", ");
                invalid("tool_choice".into(), format!("no tool is called {name:?}; the tools are: {known}"))
            }
            ToolChoice::Required if self.tools.is_empty() => {
                invalid("tool_choice".into(), "a tool call is required, but no tools are given".into())
            }
            _ => Ok(()),
        }
    }
}

fn is_tool_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'))
}
