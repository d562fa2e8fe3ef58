//! The request that a caller hands to the engine. A request is plain data: it holds no reference to a running
//! engine, and everything in it is checked against the model's limits before it is queued.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use skep_cache::{Digest, PageNamer};
use skep_model::Sampling;

use crate::{EngineError, ModelInfo, Observer, RolledBack};

/// Maximum number of stop strings in a request.
const MAX_STOP_STRINGS: usize = 16;
/// Maximum length of one stop string.
const MAX_STOP_BYTES: usize = 1024;
/// Maximum number of log-probabilities reported for each token.
const MAX_TOP_LOGPROBS: u32 = 32;

/// The caller of a request. The tenant separates prefix caches: pages are never shared between tenants, except for those of a
/// public part. The session decides which replica serves the request; a session that is not known yet starts on the home replica
/// of its parent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Affinity {
    pub tenant: String,
    pub agent: Option<String>,
    pub session: Option<String>,
    /// The session of the same agent from which this one was opened.
    pub parent: Option<String>,
    /// The beginning of the prompt that other tenants may know.
    #[serde(default)]
    pub public: PublicPart,
}

/// The beginning of a prompt whose pages outside of memory tenants share. The pages after it belong to the tenant, and so do all
/// pages in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PublicPart {
    #[default]
    Nothing,
    /// The system message, with what the template writes before and around it. A chat finds out how many tokens that is.
    SystemMessage,
    /// This number of tokens.
    Tokens(usize),
}

impl Affinity {
    /// Returns the names of the whole pages of this caller's tokens. A public part whose length is not known counts as none.
    pub fn page_names(&self, keys: &PageNamer, tokens: &[u32], page_tokens: usize) -> Vec<Digest> {
        keys.prefixes_after_public(&self.tenant, tokens, page_tokens, self.public_pages(page_tokens))
    }

    /// Returns the number of pages at the beginning of the prompt that are public as a whole.
    pub(crate) fn public_pages(&self, page_tokens: usize) -> usize {
        match self.public {
            PublicPart::Tokens(tokens) => tokens / page_tokens,
            PublicPart::Nothing | PublicPart::SystemMessage => 0,
        }
    }
}

/// Interactive work is admitted and prefilled before background work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Priority {
    #[default]
    Interactive,
    Background,
}

/// The form that the output must have.
///
/// JSON may be written in any form of the *accepted set*:
///
/// - White space may stand wherever JSON allows it, before and after the document too. At each position it is
///   empty, one space, or a line break followed by at most 20 spaces or tabs.
/// - Properties come in the order of the schema, then those that it requires without describing them, then
///   others.
/// - The names that the schema spells out are written without needless escapes. `\u` escapes may stand in
///   strings that have no `pattern`, `enum`, `const` or `format`, except where additional properties have a
///   schema of their own in addition to described ones.
/// - Numbers may have a fraction or an exponent where the schema allows them and has no bound that forbids
///   them.
///
/// A schema's keywords are enforced token by token where a grammar can follow them. Where it cannot
/// (`uniqueItems`, `not`, `if`, …), the mask is looser than the schema, and the value is checked when it is
/// complete.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Constraint {
    /// A JSON Schema of draft 4 to 2020-12. Unknown keywords are annotations. Malformed schemas, references out
    /// of the document, schemas that nothing satisfies, and schemas past the bounds on size and complexity are
    /// refused.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// A regular expression (Rust's syntax) that the whole output must match.
    Regex(String),
    /// A grammar in llguidance's variant of Lark.
    Lark(String),
    /// Tool calls in a model's markup.
    ToolCalls(ToolCallForm),
}

impl Constraint {
    /// Returns whether the output contains JSON whose form is known here.
    pub(crate) fn writes_json(&self) -> bool {
        matches!(self, Constraint::JsonSchema(_) | Constraint::JsonObject | Constraint::ToolCalls(_))
    }
}

/// The form of an answer that calls tools. JSON in it is written in any form of the accepted set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCallForm {
    /// The tools that may be called.
    pub tools: Vec<CallableTool>,
    pub before: BeforeCalls,
    /// Whether one answer may make several calls.
    pub parallel: bool,
    pub markup: CallMarkup,
}

/// A tool as the grammar needs it. The name contains no characters that JSON escapes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallableTool {
    pub name: String,
    /// JSON Schema of the arguments, which are always an object, even if the schema does not say so.
    pub parameters: Value,
}

/// The output that is allowed before the first call, or instead of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum BeforeCalls {
    /// The answer begins with a call.
    Nothing,
    /// Any text.
    Text,
    /// A JSON document or a regular expression instead of calls.
    Answer(Box<Constraint>),
}

