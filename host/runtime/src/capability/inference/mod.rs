//! `skep:agent/inference`: a guest's access to the host's models.
//!
//! A conversation is a resource whose tokens stay in the host. Generations and compactions run concurrently, each as one
//! asynchronous call. Opening or forking a conversation may read the store; everything else is answered at once.

mod answer;
mod attempts;
mod compaction;
mod completion;
mod conversation;
mod conversation_set;
mod conversion;
mod generation;
mod model_errors;
mod options;
mod progress;
mod record;
mod remote;
mod sync;
mod text_stream;

use conversation::Conversation;
use generation::{RequestedGeneration, StartedGeneration};

pub(crate) use attempts::left_use;
pub(crate) use conversation_set::{
    CommittedConversations, ConversationSet, StoredConversation, check_conversation, is_quick_conversation,
};

use crate::{
    Json, RunEvent,
    bindings::{
        ConversationHandle,
        inference::{
            AssistantEntry, CompactOptions, Compaction, CompactionPolicy, Entry, GenerateOptions, Generation,
            Host, HostConversation, HostConversationWithStore, HostWithStore, ModelInfo,
        },
        types::{Error, ToolResult, Usage},
    },
    capability::{Capabilities, TurnContext, turn::Turn},
    compute::in_place,
    journal::{Identity, Stopped},
};
use serde::Deserialize;
use serde_json::json;
use skep_engine::{
    ServedModel,
    chat::{ChatMessage, Role},
};
use std::sync::Arc;
use tokio::sync::oneshot;
use wasmtime::component::{Access, Accessor, FutureReader, Resource, ResourceTableError, StreamReader};

type Streamed = (StreamReader<String>, FutureReader<Result<Generation, Error>>);

impl HostConversationWithStore<TurnContext> for Capabilities {
    async fn generate(
        accessor: &Accessor<TurnContext, Self>,
        conversation: Resource<ConversationHandle>,
        options: GenerateOptions,
    ) -> wasmtime::Result<Result<Generation, Error>> {
        match accessor.with(|mut access| access.get().ask(&conversation, options))? {
            Ok(requested) => generated(requested).await,
            Err(error) => Ok(Err(error)),
        }
    }

    async fn compact(
        accessor: &Accessor<TurnContext, Self>,
        conversation: Resource<ConversationHandle>,
        options: CompactOptions,
    ) -> wasmtime::Result<Result<Compaction, Error>> {
        match accessor.with(|mut access| access.get().ask_compaction(&conversation, options))? {
            Ok(requested) => Ok(requested.finish().await?),
            Err(error) => Ok(Err(error)),
        }
    }

    async fn stream(
        accessor: &Accessor<TurnContext, Self>,
        conversation: Resource<ConversationHandle>,
        options: GenerateOptions,
    ) -> wasmtime::Result<Result<Streamed, Error>> {
        let requested = match accessor.with(|mut access| access.get().ask(&conversation, options))? {
            Ok(requested) => requested,
            Err(error) => return Ok(Err(error)),
        };
        match requested.begin().await? {
            Ok(started) => accessor.with(|access| stream(access, started)).map(Ok),
            Err(error) => Ok(Err(error)),
        }
    }
}

impl HostWithStore<TurnContext> for Capabilities {
    async fn complete(
        accessor: &Accessor<TurnContext, Self>,
        model: Option<String>,
        prompt: String,
        options: GenerateOptions,
    ) -> wasmtime::Result<Result<Generation, Error>> {
        match accessor.with(|mut access| access.get().begin_completion(&prompt))? {
            Ok(turn) => Ok(completion::complete(turn, model, prompt, options).await?),
            Err(error) => Ok(Err(error)),
        }
    }
}

