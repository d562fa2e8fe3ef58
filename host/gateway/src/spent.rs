//! Tokens that the answer to one request took, for the access log.

use skep_engine::Usage;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Clones count together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spent(Arc<Tokens>);

#[derive(Debug, Default)]
struct Tokens {
    prompt: AtomicU64,
    output: AtomicU64,
}

impl Spent {
    pub(crate) fn add(&self, usage: &Usage) {
        self.0.prompt.fetch_add(usage.prompt_tokens.into(), Ordering::Relaxed);
        self.0.output.fetch_add(usage.completion_tokens.into(), Ordering::Relaxed);
    }

    /// Tokens of prompts and of outputs; `None` if no model was asked, or none has answered.
    pub(crate) fn tokens(&self) -> Option<(u64, u64)> {
        let tokens = (self.0.prompt.load(Ordering::Relaxed), self.0.output.load(Ordering::Relaxed));
        (tokens != (0, 0)).then_some(tokens)
    }
}
