//! The events that a generation reports while it runs. The texts of all tokens and the held-back rest, joined,
//! are exactly the final text, however the tokens were grouped into steps.

use serde::{Deserialize, Serialize};

/// Events come in this order: `Started`, `PromptLogprobs` if requested, any number of `Token`, `Finished`.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenEvent {
    /// The sequence was admitted. `cached_tokens` of the prompt were found in the KV cache and are not computed again;
    /// the last prompt token never counts as cached.
    Started {
        prompt_tokens: u32,
        cached_tokens: u32,
    },
    /// One entry per prompt token; the first token has no predecessor and hence no score.
    PromptLogprobs(Vec<Option<TokenLogprob>>),
    Token(Token),
    Finished(Finished),
}

/// A token of the output.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// Its id in the vocabulary.
    pub id: u32,
    /// May be empty: bytes are held back until a character is complete, and while they may begin a stop string.
    pub text: String,
    /// Whether the constraint left no other choice, so that the token was appended without sampling.
    pub forced: bool,
    /// Its log-probability, if the request asked for some.
    pub logprob: Option<TokenLogprob>,
    /// The output that the generation had rolled back when this token, and all tokens before it, were settled.
    /// A run that resumes after this token needs it.
    pub rolled_back: RolledBack,
}

/// Output that was complete, did not satisfy its schema where the masks cannot enforce it, and was generated
/// again. None of it was ever reported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolledBack {
    pub times: u32,
    pub tokens: u32,
}

/// A log-probability under the model's own distribution, before temperature, penalties and masks.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    pub id: u32,
    pub logprob: f32,
    pub top: Vec<(u32, f32)>,
}

/// The end of a generation.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    pub reason: FinishReason,
    /// Text that was held back and turned out to belong to the output.
    pub text_rest: String,
    pub usage: Usage,
    pub timing: Timing,
    /// All ids produced, including the end-of-generation token where it was produced.
    pub tokens: Vec<u32>,
}

/// The reason why a generation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its output.
    Eos,
    /// The text reached this stop string.
    Stop(String),
    /// `max_tokens` were produced; constrained output may then be incomplete.
    Length,
    /// The constraint is complete and allows nothing more.
    ConstraintDone,
}

impl FinishReason {
    /// Returns the name of the reason, as OpenAI's API has it.
    pub fn as_str(&self) -> &'static str {
        match self {
            FinishReason::Eos | FinishReason::Stop(_) | FinishReason::ConstraintDone => "stop",
            FinishReason::Length => "length",
        }
    }

    /// Returns whether the output stopped before it was complete in itself. A form or a call that has to be
    /// whole is then incomplete.
    pub fn cuts_off(&self) -> bool {
        matches!(self, FinishReason::Length | FinishReason::Stop(_))
    }
}

/// Token counts of one or several generations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Usage {
    /// Tokens of the prompts, cached ones included.
    pub prompt_tokens: u32,
    /// Tokens of the prompts that were not computed, because their KV pages were there.
    pub cached_tokens: u32,
    /// Tokens of the prompts that another server wrote to its cache, if it bills them at a price of their own. They are
    /// not part of `cached_tokens`.
    pub cache_write_tokens: u32,
    /// Sampled and forced tokens.
    pub completion_tokens: u32,
    /// The part of `completion_tokens` that is reasoning, with the marks around it.
    pub reasoning_tokens: u32,
    /// Tokens to which the constraint left no alternative, so that they were not sampled.
    pub forced_tokens: u32,
    /// Sampled tokens that had been drafted, and so took no step of their own.
    pub accepted_tokens: u32,
    /// Drafted tokens that were computed but rejected. They are not part of the output.
    pub rejected_tokens: u32,
    /// Tokens that were produced and rolled back, because a value did not satisfy its schema. They are not part
    /// of the output.
    pub rolled_back_tokens: u32,
    /// Tokens of whole answers of another server that were refused, because they did not match their schema. The server
    /// bills them. They are not part of the output.
    pub refused_tokens: u32,
    /// Tokens of the prompts that a prefill host of the cluster computed for this one. They are not part of `cached_tokens`.
    pub prefilled_tokens: u32,
    /// Milliseconds for which prefill hosts computed them.
    pub prefill_ms: u32,
}

impl Usage {
    /// Returns the number of tokens that were produced, whether they were kept or not. Budgets count this
    /// number.
    pub fn produced_tokens(&self) -> usize {
        self.completion_tokens as usize + self.rolled_back_tokens as usize + self.refused_tokens as usize
    }

    /// Adds the usage of another generation; sums saturate instead of wrapping around.
    pub fn add(&mut self, other: &Usage) {
        let sums = [
            (&mut self.prompt_tokens, other.prompt_tokens),
            (&mut self.cached_tokens, other.cached_tokens),
            (&mut self.cache_write_tokens, other.cache_write_tokens),
            (&mut self.completion_tokens, other.completion_tokens),
            (&mut self.reasoning_tokens, other.reasoning_tokens),
            (&mut self.forced_tokens, other.forced_tokens),
            (&mut self.accepted_tokens, other.accepted_tokens),
            (&mut self.rejected_tokens, other.rejected_tokens),
            (&mut self.rolled_back_tokens, other.rolled_back_tokens),
            (&mut self.refused_tokens, other.refused_tokens),
            (&mut self.prefilled_tokens, other.prefilled_tokens),
            (&mut self.prefill_ms, other.prefill_ms),
        ];
        for (sum, more) in sums {
            *sum = sum.saturating_add(more);
        }
    }
}

/// Durations of a generation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Timing {
    /// Time from submission to admission.
    pub queue_us: u64,
    /// Time from submission to the first sampled token; the total time where nothing was sampled.
    pub first_token_us: u64,
    /// Time from submission to the end.
    pub total_us: u64,
}
