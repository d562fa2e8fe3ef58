//! Conversations of a session, as one turn sees them.
//!
//! A turn works on copies of the session's conversations; what it changed is committed with it. One generation at a
//! time extends a conversation, and nothing else changes it meanwhile.

use crate::bindings::{inference::CompactionPolicy, types::Error};
use serde::{Deserialize, Serialize};
use skep_engine::{
    Engine, Usage,
    chat::{ChatMessage, ChatOutcome, Transcript},
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

const MAX_CONVERSATIONS: usize = 64;
const MAX_NAME_BYTES: usize = 128;
const MAX_MESSAGES: usize = 10_000;
const MAX_TEXT_BYTES: usize = 8 << 20;

/// A conversation between turns.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct StoredConversation {
    pub(crate) model: String,
    pub(crate) transcript: Transcript,
}

/// A conversation that a guest holds. Clones are the same conversation.
#[derive(Clone)]
pub struct Conversation {
    pub(crate) engine: Engine,
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    transcript: Transcript,
    changed: bool,
    phase: Phase,
    /// Of the messages, so that they stay bounded.
    text_bytes: usize,
    /// As the agent set it in this turn.
    compaction: Option<CompactionPolicy>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    Generating,
    /// It was cleared while a generation ran; that generation's message will not be appended.
    ClearedWhileGenerating,
}

/// The right to append a generated message. Dropped, it gives the conversation back as it was.
pub(crate) struct Generating(Conversation);

/// The conversations of one turn.
pub(crate) struct ConversationSet {
    committed: Arc<BTreeMap<String, StoredConversation>>,
    opened: BTreeMap<String, Conversation>,
}

impl ConversationSet {
    pub(crate) fn new(committed: Arc<BTreeMap<String, StoredConversation>>) -> Self {
        ConversationSet { committed, opened: BTreeMap::new() }
    }

    /// The session's conversation of this name with its model, or a new one with `model`.
    pub(crate) fn open(
        &mut self,
        name: &str,
        engine: impl Fn(Option<&str>) -> Result<Engine, Error>,
        model: Option<&str>,
    ) -> Result<Conversation, Error> {
        if let Some(open) = self.opened.get(name) {
            return Ok(open.clone());
        }
        let conversation = match self.committed.get(name) {
            Some(StoredConversation { model, transcript }) => {
                Conversation::new(engine(Some(model))?, transcript.clone())
            }
            None => {
                self.check_new(name)?;
                Conversation::new(engine(model)?, Transcript::new())
            }
        };
        self.opened.insert(name.to_owned(), conversation.clone());
        Ok(conversation)
    }

    /// The name and the arguments of a call of the model that waits for its result.
    pub(crate) fn outstanding_call(&self, id: &str) -> Option<(String, String)> {
        self.opened.values().find_map(|conversation| conversation.outstanding_call(id))
    }

    /// A copy of `from` under a name that is free or whose conversation is empty.
    pub(crate) fn fork(&mut self, from: &Conversation, name: &str) -> Result<Conversation, Error> {
        let taken = match (self.opened.get(name), self.committed.get(name)) {
            (Some(open), _) => !open.messages().is_empty(),
            (None, Some(stored)) => !stored.transcript.messages().is_empty(),
            (None, None) => {
                self.check_new(name)?;
                false
            }
        };
        if taken {
            let message = format!("the session has a conversation {name:?} already; clear it first");
            return Err(Error::InvalidArgument(message));
        }
        let source = from.when_open()?;
        let copy = Conversation::new(from.engine.clone(), source.transcript.clone());
        drop(source);
        copy.lock().changed = true;
        self.opened.insert(name.to_owned(), copy.clone());
        Ok(copy)
    }

    /// What the turn changed, to be committed.
    pub(crate) fn changed(&self) -> BTreeMap<String, StoredConversation> {
        let mut changed = BTreeMap::new();
        for (name, conversation) in &self.opened {
            let inner = conversation.lock();
            if inner.changed {
                let model = conversation.engine.info().name.clone();
                let transcript = inner.transcript.clone();
                changed.insert(name.clone(), StoredConversation { model, transcript });
            }
        }
        changed
    }

    fn check_new(&self, name: &str) -> Result<(), Error> {
        let fresh = self.opened.keys().filter(|name| !self.committed.contains_key(*name)).count();
        check_name(name, self.committed.len() + fresh).map_err(Error::InvalidArgument)
    }
}

impl Conversation {
    pub(crate) fn messages(&self) -> Vec<ChatMessage> {
        self.lock().transcript.messages().to_vec()
    }

    /// Messages after the first `skip` ones.
    pub(crate) fn messages_page(&self, skip: usize, limit: usize) -> Vec<ChatMessage> {
        self.lock().transcript.messages().iter().skip(skip).take(limit).cloned().collect()
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
        inner.make_room(text.len())?;
        inner.transcript.set_system(text);
        inner.changed = true;
        Ok(())
    }

