//! The types of a generation: its options and its results.
//!
//! They are plain values that mirror the records of the WIT interface, with JSON already parsed.

use serde_json::Value;

use crate::OutputExample;

/// Settings for choosing the next token. `None` means the model's default.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sampling {
    /// From 0 to 2; 0 is greedy.
    pub temperature: Option<f32>,
    /// Keeps the k most likely tokens; 0 keeps all.
    pub top_k: Option<u32>,
    /// Keeps the smallest set of tokens with at least this total probability, in (0, 1].
    pub top_p: Option<f32>,
    /// Drops tokens whose probability is below this share of the most likely token's, in [0, 1).
    pub min_p: Option<f32>,
    /// From -2 to 2.
    pub frequency_penalty: Option<f32>,
    /// From -2 to 2.
    pub presence_penalty: Option<f32>,
    /// Greater than 0; 1 disables it.
    pub repetition_penalty: Option<f32>,
    /// The same seed and the same request give the same output.
    pub seed: Option<u64>,
}

/// Whether the model calls a tool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// The model calls no tool.
    None,
    /// The model calls at least one tool.
    Required,
    /// The model calls this tool.
    Named(String),
}

impl ToolChoice {
    /// Requires a call of the tool with this name.
    pub fn named(name: impl Into<String>) -> Self {
        Self::Named(name.into())
    }
}

/// The format of a generated text. The host enforces it while decoding.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Output {
    /// Free text.
    #[default]
    Text,
    /// JSON that validates against this JSON Schema.
    JsonSchema(Value),
    /// Text that this regular expression matches from start to end.
    Regex(String),
    /// Text that matches this grammar, in llguidance's dialect of Lark.
    Grammar(String),
}

/// Options of one generation. The builder methods set them.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// Settings for choosing the next token.
    pub sampling: Sampling,
    /// Maximum number of tokens to generate. `None` means 1024, or the rest of the turn's limit if that is
    /// less.
    pub max_tokens: Option<u32>,
    /// Strings that end the text; at most 16.
    pub stop: Vec<String>,
    /// Names of the agent's tools that the model may call.
    pub tools: Vec<String>,
    /// Whether the model calls a tool.
    pub tool_choice: ToolChoice,
    /// The format of the text.
    pub output: Output,
    /// Examples of that format for the model. Only for [`Output::JsonSchema`].
    pub examples: Vec<OutputExample>,
    /// Whether the text is forwarded to the turn's caller while it is generated.
    pub visible: bool,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            sampling: Sampling::default(),
            max_tokens: None,
            stop: Vec::new(),
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            output: Output::Text,
            examples: Vec::new(),
            visible: true,
        }
    }
}

/// A call that the model made. The host created the id and validated the arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// The id of the call, unique in the conversation.
    pub id: String,
    /// The name of the tool.
    pub name: String,
    /// The arguments, which validate against the tool's input schema.
    pub arguments: Value,
}

/// Why a generation finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model finished its answer, or generated a stop string.
    Stop,
    /// A token limit cut the output off.
    Length,
    /// The model finished by calling tools.
    ToolCalls,
}

/// Token counts of one or several generations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Number of prompt tokens.
    pub prompt_tokens: u32,
    /// Number of prompt tokens that came from the KV cache.
    pub cached_tokens: u32,
    /// Number of generated tokens.
    pub completion_tokens: u32,
}

/// Durations of one generation, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timing {
    /// Time spent waiting for the engine.
    pub queue_us: u64,
    /// Time from submission to the first token.
    pub first_token_us: u64,
    /// Time from submission to the end.
    pub total_us: u64,
}

/// One assistant message and its cost.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The text. It may be empty if there are tool calls.
    pub text: String,
    /// The model's reasoning before its answer, if it was made to reason before it answers.
    /// [`complete`](crate::Context::complete) gives none.
    pub reasoning: Option<String>,
    /// The calls that the model made, in order.
    pub tool_calls: Vec<ToolCall>,
    /// Why the generation finished.
    pub finish: Finish,
    /// The token counts.
    pub usage: Usage,
    /// The durations.
    pub timing: Timing,
}

/// A model that this agent may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInfo {
    /// The name, as `conversation_with_model` takes it.
    pub name: String,
    /// Length of the context in tokens.
    pub context_length: u32,
    /// Whether the agent uses this model when it names none.
    pub is_default: bool,
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq)]
pub enum Entry {
    /// The system message, always the first one.
    System(String),
    /// A message of the user.
    User(String),
    /// An answer of the model.
    Assistant {
        /// The text.
        text: String,
        /// The tool calls.
        tool_calls: Vec<ToolCall>,
    },
    /// The outcome of a tool call.
    Tool {
        /// The id of the call.
        call_id: String,
        /// The result, or the text that tells the model what went wrong.
        outcome: Result<Value, String>,
    },
}
