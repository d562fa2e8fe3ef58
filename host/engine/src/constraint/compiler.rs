//! Compiles constraints with llguidance, within bounds that make a hostile schema an error in well under a second.
//!
//! Schemas, patterns and grammars come from anyone who can reach the HTTP port, so their size, nesting and repetition
//! counts are checked first, and llguidance runs with limited fuel on a thread with a large stack.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use llguidance::{GrammarBuilder, JsonCompileOptions, Matcher, ParserFactory};
use metrics::{SharedString, counter, histogram};
use serde_json::{Value, json};
use skep_model::Tokenizer;

use super::token_env::TokenizerWithTrie;
use super::{OutputConstraint, PARAMETER, complaint, schema_bounds, schema_form, schema_keywords};
use crate::{Constraint, EngineError};

/// Longest source of a constraint.
const MAX_SOURCE_BYTES: usize = 256 << 10;
/// Compiled and refused constraints that are kept.
const CACHED_CONSTRAINTS: usize = 64;
/// llguidance descends recursively into what it compiles.
const COMPILE_STACK_BYTES: usize = 64 << 20;

/// One per engine: the tokenizer's trie and the compiled constraints.
pub(crate) struct ConstraintCompiler {
    factory: ParserFactory,
    vocabulary_size: usize,
    model: SharedString,
    /// Compiled or refused, and asked for again.
    pub(super) misses: AtomicU64,
    pub(super) hits: AtomicU64,
    /// Most recently used last.
    cache: Mutex<Vec<(CacheKey, Arc<Slot>)>>,
}

/// Filled by the first who asks; who asks for the same meanwhile waits for it.
type Slot = OnceLock<Result<Mutex<Matcher>, Failure>>;

#[derive(Debug, Clone)]
enum Failure {
    /// It will be refused the next time too.
    Refused(String),
    /// The host could not; it may the next time.
    Host(String),
}

/// The kind and the text of a constraint, compared exactly.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CacheKey {
    kind: &'static str,
    source: String,
}

impl ConstraintCompiler {
    pub fn new(
        tokenizer: &Arc<Tokenizer>,
        vocabulary_size: usize,
        eos: &[u32],
        model: &str,
    ) -> Result<Self, EngineError> {
        let env: TokEnv = Arc::new(TokenizerWithTrie::new(tokenizer.clone(), vocabulary_size, eos));
        let capabilities = InferenceCapabilities { ff_tokens: true, ..InferenceCapabilities::default() };
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, capabilities, &slices).map_err(|error| {
            EngineError::Failed(format!("the tokenizer cannot be used for constraints: {error:#}"))
        })?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            max_items_in_row: 2000,
            initial_lexer_fuel: 1_000_000,
            step_lexer_fuel: 200_000,
            step_max_items: 50_000,
            max_lexer_states: 50_000,
            max_grammar_size: 200_000,
            precompute_large_lexemes: false,
            verbose_errors: false,
        };
        Ok(ConstraintCompiler {
            factory,
            vocabulary_size,
            model: SharedString::from(model.to_string()),
            misses: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            cache: Mutex::new(Vec::new()),
        })
    }

    /// A fresh state at the beginning of the constraint.
    pub fn compile(&self, constraint: &Constraint) -> Result<OutputConstraint, EngineError> {
        // Before anything that descends into the constraint without a bound.
        check_bounds(constraint).map_err(refused)?;
        let key = CacheKey::of(constraint);
        if key.source.len() > MAX_SOURCE_BYTES {
            return Err(refused(format!(
                "the {} has {} bytes; at most {MAX_SOURCE_BYTES} are allowed",
                key.kind,
                key.source.len()
            )));
        }
        let slot = self.slot(&key);
        let mut is_known = true;
        let compiled = slot.get_or_init(|| {
            is_known = false;
            let began = Instant::now();
            let built = grammar(constraint).and_then(|grammar| self.build(grammar, constraint));
            self.record_miss(began.elapsed());
            built.map(Mutex::new)
        });
        if is_known {
            self.record_hit();
        }
        match compiled {
            Ok(pristine) => {
                // A deep clone, because clones share a lexer whose states only grow.
                let matcher = pristine.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
                Ok(OutputConstraint { matcher, vocabulary_size: self.vocabulary_size })
            }
            Err(Failure::Refused(message)) => Err(refused(message.clone())),
            Err(Failure::Host(message)) => {
                self.forget(&key);
                Err(EngineError::Failed(message.clone()))
            }
        }
    }

    fn build(&self, grammar: TopLevelGrammar, constraint: &Constraint) -> Result<Matcher, Failure> {
        let build = || {
            let parser = self.factory.create_parser(grammar).map_err(|error| {
                Failure::Refused(match constraint {
                    Constraint::JsonSchema(schema) => self.placed_complaint(schema, &error),
                    _ => plain_message(&format!("{error:#}")),
                })
            })?;
            let matcher = Matcher::new(Ok(parser));
            // The first real choice shows early whether the grammar is too complex.
            let mut probe = matcher.deep_clone();
            probe.consume_ff_tokens();
            probe
                .compute_mask_or_eos()
                .map_err(|error| Failure::Refused(plain_message(&error.to_string())))?;
            Ok(matcher)
        };
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("constraint".to_string())
                .stack_size(COMPILE_STACK_BYTES)
                .spawn_scoped(scope, build)
                .map_err(|error| Failure::Host(format!("no thread for compiling: {error}")))?
                .join()
                .unwrap_or_else(|_| Err(Failure::Refused("the compiler failed on it".to_string())))
        })
    }

    /// What the compiler says of a schema, with the place that it says it of.
    fn placed_complaint(&self, schema: &Value, error: &impl std::fmt::Display) -> String {
        let complain = |schema: Value| {
            let builder = GrammarBuilder::new(None, self.factory.limits().clone());
            let compiled = spelling().json_to_llg(builder, schema_form::normalise(&schema));
            compiled.err().map(|error| plain_message(&format!("{error:#}")))
        };
        match complain(schema.clone()) {
            Some(complaint) => {
                let place = complaint::place(schema, &complaint, complain);
                if place.is_empty() { complaint } else { format!("at `{place}`: {complaint}") }
            }
            // The grammar was made and is too large.
            None => plain_message(&format!("{error:#}")),
        }
    }

    /// The place of this constraint, which becomes the most recently used.
    fn slot(&self, key: &CacheKey) -> Arc<Slot> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = match cache.iter().position(|(known, _)| known == key) {
            Some(at) => cache.remove(at),
            None => (key.clone(), Arc::default()),
        };
        if cache.len() >= CACHED_CONSTRAINTS {
            cache.remove(0);
        }
        let slot = entry.1.clone();
        cache.push(entry);
        slot
    }

    fn record_miss(&self, compiling: Duration) {
        self.misses.fetch_add(1, Relaxed);
        let model = self.model.clone();
        histogram!("skep_engine_constraint_compile_seconds", "model" => model)
            .record(compiling.as_secs_f64());
        counter!("skep_engine_constraints_total", "model" => self.model.clone(), "cache" => "miss")
            .increment(1);
    }

    fn record_hit(&self) {
        self.hits.fetch_add(1, Relaxed);
        counter!("skep_engine_constraints_total", "model" => self.model.clone(), "cache" => "hit")
            .increment(1);
    }

    fn forget(&self, key: &CacheKey) {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.retain(|(known, _)| known != key);
    }
}

