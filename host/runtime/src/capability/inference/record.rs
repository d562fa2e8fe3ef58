//! The journal record of a generation: the guest's result, and the data with which a conversation continues from it.
//!
//! A prompt mostly repeats the conversation so far, so only the part that was added to it is written.

use crate::{
    bindings::{
        inference::{self, Generation},
        types::Error,
    },
    capability::inference::conversation::Generating,
    invocation::StoredUsage,
};
use serde::{Deserialize, Serialize};
use skep_engine::{
    ModelDigest, Timing, UnreportedUse, Usage,
    chat::{ChatFinish, ChatOutcome, ToolCall, Transcript},
};

/// The outcome of a generation.
#[derive(Serialize, Deserialize)]
pub(in crate::capability) enum GenerationRecord {
    /// The generation never started.
    Refused(Error),
    /// The generation failed before its first event, after remote models had used something.
    RefusedAfter { error: Error, unreported: Vec<WrittenUnreported> },
    Ended {
        result: Result<Generation, Error>,
        /// `None`: the generation failed before its usage was known.
        usage: Option<WrittenUsage>,
        /// The message that was appended to a conversation.
        message: Option<Box<Message>>,
        /// Index of the message before which the conversation was compacted first.
        #[serde(default)]
        compacted_at: Option<usize>,
        /// The text that a streaming guest had been given when the generation failed.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        read: String,
        /// The estimated usage of a generation that was cut off.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cut: Option<Box<WrittenUsage>>,
        /// The use of remote models that no event reported.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        unreported: Vec<WrittenUnreported>,
    },
}

impl GenerationRecord {
    pub(in crate::capability) fn usage(&self) -> Usage {
        match self {
            GenerationRecord::Ended { usage: Some(WrittenUsage(usage)), .. } => *usage,
            GenerationRecord::Ended { usage: None, .. }
            | GenerationRecord::Refused(_)
            | GenerationRecord::RefusedAfter { .. } => Usage::default(),
        }
    }

    /// Returns the record of a generation that was refused before its first event.
    pub(in crate::capability) fn refused(error: Error, unreported: Vec<UnreportedUse>) -> Self {
        match unreported.is_empty() {
            true => GenerationRecord::Refused(error),
            false => GenerationRecord::RefusedAfter { error, unreported: written(unreported) },
        }
    }

    /// Returns the error of a generation that was refused before its first event.
    pub(in crate::capability) fn refusal(&self) -> Option<&Error> {
        match self {
            GenerationRecord::Refused(error) | GenerationRecord::RefusedAfter { error, .. } => Some(error),
            GenerationRecord::Ended { .. } => None,
        }
    }

    /// Returns what remote models used and no event reported.
    pub(in crate::capability) fn unreported(&self) -> Vec<UnreportedUse> {
        match self {
            GenerationRecord::RefusedAfter { unreported, .. }
            | GenerationRecord::Ended { unreported, .. } => {
                unreported.iter().map(WrittenUnreported::read).collect()
            }
            GenerationRecord::Refused(_) => Vec::new(),
        }
    }

    pub(in crate::capability) fn is_ok(&self) -> bool {
        matches!(self, GenerationRecord::Ended { result: Ok(_), .. })
    }

    pub(in crate::capability) fn compacted_at(&self) -> Option<usize> {
        match self {
            GenerationRecord::Ended { compacted_at, .. } => *compacted_at,
            GenerationRecord::Refused(_) | GenerationRecord::RefusedAfter { .. } => None,
        }
    }
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(in crate::capability) struct WrittenUsage(#[serde(with = "StoredUsage")] pub(in crate::capability) Usage);

/// The stored form of [`UnreportedUse`].
#[derive(Clone, Serialize, Deserialize)]
pub(in crate::capability) struct WrittenUnreported {
    model: String,
    usage: WrittenUsage,
    is_estimate: bool,
}

/// Returns the stored form of what no event reported.
pub(in crate::capability) fn written(unreported: Vec<UnreportedUse>) -> Vec<WrittenUnreported> {
    let write = |UnreportedUse { model, usage, is_estimate }| WrittenUnreported {
        model,
        usage: WrittenUsage(usage),
        is_estimate,
    };
    unreported.into_iter().map(write).collect()
}

impl WrittenUnreported {
    fn read(&self) -> UnreportedUse {
        let WrittenUnreported { model, usage: WrittenUsage(usage), is_estimate } = self.clone();
        UnreportedUse { model, usage, is_estimate }
    }
}

/// An assistant message with its exact tokens, relative to the conversation before it.
#[derive(Serialize, Deserialize)]
pub(in crate::capability) struct Message {
    raw: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    reasoning: String,
    tokens: Vec<u32>,
    kept_prompt_tokens: usize,
    new_prompt_tokens: Vec<u32>,
    kept_rendered_bytes: usize,
    new_rendered: String,
    /// The model that generated it. Early versions recorded none.
    #[serde(default)]
    model: Option<ModelDigest>,
}

impl Message {
    pub(in crate::capability) fn of(outcome: &ChatOutcome, before: &Transcript, model: &ModelDigest) -> Self {
        let same = outcome.prompt.iter().zip(before.tokens()).take_while(|(new, old)| new == old).count();
        let kept = match outcome.rendered.strip_prefix(before.rendered()) {
            Some(_) => before.rendered().len(),
            None => 0,
        };
        Message {
            raw: outcome.raw.clone(),
            reasoning: outcome.reasoning.clone(),
            tokens: outcome.tokens.clone(),
            kept_prompt_tokens: same,
            new_prompt_tokens: outcome.prompt[same..].to_vec(),
            kept_rendered_bytes: kept,
            new_rendered: outcome.rendered[kept..].to_owned(),
            model: Some(model.clone()),
        }
    }

    /// Appends the message again. The conversation must be the same as when the message was generated, unless the model has
    /// changed: then only the text is appended.
    pub(in crate::capability) fn append(
        self,
        generating: Generating,
        before: &Transcript,
        generation: &Generation,
        usage: Usage,
    ) -> Result<(), Error> {
        let tool_calls = generation.tool_calls.iter().cloned().map(chat_call).collect();
        let finish = match generation.finish {
            inference::FinishReason::Stop => ChatFinish::Stop,
            inference::FinishReason::Length => ChatFinish::Length,
            inference::FinishReason::ToolCalls => ChatFinish::ToolCalls,
        };
        let mut outcome = ChatOutcome {
            text: generation.text.clone(),
            reasoning: self.reasoning,
            tool_calls,
            finish,
            stopped_by: None,
            cut_off: false,
            usage,
            timing: Timing::default(),
            prompt: Vec::new(),
            tokens: Vec::new(),
            raw: self.raw,
            rendered: String::new(),
        };
        if self.model.is_some_and(|generated| generated != *generating.model().digest()) {
            return generating.commit_text(&outcome);
        }
        let changed = || Error::Internal("the conversation differs from its form before the restart".into());
        let mut prompt = before.tokens().get(..self.kept_prompt_tokens).ok_or_else(changed)?.to_vec();
        prompt.extend(self.new_prompt_tokens);
        let mut rendered = before.rendered().get(..self.kept_rendered_bytes).ok_or_else(changed)?.to_owned();
        rendered.push_str(&self.new_rendered);
        (outcome.prompt, outcome.tokens, outcome.rendered) = (prompt, self.tokens, rendered);
        generating.commit(&outcome)
    }
}

fn chat_call(call: crate::bindings::types::ToolCall) -> ToolCall {
    ToolCall { id: call.id, name: call.name, arguments: call.arguments }
}
