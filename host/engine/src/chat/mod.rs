//! Conversations on top of the engine: messages and tools in, text and tool calls out.
//!
//! One answer passes through `message` (the messages) → `render` (the chat template's text) → `prompt` (its
//! tokens) → `tool_grammar` (the output that the model may produce) → the engine → `reading` (the reasoning, text and calls that
//! it produced) → `local_answer` (events) → `stream` → `transcript` (the remembered conversation, token for token). The
//! module knows nothing of HTTP, agents or tensors.

mod answer;
mod call_object;
mod continuation;
mod dialect;
mod free_text;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod guard;
mod image;
mod input;
mod json_scan;
mod local_answer;
mod markup;
mod message;
mod native;
mod observed;
mod options;
mod parsed;
mod prompt;
mod reading;
mod remote_answer;
mod render;
mod sampling_overrides;
mod stream;
mod tool_grammar;
mod tool_parser;
mod transcript;
mod truncation;
mod typescript;
mod usage_sum;

#[cfg(test)]
mod chunking_tests;
#[cfg(test)]
mod dialect_tests;
#[cfg(test)]
mod drafted;
#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
mod reasoning_tests;
#[cfg(test)]
mod rolled_back_tests;

pub use answer::{ChatEvent, ChatFinish, ChatOutcome, Routed};
pub(crate) use continuation::continue_text;
pub use dialect::Dialect;
pub use image::{ContentPart, Image, ImageDetail, ImageKind, ImageSource, ImageText};
pub use input::{Input, estimated_tokens, refusal, refuse_images};
pub use markup::Markup;
pub use message::{ChatMessage, Role, ToolCall, ToolChoice, ToolSpec};
pub(crate) use observed::{observed, said};
pub use options::{ChatOptions, Opening, Reasoning};
pub use prompt::{Sender, encode_chat, encode_prompt, refuse_oversized};
pub(crate) use remote_answer::RemoteAnswer;
pub use remote_answer::RemoteStream;
pub use render::prompt_text;
pub use sampling_overrides::SamplingOverrides;
pub use stream::{ChatStream, chat};
pub use transcript::Transcript;
pub(crate) use truncation::fitting;