impl Host for TurnContext {
    fn models(&mut self) -> wasmtime::Result<Vec<ModelInfo>> {
        self.charge(0)?;
        let Ok(turn) = self.turn() else { return Ok(Vec::new()) };
        let own = turn.own_model_name();
        let describe = |model: ServedModel| {
            let loaded = model.loaded().map(|model| model.sequence_limit());
            ModelInfo {
                name: model.name().to_owned(),
                // The context of a model that was never loaded is not known yet.
                context_length: u32::try_from(loaded.or(model.context_length()).unwrap_or(0))
                    .unwrap_or(u32::MAX),
                is_default: own.as_deref() == Some(model.name()),
            }
        };
        let list = || turn.usable_models().map(describe).collect();
        Ok(turn.journal.immediate(Identity::new("models", &()), list)?)
    }
}

impl HostConversation for TurnContext {
    async fn open(
        &mut self,
        name: String,
        model: Option<String>,
    ) -> wasmtime::Result<Result<Resource<ConversationHandle>, Error>> {
        self.charge(name.len())?;
        let opened = match self.turn() {
            Ok(turn) => self.conversations.open(&name, &turn, model.as_deref()).await?,
            Err(error) => Err(error),
        };
        self.hand_out(opened)
    }

    fn set_system(
        &mut self,
        conversation: Resource<ConversationHandle>,
        text: String,
    ) -> wasmtime::Result<Result<(), Error>> {
        self.charge(text.len())?;
        Ok(self.conversation(&conversation)?.set_system(&text))
    }

    fn append_user(
        &mut self,
        conversation: Resource<ConversationHandle>,
        text: String,
    ) -> wasmtime::Result<Result<(), Error>> {
        self.charge(text.len())?;
        Ok(self.conversation(&conversation)?.push(ChatMessage::user(text)))
    }

    fn append_tool_result(
        &mut self,
        conversation: Resource<ConversationHandle>,
        result: ToolResult,
    ) -> wasmtime::Result<Result<(), Error>> {
        self.charge(result.outcome.as_ref().map_or_else(String::len, String::len))?;
        let bytes = result.outcome.as_ref().map_or_else(String::len, String::len);
        let conversation = self.conversation(&conversation)?;
        match self.turn() {
            Ok(turn) => Ok(in_place(bytes, || append_result(&turn, conversation, result))?),
            Err(error) => Ok(Err(error)),
        }
    }

    fn messages(&mut self, conversation: Resource<ConversationHandle>) -> wasmtime::Result<Vec<Entry>> {
        self.charge(0)?;
        let messages = self.conversation(&conversation)?.messages();
        let bytes = messages.iter().map(|message| message.content.len()).sum();
        self.charge_result(bytes)?;
        Ok(in_place(bytes, || messages.into_iter().map(entry).collect()))
    }

    fn messages_page(
        &mut self,
        conversation: Resource<ConversationHandle>,
        skip: u32,
        limit: u32,
    ) -> wasmtime::Result<Vec<Entry>> {
        self.charge(0)?;
        let messages = self.conversation(&conversation)?.messages_page(skip as usize, limit as usize);
        let bytes = messages.iter().map(|message| message.content.len()).sum();
        self.charge_result(bytes)?;
        Ok(in_place(bytes, || messages.into_iter().map(entry).collect()))
    }

    fn reasoning(
        &mut self,
        conversation: Resource<ConversationHandle>,
        message: Option<u32>,
    ) -> wasmtime::Result<Option<String>> {
        self.charge(0)?;
        let reasoning = self.conversation(&conversation)?.reasoning(message.map(|index| index as usize));
        self.charge_result(reasoning.as_ref().map_or(0, String::len))?;
        Ok(reasoning)
    }

    fn set_compaction(
        &mut self,
        conversation: Resource<ConversationHandle>,
        policy: CompactionPolicy,
    ) -> wasmtime::Result<()> {
        self.charge(if let CompactionPolicy::Summary(text) = &policy { text.len() } else { 0 })?;
        self.conversation(&conversation)?.set_compaction(policy);
        Ok(())
    }

