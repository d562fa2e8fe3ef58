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

use super::relaxed::{CompilerSupport, Relaxations, RelaxedSchema, relaxed};
use super::schema_keywords::Members;
use super::spelling::AcceptedSpelling;
use super::unenforced::UnenforcedValue;
use super::{
    canonical, error_location, rule_grammar, schema_bounds, schema_keywords, unenforced_paths,
    written_unenforced,
};

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
    relaxations: Relaxations,
    warnings: Vec<String>,
    limits: ParserLimits,
    /// Patterns and sets of patterns that were tried, with the results.
    tried: Mutex<HashMap<String, bool>>,
}

impl Document {
    /// Checks a schema and makes it canonical, without relaxing anything. The error is a message for the schema's
    /// author.
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
            relaxations: Relaxations::default(),
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
        let rules = rule_grammar::rules(&relaxed, AcceptedSpelling::Any);
        rule_grammar::order_warnings(&self.canonical, "", rules.is_some(), &mut warnings);
        warnings
    }

    /// Returns the schema for the compiler.
    pub fn relaxed(&self) -> RelaxedSchema {
        self.relax(&self.canonical)
    }

    /// Returns the values that `relaxed`, a form of this document, accepts although the schema may not.
    pub fn unenforced(&self, relaxed: &RelaxedSchema) -> Arc<[UnenforcedValue]> {
        unenforced_paths::unenforced(&self.canonical, &relaxed.lost)
    }

    /// Returns the same for arguments that are written one by one.
    pub fn unenforced_arguments(&self, relaxed: &RelaxedSchema) -> Vec<UnenforcedValue> {
        written_unenforced::unenforced(&self.canonical, &relaxed.lost)
    }

    /// Relaxes the parts that the compiler cannot follow when it compiles this document alone. Returns whether
    /// there were any.
    pub fn settle(&mut self) -> Result<bool, String> {
        let began = Instant::now();
        for round in 0.. {
            let Some(error) = self.compile_error(&self.canonical) else { return Ok(round > 0) };
            if is_final(&error) || self.relaxations.locations.contains("") {
                return Err(self.placed(error));
            }
            if error.contains("circular references") && !self.relaxations.beside_cycles {
                self.relaxations.beside_cycles = true;
                continue;
            }
            let late = || round >= MAX_ROUNDS || began.elapsed() > MAX_SEARCH;
            let location = match late() {
                true => String::new(),
                false => error_location::find(&self.canonical, &error, |part| match late() {
                    true => None,
                    false => self.compile_error(&part),
                }),
            };
            // If the search stops at a location that is already relaxed, the whole document is relaxed.
            let location =
                if self.relaxations.locations.contains(&location) { String::new() } else { location };
            self.relaxations.locations.insert(location);
        }
        Ok(true)
    }

    /// Adds the location to an error.
    fn placed(&self, error: String) -> String {
        let location = error_location::find(&self.canonical, &error, |part| self.compile_error(&part));
        if location.is_empty() { error } else { format!("at `{location}`: {error}") }
    }

    fn relax(&self, document: &Value) -> RelaxedSchema {
        let abilities = CompilerSupport {
            pattern: &|pattern| self.compiles_pattern(pattern),
            names: &|names| self.tells_apart(names),
        };
        relaxed(document, &self.relaxations, &abilities)
    }

    fn compile_error(&self, document: &Value) -> Option<String> {
        let relaxed = self.relax(document);
        self.compile(AcceptedSpelling::Any.options(relaxed.unicode_escapes), relaxed.schema).err()
    }

    fn compile(&self, options: JsonCompileOptions, schema: Value) -> Result<(), String> {
        let mut schema = schema;
        rule_grammar::without_key_order(&mut schema);
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
        let error = self.compile(AcceptedSpelling::Any.options(true), schema).err();
        error.is_none_or(|error| is_unsatisfiable(&error))
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
pub(super) fn is_final(error: &str) -> bool {
    is_unsatisfiable(error) || is_size(error)
}

fn is_unsatisfiable(error: &str) -> bool {
    error.contains("nsatisfiable")
}

fn is_size(error: &str) -> bool {
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
    .any(|part| error.contains(part))
}

/// Returns the compiler's own message without its options and the dump of its state.
pub(super) fn plain_message(message: &str) -> String {
    message.split("\n<").next().unwrap_or_default().trim().to_string()
}
