//! Compiles constraints with llguidance, within bounds that turn a hostile schema into an error in well under a
//! second.
//!
//! Schemas, patterns and grammars come from anyone who can reach the HTTP port, so their size, nesting and
//! repetition counts are checked first, and llguidance runs with limited fuel on a thread with a large stack.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, SimpleVob, TokEnv};
use llguidance::{Matcher, ParserFactory};
use metrics::{SharedString, counter, histogram};
use skep_model::Tokenizer;

use super::document::plain_message;
use super::form::Form;
use super::relaxed::RelaxedSchema;
use super::spelling::{AcceptedSpelling, Spelling};
use super::token_env::TokenizerWithTrie;
use super::unenforced::UnenforcedValue;
use super::{OutputConstraint, PARAMETER, schema_bounds};
use crate::metric;
use crate::request::BeforeCalls;
use crate::{Constraint, EngineError};

/// Maximum length of a constraint's source.
const MAX_SOURCE_BYTES: usize = 256 << 10;
/// Maximum number of compiled and refused constraints that are cached.
const CACHED_CONSTRAINTS: usize = 64;
/// Stack size of a compiling thread. llguidance descends recursively into what it compiles.
const COMPILE_STACK_BYTES: usize = 64 << 20;

/// The tokenizer's trie and the compiled constraints. There is one compiler per engine.
pub(crate) struct ConstraintCompiler {
    factory: ParserFactory,
    vocabulary_size: usize,
    /// Tokens of white space, and tokens that end the output.
    blank: Arc<SimpleVob>,
    model: SharedString,
    /// Number of constraints that were compiled or refused.
    pub(super) misses: AtomicU64,
    /// Number of constraints that were found in the cache.
    pub(super) hits: AtomicU64,
    /// Cached constraints, most recently used last.
    cache: Mutex<Vec<CachedConstraint>>,
}

/// A cached constraint, and the tenant that was the first to request it.
struct CachedConstraint {
    key: CacheKey,
    tenant: String,
    slot: Arc<Slot>,
}

/// Filled by the first request; concurrent requests for the same constraint wait for it.
type Slot = OnceLock<Result<Compiled, Failure>>;

/// A compiled constraint.
struct Compiled {
    matcher: Mutex<Matcher>,
    /// Matchers for a single spelling each, by [`Spelling`].
    spelled: [OnceLock<Result<Mutex<Matcher>, Failure>>; 2],
    form: Form,
    parts: Vec<RelaxedSchema>,
    unenforced: Arc<[UnenforcedValue]>,
    warnings: Arc<[String]>,
}

#[derive(Debug, Clone)]
enum Failure {
    /// The constraint will be refused the next time too.
    Refused(String),
    /// The host could not compile it; it may be able to the next time.
    Host(String),
}

/// The kind and the source of a constraint, compared exactly.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CacheKey {
    kind: &'static str,
    source: String,
}