    async fn fork(
        &mut self,
        conversation: Resource<ConversationHandle>,
        name: String,
    ) -> wasmtime::Result<Result<Resource<ConversationHandle>, Error>> {
        self.charge(name.len())?;
        let source = self.conversation(&conversation)?.clone();
        let copy = match self.turn() {
            Ok(turn) => self.conversations.fork(&source, &name, &turn).await?,
            Err(error) => Err(error),
        };
        self.hand_out(copy)
    }

    fn clear(&mut self, conversation: Resource<ConversationHandle>) -> wasmtime::Result<()> {
        self.charge(0)?;
        self.conversation(&conversation)?.clear();
        Ok(())
    }

    fn usage(&mut self, conversation: Resource<ConversationHandle>) -> wasmtime::Result<Usage> {
        self.charge(0)?;
        Ok(conversion::usage(&self.conversation(&conversation)?.usage()))
    }

    fn drop(&mut self, conversation: Resource<ConversationHandle>) -> wasmtime::Result<()> {
        self.table.delete(Resource::<Conversation>::new_own(conversation.rep()))?;
        Ok(())
    }
}

impl TurnContext {
    fn turn(&self) -> Result<Arc<Turn>, Error> {
        let denied = || {
            Error::Denied(
                "inference is available only in a turn, not while the agent describes itself".into(),
            )
        };
        self.turn.clone().ok_or_else(denied)
    }

    fn conversation(
        &self,
        handle: &Resource<ConversationHandle>,
    ) -> Result<&Conversation, ResourceTableError> {
        self.table.get(&Resource::new_borrow(handle.rep()))
    }

    /// Requests a generation. The outer error is for an invalid handle, on which the guest traps.
    pub(in crate::capability) fn ask(
        &mut self,
        conversation: &Resource<ConversationHandle>,
        options: GenerateOptions,
    ) -> wasmtime::Result<Result<RequestedGeneration, Error>> {
        self.charge(options.stop.iter().map(String::len).sum())?;
        while self.streams.try_join_next().is_some() {}
        let conversation = self.conversation(conversation)?;
        match self.turn() {
            Ok(turn) => Ok(generation::ask(turn, conversation, options)?),
            Err(error) => Ok(Err(error)),
        }
    }

    pub(in crate::capability) fn ask_compaction(
        &mut self,
        conversation: &Resource<ConversationHandle>,
        options: CompactOptions,
    ) -> wasmtime::Result<Result<compaction::RequestedCompaction, Error>> {
        self.charge(options.summary.as_ref().map_or(0, String::len))?;
        let conversation = self.conversation(conversation)?;
        Ok(self.turn().and_then(|turn| compaction::ask(&turn, conversation, options)))
    }

    pub(in crate::capability) fn begin_completion(
        &mut self,
        prompt: &str,
    ) -> wasmtime::Result<Result<Arc<Turn>, Error>> {
        self.charge(prompt.len())?;
        Ok(self.turn())
    }

    fn hand_out(
        &mut self,
        conversation: Result<Conversation, Error>,
    ) -> wasmtime::Result<Result<Resource<ConversationHandle>, Error>> {
        Ok(match conversation {
            Ok(conversation) => {
                let handle = self.table.push(conversation)?;
                Ok(Resource::new_own(handle.rep()))
            }
            Err(error) => Err(error),
        })
    }
}

/// Runs a generation to its end.
pub(in crate::capability) async fn generated(
    requested: RequestedGeneration,
) -> wasmtime::Result<Result<Generation, Error>> {
    match requested.begin().await? {
        Ok(started) => Ok(started.finish(None).await?),
        Err(error) => Ok(Err(error)),
    }
}

