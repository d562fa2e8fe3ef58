//! Answers the forms with which a server asks for what only a person knows (elicitation).
//!
//! No person is at the host, so a form is declined unless the operator lets its default values answer for the server.

use rmcp::model::{ElicitRequestParams, ElicitResult, ElicitationAction};
use serde_json::{Map, Value};

/// Fills in a form with its default values. A form that has none for a field that it requires is declined.
pub(super) fn filled_in(request: &ElicitRequestParams) -> ElicitResult {
    let form = match request {
        ElicitRequestParams::FormElicitationParams { requested_schema, .. } => {
            serde_json::to_value(requested_schema).unwrap_or_default()
        }
        // Another kind of question, such as one that a page answers.
        _ => return ElicitResult::new(ElicitationAction::Decline),
    };
    match defaults(&form) {
        Some(values) => ElicitResult::new(ElicitationAction::Accept).with_content(Value::Object(values)),
        None => ElicitResult::new(ElicitationAction::Decline),
    }
}

fn defaults(form: &Value) -> Option<Map<String, Value>> {
    let fields = form["properties"].as_object()?;
    let values =
        fields.iter().filter_map(|(name, field)| Some((name.clone(), field.get("default")?.clone())));
    let values: Map<String, Value> = values.collect();
    let mut required = form["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    required.all(|name| values.contains_key(name)).then_some(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn answer(properties: Value, required: Value) -> (ElicitationAction, Option<Value>) {
        let schema = json!({"type": "object", "properties": properties, "required": required});
        let request = json!({"message": "?", "requestedSchema": schema});
        let answer = filled_in(&serde_json::from_value(request).expect("a form"));
        (answer.action, answer.content)
    }

    #[test]
    fn only_forms_with_defaults_for_required_fields_are_accepted() {
        let fields = json!({
            "name": {"type": "string", "default": "Ann"},
            "age": {"type": "integer", "default": 30},
            "score": {"type": "number", "default": 9.5},
            "color": {"type": "string", "enum": ["red", "green"], "default": "green"},
            "sure": {"type": "boolean", "default": true},
            "note": {"type": "string"},
        });
        let values = json!({"name": "Ann", "age": 30, "score": 9.5, "color": "green", "sure": true});
        assert_eq!(answer(fields.clone(), json!(["name"])), (ElicitationAction::Accept, Some(values)));
        assert_eq!(answer(fields, json!(["note"])), (ElicitationAction::Decline, None));
        assert_eq!(answer(json!({}), json!([])), (ElicitationAction::Accept, Some(json!({}))));
        let page = json!({"mode": "url", "message": "?", "url": "https://example.com", "elicitationId": "1"});
        let page = filled_in(&serde_json::from_value(page).expect("a page"));
        assert_eq!(page.action, ElicitationAction::Decline);
    }
}
