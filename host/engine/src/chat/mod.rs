//! Conversations on top of the engine: messages and tools in, text and tool calls out.
//!
//! One answer passes through `message` (the messages) → `render` (the chat template's text) → `prompt` (its
//! tokens) → `tool_grammar` (the output that the model may produce) → the engine → `tool_parser` (the output
//! that it produced) → `local_answer` (events) → `stream` → `transcript` (the remembered conversation, token for token). The
//! module knows nothing of HTTP, agents or tensors.

mod answer;
mod free_text;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod json_scan;
mod local_answer;
mod markup;
mod message;
mod observed;
mod options;
mod prompt;
mod remote_answer;
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
mod rolled_back_tests;

pub use answer::{ChatEvent, ChatFinish, ChatOutcome, Routed};
pub use message::{ChatMessage, Role, ToolCall, ToolChoice, ToolSpec};
pub(crate) use observed::observed;
pub use options::{ChatOptions, Opening};
pub use prompt::{encode_prompt, refuse_oversized};
pub use remote_answer::RemoteStream;
pub(crate) use remote_answer::{RemoteAnswer, TOKEN_BYTES};
pub use stream::{ChatStream, chat};
pub use transcript::Transcript;
