//! Compiles constraints with llguidance, within bounds that make a hostile schema an error in well under a second.
//!
//! Schemas, patterns and grammars come from anyone who can reach the HTTP port, so their size, nesting and repetition
//! counts are checked first, and llguidance runs with limited fuel on a thread with a large stack.

use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use serde_json::{Value, json};
use skep_model::Tokenizer;

use super::token_env::TokenizerWithTrie;
use super::{OutputConstraint, one_of, schema_bounds};
use crate::{Constraint, EngineError};

/// Longest source of a constraint.
const MAX_SOURCE_BYTES: usize = 256 << 10;
/// Compiled constraints that are kept.
const CACHED_CONSTRAINTS: usize = 64;
/// llguidance descends recursively into what it compiles.
const COMPILE_STACK_BYTES: usize = 64 << 20;

/// One per engine: the tokenizer's trie and the compiled constraints.
pub(crate) struct ConstraintCompiler {
    factory: ParserFactory,
    vocabulary_size: usize,
    /// Most recently used last.
    cache: Mutex<Vec<(CacheKey, Arc<Mutex<Matcher>>)>>,
}

/// The kind and the text of a constraint, compared exactly.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CacheKey {
    kind: &'static str,
    source: String,
}

impl ConstraintCompiler {
    pub fn new(tokenizer: &Arc<Tokenizer>, vocabulary_size: usize, eos: &[u32]) -> Result<Self, EngineError> {
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
        Ok(ConstraintCompiler { factory, vocabulary_size, cache: Mutex::new(Vec::new()) })
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
        let pristine = match self.cached(&key) {
            Some(pristine) => pristine,
            None => {
                let grammar = grammar(constraint)?;
                let pristine = Arc::new(Mutex::new(self.build(grammar)?));
                self.keep(key, pristine.clone());
                pristine
            }
        };
        // A deep clone, because clones share a lexer whose states only grow.
        let matcher = pristine.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        Ok(OutputConstraint { matcher, vocabulary_size: self.vocabulary_size })
    }

    fn build(&self, grammar: TopLevelGrammar) -> Result<Matcher, EngineError> {
        let build = || {
            let parser =
                self.factory.create_parser(grammar).map_err(|error| refused(format!("{error:#}")))?;
            let matcher = Matcher::new(Ok(parser));
            // The first real choice shows early whether the grammar is too complex.
            let mut probe = matcher.deep_clone();
            probe.consume_ff_tokens();
            probe.compute_mask_or_eos().map_err(|error| refused(error.to_string()))?;
            Ok(matcher)
        };
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("constraint".to_string())
                .stack_size(COMPILE_STACK_BYTES)
                .spawn_scoped(scope, build)
                .map_err(|error| EngineError::Failed(format!("no thread for compiling: {error}")))?
                .join()
                .unwrap_or_else(|_| Err(refused("the compiler failed on it".to_string())))
        })
    }

    fn cached(&self, key: &CacheKey) -> Option<Arc<Mutex<Matcher>>> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let at = cache.iter().position(|(known, _)| known == key)?;
        let entry = cache.remove(at);
        let pristine = entry.1.clone();
        cache.push(entry);
        Some(pristine)
    }

    fn keep(&self, key: CacheKey, pristine: Arc<Mutex<Matcher>>) {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.retain(|(known, _)| *known != key);
        if cache.len() >= CACHED_CONSTRAINTS {
            cache.remove(0);
        }
        cache.push((key, pristine));
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
        Constraint::JsonSchema(schema) => schema_bounds::check_schema(schema),
        Constraint::JsonObject => Ok(()),
        Constraint::Regex(pattern) => schema_bounds::check_pattern(pattern),
        Constraint::Lark(source) => schema_bounds::check_grammar(source),
    }
}

fn grammar(constraint: &Constraint) -> Result<TopLevelGrammar, EngineError> {
    let single = match constraint {
        Constraint::JsonSchema(schema) => json_grammar(schema)?,
        Constraint::JsonObject => json_grammar(&json!({"type": "object"}))?,
        Constraint::Regex(pattern) => GrammarWithLexer::from_regex(pattern),
        Constraint::Lark(source) => GrammarWithLexer::from_lark(source.clone()),
    };
    Ok(TopLevelGrammar::from_grammar(single))
}

fn json_grammar(schema: &Value) -> Result<GrammarWithLexer, EngineError> {
    spelled_schema(schema).map(GrammarWithLexer::from_json_schema)
}

/// A schema as it is compiled, alone or within a grammar: checked, and with one spelling of JSON, a space after `:` and
/// `,`, as models have mostly seen it, and no other white space.
pub(crate) fn spelled_schema(schema: &Value) -> Result<Value, EngineError> {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        Value::Object(_) => schema.clone(),
        other => return Err(refused(format!("a schema is an object, not {other}"))),
    };
    let options = JsonCompileOptions {
        item_separator: ", ".to_string(),
        key_separator: ": ".to_string(),
        whitespace_flexible: false,
        ..JsonCompileOptions::default()
    };
    one_of::inline_alternatives(&mut schema);
    schema_bounds::check_schema(&schema).map_err(refused)?;
    options.apply_to(&mut schema);
    Ok(schema)
}

fn refused(message: String) -> EngineError {
    if message.contains("coerce_one_of") {
        let message =
            "`oneOf` is only possible where its alternatives visibly exclude each other; use `anyOf`";
        return EngineError::Constraint { message: message.to_string() };
    }
    let message = message.split("\n<").next().unwrap_or_default().trim().to_string();
    EngineError::Constraint { message }
}
