//! Reads the fields of a request that ask for reasoning, in the shapes of several APIs.

use super::fields::Fields;
use crate::ApiError;
use serde::Deserialize;
use skep_engine::chat::Reasoning;
use utoipa::ToSchema;

/// The efforts that a request may ask for. `none` turns reasoning off.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// The fields that are read inside of others.
const KNOWN_INSIDE: [(&str, &[&str]); 3] = [
    ("chat_template_kwargs", &["enable_thinking", "thinking"]),
    ("reasoning", &["enabled", "effort", "max_tokens"]),
    ("thinking", &["type", "budget_tokens"]),
];

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

/// Variables of the chat template.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatTemplateVariables)]
pub(super) struct TemplateBody {
    #[serde(default)]
    enable_thinking: Option<bool>,
    #[serde(default)]
    thinking: Option<bool>,
}

/// Takes the reasoning that a request asks for. A more specific field takes precedence.
pub(crate) fn take(fields: &mut Fields) -> Result<Reasoning, ApiError> {
    let mut wanted = Reasoning::default();
    for (name, known) in KNOWN_INSIDE {
        fields.note_unknown_inside(name, known);
    }
    if let Some(body) = fields.take::<TemplateBody>("chat_template_kwargs")? {
        wanted.enabled = body.enable_thinking.or(body.thinking);
    }
    if let Some(enabled) = fields.take("enable_thinking")? {
        wanted.enabled = Some(enabled);
    }
    if let Some(effort) = fields.take::<String>("reasoning_effort")? {
        set_effort(&mut wanted, "reasoning_effort", effort)?;
    }
    if let Some(body) = fields.take::<ReasoningBody>("reasoning")? {
        if let Some(effort) = body.effort {
            set_effort(&mut wanted, "reasoning.effort", effort)?;
        }
        wanted.enabled = body.enabled.or(wanted.enabled);
        wanted.budget = body.max_tokens.map(|tokens| tokens as usize);
    }
    if let Some(body) = fields.take::<ThinkingBody>("thinking")? {
        match body.r#type.as_deref() {
            Some("enabled" | "adaptive") => wanted.enabled = Some(true),
            Some("disabled") => wanted.enabled = Some(false),
            None => {}
            Some(kind) => {
                let message = format!(
                    "{kind:?} is not a type of thinking; the types are \"enabled\", \"disabled\" and \"adaptive\""
                );
                return Err(ApiError::parameter("thinking.type", message));
            }
        }
        wanted.budget = body.budget_tokens.map(|tokens| tokens as usize).or(wanted.budget);
    }
    Ok(wanted)
}

fn set_effort(wanted: &mut Reasoning, field: &str, effort: String) -> Result<(), ApiError> {
    match effort_word(field, &effort)? {
        None => wanted.enabled = Some(false),
        word => wanted.effort = word,
    }
    if wanted.effort.is_some() && wanted.enabled.is_none() {
        wanted.enabled = Some(true);
    }
    Ok(())
}

/// Returns the word that templates know for an effort; they know three. `None` turns reasoning off.
pub(crate) fn effort_word(field: &str, effort: &str) -> Result<Option<String>, ApiError> {
    match effort {
        "none" => Ok(None),
        "minimal" | "low" => Ok(Some("low".to_owned())),
        "medium" => Ok(Some("medium".to_owned())),
        "high" | "xhigh" | "max" => Ok(Some("high".to_owned())),
        _ => {
            let message = format!("{effort:?} is not an effort; the efforts are {}", EFFORTS.join(", "));
            Err(ApiError::parameter(field, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(body: Value) -> Result<Reasoning, ApiError> {
        take(&mut serde_json::from_value(body).expect("an object"))
    }

    #[test]
    fn each_shape_asks_for_the_same_reasoning() {
        let reasoning = |enabled, effort: Option<&str>, budget| Reasoning {
            enabled,
            effort: effort.map(str::to_owned),
            budget,
        };
        for (body, expected) in [
            (json!({}), reasoning(None, None, None)),
            (json!({"reasoning_effort": "none"}), reasoning(Some(false), None, None)),
            (json!({"reasoning_effort": "minimal"}), reasoning(Some(true), Some("low"), None)),
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
                json!({"chat_template_kwargs": {"enable_thinking": false, "x": 1}}),
                reasoning(Some(false), None, None),
            ),
        ] {
            assert_eq!(read(body.clone()).expect("valid"), expected, "{body}");
        }
        for (body, field) in [
            (json!({"reasoning_effort": "a lot"}), "reasoning_effort"),
            (json!({"thinking": {"type": "maybe"}}), "thinking.type"),
            (json!({"thinking": {"budget_tokens": -1}}), "thinking.budget_tokens"),
        ] {
            assert_eq!(read(body).expect_err("refused").param.as_deref(), Some(field));
        }
    }
}
