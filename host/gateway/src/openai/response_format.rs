//! Reads `response_format` and related fields as the engine's constraints.

use super::fields::Fields;
use crate::ApiError;
use serde_json::Value;
use skep_engine::Constraint;

/// The form that the response must have, and the field that specifies it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Form {
    pub field: &'static str,
    pub constraint: Constraint,
}

/// Takes the form from `response_format` or one of the `guided_…` fields.
pub(crate) fn take(fields: &mut Fields) -> Result<Option<Form>, ApiError> {
    let mut found = Vec::new();
    let format = fields.take::<Value>("response_format")?;
    if let Some(constraint) = format.as_ref().map(of_format).transpose()?.flatten() {
        found.push(Form { field: "response_format", constraint });
    }
    if let Some(schema) = fields.take::<Value>("guided_json")? {
        found.push(Form { field: "guided_json", constraint: Constraint::JsonSchema(schema) });
    }
    if let Some(regex) = fields.take("guided_regex")? {
        found.push(Form { field: "guided_regex", constraint: Constraint::Regex(regex) });
    }
    if let Some(grammar) = fields.take("guided_grammar")? {
        found.push(Form { field: "guided_grammar", constraint: Constraint::Lark(grammar) });
    }
    match found.as_slice() {
        [_, second, ..] => {
            Err(ApiError::parameter(second.field, "only one form of the answer can be specified"))
        }
        _ => Ok(found.pop()),
    }
}

fn of_format(format: &Value) -> Result<Option<Constraint>, ApiError> {
    let text = |key: &str| {
        let value = format[key].as_str().map(str::to_owned);
        let param = format!("response_format.{key}");
        value.ok_or_else(|| ApiError::parameter(&param, format!("{param} must be a string")))
    };
    match format["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Constraint::JsonObject)),
        Some("json_schema") => schema(format).map(|schema| Some(Constraint::JsonSchema(schema))),
        Some("regex") => Ok(Some(Constraint::Regex(text("regex")?))),
        Some("grammar") => Ok(Some(Constraint::Lark(text("grammar")?))),
        other => {
            let message = format!(
                "response_format.type is {:?}; it must be text, json_object, json_schema, regex or grammar",
                other.unwrap_or("missing")
            );
            Err(ApiError::parameter("response_format.type", message))
        }
    }
}

/// Returns the schema from OpenAI's envelope `{name, strict, schema}`, or the bare schema.
fn schema(format: &Value) -> Result<Value, ApiError> {
    let given = [&format["json_schema"], &format["schema"]].into_iter().find(|value| !value.is_null());
    let given =
        given.ok_or_else(|| ApiError::parameter("response_format.json_schema", "the schema is missing"))?;
    let in_envelope = given.get("schema").filter(|_| given.get("type").is_none());
    match in_envelope.unwrap_or(given) {
        schema @ (Value::Object(_) | Value::Bool(_)) => Ok(schema.clone()),
        _ => Err(ApiError::parameter("response_format.json_schema", "a JSON Schema must be an object")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of_fields(fields: Value) -> Result<Option<Constraint>, ApiError> {
        let form = take(&mut serde_json::from_value(fields).unwrap())?;
        Ok(form.map(|form| form.constraint))
    }

    fn of(format: Value) -> Result<Option<Constraint>, ApiError> {
        of_fields(json!({"response_format": format}))
    }

    #[test]
    fn accepts_a_schema_in_an_envelope_or_bare() {
        let schema = json!({"type": "object"});
        let enveloped =
            json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
        let bare = json!({"type": "json_schema", "json_schema": schema});
        assert_eq!(of(enveloped).unwrap(), Some(Constraint::JsonSchema(schema.clone())));
        assert_eq!(of(bare).unwrap(), Some(Constraint::JsonSchema(schema)));
    }

    #[test]
    fn rejects_an_unknown_or_a_second_format() {
        assert!(of(json!({"type": "yaml"})).is_err());
        assert!(of(json!({"type": "json_schema"})).is_err());
        assert!(
            of_fields(json!({"response_format": {"type": "json_object"}, "guided_regex": "a+"})).is_err()
        );
        assert!(of_fields(json!({"guided_regex": 7})).is_err());
        assert_eq!(of_fields(json!({"guided_regex": "a+"})).unwrap(), Some(Constraint::Regex("a+".into())));
    }
}
