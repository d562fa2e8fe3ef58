//! The nouns of a generation: how to generate, and what came of it.
//!
//! Plain values. They mirror the interface's records, with JSON already parsed.

use serde_json::Value;

use crate::OutputExample;

/// How to choose the next token. `None` is the model's default.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; 0 to 2.
    pub temperature: Option<f32>,
    /// Keep the k likeliest; 0 keeps all.
    pub top_k: Option<u32>,
    /// Keep the smallest set with this much probability, (0, 1].
    pub top_p: Option<f32>,
    /// Drop tokens below this share of the likeliest one's probability, [0, 1).
    pub min_p: Option<f32>,
    /// -2 to 2.
    pub frequency_penalty: Option<f32>,
    /// -2 to 2.
    pub presence_penalty: Option<f32>,
    /// 1 is off; over 0.
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
    /// No tool is called.
    None,
    /// At least one tool is called.
    Required,
    /// This tool is called.
    Named(String),
}

impl ToolChoice {
    /// The tool of this name is called.
    pub fn named(name: impl Into<String>) -> Self {
        Self::Named(name.into())
    }
}

/// The form that the text of an answer has. The host enforces it while decoding.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Output {
    /// Free text.
    #[default]
    Text,
    /// JSON that validates against this JSON Schema.
    JsonSchema(Value),
    /// Text that this regular expression matches from end to end.
    Regex(String),
    /// Text of this grammar, in llguidance's dialect of Lark.
    Grammar(String),
}

/// Everything that one generation is asked for. The builders fill it.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// How to choose the next token.
    pub sampling: Sampling,
    /// Upper bound of tokens produced; `None` is 1024, or what is left of the turn's limit if that is less.
    pub max_tokens: Option<u32>,
    /// Strings that end the text; at most 16.
    pub stop: Vec<String>,
    /// Names of the agent's tools that the model may call.
    pub tools: Vec<String>,
    /// Whether it calls one.
    pub tool_choice: ToolChoice,
    /// The form of the text.
    pub output: Output,
    /// What the model is shown of that form. Only for [`Output::JsonSchema`].
    pub examples: Vec<OutputExample>,
    /// Whether the caller of the turn sees the text while it is generated.
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

/// A call that the model made. The host minted the id and validated the arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// Unique in the conversation.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// Validates against the tool's input schema.
    pub arguments: Value,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its answer, or a stop string did.
    Stop,
    /// A token limit did.
    Length,
    /// It ended by calling tools.
    ToolCalls,
}

/// Tokens of one or several generations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt_tokens: u32,
    /// How many of them came from the KV cache.
    pub cached_tokens: u32,
    /// Tokens produced.
    pub completion_tokens: u32,
}

/// Times of one generation, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timing {
    /// Waiting for the engine.
    pub queue_us: u64,
    /// From submission to the first token.
    pub first_token_us: u64,
    /// From submission to the end.
    pub total_us: u64,
}

/// One assistant message and what it cost.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The text; may be empty beside tool calls.
    pub text: String,
    /// The calls that the model made, in order.
    pub tool_calls: Vec<ToolCall>,
    /// Why it ended.
    pub finish: Finish,
    /// Its tokens.
    pub usage: Usage,
    /// Its times.
    pub timing: Timing,
}

/// A model that this agent may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInfo {
    /// Its name, as `conversation_with_model` takes it.
    pub name: String,
    /// Its context, in tokens.
    pub context_length: u32,
    /// Whether it is the one used when none is named.
    pub is_default: bool,
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq)]
pub enum Entry {
    /// The system message; always the first.
    System(String),
    /// What the user said.
    User(String),
    /// What the model answered.
    Assistant {
        /// Its text.
        text: String,
        /// Its calls.
        tool_calls: Vec<ToolCall>,
    },
    /// What a tool gave back for a call.
    Tool {
        /// The call that it answers.
        call_id: String,
        /// The result, or the text that tells the model what went wrong.
        outcome: Result<Value, String>,
    },
}
