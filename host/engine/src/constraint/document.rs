//! One JSON Schema on its way into a grammar: checked, canonical, and relaxed as far as the compiler needs it.
//!
//! Invariant: a schema is refused here only because it is malformed, refers outside itself, or nothing
//! satisfies it. The parts that the compiler cannot follow are relaxed one location at a time, and the affected
//! values are named.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use llguidance::api::ParserLimits;
use llguidance::{GrammarBuilder, JsonCompileOptions};
use serde_json::{Map, Value, json};

use super::drafts::Draft;
use super::relaxed::{Abilities, GivenUp, RelaxedSchema, relaxed};
use super::schema_keywords::Members;
use super::spelling::Written;
use super::unenforced::UnenforcedValue;
use super::{canonical, complaint, naming, schema_bounds, schema_keywords, spine};

/// Maximum number of locations that are relaxed before the whole document is.
const MAX_ROUNDS: usize = 6;
/// Maximum duration of the search for a location that the compiler cannot follow. After it, the whole document
/// is relaxed.
const MAX_SEARCH: Duration = Duration::from_millis(1500);
/// Maximum length of a pattern that is tried as a check.
const MAX_CHECKED_PATTERN_BYTES: usize = 4096;

/// A schema, and the parts of it that have been relaxed so far.
pub(super) struct Document {
    canonical: Value,
    draft: Draft,
    given_up: GivenUp,
    warnings: Vec<String>,
    limits: ParserLimits,
    /// Patterns and sets of patterns that were tried, with the results.
    tried: Mutex<HashMap<String, bool>>,
}

impl Document {
    pub fn new(schema: &Value, limits: &ParserLimits) -> Result<Self, String> {
        let schema = match schema {
            Value::Bool(true) => &json!({}),
            Value::Bool(false) => return Err("no value satisfies the schema `false`".to_string()),
            Value::Object(_) => schema,
            other => return Err(format!("a schema must be an object, not {other}")),
        };
        schema_bounds::check_size(schema)?;
        let mut document = Document {
            canonical: Value::Null,
            draft: Draft::of(schema),
            given_up: GivenUp::default(),
            warnings: Vec::new(),
            limits: limits.clone(),
            tried: Mutex::default(),
        };
        let checked = schema_keywords::check(schema, &|pattern| {
            document.compiles_pattern(pattern) || document.checks_pattern(pattern)
        })?;
        document.canonical = canonical::canonical(schema, &checked);
        // Referenced schemas are copied; a few references to large parts could make the document much larger.
        schema_bounds::check_size(&document.canonical)?;
        document.warnings = checked.warnings;
        Ok(document)
    }

