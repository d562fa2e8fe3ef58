//! The conversations of a session, as they are stored and as one turn sees them.
//!
//! A turn works on copies of the session's conversations, and its changes are committed with it. A conversation is read when
//! a turn first opens it. Its tokens belong to one model; with another model they are encoded again from the messages.

use crate::{
    RuntimeError,
    bindings::types::Error,
    capability::{
        inference::{
            conversation::{Conversation, ModelChange},
            model_errors,
        },
        session_quota::SessionQuota,
        turn::Turn,
    },
    compute::Compute,
    journal::Identity,
    name::SessionKey,
};
use serde::{Deserialize, Serialize};
use skep_engine::{
    Cancel, Model, ModelDigest,
    chat::{ChatMessage, Transcript},
};
use skep_store::{ConversationOutline, ConversationRow, Store};
use std::{collections::BTreeMap, sync::Arc};

const MAX_CONVERSATIONS: usize = 64;
const MAX_NAME_BYTES: usize = 128;
pub(in crate::capability) const MAX_MESSAGES: usize = 10_000;
pub(in crate::capability) const MAX_TEXT_BYTES: usize = 8 << 20;
const QUICK_BYTES: usize = 256 << 10;

/// A conversation between turns.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct StoredConversation {
    pub(crate) model: String,
    /// The digest of that model. Early versions did not store it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) digest: Option<ModelDigest>,
    pub(crate) transcript: Transcript,
}

/// The committed conversations of a session, by name.
#[derive(Clone, Default)]
pub(crate) struct CommittedConversations(BTreeMap<String, Committed>);

#[derive(Clone)]
struct Committed {
    /// The length of the stored form, which is about the size in memory.
    bytes: usize,
    /// `None`: the conversation is read when it is opened.
    read: Option<Arc<StoredConversation>>,
}

/// The conversations of one turn.
#[derive(Default)]
pub(crate) struct ConversationSet {
    committed: Arc<CommittedConversations>,
    /// `None` while an agent describes itself, because there is no session.
    source: Option<(Store, SessionKey)>,
    /// Conversations that this turn read from the store.
    read: BTreeMap<String, Arc<StoredConversation>>,
    opened: BTreeMap<String, Conversation>,
    quota: Arc<SessionQuota>,
}

/// The conversations that a turn read or changed.
#[derive(Default)]
pub(crate) struct TurnConversations {
    changed: BTreeMap<String, Arc<StoredConversation>>,
    read: BTreeMap<String, Arc<StoredConversation>>,
}

impl StoredConversation {
    pub(crate) fn read(row: &ConversationRow) -> Result<Self, RuntimeError> {
        serde_json::from_slice(&row.body).map_err(|error| RuntimeError::Internal {
            message: format!("conversation {:?} is unreadable: {error}", row.name),
        })
    }

    pub(crate) fn row(&self, name: &str) -> Result<ConversationRow, RuntimeError> {
        let body = serde_json::to_vec(self).map_err(|error| RuntimeError::Internal {
            message: format!("conversation {name:?} cannot be written: {error}"),
        })?;
        let (model, digest) = (Some(self.model.clone()), self.digest.as_ref().map(ModelDigest::to_string));
        Ok(ConversationRow { name: name.to_owned(), model, digest, body })
    }
}

/// Returns whether a conversation of `bytes` bytes is parsed and serialized in about a millisecond.
pub(crate) fn is_quick_conversation(bytes: usize) -> bool {
    bytes <= QUICK_BYTES
}

impl CommittedConversations {
    pub(crate) fn outlined(conversations: Vec<ConversationOutline>) -> Self {
        let committed =
            |outline: ConversationOutline| (outline.name, Committed { bytes: outline.bytes, read: None });
        CommittedConversations(conversations.into_iter().map(committed).collect())
    }

    /// Returns the stored size of all conversations.
    pub(crate) fn bytes(&self) -> usize {
        self.0.values().map(|committed| committed.bytes).sum()
    }

    /// Returns the size of the conversations that are in memory.
    pub(crate) fn read_bytes(&self) -> usize {
        self.0.values().filter(|committed| committed.read.is_some()).map(|committed| committed.bytes).sum()
    }

    /// Returns the stored size of all conversations after these rows are written.
    pub(crate) fn bytes_with(&self, rows: &[ConversationRow]) -> usize {
        let before = |row: &ConversationRow| self.0.get(&row.name).map_or(0, |committed| committed.bytes);
        let (old, new): (usize, usize) =
            rows.iter().fold((0, 0), |(old, new), row| (old + before(row), new + row.body.len()));
        self.bytes() - old + new
    }

