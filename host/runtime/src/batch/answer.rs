//! The answer to an item, as it is stored.

use crate::{Json, Outcome};
use serde::{Deserialize, Serialize};
use skep_engine::{
    Engine, TokenLogprob, Usage,
    chat::{ChatFinish, ChatOutcome, ToolCall},
};

/// The log-probability of a token that practically never comes, for which JSON has no number.
const NEVER: f32 = -9999.0;

/// The answer to an item.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BatchAnswer {
    /// The response format from the request.
    pub form: String,
    pub text: String,
    /// The model's reasoning. Answers stored by earlier versions lack it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reasoning: String,
    /// The answer's text exactly as a local model generated it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub raw: String,
    /// Data of an agent's reply.
    pub data: Option<Json>,
    pub tool_calls: Vec<ToolCall>,
    pub finish: ChatFinish,
    /// Whether output that must be complete was cut off.
    pub cut_off: bool,
    /// The usage of this choice.
    #[serde(with = "crate::invocation::StoredUsage")]
    pub usage: Usage,
    /// The tokens of the text, if the request asks for log-probabilities.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scores: Option<Vec<ScoredToken>>,
    /// The other choices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<BatchAnswer>,
}

/// A token with its log-probability. It has its bytes, because its model may not be loaded when it is read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScoredToken {
    pub bytes: Vec<u8>,
    /// `None` for a token without a predecessor and for one that a grammar forced.
    pub logprob: Option<f32>,
    /// The most likely tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top: Vec<(Vec<u8>, f32)>,
}

impl ScoredToken {
    /// Converts a token of `engine`. A log-probability that is not finite becomes -9999, because JSON has no
    /// infinity.
    pub fn of(engine: &Engine, id: u32, score: Option<&TokenLogprob>) -> Self {
        let bytes = |id: u32| engine.tokenizer().token_bytes(id).unwrap_or_default().to_vec();
        let finite = |value: f32| if value.is_finite() { value } else { NEVER };
        let top = score.into_iter().flat_map(|score| &score.top);
        ScoredToken {
            bytes: bytes(id),
            logprob: score.map(|score| finite(score.logprob)),
            top: top.map(|(id, value)| (bytes(*id), finite(*value))).collect(),
        }
    }
}

impl BatchAnswer {
    /// Returns a model's answer.
    pub fn of_chat(form: String, outcome: &ChatOutcome) -> Self {
        let ChatOutcome { text, reasoning, raw, tool_calls, finish, cut_off, usage, .. } = outcome;
        BatchAnswer {
            form,
            text: text.clone(),
            reasoning: reasoning.clone(),
            raw: raw.clone(),
            data: None,
            tool_calls: tool_calls.clone(),
            finish: *finish,
            cut_off: *cut_off,
            usage: *usage,
            scores: None,
            others: Vec::new(),
        }
    }

    /// Returns an agent's answer.
    pub fn of_turn(form: String, outcome: Outcome) -> Self {
        let Outcome { text, data, usage, .. } = outcome;
        let answer = ChatOutcome::remote(text, ChatFinish::Stop);
        BatchAnswer { data, usage, ..BatchAnswer::of_chat(form, &answer) }
    }

    /// Returns all choices, of which this answer is the first.
    pub fn choices(&self) -> impl Iterator<Item = &BatchAnswer> {
        std::iter::once(self).chain(&self.others)
    }

    /// Returns the usage of all choices together.
    pub fn total_usage(&self) -> Usage {
        let mut usage = Usage::default();
        self.choices().for_each(|choice| usage.add(&choice.usage));
        usage
    }
}
