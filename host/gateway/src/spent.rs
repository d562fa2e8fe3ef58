//! Counts the tokens that one request used, for the access log.

use skep_engine::Usage;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// The token counts of one request. Clones share the counts.
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

    /// Returns the prompt and output tokens, or `None` if no model was called or none has responded.
    pub(crate) fn tokens(&self) -> Option<(u64, u64)> {
        let tokens = (self.0.prompt.load(Ordering::Relaxed), self.0.output.load(Ordering::Relaxed));
        (tokens != (0, 0)).then_some(tokens)
    }
}
