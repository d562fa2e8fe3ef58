//! Takes the fields of a request one by one, so that an error names its field.

use crate::ApiError;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

/// A JSON object. A field that is `null` counts as missing.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    pub(crate) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        let Some(value) = self.0.remove(name).filter(|value| !value.is_null()) else { return Ok(None) };
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

    /// Whether a field exists and is not `null`.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| !value.is_null())
    }

    /// Returns the names of the fields that have not been taken and are not `null`.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| name.as_str())
    }

    /// Sets a field that another shape has under a different name.
    pub(crate) fn put(&mut self, name: &str, value: Value) {
        self.0.insert(name.to_owned(), value);
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
}