    /// Returns likely mistakes in the schema, and requests in it that are not followed.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.warnings.clone();
        let relaxed = self.relaxed();
        let rules = spine::rules(&relaxed, Written::AnyWay);
        spine::order_warnings(&self.canonical, "", rules.is_some(), &mut warnings);
        warnings
    }

    /// Returns the schema for the compiler.
    pub fn relaxed(&self) -> RelaxedSchema {
        RelaxedSchema { pointed_integers: self.draft > Draft::Draft4, ..self.relax(&self.canonical) }
    }

    pub fn unenforced(&self, relaxed: &RelaxedSchema) -> Arc<[UnenforcedValue]> {
        naming::unenforced(&self.canonical, &relaxed.lost)
    }

    /// Relaxes the parts that the compiler cannot follow when it compiles this document alone. Returns whether
    /// there were any.
    pub fn settle(&mut self) -> Result<bool, String> {
        let began = Instant::now();
        for round in 0.. {
            let Some(complaint) = self.complaint(&self.canonical) else { return Ok(round > 0) };
            if is_final(&complaint) || self.given_up.places.contains("") {
                return Err(self.placed(complaint));
            }
            if complaint.contains("circular references") && !self.given_up.beside_cycles {
                self.given_up.beside_cycles = true;
                continue;
            }
            let late = || round >= MAX_ROUNDS || began.elapsed() > MAX_SEARCH;
            let place = match late() {
                true => String::new(),
                false => complaint::place(&self.canonical, &complaint, |part| match late() {
                    true => None,
                    false => self.complaint(&part),
                }),
            };
            // If the search stops at a location that is already relaxed, the whole document is relaxed.
            let place = if self.given_up.places.contains(&place) { String::new() } else { place };
            self.given_up.places.insert(place);
        }
        Ok(true)
    }

    /// Adds the location to a complaint.
    fn placed(&self, complaint: String) -> String {
        let place = complaint::place(&self.canonical, &complaint, |part| self.complaint(&part));
        if place.is_empty() { complaint } else { format!("at `{place}`: {complaint}") }
    }

    fn relax(&self, document: &Value) -> RelaxedSchema {
        let abilities = Abilities {
            pattern: &|pattern| self.compiles_pattern(pattern),
            names: &|names| self.tells_apart(names),
        };
        relaxed(document, &self.given_up, &abilities)
    }

    fn complaint(&self, document: &Value) -> Option<String> {
        let relaxed = self.relax(document);
        self.compile(Written::AnyWay.options(relaxed.unicode_escapes), relaxed.schema).err()
    }

    fn compile(&self, options: JsonCompileOptions, schema: Value) -> Result<(), String> {
        let mut schema = schema;
        spine::without_key_order(&mut schema);
        let builder = GrammarBuilder::new(None, self.limits.clone());
        let compiled = options.json_to_llg(builder, schema);
        compiled.map(|_| ()).map_err(|error| plain_message(&format!("{error:#}")))
    }

    fn compiles_pattern(&self, pattern: &str) -> bool {
        self.try_once(pattern, || {
            schema_bounds::check_pattern(pattern).is_ok()
                && self.compiles_or_is_empty(json!({"type": "string", "pattern": pattern}))
        })
    }

    /// Returns whether a complete string can be checked against the pattern.
    fn checks_pattern(&self, pattern: &str) -> bool {
        pattern.len() <= MAX_CHECKED_PATTERN_BYTES
            && schema_bounds::check_nesting(pattern).is_ok()
            && jsonschema::validator_for(&json!({"pattern": pattern})).is_ok()
    }

    fn tells_apart(&self, members: &Members) -> bool {
        let Some(patterns) = members.get("patternProperties").and_then(Value::as_object) else { return true };
        let bare: Map<String, Value> =
            patterns.keys().map(|pattern| (pattern.clone(), json!(true))).collect();
        let names: Value = bare.into();
        self.try_once(&names.to_string(), || {
            self.compiles_or_is_empty(json!({"type": "object", "patternProperties": names}))
        })
    }

    fn compiles_or_is_empty(&self, schema: Value) -> bool {
        let complaint = self.compile(Written::AnyWay.options(true), schema).err();
        complaint.is_none_or(|complaint| is_unsatisfiable(&complaint))
    }

    fn try_once(&self, source: &str, attempt: impl FnOnce() -> bool) -> bool {
        let tried = || self.tried.lock().unwrap_or_else(PoisonError::into_inner);
        let known = tried().get(source).copied();
        known.unwrap_or_else(|| {
            let result = attempt();
            tried().insert(source.to_string(), result);
            result
        })
    }
}

/// Returns whether relaxing the schema would not help, or must not be done.
pub(super) fn is_final(complaint: &str) -> bool {
    is_unsatisfiable(complaint) || is_size(complaint)
}

fn is_unsatisfiable(complaint: &str) -> bool {
    complaint.contains("nsatisfiable")
}

fn is_size(complaint: &str) -> bool {
    [
        "too big",
        "too large",
        "too many",
        "too complex",
        "limit for this grammar",
        "stack level exceeded",
        "fuel",
        "schema too",
    ]
    .iter()
    .any(|part| complaint.contains(part))
}

/// Returns the compiler's own message without its options and the dump of its state.
pub(super) fn plain_message(message: &str) -> String {
    message.split("\n<").next().unwrap_or_default().trim().to_string()
}