impl CacheKey {
    fn of(constraint: &Constraint) -> Self {
        let (kind, source) = match constraint {
            Constraint::JsonSchema(schema) => ("JSON schema", schema.to_string()),
            Constraint::JsonObject => ("JSON object", String::new()),
            Constraint::Regex(pattern) => ("regular expression", pattern.clone()),
            Constraint::Lark(source) => ("grammar", source.clone()),
        };
        CacheKey { kind, source }
    }
}

fn check_bounds(constraint: &Constraint) -> Result<(), String> {
    match constraint {
        Constraint::JsonSchema(schema) => schema_bounds::check_size(schema),
        Constraint::JsonObject => Ok(()),
        Constraint::Regex(pattern) => schema_bounds::check_pattern(pattern),
        Constraint::Lark(source) => schema_bounds::check_grammar(source),
    }
}

fn grammar(constraint: &Constraint) -> Result<TopLevelGrammar, Failure> {
    let json = |schema: &Value| spelled(schema).map(GrammarWithLexer::from_json_schema);
    let single = match constraint {
        Constraint::JsonSchema(schema) => json(schema).map_err(Failure::Refused)?,
        Constraint::JsonObject => json(&json!({"type": "object"})).map_err(Failure::Refused)?,
        Constraint::Regex(pattern) => GrammarWithLexer::from_regex(pattern),
        Constraint::Lark(source) => GrammarWithLexer::from_lark(source.clone()),
    };
    Ok(TopLevelGrammar::from_grammar(single))
}

/// A schema as it is compiled within a grammar.
pub(crate) fn spelled_schema(schema: &Value) -> Result<Value, EngineError> {
    spelled(schema).map_err(refused)
}

/// A schema as it is compiled: checked, and with one spelling of JSON, a space after `:` and `,`, as models have
/// mostly seen it, and no other white space. Only the escapes that have to be are there: with `\u0061` an additional
/// property could be called `a` beside the `a` that the schema describes.
fn spelled(schema: &Value) -> Result<Value, String> {
    let schema = match schema {
        Value::Bool(true) => json!({}),
        Value::Object(_) => schema.clone(),
        other => return Err(format!("a schema is an object, not {other}")),
    };
    schema_bounds::check_size(&schema)?;
    schema_keywords::check(&schema)?;
    let mut schema = schema_form::normalise(&schema);
    spelling().apply_to(&mut schema);
    Ok(schema)
}

fn spelling() -> JsonCompileOptions {
    JsonCompileOptions {
        item_separator: ", ".to_string(),
        key_separator: ": ".to_string(),
        whitespace_flexible: false,
        json_allowed_escapes: Some("nrbtf\\\"".to_string()),
        ..JsonCompileOptions::default()
    }
}

fn refused(message: String) -> EngineError {
    EngineError::Constraint { parameter: PARAMETER.to_string(), message }
}

/// The compiler's own words without its options and the dump of its state.
fn plain_message(message: &str) -> String {
    let clearer = [
        (
            "coerce_one_of",
            "`oneOf` is only possible where its alternatives visibly exclude each other; use `anyOf`",
        ),
        (
            "min/maxProperties only supported",
            "`minProperties` and `maxProperties` are only possible where all `properties` are `required`, \
             or, with `additionalProperties: false`, for one more than are",
        ),
    ];
    if let Some((_, clearer)) = clearer.iter().find(|(theirs, _)| message.contains(theirs)) {
        return (*clearer).to_string();
    }
    message.split("\n<").next().unwrap_or_default().trim().to_string()
}
