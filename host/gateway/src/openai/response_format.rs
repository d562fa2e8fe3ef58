//! `response_format` and its kin, as the engine's constraints.

use crate::ApiError;
use serde_json::Value;
use skep_engine::Constraint;
use std::collections::HashMap;

/// The form that the answer must have, from `response_format` or one of the `guided_…` fields.
pub(crate) fn constraint(
    format: Option<&Value>,
    fields: &HashMap<String, Value>,
) -> Result<Option<Constraint>, ApiError> {
    let mut found = Vec::new();
    if let Some(constraint) = format.map(of_format).transpose()?.flatten() {
        found.push(("response_format", constraint));
    }
    for name in ["guided_json", "guided_regex", "guided_grammar"] {
        let Some(value) = fields.get(name).filter(|value| !value.is_null()) else { continue };
        let text = || {
            let text = value.as_str().map(str::to_owned);
            text.ok_or_else(|| ApiError::parameter(name, format!("{name} must be a string")))
        };
        let constraint = match name {
            "guided_json" => Constraint::JsonSchema(value.clone()),
            "guided_regex" => Constraint::Regex(text()?),
            _ => Constraint::Lark(text()?),
        };
        found.push((name, constraint));
    }
    match found.as_slice() {
        [_, (second, _), ..] => Err(ApiError::parameter(*second, "the answer can have one form only")),
        _ => Ok(found.pop().map(|(_, constraint)| constraint)),
    }
}

fn of_format(format: &Value) -> Result<Option<Constraint>, ApiError> {
    let text = |key: &str| {
        let value = format[key].as_str().map(str::to_owned);
        let param = format!("response_format.{key}");
        value.ok_or_else(|| ApiError::parameter(&param, format!("{param} must be a string")))
    };
    match format["type"].as_str() {
        _ if format.is_null() => Ok(None),
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Constraint::JsonObject)),
        Some("json_schema") => schema(format).map(|schema| Some(Constraint::JsonSchema(schema))),
        Some("regex") => Ok(Some(Constraint::Regex(text("regex")?))),
        Some("grammar") => Ok(Some(Constraint::Lark(text("grammar")?))),
        other => {
            let message = format!(
                "response_format.type is {:?}; it may be text, json_object, json_schema, regex or grammar",
                other.unwrap_or("missing")
            );
            Err(ApiError::parameter("response_format.type", message))
        }
    }
}

/// OpenAI's envelope `{name, strict, schema}`, or the schema itself.
fn schema(format: &Value) -> Result<Value, ApiError> {
    let given = [&format["json_schema"], &format["schema"]].into_iter().find(|value| !value.is_null());
    let given =
        given.ok_or_else(|| ApiError::parameter("response_format.json_schema", "the schema is missing"))?;
    let in_envelope = given.get("schema").filter(|_| given.get("type").is_none());
    match in_envelope.unwrap_or(given) {
        schema @ (Value::Object(_) | Value::Bool(_)) => Ok(schema.clone()),
        _ => Err(ApiError::parameter("response_format.json_schema", "a JSON Schema is an object")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(format: Value) -> Result<Option<Constraint>, ApiError> {
        constraint(Some(&format), &HashMap::new())
    }

    #[test]
    fn a_schema_comes_in_an_envelope_or_bare() {
        let schema = json!({"type": "object"});
        let enveloped =
            json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
        let bare = json!({"type": "json_schema", "json_schema": schema});
        assert_eq!(of(enveloped).unwrap(), Some(Constraint::JsonSchema(schema.clone())));
        assert_eq!(of(bare).unwrap(), Some(Constraint::JsonSchema(schema)));
    }

    #[test]
    fn an_unknown_or_a_second_form_is_refused() {
        assert!(of(json!({"type": "yaml"})).is_err());
        assert!(of(json!({"type": "json_schema"})).is_err());
        let fields = HashMap::from([("guided_regex".to_owned(), json!("a+"))]);
        assert!(constraint(Some(&json!({"type": "json_object"})), &fields).is_err());
        assert_eq!(constraint(None, &fields).unwrap(), Some(Constraint::Regex("a+".into())));
    }
}
