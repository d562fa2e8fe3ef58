//! The parts of an answer as they arrive, the same for every wire format.

use skep_engine::chat::ChatFinish;

use crate::failure::Failure;

/// One part of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Delta {
    Reasoning(String),
    Text(String),
    Call(CallPart),
    Count(Count),
    /// The model has ended its answer; counts may follow.
    Finish(ChatFinish),
    /// The answer ends at this stop string, which is not a part of it.
    StoppedBy(String),
    /// The stream ends here.
    Done,
}

/// A part of a call. Its texts are appended to those that came before with the same index.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct CallPart {
    /// The call's index in the answer, if the server reports it.
    pub index: Option<usize>,
    pub id: String,
    pub name: String,
    pub arguments: String,
}

/// The token counts that the server has reported so far; `None` if it reported nothing new.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub prompt: Option<u32>,
    pub cached: Option<u32>,
    /// Tokens of the prompt that were written to the server's cache.
    pub cache_write: Option<u32>,
    pub completion: Option<u32>,
    pub reasoning: Option<u32>,
}

impl Count {
    /// Takes over what `newer` reports.
    pub(crate) fn update(&mut self, newer: Count) {
        self.prompt = newer.prompt.or(self.prompt);
        self.cached = newer.cached.or(self.cached);
        self.cache_write = newer.cache_write.or(self.cache_write);
        self.completion = newer.completion.or(self.completion);
        self.reasoning = newer.reasoning.or(self.reasoning);
    }
}

/// Reads the answer of one wire format. There is one decoder for each attempt.
pub(crate) trait Decoder: Send {
    /// Reads the data of one event of a stream.
    fn event(&mut self, data: &str) -> Result<Vec<Delta>, Failure>;

    /// Reads a response that is one JSON document instead of a stream.
    fn whole(&mut self, body: &str) -> Result<Vec<Delta>, Failure>;
}
