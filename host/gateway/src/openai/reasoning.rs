//! Reads the fields of a request that ask for reasoning, in the shapes of several APIs.

use super::fields::Fields;
use crate::ApiError;
use serde::Deserialize;
use serde_json::{Map, Value};
use skep_engine::{
    Model,
    chat::{ChatOptions, Reasoning},
};
use utoipa::ToSchema;

/// The efforts that a request may ask for. `none` turns reasoning off.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// The fields that are read inside of others.
const KNOWN_INSIDE: [(&str, &[&str]); 2] =
    [("reasoning", &["enabled", "effort", "max_tokens"]), ("thinking", &["type", "budget_tokens"])];

/// The field with variables of the chat template.
const TEMPLATE: &str = "chat_template_kwargs";
/// Variables of the chat template that a request does not set.
const RESERVED: [&str; 8] = [
    "messages",
    "tools",
    "tools_ts_str",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "chat_template",
];
const MAX_VARIABLES: usize = 32;
/// Maximum size of all variables together, as JSON.
const MAX_VARIABLE_BYTES: usize = 16 << 10;

/// Reasoning as Anthropic's API has it.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatThinking)]
pub(super) struct ThinkingBody {
    /// `enabled`, `disabled` or `adaptive`.
    #[serde(default)]
    r#type: Option<String>,
    /// Maximum number of tokens of the reasoning.
    #[serde(default)]
    budget_tokens: Option<u32>,
}

/// Reasoning as OpenRouter's API has it.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatReasoning)]
pub(super) struct ReasoningBody {
    #[serde(default)]
    enabled: Option<bool>,
    /// The same as `reasoning_effort`.
    #[serde(default)]
    effort: Option<String>,
    /// Maximum number of tokens of the reasoning.
    #[serde(default)]
    max_tokens: Option<u32>,
}

/// Variables of the chat template. Further ones are passed to it as they are.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatTemplateVariables)]
pub(super) struct TemplateBody {
    #[serde(default)]
    enable_thinking: Option<bool>,
    #[serde(default)]
    thinking: Option<bool>,
    /// The same as the field `reasoning_effort`, which takes precedence.
    #[serde(default)]
    reasoning_effort: Option<String>,
    #[serde(flatten)]
    #[schema(value_type = std::collections::BTreeMap<String, Value>)]
    further: Map<String, Value>,
}

/// The reasoning that a request asks for.
#[derive(Clone, Debug, Default)]
pub(crate) struct AskedReasoning {
    pub wanted: Reasoning,
    /// The fields that ask for it.
    given: Vec<Given>,
}

#[derive(Clone, Debug)]
struct Given {
    field: &'static str,
    asks_for: AsksFor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AsksFor {
    Reasoning,
    NoReasoning,
    Effort,
}

impl AskedReasoning {
    /// Returns the names of the fields that change nothing with this model.
    pub(crate) fn without_effect(&self, model: &Model) -> Vec<String> {
        if self.given.is_empty() && self.wanted.variables.is_empty() {
            return Vec::new();
        }
        if let Model::Remote(_) = model {
            let ignores =
                |reasoning| model.ignores_reasoning(&ChatOptions { reasoning, ..ChatOptions::default() });
            let variables = self.wanted.variables.clone();
            let fields = ignores(Reasoning { variables: Map::new(), ..self.wanted.clone() });
            let variables = ignores(Reasoning { variables, ..Reasoning::default() });
            let fields = self.given.iter().filter(|_| fields).map(|given| given.field.to_owned());
            let variables = self.wanted.variables.keys().filter(|_| variables);
            return fields.chain(variables.map(|name| format!("{TEMPLATE}.{name}"))).collect();
        }
        let reasons = model.abilities().reasoning != Some(false);
        let takes_effort = model.reads_variable("reasoning_effort") == Some(true);
        let given = self.given.iter().filter(|given| match given.asks_for {
            AsksFor::Reasoning => !reasons,
            AsksFor::NoReasoning => false,
            AsksFor::Effort => !reasons || !takes_effort,
        });
        let variables = self.wanted.variables.keys().filter(|name| model.reads_variable(name) != Some(true));
        let given = given.map(|given| given.field.to_owned());
        given.chain(variables.map(|name| format!("{TEMPLATE}.{name}"))).collect()
    }

    fn note(&mut self, field: &'static str, asks_for: AsksFor) {
        self.given.push(Given { field, asks_for });
    }

    fn set_enabled(&mut self, field: &'static str, enabled: Option<bool>) {
        if let Some(enabled) = enabled {
            self.wanted.enabled = Some(enabled);
            self.note(field, if enabled { AsksFor::Reasoning } else { AsksFor::NoReasoning });
        }
    }

    fn set_effort(&mut self, field: &'static str, effort: &str) -> Result<(), ApiError> {
        match effort_word(field, effort)? {
            None => self.set_enabled(field, Some(false)),
            word => {
                self.wanted.effort = word;
                self.wanted.enabled = self.wanted.enabled.or(Some(true));
                self.note(field, AsksFor::Effort);
            }
        }
        Ok(())
    }

    fn set_budget(&mut self, field: &'static str, tokens: Option<u32>) {
        if let Some(tokens) = tokens {
            self.wanted.budget = Some(tokens as usize);
            self.note(field, if tokens > 0 { AsksFor::Reasoning } else { AsksFor::NoReasoning });
        }
    }

