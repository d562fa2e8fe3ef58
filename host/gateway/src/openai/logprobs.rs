//! Log-probabilities in the two shapes of OpenAI's routes.

use serde_json::json;
use skep_api::{CompletionLogprobs, LikelyToken};
use skep_runtime::ScoredToken;

/// Returns an entry of a chat choice's `logprobs.content`.
pub(crate) fn chat_entry(token: &ScoredToken) -> skep_api::TokenLogprob {
    skep_api::TokenLogprob {
        token: named(&token.bytes, token.logprob.unwrap_or_default()),
        top_logprobs: token.top.iter().map(|(bytes, logprob)| named(bytes, *logprob)).collect(),
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
    /// Adds a token. One without a predecessor and one that a grammar forced have no log-probability.
    pub(crate) fn push(&mut self, token: &ScoredToken) {
        let text = text_of(&token.bytes);
        self.entries.text_offset.push(self.offset as u64);
        self.offset += text.chars().count();
        self.entries.tokens.push(text);
        self.entries.token_logprobs.push(token.logprob.map(f64::from));
        let top = token
            .logprob
            .map(|_| token.top.iter().map(|(bytes, value)| (text_of(bytes), json!(value))).collect());
        self.entries.top_logprobs.push(top);
    }

    /// Returns the entries since the last call.
    pub(crate) fn take(&mut self) -> CompletionLogprobs {
        std::mem::take(&mut self.entries)
    }
}

/// Returns the `logprobs` of a whole text completion.
pub(crate) fn of_text(tokens: &[ScoredToken]) -> CompletionLogprobs {
    let mut logprobs = TextLogprobs::default();
    tokens.iter().for_each(|token| logprobs.push(token));
    logprobs.take()
}

fn named(bytes: &[u8], logprob: f32) -> LikelyToken {
    LikelyToken { token: text_of(bytes), logprob: logprob.into(), bytes: bytes.to_vec() }
}

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