/// The way in which a model writes calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CallMarkup {
    /// A call is `OPEN {"name": "…", "arguments": {…}} CLOSE`.
    Object(ObjectMarkup),
    /// A call is a sequence of parts.
    Parts(PartsMarkup),
}

/// The markup around calls that are JSON objects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectMarkup {
    pub open: String,
    pub close: String,
    /// The text that a template writes between two calls.
    pub between: String,
    /// Whether `open` is a special token of the tokenizer, which no text contains.
    pub open_is_special: bool,
    /// Texts of the markup, besides `open`, that free text never contains.
    pub reserved: Vec<String>,
}

/// The parts of a markup, in the order in which they are written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartsMarkup {
    /// The parts before free text, or before the answer that replaces calls.
    pub before_text: Vec<CallPart>,
    /// The parts before the first call.
    pub before: Vec<CallPart>,
    /// The parts of one call, one of which is the name.
    pub call: Vec<CallPart>,
    pub between: Vec<CallPart>,
    /// The parts after the last call.
    pub after: Vec<CallPart>,
    /// Whether calls stand only at the beginning of an answer, with no text before them.
    pub only_first: bool,
    /// Texts that free text never contains.
    pub reserved: Vec<String>,
}

/// One part of a call, or of the markup around it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CallPart {
    Text(String),
    /// A special token of the tokenizer, with its text.
    Token(u32, String),
    /// White space that may be written in another way, or left out.
    Gap(String),
    /// The name of the tool.
    Name,
    /// A number that counts calls.
    Number,
    /// An id of nine letters and digits.
    Id,
    /// The arguments, as a JSON object.
    Arguments,
    /// The arguments one by one.
    Parameters(ParameterMarkup),
}

/// The way in which a markup writes one argument: its name, and its value as JSON or, if it is a string, as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterMarkup {
    pub before_name: Vec<CallPart>,
    /// The parts between the name and a string.
    pub before_string: Vec<CallPart>,
    /// The parts between the name and JSON.
    pub before_json: Vec<CallPart>,
    pub after_value: Vec<CallPart>,
    /// The text that ends a value, which no string contains.
    pub close: String,
}

impl CallMarkup {
    /// Returns the text right before the tool of a call, by which calls are found in the output. `None` means that
    /// nothing is found by it.
    pub(crate) fn opener(&self) -> Option<String> {
        match self {
            CallMarkup::Object(markup) => Some(markup.open.clone()),
            CallMarkup::Parts(markup) => {
                let name = markup.call.iter().position(|part| *part == CallPart::Name)?;
                let mut text = String::new();
                for part in markup.call[..name].iter().rev() {
                    match part {
                        CallPart::Text(part) | CallPart::Token(_, part) => text.insert_str(0, part),
                        _ => break,
                    }
                }
                Some(text)
            }
        }
    }

    /// Returns the way in which arguments are written one by one; `None` if they are JSON.
    pub(crate) fn parameters(&self) -> Option<&ParameterMarkup> {
        let CallMarkup::Parts(markup) = self else { return None };
        markup.call.iter().find_map(|part| match part {
            CallPart::Parameters(parameters) => Some(parameters),
            _ => None,
        })
    }
}

/// The markup of an output besides its constraint.
#[derive(Debug, Clone, Default)]
pub struct AnswerMarkup {
    /// The special tokens whose text is part of the text.
    pub kept_special: Arc<[u32]>,
    pub thinking: Option<Thinking>,
}

/// The reasoning of a model before its answer. The constraint on an output binds what follows the reasoning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thinking {
    /// Whether the prompt ends within the reasoning.
    pub is_open: bool,
    /// The tokens with which an output begins its reasoning. Unless the prompt does it, they are forced if the output
    /// has a constraint or a budget.
    pub begin: Vec<u32>,
    /// The token that ends the reasoning.
    pub end: u32,
    /// Tokens between the reasoning and the answer, which are forced before a constraint or after a budget.
    pub between: Vec<u32>,
    /// Tokens that belong to the answer and end the reasoning, too.
    pub interrupts: Vec<u32>,
    /// Maximum number of tokens of the reasoning; after them, its end is forced.
    pub budget: Option<usize>,
}