    fn set_variables(&mut self, variables: Map<String, Value>) -> Result<(), ApiError> {
        if let Some(name) = variables.keys().find(|name| RESERVED.contains(&name.as_str())) {
            let message = format!("{name} is a variable that the host sets itself");
            return Err(ApiError::parameter(format!("{TEMPLATE}.{name}"), message));
        }
        let bytes: usize = variables.iter().map(|(name, value)| name.len() + value.to_string().len()).sum();
        if variables.len() > MAX_VARIABLES || bytes > MAX_VARIABLE_BYTES {
            let message = format!(
                "{TEMPLATE} has {} variables of {bytes} bytes; at most {MAX_VARIABLES} of {MAX_VARIABLE_BYTES} bytes together are allowed",
                variables.len()
            );
            return Err(ApiError::parameter(TEMPLATE, message));
        }
        self.wanted.variables = variables;
        self.wanted.variables.retain(|_, value| !value.is_null());
        Ok(())
    }

    /// Sets the effort of a field that another API has.
    pub(crate) fn put_effort(&mut self, field: &'static str, effort: &str) -> Result<(), ApiError> {
        self.wanted.effort = effort_word(field, effort)?;
        self.note(field, AsksFor::Effort);
        Ok(())
    }
}

/// Takes the reasoning that a request asks for. A more specific field takes precedence.
pub(crate) fn take(fields: &mut Fields) -> Result<AskedReasoning, ApiError> {
    let mut asked = AskedReasoning::default();
    for (name, known) in KNOWN_INSIDE {
        fields.note_unknown_inside(name, known);
    }
    if let Some(body) = fields.take::<TemplateBody>("chat_template_kwargs")? {
        asked.set_enabled("chat_template_kwargs.thinking", body.thinking);
        asked.set_enabled("chat_template_kwargs.enable_thinking", body.enable_thinking);
        if let Some(effort) = body.reasoning_effort {
            asked.set_effort("chat_template_kwargs.reasoning_effort", &effort)?;
        }
        asked.set_variables(body.further)?;
    }
    asked.set_enabled("enable_thinking", fields.take("enable_thinking")?);
    if let Some(effort) = fields.take::<String>("reasoning_effort")? {
        asked.set_effort("reasoning_effort", &effort)?;
    }
    if let Some(body) = fields.take::<ReasoningBody>("reasoning")? {
        if let Some(effort) = body.effort {
            asked.set_effort("reasoning.effort", &effort)?;
        }
        asked.set_enabled("reasoning.enabled", body.enabled);
        asked.set_budget("reasoning.max_tokens", body.max_tokens);
    }
    if let Some(body) = fields.take::<ThinkingBody>("thinking")? {
        match body.r#type.as_deref() {
            Some("enabled" | "adaptive") => asked.set_enabled("thinking.type", Some(true)),
            Some("disabled") => asked.set_enabled("thinking.type", Some(false)),
            None => {}
            Some(kind) => {
                let message = format!(
                    "{kind:?} is not a type of thinking; the types are \"enabled\", \"disabled\" and \"adaptive\""
                );
                return Err(ApiError::parameter("thinking.type", message));
            }
        }
        asked.set_budget("thinking.budget_tokens", body.budget_tokens);
    }
    Ok(asked)
}

/// Returns the word of an effort; `None` turns reasoning off.
fn effort_word(field: &str, effort: &str) -> Result<Option<String>, ApiError> {
    match effort {
        "none" => Ok(None),
        _ if EFFORTS.contains(&effort) => Ok(Some(effort.to_owned())),
        _ => {
            let message = format!("{effort:?} is not an effort; the efforts are {}", EFFORTS.join(", "));
            Err(ApiError::parameter(field, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: Value) -> Result<Reasoning, ApiError> {
        Ok(take(&mut serde_json::from_value(body).expect("an object"))?.wanted)
    }

    #[test]
    fn each_shape_asks_for_the_same_reasoning() {
        let reasoning = |enabled, effort: Option<&str>, budget| Reasoning {
            enabled,
            effort: effort.map(str::to_owned),
            budget,
            variables: Map::new(),
        };
        for (body, expected) in [
            (json!({}), reasoning(None, None, None)),
            (json!({"reasoning_effort": "none"}), reasoning(Some(false), None, None)),
            (json!({"reasoning_effort": "minimal"}), reasoning(Some(true), Some("minimal"), None)),
            (
                json!({"thinking": {"type": "enabled", "budget_tokens": 9}}),
                reasoning(Some(true), None, Some(9)),
            ),
            (json!({"thinking": {"type": "disabled"}}), reasoning(Some(false), None, None)),
            (json!({"reasoning": {"max_tokens": 7}}), reasoning(None, None, Some(7))),
            (
                json!({"reasoning": {"effort": "high"}, "enable_thinking": true}),
                reasoning(Some(true), Some("high"), None),
            ),
            (
                json!({"chat_template_kwargs": {"enable_thinking": false, "x": null}}),
                reasoning(Some(false), None, None),
            ),
            (
                json!({"chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "low"}),
                reasoning(Some(true), Some("low"), None),
            ),
        ] {
            assert_eq!(read(body.clone()).expect("valid"), expected, "{body}");
        }
        for (body, field) in [
            (json!({"reasoning_effort": "a lot"}), "reasoning_effort"),
            (json!({"thinking": {"type": "maybe"}}), "thinking.type"),
            (json!({"thinking": {"budget_tokens": -1}}), "thinking.budget_tokens"),
            (json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs.messages"),
            (json!({"chat_template_kwargs": {"x": "y".repeat(17 << 10)}}), "chat_template_kwargs"),
            (json!({"chat_template_kwargs": {"thinking": "yes"}}), "chat_template_kwargs.thinking"),
        ] {
            assert_eq!(read(body).expect_err("refused").param.as_deref(), Some(field));
        }
        let kept = read(json!({"chat_template_kwargs": {"preserve_thinking": true, "depth": {"n": [1]}}}));
        let kept = Value::Object(kept.expect("valid").variables);
        assert_eq!(kept, json!({"preserve_thinking": true, "depth": {"n": [1]}}));
    }
}
