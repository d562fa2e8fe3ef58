//! The events of an answer, and its outcome.

use serde::{Deserialize, Serialize};

use super::message::ToolCall;
use crate::{Timing, TokenLogprob, Usage};

/// An event of an answer. The events come in order, and an answer that does not fail ends with `Finished`. The serialized
/// form is for another host, which does not get what belongs to the model's tokens.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ChatEvent {
    /// A route chose the model that answers. It comes first, or not at all.
    Routed(Routed),
    /// The model begins. `cached_tokens` of the prompt's tokens were in its KV cache, and `cache_write_tokens` were
    /// written to a cache whose provider charges for that.
    Started { prompt_tokens: u32, cached_tokens: u32, cache_write_tokens: u32 },
    /// A chunk of the model's reasoning, which is not part of its text.
    Reasoning { delta: String },
    /// A chunk of text. `logprobs` are those of the tokens that ended in this delta.
    Text {
        delta: String,
        #[serde(skip)]
        logprobs: Vec<TokenLogprob>,
    },
    /// The model has begun a call: its name is known, its arguments follow. `index` counts the calls of the answer
    /// from 0.
    ToolCallStarted { index: usize, id: String, name: String },
    /// A chunk of the JSON of a call's arguments.
    ToolCallArguments { index: usize, delta: String },
    /// The call is complete.
    ToolCallFinished { index: usize, call: ToolCall },
    /// The answer is complete. This is the last event.
    Finished(ChatOutcome),
}

/// The model that a route chose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Routed {
    pub model: String,
    /// Number of models that were asked, this one included.
    pub attempts: u32,
}

/// The whole of an answer, once it has ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChatOutcome {
    /// The text without reasoning and without the markup of calls.
    pub text: String,
    /// The model's reasoning, if it is reported separately from the text.
    pub reasoning: String,
    /// Complete calls only: a call that a limit cut off is not included.
    pub tool_calls: Vec<ToolCall>,
    pub finish: ChatFinish,
    /// The stop string that ended the text.
    pub stopped_by: Option<String>,
    /// Whether output that must be whole was cut off: a tool call, or an answer that must match a schema or be a
    /// call.
    pub cut_off: bool,
    pub usage: Usage,
    pub timing: Timing,
    /// The prompt's tokens. Remote models report neither them nor any of the following.
    #[serde(skip)]
    pub prompt: Vec<u32>,
    /// The answer's tokens that count as history, without an end-of-turn token and without a stop string.
    #[serde(skip)]
    pub tokens: Vec<u32>,
    /// The text of `tokens`, tool-call markup included.
    #[serde(skip)]
    pub raw: String,
    /// The prompt's text.
    #[serde(skip)]
    pub rendered: String,
}

impl ChatOutcome {
    /// Returns the outcome of a remote answer, which has no tokens of ours. Its usage and its timing are zero.
    pub fn remote(text: String, finish: ChatFinish) -> Self {
        ChatOutcome {
            text,
            reasoning: String::new(),
            tool_calls: Vec::new(),
            finish,
            stopped_by: None,
            cut_off: false,
            usage: Usage::default(),
            timing: Timing::default(),
            prompt: Vec::new(),
            tokens: Vec::new(),
            raw: String::new(),
            rendered: String::new(),
        }
    }
}

/// The reason that an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChatFinish {
    /// The model or a stop string ended the answer.
    Stop,
    /// A token limit ended the answer, or a stop string inside output that must be whole.
    Length,
    /// The answer ended with calls, which the caller has to make.
    ToolCalls,
}

impl ChatFinish {
    /// Returns the name of the reason, as OpenAI's API has it.
    pub fn as_str(self) -> &'static str {
        match self {
            ChatFinish::Stop => "stop",
            ChatFinish::Length => "length",
            ChatFinish::ToolCalls => "tool_calls",
        }
    }
}