/// One generation.
#[derive(Debug, Clone)]
pub struct GenerateRequest {
    pub prompt: Vec<u32>,
    pub sampling: Sampling,
    /// The same seed, prompt and sampling give the same draws, whatever else is in the batch. `None` draws a
    /// random seed.
    pub seed: Option<u64>,
    /// Maximum number of output tokens. `None` allows output up to the end of the context; `Some(0)` only
    /// prefills (and scores).
    pub max_tokens: Option<usize>,
    /// Strings that end the generation once the text contains one of them; the stop string is not part of the
    /// text.
    pub stop: Vec<String>,
    /// Whether end-of-generation tokens are never drawn, so that the output has exactly `max_tokens` tokens.
    pub ignore_eos: bool,
    pub constraint: Option<Constraint>,
    /// `Some(n)` reports the log-probability of each sampled token and of the `n` likeliest ones. Forced tokens
    /// have none.
    pub top_logprobs: Option<u32>,
    /// `Some(n)` scores the prompt too. Every prompt position is then computed (no prefix is reused), in chunks
    /// no longer than the executor's logit rows.
    pub prompt_logprobs: Option<u32>,
    pub markup: AnswerMarkup,
    /// Output that an earlier run of the same request produced before it was cut off. It is taken over,
    /// reported again, and counted as produced; then the generation continues with the draw that would have
    /// come next.
    pub resume: Vec<u32>,
    /// The output that the earlier run had rolled back by then, as reported with the last of these tokens.
    pub resume_rolled_back: RolledBack,
    pub affinity: Affinity,
    pub priority: Priority,
    /// The deadline of the request; `None` uses the engine's default.
    pub deadline: Option<Instant>,
    /// Follows the request.
    pub observer: Option<Arc<dyn Observer>>,
}

impl GenerateRequest {
    /// Creates a request with default sampling and without limits of its own.
    pub fn new(prompt: Vec<u32>) -> Self {
        GenerateRequest {
            prompt,
            sampling: Sampling::default(),
            seed: None,
            max_tokens: None,
            stop: Vec::new(),
            ignore_eos: false,
            constraint: None,
            top_logprobs: None,
            prompt_logprobs: None,
            markup: AnswerMarkup::default(),
            resume: Vec::new(),
            resume_rolled_back: RolledBack::default(),
            affinity: Affinity::default(),
            priority: Priority::default(),
            deadline: None,
            observer: None,
        }
    }

    /// Checks the request against the model and returns the number of tokens that it may produce. `limit` is
    /// the length of the longest sequence that can ever run: the context, or the whole KV cache where that is
    /// smaller.
    pub(crate) fn validate(&self, model: &ModelInfo, limit: usize) -> Result<usize, EngineError> {
        let prompt = self.prompt.len();
        if prompt == 0 {
            return Err(EngineError::invalid("prompt", "the prompt is empty; give at least one token"));
        }
        if let Some(id) = self.prompt.iter().find(|id| **id as usize >= model.vocabulary_size) {
            let message = format!("token id {id} is outside the vocabulary of {}", model.vocabulary_size);
            return Err(EngineError::invalid("prompt", message));
        }
        self.sampling.validate().map_err(|message| EngineError::invalid("sampling", message))?;
        if let Some((id, _)) =
            self.sampling.logit_bias.iter().find(|(id, _)| *id as usize >= model.vocabulary_size)
        {
            let message = format!("token id {id} is outside the vocabulary of {}", model.vocabulary_size);
            return Err(EngineError::invalid("logit_bias", message));
        }
        if self.stop.len() > MAX_STOP_STRINGS {
            let message = format!("{} stop strings; at most {MAX_STOP_STRINGS} are allowed", self.stop.len());
            return Err(EngineError::invalid("stop", message));
        }
        if self.stop.iter().any(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
            let message = format!("a stop string is empty or longer than {MAX_STOP_BYTES} bytes");
            return Err(EngineError::invalid("stop", message));
        }
        for (parameter, top) in
            [("top_logprobs", self.top_logprobs), ("prompt_logprobs", self.prompt_logprobs)]
        {
            if top.is_some_and(|top| top > MAX_TOP_LOGPROBS) {
                return Err(EngineError::invalid(parameter, format!("must be at most {MAX_TOP_LOGPROBS}")));
            }
        }
        if self.resume.iter().any(|id| *id as usize >= model.vocabulary_size)
            || self.max_tokens.is_some_and(|most| self.resume.len() > most)
        {
            let message =
                "the tokens to resume from are outside the model's vocabulary, or more than `max_tokens`";
            return Err(EngineError::invalid("resume", message));
        }
        let requested = self.max_tokens.unwrap_or(1).max(self.resume.len());
        match prompt.checked_add(requested) {
            Some(total) if total <= limit => Ok(self.max_tokens.unwrap_or(limit - prompt)),
            _ => Err(EngineError::ContextOverflow { limit, prompt, requested }),
        }
    }
}
