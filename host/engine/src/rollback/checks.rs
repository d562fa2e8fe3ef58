//! Validators of the values that masks do not enforce, compiled once for each constraint.
//!
//! Invariant: a value that passes is one that its schema accepts, and no object in it has a key twice. A number that passes
//! is a finite double.

use std::sync::{Arc, Mutex, PoisonError};

use jsonschema::ValidationError;
use jsonschema::error::ValidationErrorKind;
use serde_json::Value;

use super::instance::{end_of, end_of_key, repeated_key, second_equal};
use super::json_values::Check;
use crate::constraint::UnenforcedValue;
use crate::{Dialect, EngineError, Invalid, SchemaValidator};

/// Number of constraints whose validators are cached.
const KEPT: usize = 64;
/// Maximum length of a reason, which may quote the value.
const LONGEST_REASON: usize = 200;

/// The values that one constraint's masks do not enforce, with their validators.
pub(crate) struct Checks {
    values: Arc<[UnenforcedValue]>,
    validators: Vec<SchemaValidator>,
}

/// An error in a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InvalidInstance {
    /// The JSON pointer to the innermost invalid instance, relative to the value.
    pub pointer: String,
    pub reason: String,
    /// The byte after that instance.
    pub end: usize,
}

impl Checks {
    /// Returns the values that are checked, in the order of their validators.
    pub fn values(&self) -> &[UnenforcedValue] {
        &self.values
    }

    fn compile(values: &Arc<[UnenforcedValue]>) -> Result<Self, EngineError> {
        let validators = values.iter().map(|value| {
            SchemaValidator::compile(&value.schema, Dialect::Backtracking).map_err(|message| {
                EngineError::Constraint { parameter: crate::constraint::PARAMETER.to_string(), message }
            })
        });
        Ok(Checks { values: values.clone(), validators: validators.collect::<Result<_, _>>()? })
    }

    /// Returns the error that comes first in the text of a value, if there is one.
    pub(super) fn flaw(&self, check: Check, text: &[u8]) -> Option<InvalidInstance> {
        match check {
            Check::Schema(entry) => self.flaw_by_schema(entry, text),
            Check::FiniteNumber => infinity(text),
            // The tags that the text is read by are known elsewhere.
            Check::Argument { .. } | Check::Arguments(_) => None,
        }
    }

    /// Returns the errors of a value, each as its pointer and its reason.
    pub(super) fn errors(&self, entry: usize, value: &Value) -> Vec<(String, String)> {
        match self.validators[entry].check_all(value) {
            Ok(()) => Vec::new(),
            Err(Invalid::Errors(errors)) => {
                errors.iter().map(|error| (error.instance_path().to_string(), reason_of(error))).collect()
            }
            Err(unknown) => vec![(String::new(), unknown.to_string())],
        }
    }

    fn flaw_by_schema(&self, entry: usize, text: &[u8]) -> Option<InvalidInstance> {
        let value: Value = match serde_json::from_slice(text) {
            Ok(value) => value,
            Err(error) => {
                let reason = format!("it cannot be read: {error}");
                return Some(InvalidInstance { pointer: String::new(), reason, end: text.len() });
            }
        };
        let repeated = repeated_key(text).map(|repeated| InvalidInstance {
            reason: format!("duplicate key {:?}", repeated.key),
            pointer: repeated.pointer,
            end: repeated.end,
        });
        let flaws = match self.validators[entry].check_all(&value) {
            Ok(()) => Vec::new(),
            Err(Invalid::Errors(errors)) => errors.iter().map(|error| flaw_of(error, &value, text)).collect(),
            Err(unknown) => {
                vec![InvalidInstance { pointer: String::new(), reason: unknown.to_string(), end: text.len() }]
            }
        };
        flaws.into_iter().chain(repeated).min_by_key(|flaw| flaw.end)
    }
}

/// Rejects numbers that overflow a double: JSON allows numbers of any size, but most readers use doubles.
fn infinity(text: &[u8]) -> Option<InvalidInstance> {
    let number = std::str::from_utf8(text).ok().and_then(|text| text.parse::<f64>().ok());
    let is_finite = number.is_some_and(f64::is_finite);
    (!is_finite).then(|| InvalidInstance {
        pointer: String::new(),
        reason: "the number is too large for a double".to_string(),
        end: text.len(),
    })
}

fn flaw_of(error: &ValidationError<'_>, value: &Value, text: &[u8]) -> InvalidInstance {
    let pointer = error.instance_path().to_string();
    let instance = value.pointer(&pointer);
    let repeated_item = match (error.kind(), instance) {
        (ValidationErrorKind::UniqueItems, Some(Value::Array(items))) => second_equal(items),
        _ => None,
    };
    let surplus = match error.kind() {
        ValidationErrorKind::AdditionalProperties { unexpected }
        | ValidationErrorKind::UnevaluatedProperties { unexpected } => unexpected.first(),
        _ => None,
    };
    let end = match (repeated_item, surplus) {
        (Some(item), _) => end_of(text, &format!("{pointer}/{item}")),
        (None, Some(key)) => end_of_key(text, &pointer, key),
        (None, None) => end_of(text, &pointer),
    };
    InvalidInstance { pointer, reason: reason_of(error), end }
}

