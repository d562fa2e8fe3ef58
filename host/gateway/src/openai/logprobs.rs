//! Log-probabilities in the two shapes of OpenAI's routes.

use serde_json::{Map, Value, json};
use skep_engine::{Engine, TokenLogprob};

/// Returns an entry of a chat choice's `logprobs.content`.
pub(crate) fn chat_entry(engine: &Engine, token: &TokenLogprob) -> Value {
    let mut entry = named(engine, token.id, token.logprob);
    entry["top_logprobs"] = token.top.iter().map(|(id, logprob)| named(engine, *id, *logprob)).collect();
    entry
}

/// The `logprobs` of a text completion, collected while it is generated.
#[derive(Default)]
pub(crate) struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
    /// Number of characters in all tokens so far.
    offset: usize,
}

impl TextLogprobs {
    /// Adds a token. `logprob` is `None` for a token without a predecessor and for one that a grammar forced.
    pub(crate) fn push(&mut self, engine: &Engine, id: u32, logprob: Option<&TokenLogprob>) {
        let text = text_of(engine, id);
        self.text_offset.push(self.offset);
        self.offset += text.chars().count();
        self.tokens.push(text);
        self.token_logprobs.push(logprob.map(|logprob| logprob.logprob));
        let top = logprob.map(|logprob| {
            logprob.top.iter().map(|(id, value)| (text_of(engine, *id), json!(value))).collect()
        });
        self.top_logprobs.push(top);
    }

    /// Returns the entries since the last call.
    pub(crate) fn take(&mut self) -> Value {
        json!({
            "tokens": std::mem::take(&mut self.tokens),
            "token_logprobs": std::mem::take(&mut self.token_logprobs),
            "top_logprobs": std::mem::take(&mut self.top_logprobs),
            "text_offset": std::mem::take(&mut self.text_offset),
        })
    }
}

fn named(engine: &Engine, id: u32, logprob: f32) -> Value {
    let bytes = engine.tokenizer().token_bytes(id).unwrap_or_default();
    json!({"token": text_of(engine, id), "logprob": logprob, "bytes": bytes})
}

fn text_of(engine: &Engine, id: u32) -> String {
    String::from_utf8_lossy(engine.tokenizer().token_bytes(id).unwrap_or_default()).into_owned()
}
