//! Log-probabilities in the two shapes of OpenAI's routes.

use serde_json::json;
use skep_api::{CompletionLogprobs, LikelyToken};
use skep_engine::{Engine, TokenLogprob};

/// Returns an entry of a chat choice's `logprobs.content`.
pub(crate) fn chat_entry(engine: &Engine, token: &TokenLogprob) -> skep_api::TokenLogprob {
    skep_api::TokenLogprob {
        token: named(engine, token.id, token.logprob),
        top_logprobs: token.top.iter().map(|(id, logprob)| named(engine, *id, *logprob)).collect(),
    }
}

/// The `logprobs` of a text completion, collected while it is generated.
#[derive(Default)]
pub(crate) struct TextLogprobs {
    /// The entries since the last call of [`TextLogprobs::take`].
    entries: CompletionLogprobs,
    /// Number of characters in all tokens so far.
    offset: usize,
}

impl TextLogprobs {
    /// Adds a token. `logprob` is `None` for a token without a predecessor and for one that a grammar forced.
    pub(crate) fn push(&mut self, engine: &Engine, id: u32, logprob: Option<&TokenLogprob>) {
        let text = text_of(engine, id);
        self.entries.text_offset.push(self.offset as u64);
        self.offset += text.chars().count();
        self.entries.tokens.push(text);
        self.entries.token_logprobs.push(logprob.map(|logprob| logprob.logprob.into()));
        let top = logprob.map(|logprob| {
            logprob.top.iter().map(|(id, value)| (text_of(engine, *id), json!(value))).collect()
        });
        self.entries.top_logprobs.push(top);
    }

    /// Returns the entries since the last call.
    pub(crate) fn take(&mut self) -> CompletionLogprobs {
        std::mem::take(&mut self.entries)
    }
}

fn named(engine: &Engine, id: u32, logprob: f32) -> LikelyToken {
    let bytes = engine.tokenizer().token_bytes(id).unwrap_or_default();
    LikelyToken { token: text_of(engine, id), logprob: logprob.into(), bytes: bytes.to_vec() }
}

fn text_of(engine: &Engine, id: u32) -> String {
    String::from_utf8_lossy(engine.tokenizer().token_bytes(id).unwrap_or_default()).into_owned()
}
