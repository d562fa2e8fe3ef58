//! What runs next: sequences, the scheduler, KV pages, the prefix tree, output constraints and conversations.
//!
//! One loop thread per engine owns all of that; callers hold a cheap [`Engine`] handle and read a [`TokenStream`].
//! The crate holds no tensors: it hands a `Batch` of token ids and page numbers to an `Executor` and gets token ids
//! back. It knows nothing of HTTP, agents or storage.
//!
//! Read in the order of a request: `handle` → `engine_loop` → `scheduler` → `kv` → `sequence` → `stream`.

#![forbid(unsafe_code)]

pub mod chat;
mod constraint;
mod detokenise;
mod engine_loop;
mod error;
mod event;
mod handle;
mod kv;
mod model_set;
mod request;
mod scheduler;
mod sequence;
mod stream;
mod telemetry;
#[cfg(test)]
mod tests;

pub use error::EngineError;
pub use event::{FinishReason, Finished, Timing, Token, TokenEvent, TokenLogprob, Usage};
pub use handle::{Engine, EngineOptions, EngineStats, ModelInfo};
pub use model_set::ModelSet;
pub use request::{Affinity, Constraint, GenerateRequest, Priority};
pub use skep_model::{Sampling, SpecialTokens};
pub use stream::TokenStream;
