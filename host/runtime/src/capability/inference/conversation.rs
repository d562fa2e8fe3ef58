//! A conversation that a guest holds. One generation at a time extends it; meanwhile nothing but clearing may change it.

use crate::{
    bindings::{inference::CompactionPolicy, types::Error},
    capability::{
        inference::conversation_set::{
            MAX_MESSAGES, MAX_TEXT_BYTES, StoredConversation, text_bytes, too_long,
        },
        session_quota::SessionQuota,
    },
};
use skep_engine::{
    Model, Usage,
    chat::{ChatMessage, ChatOutcome, Role, Transcript},
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A conversation that a guest holds. Clones share the conversation.
#[derive(Clone)]
pub struct Conversation {
    pub(crate) model: Model,
    quota: Arc<SessionQuota>,
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    transcript: Transcript,
    changed: bool,
    phase: Phase,
    /// Text size of all messages, which is bounded.
    text_bytes: usize,
    /// Bytes that the conversation takes of the session's size budget.
    bytes: usize,
    /// The policy that the agent set in this turn.
    compaction: Option<CompactionPolicy>,
    /// A model change of which the caller has not been notified yet.
    model_change: Option<ModelChange>,
}

/// A conversation continues with a different model: one with another name, or another model under the same name.
#[derive(Clone, Debug)]
pub(crate) struct ModelChange {
    pub(crate) conversation: String,
    pub(crate) from: String,
    pub(crate) to: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    Generating,
    /// The conversation was cleared while a generation ran; that generation's message will not be appended.
    ClearedWhileGenerating,
}

/// The right to append a generated message. Dropping it releases the conversation unchanged.
pub(crate) struct Generating(Conversation);

impl Conversation {
    pub(crate) fn messages(&self) -> Vec<ChatMessage> {
        self.lock().transcript.messages().to_vec()
    }

    /// Returns at most `limit` messages after the first `skip` ones.
    pub(crate) fn messages_page(&self, skip: usize, limit: usize) -> Vec<ChatMessage> {
        self.lock().transcript.messages().iter().skip(skip).take(limit).cloned().collect()
    }

    /// Returns the reasoning of the message with this index, or of the last assistant message.
    pub(crate) fn reasoning(&self, index: Option<usize>) -> Option<String> {
        let inner = self.lock();
        let messages = inner.transcript.messages();
        let message = match index {
            Some(index) => messages.get(index),
            None => messages.iter().rfind(|message| message.role == Role::Assistant),
        };
        message?.reasoning.clone()
    }

    pub(crate) fn compaction(&self) -> Option<CompactionPolicy> {
        self.lock().compaction.clone()
    }

    pub(crate) fn set_compaction(&self, policy: CompactionPolicy) {
        self.lock().compaction = Some(policy);
    }

    pub(crate) fn usage(&self) -> Usage {
        self.lock().transcript.usage()
    }

    pub(crate) fn set_system(&self, text: &str) -> Result<(), Error> {
        let mut inner = self.when_open()?;
        if let Some(first) = inner.transcript.messages().first()
            && *first == ChatMessage::system(text)
        {
            return Ok(());
        }
        self.make_room(&mut inner, &ChatMessage::system(text))?;
        inner.transcript.set_system(text);
        inner.changed = true;
        Ok(())
    }

    /// Checks that a message of `bytes` bytes may be appended, before it is processed.
    pub(crate) fn check_room(&self, bytes: usize) -> Result<(), Error> {
        self.lock().check_room(bytes)
    }

    pub(crate) fn push(&self, message: ChatMessage) -> Result<(), Error> {
        let mut inner = self.when_open()?;
        self.make_room(&mut inner, &message)?;
        inner.transcript.push(message);
        inner.changed = true;
        Ok(())
    }

    /// Returns the tool name and arguments of a call whose result is still missing.
    pub(crate) fn outstanding_call(&self, id: &str) -> Option<(String, String)> {
        let inner = self.lock();
        if !inner.transcript.needs_tool_results().iter().any(|needed| needed == id) {
            return None;
        }
        let messages = inner.transcript.messages().iter().rev();
        messages
            .flat_map(|message| &message.tool_calls)
            .find(|call| call.id == id)
            .map(|call| (call.name.clone(), call.arguments.clone()))
    }

    pub(crate) fn clear(&self) {
        let mut inner = self.lock();
        inner.transcript.clear();
        inner.text_bytes = 0;
        inner.measure(&self.quota);
        inner.changed = true;
        if inner.phase == Phase::Generating {
            inner.phase = Phase::ClearedWhileGenerating;
        }
    }

    /// Locks the conversation for a generation, and returns its current transcript.
    pub(crate) fn begin(&self) -> Result<(Generating, Transcript), Error> {
        let mut inner = self.when_open()?;
        inner.phase = Phase::Generating;
        let transcript = inner.transcript.clone();
        drop(inner);
        Ok((Generating(self.clone()), transcript))
    }

    /// Creates a conversation for which `bytes` of the session's size budget are already counted.
    pub(in crate::capability) fn new(
        model: Model,
        transcript: Transcript,
        quota: Arc<SessionQuota>,
        bytes: usize,
    ) -> Self {
        let text_bytes = text_bytes(transcript.messages());
        let inner = Inner {
            transcript,
            changed: false,
            phase: Phase::Open,
            text_bytes,
            bytes,
            compaction: None,
            model_change: None,
        };
        Conversation { model, quota, inner: Arc::new(Mutex::new(inner)) }
    }

    pub(in crate::capability) fn with_change(self, change: ModelChange) -> Self {
        self.lock().model_change = Some(change);
        self
    }

    /// Takes the pending notification about a model change.
    pub(in crate::capability) fn take_model_change(&self) -> Option<ModelChange> {
        self.lock().model_change.take()
    }

    pub(in crate::capability) fn is_empty(&self) -> bool {
        self.lock().transcript.messages().is_empty()
    }

    /// Creates another conversation with the same messages.
    pub(in crate::capability) fn copy(&self) -> Result<Self, Error> {
        let inner = self.when_open()?;
        let bytes = inner.transcript.bytes();
        self.quota.take(bytes).map_err(Error::InvalidArgument)?;
        let copy = Conversation::new(self.model.clone(), inner.transcript.clone(), self.quota.clone(), bytes);
        let model_change = inner.model_change.clone();
        drop(inner);
        let mut of_copy = copy.lock();
        (of_copy.changed, of_copy.model_change) = (true, model_change);
        drop(of_copy);
        Ok(copy)
    }

    /// Returns the conversation as it is stored, if the turn changed it.
    pub(in crate::capability) fn changed(&self) -> Option<StoredConversation> {
        let inner = self.lock();
        inner.changed.then(|| StoredConversation {
            model: self.model.name().to_owned(),
            digest: Some(self.model.digest().clone()),
            transcript: inner.transcript.clone(),
        })
    }

    fn make_room(&self, inner: &mut Inner, message: &ChatMessage) -> Result<(), Error> {
        let bytes = message.text_bytes();
        inner.check_room(bytes)?;
        self.quota.take(message.bytes()).map_err(Error::InvalidArgument)?;
        inner.text_bytes += bytes;
        inner.bytes += message.bytes();
        Ok(())
    }

    fn when_open(&self) -> Result<MutexGuard<'_, Inner>, Error> {
        let inner = self.lock();
        if inner.phase == Phase::Open {
            return Ok(inner);
        }
        Err(Error::InvalidArgument(
            "a generation of this conversation is running; await it first, or fork the conversation before starting one"
                .into(),
        ))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Recounts the bytes that the conversation takes of the session's size budget.
    fn measure(&mut self, quota: &SessionQuota) {
        let bytes = self.transcript.bytes();
        quota.replace(self.bytes, bytes);
        self.bytes = bytes;
    }

    fn check_room(&self, bytes: usize) -> Result<(), Error> {
        let messages = self.transcript.messages().len();
        if messages >= MAX_MESSAGES || self.text_bytes.saturating_add(bytes) > MAX_TEXT_BYTES {
            return Err(Error::InvalidArgument(too_long(messages, self.text_bytes)));
        }
        Ok(())
    }
}

impl Generating {
    /// Replaces the conversation's transcript.
    pub(crate) fn rewrite(&self, transcript: &Transcript) -> Result<(), Error> {
        let mut inner = self.0.lock();
        if inner.phase != Phase::Generating {
            return Err(Error::Cancelled);
        }
        inner.transcript = transcript.clone();
        inner.text_bytes = text_bytes(transcript.messages());
        inner.measure(&self.0.quota);
        inner.changed = true;
        Ok(())
    }

    /// Appends the generated message.
    pub(crate) fn commit(self, outcome: &ChatOutcome) -> Result<(), Error> {
        self.append(|transcript| transcript.commit(outcome))
    }

    /// Appends a message that another model generated, as text only, because its tokens are meaningless to this model.
    pub(crate) fn commit_text(self, outcome: &ChatOutcome) -> Result<(), Error> {
        self.append(|transcript| transcript.commit_text(outcome))
    }

    fn append(self, append: impl FnOnce(&mut Transcript)) -> Result<(), Error> {
        let mut inner = self.0.lock();
        if inner.phase != Phase::Generating {
            return Err(Error::Cancelled);
        }
        append(&mut inner.transcript);
        let added = inner.transcript.messages().last().map_or(0, ChatMessage::text_bytes);
        inner.text_bytes = inner.text_bytes.saturating_add(added);
        inner.measure(&self.0.quota);
        inner.changed = true;
        Ok(())
    }

    /// Returns the conversation's model.
    pub(in crate::capability) fn model(&self) -> &Model {
        &self.0.model
    }

    /// Takes the pending notification about a model change.
    pub(in crate::capability) fn take_model_change(&self) -> Option<ModelChange> {
        self.0.take_model_change()
    }
}

impl Drop for Generating {
    fn drop(&mut self) {
        self.0.lock().phase = Phase::Open;
    }
}