    /// Takes over the conversations that a turn read, and those that it changed, which were committed as `rows`.
    pub(crate) fn remember(&mut self, turn: TurnConversations, rows: &[ConversationRow]) {
        for (name, read) in turn.read {
            if let Some(committed) = self.0.get_mut(&name) {
                committed.read = Some(read);
            }
        }
        let mut changed = turn.changed;
        for row in rows {
            let read = changed.remove(&row.name);
            self.0.insert(row.name.clone(), Committed { bytes: row.body.len(), read });
        }
    }
}

impl TurnConversations {
    /// Serializes the conversations that the turn changed.
    pub(crate) async fn rows(
        &self,
        compute: &Compute,
        tenant: &str,
    ) -> Result<Vec<ConversationRow>, RuntimeError> {
        let bytes = self.changed.values().map(|changed| changed.transcript.bytes()).sum();
        let changed = self.changed.clone();
        let write = move |_: &Cancel| changed.iter().map(|(name, changed)| changed.row(name)).collect();
        compute.run_unless(is_quick_conversation(bytes), tenant, write).await
    }
}

impl ConversationSet {
    pub(crate) fn new(
        committed: Arc<CommittedConversations>,
        source: (Store, SessionKey),
        quota: SessionQuota,
    ) -> Self {
        ConversationSet { committed, source: Some(source), quota: Arc::new(quota), ..Self::default() }
    }

    /// Opens the session's conversation of this name with its own model, or creates one with `model`.
    pub(crate) async fn open(
        &mut self,
        name: &str,
        turn: &Turn,
        model: Option<&str>,
    ) -> wasmtime::Result<Result<Conversation, Error>> {
        if let Some(open) = self.opened.get(name) {
            return Ok(Ok(open.clone()));
        }
        let asked = Identity::new("open", &(name, model));
        if let Some(error) = model_errors::before(turn, &asked)? {
            return Ok(Err(error));
        }
        let opened = loop {
            match self.try_open(name, turn, model).await? {
                Err(error) if model_errors::waits(turn, &error).await => {}
                opened => break opened,
            }
        };
        match &opened {
            Ok(conversation) => {
                self.opened.insert(name.to_owned(), conversation.clone());
            }
            Err(error) => model_errors::note(turn, asked, error)?,
        }
        Ok(opened)
    }

    async fn try_open(
        &mut self,
        name: &str,
        turn: &Turn,
        model: Option<&str>,
    ) -> Result<Result<Conversation, Error>, RuntimeError> {
        if let Some(stored) = self.stored(name, turn).await? {
            return Ok(self.reopen(name, stored, turn, model).await);
        }
        if let Err(error) = self.check_new(name) {
            return Ok(Err(error));
        }
        let model = turn.model(model).await;
        Ok(model.map(|model| Conversation::new(model, Transcript::new(), self.quota.clone(), 0)))
    }

    /// Returns the tool name and arguments of a model's call that is waiting for its result.
    pub(crate) fn outstanding_call(&self, id: &str) -> Option<(String, String)> {
        self.opened.values().find_map(|conversation| conversation.outstanding_call(id))
    }

    /// Copies `from` to a name that is unused or whose conversation is empty.
    pub(crate) async fn fork(
        &mut self,
        from: &Conversation,
        name: &str,
        turn: &Turn,
    ) -> Result<Result<Conversation, Error>, RuntimeError> {
        let taken = match self.opened.get(name) {
            Some(open) => !open.is_empty(),
            None => {
                self.stored(name, turn).await?.is_some_and(|stored| !stored.transcript.messages().is_empty())
            }
        };
        if taken {
            let message = format!("the session already has a conversation {name:?}; clear it first");
            return Ok(Err(Error::InvalidArgument(message)));
        }
        let is_new = !self.opened.contains_key(name) && !self.committed.0.contains_key(name);
        let checked = if is_new { self.check_new(name) } else { Ok(()) };
        Ok(checked.and_then(|()| {
            let copy = from.copy()?;
            self.opened.insert(name.to_owned(), copy.clone());
            Ok(copy)
        }))
    }