    /// Whether a message of so many bytes may be appended, before anything is done with it.
    pub(crate) fn check_room(&self, bytes: usize) -> Result<(), Error> {
        self.lock().check_room(bytes)
    }

    pub(crate) fn push(&self, message: ChatMessage) -> Result<(), Error> {
        let mut inner = self.when_open()?;
        inner.make_room(message.content.len())?;
        inner.transcript.push(message);
        inner.changed = true;
        Ok(())
    }

    /// The name of the tool that this call is for and its arguments, if its result is still to come.
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
        inner.changed = true;
        if inner.phase == Phase::Generating {
            inner.phase = Phase::ClearedWhileGenerating;
        }
    }

    /// Takes the conversation for a generation, with its transcript as it is now.
    pub(crate) fn begin(&self) -> Result<(Generating, Transcript), Error> {
        let mut inner = self.when_open()?;
        inner.phase = Phase::Generating;
        let transcript = inner.transcript.clone();
        drop(inner);
        Ok((Generating(self.clone()), transcript))
    }

    fn new(engine: Engine, transcript: Transcript) -> Self {
        let text_bytes = text_bytes(transcript.messages());
        let inner = Inner { transcript, changed: false, phase: Phase::Open, text_bytes, compaction: None };
        Conversation { engine, inner: Arc::new(Mutex::new(inner)) }
    }

    fn when_open(&self) -> Result<MutexGuard<'_, Inner>, Error> {
        let inner = self.lock();
        if inner.phase == Phase::Open {
            return Ok(inner);
        }
        Err(Error::InvalidArgument(
            "a generation of this conversation is running; await it first, or fork the conversation before"
                .into(),
        ))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn check_room(&self, bytes: usize) -> Result<(), Error> {
        let messages = self.transcript.messages().len();
        if messages >= MAX_MESSAGES || self.text_bytes.saturating_add(bytes) > MAX_TEXT_BYTES {
            return Err(Error::InvalidArgument(too_long(messages, self.text_bytes)));
        }
        Ok(())
    }

    fn make_room(&mut self, bytes: usize) -> Result<(), Error> {
        self.check_room(bytes)?;
        self.text_bytes += bytes;
        Ok(())
    }
}

impl Generating {
    /// Puts another form of the conversation in its place.
    pub(crate) fn rewrite(&self, transcript: &Transcript) -> Result<(), Error> {
        let mut inner = self.0.lock();
        if inner.phase != Phase::Generating {
            return Err(Error::Cancelled);
        }
        inner.transcript = transcript.clone();
        inner.text_bytes = text_bytes(transcript.messages());
        inner.changed = true;
        Ok(())
    }

    /// Appends what was generated.
    pub(crate) fn commit(self, outcome: &ChatOutcome) -> Result<(), Error> {
        let mut inner = self.0.lock();
        if inner.phase != Phase::Generating {
            return Err(Error::Cancelled);
        }
        inner.transcript.commit(outcome);
        inner.text_bytes = inner.text_bytes.saturating_add(outcome.text.len());
        inner.changed = true;
        Ok(())
    }
}

impl Drop for Generating {
    fn drop(&mut self) {
        self.0.lock().phase = Phase::Open;
    }
}

/// What is wrong with a conversation that comes from elsewhere, if something is: the session has `others` already.
pub(crate) fn check_conversation(name: &str, others: usize, messages: &[ChatMessage]) -> Result<(), String> {
    check_name(name, others)?;
    let bytes = text_bytes(messages);
    if messages.len() > MAX_MESSAGES || bytes > MAX_TEXT_BYTES {
        return Err(too_long(messages.len(), bytes));
    }
    Ok(())
}

fn check_name(name: &str, others: usize) -> Result<(), String> {
    if !(1..=MAX_NAME_BYTES).contains(&name.len()) {
        return Err(format!("a conversation's name has 1 to {MAX_NAME_BYTES} bytes, not {}", name.len()));
    }
    if others >= MAX_CONVERSATIONS {
        return Err(format!("a session may have {MAX_CONVERSATIONS} conversations"));
    }
    Ok(())
}

fn text_bytes(messages: &[ChatMessage]) -> usize {
    messages.iter().map(|message| message.content.len()).sum()
}

fn too_long(messages: usize, bytes: usize) -> String {
    format!(
        "the conversation has {messages} messages of {bytes} bytes; {MAX_MESSAGES} messages of {MAX_TEXT_BYTES} bytes are \
         allowed"
    )
}

/// Sum over all conversations.
pub(crate) fn total_usage<'a>(conversations: impl Iterator<Item = &'a StoredConversation>) -> Usage {
    let mut sum = Usage::default();
    for conversation in conversations {
        sum.add(&conversation.transcript.usage());
    }
    sum
}