fn reason_of(error: &ValidationError<'_>) -> String {
    let mut reason = format!("`{}`: {}", error.kind().keyword(), error.masked());
    if let Some((cut, _)) = reason.char_indices().nth(LONGEST_REASON) {
        reason.truncate(cut);
        reason.push('…');
    }
    reason
}

/// The validators of the constraints that were used last.
#[derive(Default)]
pub(crate) struct ChecksCache(Mutex<Vec<Arc<Checks>>>);

impl ChecksCache {
    /// Returns the checks of `values`, compiled or from the cache. Fails if a schema cannot be compiled.
    pub fn of(&self, values: &Arc<[UnenforcedValue]>) -> Result<Arc<Checks>, EngineError> {
        if values.is_empty() {
            return Ok(Arc::new(Checks { values: values.clone(), validators: Vec::new() }));
        }
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().iter().find(|known| Arc::ptr_eq(&known.values, values)) {
            return Ok(known.clone());
        }
        let checks = Arc::new(Checks::compile(values)?);
        let mut kept = lock();
        if kept.len() >= KEPT {
            kept.remove(0);
        }
        kept.push(checks.clone());
        Ok(checks)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn flaw(schema: Value, text: &str) -> Option<(String, String, String)> {
        let values: Arc<[UnenforcedValue]> =
            vec![UnenforcedValue { tool: None, path: Vec::new(), schema }].into();
        let checks = ChecksCache::default().of(&values).unwrap();
        checks
            .flaw(Check::Schema(0), text.as_bytes())
            .map(|flaw| (flaw.pointer, flaw.reason, text[..flaw.end].to_string()))
    }

    #[test]
    fn the_first_instance_that_is_wrong_is_named_with_its_end() {
        let schema = json!({"properties": {"a": {"uniqueItems": true}, "b": {"not": {"const": 5}}},
                            "dependentRequired": {"b": ["a"]}, "unevaluatedProperties": false});
        for (text, pointer, end) in [
            (r#"{"a": [1, 2, 1.0, 1], "b": 5}"#, "/a", r#"{"a": [1, 2, 1.0"#),
            (r#"{"a": [1], "b": 5}"#, "/b", r#"{"a": [1], "b": 5"#),
            (r#"{"b": 6}"#, "", r#"{"b": 6}"#),
            (r#"{"a": [], "c": 1}"#, "", r#"{"a": [], "c""#),
            (r#"{"a": [], "b": 1, "a": [1]}"#, "", r#"{"a": [], "b": 1, "a""#),
        ] {
            let (found, reason, until) =
                flaw(schema.clone(), text).unwrap_or_else(|| panic!("{text} passes"));
            assert_eq!((found.as_str(), until.as_str()), (pointer, end), "{reason}");
        }
        assert_eq!(flaw(schema, r#"{"a": [1, "1", [1]], "b": 6}"#), None);
    }

    #[test]
    fn a_check_that_would_take_for_ever_is_a_flaw() {
        let part = |number: usize| json!({"$ref": format!("#/$defs/{number}")});
        let both =
            |number: usize| (number.to_string(), json!({"allOf": [part(number + 1), part(number + 1)]}));
        let mut parts: serde_json::Map<String, Value> = (0..14).map(both).collect();
        parts.insert("14".to_string(), json!({"type": "integer"}));
        let schema = json!({"$defs": parts, "items": part(0)});
        assert_eq!(flaw(schema.clone(), "[1, 2]"), None);
        let many = json!(vec![1; 1_000]).to_string();
        let (_, reason, until) = flaw(schema, &many).expect("nobody waits for it");
        assert!(reason.contains("takes too long"), "{reason}");
        assert_eq!(until, many);
    }

    #[test]
    fn validators_are_compiled_once_for_a_constraint() {
        let entry = UnenforcedValue { tool: None, path: Vec::new(), schema: json!({"uniqueItems": true}) };
        let values: Arc<[UnenforcedValue]> = vec![entry].into();
        let cache = ChecksCache::default();
        let first = cache.of(&values).unwrap();
        assert!(Arc::ptr_eq(&first, &cache.of(&values.clone()).unwrap()));
    }

    #[test]
    fn a_schema_that_does_not_compile_is_refused() {
        let entry = UnenforcedValue { tool: None, path: Vec::new(), schema: json!({"type": "nothing"}) };
        let error = ChecksCache::default().of(&vec![entry].into()).err().unwrap();
        assert!(matches!(error, EngineError::Constraint { .. }), "{error}");
    }
}
