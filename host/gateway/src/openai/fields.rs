//! Takes the fields of a request one by one, so that an error names its field.

use crate::ApiError;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// Maximum number of unknown fields that are noted inside of one field.
const MAX_UNKNOWN_INSIDE: usize = 32;

/// A JSON object. A field that is `null` counts as missing.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
pub(crate) struct Fields {
    given: Map<String, Value>,
    /// Names of fields inside of others that nobody reads.
    #[serde(skip)]
    unknown_inside: Vec<String>,
}

impl Fields {
    pub(crate) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        let Some(value) = self.given.remove(name).filter(|value| !value.is_null()) else { return Ok(None) };
        serde_path_to_error::deserialize(value).map(Some).map_err(|error| {
            let path = error.path().to_string();
            let param = match path.as_str() {
                "." | "?" => name.to_owned(),
                path if path.starts_with('[') => format!("{name}{path}"),
                path => format!("{name}.{path}"),
            };
            ApiError::parameter(&param, format!("`{param}`: {}", error.into_inner()))
        })
    }

    pub(crate) fn take_required<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, ApiError> {
        self.take(name)?.ok_or_else(|| ApiError::parameter(name, format!("`{name}` is missing")))
    }

    /// Returns whether a field exists and is not `null`.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.given.get(name).is_some_and(|value| !value.is_null())
    }

    /// Returns the names of the fields that nobody has read and that are not `null`.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let given = self.given.iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| name.as_str());
        given.chain(self.unknown_inside.iter().map(String::as_str))
    }

    /// Returns the names of the fields that nobody has read, for the header that names them.
    pub(crate) fn into_ignored(self) -> Vec<String> {
        self.names().map(str::to_owned).collect()
    }

    /// Notes the fields inside of an object that are not among those that its reader knows.
    pub(crate) fn note_unknown_inside(&mut self, name: &str, known: &[&str]) {
        let Some(Value::Object(inside)) = self.given.get(name) else { return };
        let unknown = inside.iter().filter(|(key, value)| !value.is_null() && !known.contains(&key.as_str()));
        self.unknown_inside.extend(unknown.map(|(key, _)| format!("{name}.{key}")).take(MAX_UNKNOWN_INSIDE));
    }

    /// Notes the fields of the objects in a list that are not among those that its reader knows, each name once. `inside` is
    /// the path from an item to the object.
    pub(crate) fn note_unknown_in_items(&mut self, name: &str, inside: &[&str], known: &[&str]) {
        let Some(Value::Array(items)) = self.given.get(name) else { return };
        let objects = items.iter().filter_map(|item| {
            let object = inside.iter().try_fold(item, |value, part| value.get(part))?;
            object.as_object()
        });
        let path: String = inside.iter().map(|part| format!(".{part}")).collect();
        let mut unknown = BTreeSet::new();
        for (key, _) in objects
            .flatten()
            .filter(|(key, value)| !known.contains(&key.as_str()) && !asks_for_nothing(value))
        {
            if unknown.len() < MAX_UNKNOWN_INSIDE {
                unknown.insert(format!("{name}[]{path}.{key}"));
            }
        }
        self.unknown_inside.extend(unknown);
    }

    /// Removes a field that asks for nothing but what happens anyway.
    pub(crate) fn settle(&mut self, name: &str, happens_anyway: impl FnOnce(&Value) -> bool) {
        if self.given.get(name).is_some_and(happens_anyway) {
            self.given.remove(name);
        }
    }

    /// Sets a field that another shape has under a different name.
    pub(crate) fn put(&mut self, name: &str, value: Value) {
        self.given.insert(name.to_owned(), value);
    }

    /// Refuses fields that are not supported and would change the meaning of the response.
    pub(crate) fn refuse(&self, unsupported: &[(&str, &str)]) -> Result<(), ApiError> {
        for (field, instead) in unsupported {
            if self.has(field) {
                return Err(ApiError::parameter(*field, format!("{field} is not supported; {instead}")));
            }
        }
        Ok(())
    }
}

/// Returns whether a value is the one that asks for nothing: false, 0, or something empty.
pub(crate) fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(value) => value.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn errors_name_the_field() {
        let fields = json!({"stop": 7, "prompt": [{"id": "x"}], "n": null});
        let mut fields: Fields = serde_json::from_value(fields).unwrap();
        #[derive(Deserialize, Debug)]
        struct Item {
            #[expect(dead_code, reason = "only its type matters")]
            id: u32,
        }
        let param = |error: ApiError| error.param.unwrap();
        assert_eq!(param(fields.take::<String>("stop").unwrap_err()), "stop");
        assert_eq!(param(fields.take::<Vec<Item>>("prompt").unwrap_err()), "prompt[0].id");
        assert_eq!(fields.take::<u32>("n").unwrap(), None);
        assert_eq!(param(fields.take_required::<u32>("n").unwrap_err()), "n");
    }

    #[test]
    fn ignored_fields_are_named() {
        let fields =
            json!({"n": 1, "store": false, "seed": null, "odd": 1, "inner": {"known": 1, "x": 2, "y": null}});
        let mut fields: Fields = serde_json::from_value(fields).unwrap();
        fields.take::<u32>("n").unwrap();
        fields.settle("store", asks_for_nothing);
        fields.settle("odd", asks_for_nothing);
        fields.note_unknown_inside("inner", &["known"]);
        fields.take::<Value>("inner").unwrap();
        assert_eq!(fields.into_ignored(), ["odd", "inner.x"]);
    }

    #[test]
    fn unknown_fields_of_items_are_named_once() {
        let item = |name: &str| json!({"role": "user", "odd": 1, "audio": null, "notes": [], name: {"known": 1, "y": 2}});
        let mut fields: Fields = serde_json::from_value(json!({"list": [item("a"), item("a"), 7]})).unwrap();
        fields.note_unknown_in_items("list", &[], &["role", "a"]);
        fields.note_unknown_in_items("list", &["a"], &["known"]);
        fields.take::<Value>("list").unwrap();
        assert_eq!(fields.into_ignored(), ["list[].odd", "list[].a.y"]);
    }
}
