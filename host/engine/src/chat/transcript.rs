//! A conversation as the model saw it, token for token.
//!
//! Invariant: `tokens` are the tokens of `rendered`, and those that the model produced are in it as it produced them. The
//! next answer goes on from them: only text that came since is encoded, so the KV cache stays warm and history never
//! changes under the model. Where the template writes history otherwise the second time, or the system message or the
//! tools changed, the conversation is encoded anew.

use serde::{Deserialize, Serialize};

use super::message::{ChatMessage, Role, ToolSpec};
use super::options::ChatOptions;
use super::prompt::{self, Prompt};
use super::render;
use super::stream::{ChatOutcome, ChatStream};
use crate::{Engine, EngineError, Usage};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Transcript {
    messages: Vec<ChatMessage>,
    tokens: Vec<u32>,
    rendered: String,
    usage: UsageSum,
}

/// Sums that stay at their largest value rather than start over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct UsageSum {
    prompt_tokens: u32,
    cached_tokens: u32,
    completion_tokens: u32,
    forced_tokens: u32,
}

impl Transcript {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn messages(&self) -> &[ChatMessage] {
        &self.messages
    }

    /// Sets the system message. The same text again changes nothing.
    pub fn set_system(&mut self, text: &str) {
        match self.messages.first_mut() {
            Some(first) if first.role == Role::System => {
                if first.content != text {
                    first.content = text.to_owned();
                }
            }
            _ => self.messages.insert(0, ChatMessage::system(text)),
        }
    }

    pub fn push(&mut self, message: ChatMessage) {
        self.messages.push(message);
    }

    /// Forgets everything but the sum of the usage.
    pub fn clear(&mut self) {
        *self = Transcript { usage: self.usage, ..Transcript::default() };
    }

    /// What the model saw and produced up to the last answer that was committed.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Sum over all answers that were committed.
    pub fn usage(&self) -> Usage {
        let UsageSum { prompt_tokens, cached_tokens, completion_tokens, forced_tokens } = self.usage;
        Usage { prompt_tokens, cached_tokens, completion_tokens, forced_tokens }
    }

    /// Ids of the last assistant message's calls that no tool message answers yet.
    pub fn needs_tool_results(&self) -> Vec<String> {
        let Some(last) = self.messages.iter().rposition(|message| message.role == Role::Assistant) else {
            return Vec::new();
        };
        let (calls, since) = (&self.messages[last].tool_calls, &self.messages[last + 1..]);
        let answered = |id: &str| since.iter().any(|message| message.tool_call_id.as_deref() == Some(id));
        calls.iter().map(|call| &call.id).filter(|id| !answered(id)).cloned().collect()
    }

    /// Generates the next assistant message. Nothing is remembered of it until [`Transcript::commit`].
    pub fn generate(&self, engine: &Engine, options: ChatOptions) -> Result<ChatStream, EngineError> {
        options.validate()?;
        let unanswered = self.needs_tool_results();
        if !unanswered.is_empty() {
            return Err(EngineError::InvalidRequest {
                parameter: "messages".into(),
                message: format!("no tool message answers the calls {}", unanswered.join(", ")),
            });
        }
        let prompt = self.prompt(engine, &options.tools)?;
        ChatStream::start(engine, prompt, options)
    }

    /// Appends the answer, with its exact tokens.
    pub fn commit(&mut self, outcome: &ChatOutcome) {
        self.messages.push(ChatMessage {
            tool_calls: outcome.tool_calls.clone(),
            raw: Some(outcome.raw.clone()),
            ..ChatMessage::assistant(outcome.text.clone())
        });
        self.tokens.clone_from(&outcome.prompt);
        self.tokens.extend(&outcome.tokens);
        self.rendered.clone_from(&outcome.rendered);
        self.rendered.push_str(&outcome.raw);
        let (sum, new) = (&mut self.usage, &outcome.usage);
        sum.prompt_tokens = sum.prompt_tokens.saturating_add(new.prompt_tokens);
        sum.cached_tokens = sum.cached_tokens.saturating_add(new.cached_tokens);
        sum.completion_tokens = sum.completion_tokens.saturating_add(new.completion_tokens);
        sum.forced_tokens = sum.forced_tokens.saturating_add(new.forced_tokens);
    }

    fn prompt(&self, engine: &Engine, tools: &[ToolSpec]) -> Result<Prompt, EngineError> {
        let rendering = render::render(engine.template(), engine.tokenizer(), &self.messages, tools)?;
        let known = self.tokens.iter().all(|&id| engine.tokenizer().token_bytes(id).is_some());
        let tokens = if !self.rendered.is_empty() && rendering.text.starts_with(&self.rendered) && known {
            let mut tokens = self.tokens.clone();
            tokens.extend(prompt::encode_from(engine.tokenizer(), &rendering, self.rendered.len())?);
            tokens
        } else {
            if !self.rendered.is_empty() {
                let same =
                    rendering.text.bytes().zip(self.rendered.bytes()).take_while(|(a, b)| a == b).count();
                tracing::debug!(
                    same_bytes = same,
                    recorded_bytes = self.rendered.len(),
                    "history changed; encoding it anew"
                );
            }
            prompt::encode_whole(engine, &rendering)?
        };
        Ok(Prompt { text: rendering.text, tokens })
    }
}
