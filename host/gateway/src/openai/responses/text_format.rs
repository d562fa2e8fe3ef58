//! Reads `text`: the form of the answer.

use crate::ApiError;
use serde_json::{Value, json};
use skep_engine::Constraint;

/// The field that specifies the form, as errors name it.
pub(crate) const FIELD: &str = "text.format";

/// The form of an answer.
#[derive(Debug)]
pub(super) struct TextFormat {
    pub constraint: Option<Constraint>,
    /// The setting as the response shows it.
    pub shown: Value,
}

pub(super) fn read(text: Option<Value>) -> Result<TextFormat, ApiError> {
    let text = text.unwrap_or_else(|| json!({}));
    let format = match &text["format"] {
        Value::Null => json!({"type": "text"}),
        format => format.clone(),
    };
    let constraint = match format["type"].as_str() {
        Some("text") => None,
        Some("json_object") => Some(Constraint::JsonObject),
        Some("json_schema") => match &format["schema"] {
            schema @ (Value::Object(_) | Value::Bool(_)) => Some(Constraint::JsonSchema(schema.clone())),
            _ => {
                return Err(ApiError::parameter(
                    "text.format.schema",
                    "the schema is missing; it must be an object",
                ));
            }
        },
        other => {
            let message = format!(
                "text.format.type is {:?}; it must be text, json_object or json_schema",
                other.unwrap_or("missing")
            );
            return Err(ApiError::parameter("text.format.type", message));
        }
    };
    Ok(TextFormat { constraint, shown: json!({"format": format, "verbosity": "medium"}) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_becomes_a_constraint_and_errors_name_the_field() {
        let schema = json!({"type": "object"});
        let format = json!({"type": "json_schema", "name": "x", "strict": true, "schema": schema});
        let read_text = |text: Value| read(Some(text));
        assert_eq!(
            read_text(json!({"format": format})).unwrap().constraint,
            Some(Constraint::JsonSchema(schema))
        );
        assert_eq!(read(None).unwrap().shown["format"], json!({"type": "text"}));
        assert_eq!(read(None).unwrap().constraint, None);
        for (text, param) in [
            (json!({"format": {"type": "json_schema"}}), "text.format.schema"),
            (json!({"format": {"type": "yaml"}}), "text.format.type"),
        ] {
            assert_eq!(read_text(text).unwrap_err().param.as_deref(), Some(param));
        }
    }
}
