//! Conversations over the engine: messages and tools in, text and tool calls out.
//!
//! The walk of one answer: `message` (what was said) → `render` (the chat template's text) → `prompt` (its tokens) →
//! `tool_grammar` (what the model may produce) → the engine → `tool_parser` (what it said) → `stream` (events) →
//! `transcript` (what is remembered, token for token). Knows no HTTP, no agents, no tensors.

mod free_text;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod json_scan;
mod markup;
mod message;
mod options;
mod prompt;
mod render;
mod stream;
mod tool_grammar;
mod tool_parser;
mod transcript;
mod usage_sum;

#[cfg(test)]
mod chunking_tests;
#[cfg(test)]
mod drafted;
#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
mod taken_back_tests;

pub use message::{ChatMessage, Role, ToolCall, ToolChoice, ToolSpec};
pub use options::{ChatOptions, Opening};
pub use prompt::{encode_prompt, refuse_hopeless};
pub use stream::{ChatEvent, ChatFinish, ChatOutcome, ChatStream, chat};
pub use transcript::Transcript;