    /// Takes the conversations that the turn read and changed, to commit and cache them.
    pub(crate) fn take(&mut self) -> TurnConversations {
        let mut turn = TurnConversations { changed: BTreeMap::new(), read: std::mem::take(&mut self.read) };
        for (name, conversation) in std::mem::take(&mut self.opened) {
            if let Some(changed) = conversation.changed() {
                turn.changed.insert(name, Arc::new(changed));
            }
        }
        turn
    }

    /// Returns the committed conversation of this name.
    async fn stored(
        &mut self,
        name: &str,
        turn: &Turn,
    ) -> Result<Option<Arc<StoredConversation>>, RuntimeError> {
        let Some(committed) = self.committed.0.get(name) else { return Ok(None) };
        if let Some(read) = committed.read.as_ref().or_else(|| self.read.get(name)) {
            return Ok(Some(read.clone()));
        }
        let Some((store, SessionKey { agent, session })) = &self.source else { return Ok(None) };
        let row = store.conversation(agent, session, name).await?.ok_or_else(|| RuntimeError::Internal {
            message: format!("conversation {name:?} of session {agent}/{session} no longer exists"),
        })?;
        let is_quick = is_quick_conversation(row.body.len());
        let read = move |_: &Cancel| StoredConversation::read(&row);
        let stored = Arc::new(turn.compute(is_quick, read).await?);
        self.read.insert(name.to_owned(), stored.clone());
        Ok(Some(stored))
    }

    /// Opens a stored conversation with its own model, unless the agent wants it to follow the model that it names. If the
    /// host no longer has the conversation's model, or the agent's alias no longer means it, the requested one is used, or
    /// else the agent's own.
    async fn reopen(
        &self,
        name: &str,
        stored: Arc<StoredConversation>,
        turn: &Turn,
        model: Option<&str>,
    ) -> Result<Conversation, Error> {
        let model = match turn.agent.manifest.inference.follow_model {
            true => turn.model(model).await?,
            false => match turn.model(Some(&stored.model)).await {
                Err(Error::ModelUnknown(_)) => turn.model(model).await?,
                Err(Error::Denied(_)) if turn.uses_alias() => turn.model(model).await?,
                model => model?,
            },
        };
        let bytes = self.committed.0.get(name).map_or(0, |committed| committed.bytes);
        let (mut transcript, quota) = (stored.transcript.clone(), self.quota.clone());
        let (checked, of) = (stored.clone(), model.clone());
        let is_quick = stored.digest.is_some() || is_quick_conversation(bytes);
        if turn.compute(is_quick, move |_: &Cancel| checked.is_of(&of)).await {
            return Ok(Conversation::new(model, transcript, quota, bytes));
        }
        transcript.forget_tokens();
        let change = ModelChange {
            conversation: name.to_owned(),
            from: stored.model.clone(),
            to: model.name().to_owned(),
        };
        tracing::warn!(
            conversation = name,
            from = change.from,
            to = change.to,
            "a conversation continues with a different model"
        );
        Ok(Conversation::new(model, transcript, quota, bytes).with_change(change))
    }

    fn check_new(&self, name: &str) -> Result<(), Error> {
        let fresh = self.opened.keys().filter(|name| !self.committed.0.contains_key(*name)).count();
        check_name(name, self.committed.0.len() + fresh).map_err(Error::InvalidArgument)
    }
}

impl StoredConversation {
    /// Returns whether the conversation's tokens belong to `model`.
    fn is_of(&self, model: &Model) -> bool {
        if self.model != model.name() {
            return false;
        }
        match (&self.digest, model.engine()) {
            (Some(digest), _) => digest == model.digest(),
            // Without a digest, only the tokens themselves can be compared.
            (None, Some(engine)) => self.transcript.check(engine).is_ok(),
            (None, None) => false,
        }
    }
}

/// Checks a conversation that is imported into a session with `others` other conversations.
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
        return Err(format!("a session may have at most {MAX_CONVERSATIONS} conversations"));
    }
    Ok(())
}

/// Returns the size of the messages' text, including the arguments of their tool calls.
pub(in crate::capability) fn text_bytes(messages: &[ChatMessage]) -> usize {
    messages.iter().map(ChatMessage::text_bytes).sum()
}

pub(in crate::capability) fn too_long(messages: usize, bytes: usize) -> String {
    format!(
        "the conversation has {messages} messages with {bytes} bytes in total; at most {MAX_MESSAGES} messages with \
         {MAX_TEXT_BYTES} bytes in total are allowed"
    )
}