impl ConstraintCompiler {
    /// Creates a compiler with an empty cache for one model. Masks have `vocabulary_size` bits; fails if llguidance
    /// cannot use the tokenizer.
    pub fn new(
        tokenizer: &Arc<Tokenizer>,
        vocabulary_size: usize,
        eos: &[u32],
        model: &str,
    ) -> Result<Self, EngineError> {
        let env: TokEnv = Arc::new(TokenizerWithTrie::new(tokenizer.clone(), vocabulary_size, eos));
        let mut blank = env.tok_trie().alloc_token_set();
        for id in 0..env.tok_trie().vocab_size() as u32 {
            let bytes = env.tok_trie().token(id);
            let is_blank = !bytes.is_empty() && bytes.iter().all(|byte| b" \t\r\n".contains(byte));
            if is_blank || eos.contains(&id) {
                blank.allow_token(id);
            }
        }
        let capabilities = InferenceCapabilities::default();
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
            blank: Arc::new(blank),
            model: SharedString::from(model.to_string()),
            misses: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            cache: Mutex::new(Vec::new()),
        })
    }

    /// Returns a fresh state at the beginning of the constraint, which accepts the whole accepted set.
    pub fn compile(&self, constraint: &Constraint) -> Result<OutputConstraint, EngineError> {
        self.compile_for("", constraint)
    }

    /// Compiles a constraint on behalf of a tenant.
    pub fn compile_for(
        &self,
        tenant: &str,
        constraint: &Constraint,
    ) -> Result<OutputConstraint, EngineError> {
        self.state(tenant, constraint, AcceptedSpelling::Any)
    }

    /// Returns the same constraint in a single spelling of JSON, for drafts. It is compiled at its first use.
    pub fn strict(
        &self,
        constraint: &Constraint,
        spelling: Spelling,
    ) -> Result<OutputConstraint, EngineError> {
        self.state("", constraint, AcceptedSpelling::Single(spelling))
    }

    fn state(
        &self,
        tenant: &str,
        constraint: &Constraint,
        written: AcceptedSpelling,
    ) -> Result<OutputConstraint, EngineError> {
        // The bounds are checked before anything that descends into the constraint without a bound.
        check_bounds(constraint).map_err(refused)?;
        let key = CacheKey::of(constraint);
        if key.source.len() > MAX_SOURCE_BYTES {
            return Err(refused(format!(
                "the {} has {} bytes; at most {MAX_SOURCE_BYTES} are allowed",
                key.kind,
                key.source.len()
            )));
        }
        let slot = self.slot(tenant, &key);
        let mut is_known = true;
        let compiled = slot.get_or_init(|| {
            is_known = false;
            let began = Instant::now();
            let built = self.on_large_stack(|| self.build(constraint));
            self.record_miss(began.elapsed());
            built
        });
        if is_known {
            self.record_hit();
        }
        let failed = |failure: &Failure| match failure {
            Failure::Refused(message) => refused(message.clone()),
            Failure::Host(message) => {
                self.forget(&key);
                EngineError::Failed(message.clone())
            }
        };
        let compiled = compiled.as_ref().map_err(failed)?;
        let pristine = match written {
            AcceptedSpelling::Single(spelling) if compiled.form.has_spellings() => {
                let spelled = &compiled.spelled[spelling as usize];
                let build = || {
                    self.on_large_stack(|| {
                        let grammar = compiled.form.grammar(&compiled.parts, written);
                        self.matcher(grammar).map(Mutex::new).map_err(Failure::Refused)
                    })
                };
                spelled.get_or_init(build).as_ref().map_err(failed)?
            }
            _ => &compiled.matcher,
        };
        // The clone is deep, because shallow clones share a lexer whose states only grow.
        let matcher = pristine.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        Ok(OutputConstraint {
            matcher,
            vocabulary_size: self.vocabulary_size,
            ending: compiled.form.ending(),
            last_token: None,
            blank: self.blank.clone(),
            unenforced: compiled.unenforced.clone(),
            warnings: compiled.warnings.clone(),
        })
    }

    fn build(&self, constraint: &Constraint) -> Result<Compiled, Failure> {
        let mut form = Form::of(constraint, self.factory.limits()).map_err(Failure::Refused)?;
        let mut parts = form.parts();
        let mut attempt = self.matcher(form.grammar(&parts, AcceptedSpelling::Any));
        if attempt.is_err() {
            // The additional rules of `rule_grammar` may be too much for the compiler.
            parts.iter_mut().for_each(|part| part.as_rules = false);
            attempt = self
                .matcher(form.grammar(&parts, AcceptedSpelling::Any))
                .map_err(|_| attempt.err().unwrap_or_default());
        }
        if let Err(error) = &attempt
            && form.settle().map_err(Failure::Refused)?
        {
            parts = form.parts();
            let again = self.matcher(form.grammar(&parts, AcceptedSpelling::Any));
            attempt = again.map_err(|_| error.clone());
        }
        let matcher = Mutex::new(attempt.map_err(Failure::Refused)?);
        let unenforced = form.unenforced(&parts);
        let warnings = form.warnings();
        Ok(Compiled { matcher, spelled: Default::default(), form, parts, unenforced, warnings })
    }

    fn matcher(&self, grammar: TopLevelGrammar) -> Result<Matcher, String> {
        let parser =
            self.factory.create_parser(grammar).map_err(|error| plain_message(&format!("{error:#}")))?;
        let matcher = Matcher::new(Ok(parser));
        // The first real choice shows early whether the grammar is too complex.
        let mut probe = matcher.deep_clone();
        let forced = probe.compute_ff_bytes();
        let forced = self.factory.tok_env().tokenize_bytes_marker(&forced).0;
        probe.consume_tokens(&forced).map_err(|error| plain_message(&error.to_string()))?;
        let trie = self.factory.tok_env().tok_trie();
        // The first names of an object come after white space and a brace.
        let failed = |error: &dyn std::fmt::Display| plain_message(&error.to_string());
        for token in [None, trie.token_id(b"{"), trie.token_id(b"\"")] {
            if let Some(token) = token
                && probe.try_consume_tokens(&[token]).map_err(|error| failed(&error))? == 0
            {
                break;
            }
            probe.compute_ff_bytes();
            probe.compute_mask_or_eos().map_err(|error| failed(&error))?;
        }
        Ok(matcher)
    }

    fn on_large_stack<T: Send>(
        &self,
        work: impl FnOnce() -> Result<T, Failure> + Send,
    ) -> Result<T, Failure> {
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("constraint".to_string())
                .stack_size(COMPILE_STACK_BYTES)
                .spawn_scoped(scope, work)
                .map_err(|error| Failure::Host(format!("cannot start a thread for compiling: {error}")))?
                .join()
                .unwrap_or_else(|_| Err(Failure::Refused("the compiler panicked on it".to_string())))
        })
    }

    /// Returns the cache slot of this constraint, which becomes the most recently used.
    fn slot(&self, tenant: &str, key: &CacheKey) -> Arc<Slot> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = match cache.iter().position(|kept| kept.key == *key) {
            Some(at) => cache.remove(at),
            None => CachedConstraint { key: key.clone(), tenant: tenant.to_string(), slot: Arc::default() },
        };
        let slot = kept.slot.clone();
        cache.push(kept);
        if cache.len() > CACHED_CONSTRAINTS {
            evict(&mut cache);
        }
        slot
    }

    fn record_miss(&self, compiling: Duration) {
        self.misses.fetch_add(1, Relaxed);
        let model = self.model.clone();
        histogram!(metric::CONSTRAINT_COMPILE, "model" => model).record(compiling.as_secs_f64());
        counter!(metric::CONSTRAINTS, "model" => self.model.clone(), "cache" => "miss").increment(1);
    }

    fn record_hit(&self) {
        self.hits.fetch_add(1, Relaxed);
        counter!(metric::CONSTRAINTS, "model" => self.model.clone(), "cache" => "hit").increment(1);
    }

    fn forget(&self, key: &CacheKey) {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.retain(|kept| kept.key != *key);
    }
}