/// Runs a generation concurrently with the guest. It stops with the turn at the latest.
fn stream(
    mut access: Access<'_, TurnContext, Capabilities>,
    mut started: StartedGeneration,
) -> wasmtime::Result<Streamed> {
    let (sink, source) = started.text();
    let (done, result) = oneshot::channel();
    access.get().streams.spawn(async move {
        let generated = started.finish(Some(sink)).await;
        // The send fails if the guest dropped the future, and then nobody needs the result.
        let _ = done.send(generated);
    });
    let text = StreamReader::new(&mut access, source)?;
    let result = FutureReader::new(&mut access, async move {
        wasmtime::error::Ok(result.await.unwrap_or(Ok(Err(Error::Cancelled)))?)
    })?;
    Ok((text, result))
}

fn append_result(
    turn: &Turn,
    conversation: &Conversation,
    result: ToolResult,
) -> Result<Result<(), Error>, Stopped> {
    let identity = Identity::new("append-tool-result", &result);
    let bytes = result.outcome.as_ref().map_or_else(String::len, String::len);
    if let Err(error) = conversation.check_room(bytes) {
        return Ok(Err(error));
    }
    let (id, name, outcome) = match check_result(turn, conversation, result) {
        Ok(checked) => checked,
        Err(error) => return Ok(Err(error)),
    };
    let mut call = turn.journal.call(identity)?;
    if turn.journal.recorded::<()>(&mut call)?.is_none() {
        turn.journal.ended(&call, &(), vec![RunEvent::ToolResult { id, name, outcome }]);
    }
    Ok(Ok(()))
}

/// Appends a tool's result if the conversation is waiting for it and it is valid.
fn check_result(
    turn: &Turn,
    conversation: &Conversation,
    result: ToolResult,
) -> Result<(String, String, Result<Json, String>), Error> {
    let ToolResult { call_id: id, outcome } = result;
    let Some((name, arguments)) = conversation.outstanding_call(&id) else {
        return Err(Error::InvalidArgument(format!(
            "no tool call {:?} in this conversation is waiting for a result",
            crate::text::cut(&id, 80)
        )));
    };
    let (content, outcome) = match outcome {
        Ok(_) if turn.needs_approval(&name) && !turn.approvals.is_approved(&id, &name, &arguments) => {
            let message = format!(
                "calls of tool {name:?} need a person's approval; ask for it first with `tools.approve`"
            );
            return Err(Error::Denied(message));
        }
        Ok(text) => {
            let tool = turn.tool(&name);
            let value = match tool {
                Some(tool) => tool.result(&text).map_err(Error::SchemaInvalid)?,
                // The tool was offered in an earlier turn, or the agent was redeployed without it.
                None => Json::from_text(text.clone()).map_err(|error| {
                    Error::SchemaInvalid(format!("the result of tool {name:?} is not JSON: {error}"))
                })?,
            };
            (text, Ok(value))
        }
        Err(text) => (json!({ "error": text }).to_string(), Err(text)),
    };
    let message = ChatMessage { name: Some(name.clone()), ..ChatMessage::tool(id.clone(), content) };
    conversation.push(message)?;
    Ok((id, name, outcome))
}

fn entry(message: ChatMessage) -> Entry {
    match message.role {
        Role::System => Entry::System(message.content),
        Role::User => Entry::User(message.content),
        Role::Assistant => Entry::Assistant(AssistantEntry {
            text: message.content,
            tool_calls: message.tool_calls.into_iter().map(conversion::tool_call).collect(),
        }),
        Role::Tool => Entry::Tool(ToolResult {
            call_id: message.tool_call_id.unwrap_or_default(),
            outcome: outcome(message.content),
        }),
    }
}

/// A result that reports an error. Parsing of any other result stops at its first member.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Failed {
    error: String,
}

/// Parses a result as `append_result` writes it.
fn outcome(content: String) -> Result<String, String> {
    match serde_json::from_str::<Failed>(&content) {
        Ok(Failed { error }) => Err(error),
        Err(_) => Ok(content),
    }
}