/// Removes the least recently used constraint of the tenant that has the most, so that no tenant's new
/// constraints push out those of others.
fn evict(cache: &mut Vec<CachedConstraint>) {
    let count = |tenant: &str| cache.iter().filter(|kept| kept.tenant == tenant).count();
    let most = cache.iter().map(|kept| count(&kept.tenant)).max();
    if let Some(at) = cache.iter().position(|kept| Some(count(&kept.tenant)) == most) {
        cache.remove(at);
    }
}

impl CacheKey {
    fn of(constraint: &Constraint) -> Self {
        let (kind, source) = match constraint {
            Constraint::JsonSchema(schema) => ("JSON schema", schema.to_string()),
            Constraint::JsonObject => ("JSON object", String::new()),
            Constraint::Regex(pattern) => ("regular expression", pattern.clone()),
            Constraint::Lark(source) => ("grammar", source.clone()),
            Constraint::ToolCalls(form) => {
                ("form of tool calls", serde_json::to_string(form).unwrap_or_default())
            }
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
        Constraint::ToolCalls(form) => {
            form.tools.iter().try_for_each(|tool| {
                schema_bounds::check_size(&tool.parameters)
                    .map_err(|message| format!("the parameters of the tool `{}`: {message}", tool.name))
            })?;
            match &form.before {
                BeforeCalls::Answer(answer) => check_bounds(answer),
                BeforeCalls::Nothing | BeforeCalls::Text => Ok(()),
            }
        }
    }
}

fn refused(message: String) -> EngineError {
    EngineError::Constraint { parameter: PARAMETER.to_string(), message }
}
