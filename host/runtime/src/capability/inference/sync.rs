//! `skep:agent/inference-sync`: inference for toolchains that do not bind asynchronous functions.
//!
//! Every call delegates to its counterpart in `inference`, and blocks the guest until it is answered.

use crate::{
    bindings::{
        ConversationHandle, inference,
        inference_sync::{Host, HostConversation},
        types::{
            CompactOptions, Compaction, CompactionPolicy, Entry, Error, GenerateOptions, Generation,
            ModelInfo, ToolResult, Usage,
        },
    },
    capability::{
        TurnContext,
        inference::{completion, generated},
    },
};
use wasmtime::component::Resource;

impl Host for TurnContext {
    async fn complete(
        &mut self,
        model: Option<String>,
        prompt: String,
        options: GenerateOptions,
    ) -> wasmtime::Result<Result<Generation, Error>> {
        match self.begin_completion(&prompt)? {
            Ok(turn) => Ok(completion::complete(turn, model, prompt, options).await?),
            Err(error) => Ok(Err(error)),
        }
    }

    fn models(&mut self) -> wasmtime::Result<Vec<ModelInfo>> {
        inference::Host::models(self)
    }
}

impl HostConversation for TurnContext {
    async fn open(
        &mut self,
        name: String,
        model: Option<String>,
    ) -> wasmtime::Result<Result<Resource<ConversationHandle>, Error>> {
        inference::HostConversation::open(self, name, model).await
    }

    fn set_system(
        &mut self,
        conversation: Resource<ConversationHandle>,
        text: String,
    ) -> wasmtime::Result<Result<(), Error>> {
        inference::HostConversation::set_system(self, conversation, text)
    }

    fn append_user(
        &mut self,
        conversation: Resource<ConversationHandle>,
        text: String,
    ) -> wasmtime::Result<Result<(), Error>> {
        inference::HostConversation::append_user(self, conversation, text)
    }

    fn append_tool_result(
        &mut self,
        conversation: Resource<ConversationHandle>,
        result: ToolResult,
    ) -> wasmtime::Result<Result<(), Error>> {
        inference::HostConversation::append_tool_result(self, conversation, result)
    }

    fn messages(&mut self, conversation: Resource<ConversationHandle>) -> wasmtime::Result<Vec<Entry>> {
        inference::HostConversation::messages(self, conversation)
    }

    fn messages_page(
        &mut self,
        conversation: Resource<ConversationHandle>,
        skip: u32,
        limit: u32,
    ) -> wasmtime::Result<Vec<Entry>> {
        inference::HostConversation::messages_page(self, conversation, skip, limit)
    }

    fn reasoning(
        &mut self,
        conversation: Resource<ConversationHandle>,
        message: Option<u32>,
    ) -> wasmtime::Result<Option<String>> {
        inference::HostConversation::reasoning(self, conversation, message)
    }

    fn set_compaction(
        &mut self,
        conversation: Resource<ConversationHandle>,
        policy: CompactionPolicy,
    ) -> wasmtime::Result<()> {
        inference::HostConversation::set_compaction(self, conversation, policy)
    }

    async fn compact(
        &mut self,
        conversation: Resource<ConversationHandle>,
        options: CompactOptions,
    ) -> wasmtime::Result<Result<Compaction, Error>> {
        match self.ask_compaction(&conversation, options)? {
            Ok(requested) => Ok(requested.finish().await?),
            Err(error) => Ok(Err(error)),
        }
    }

    async fn generate(
        &mut self,
        conversation: Resource<ConversationHandle>,
        options: GenerateOptions,
    ) -> wasmtime::Result<Result<Generation, Error>> {
        match self.ask(&conversation, options)? {
            Ok(requested) => generated(requested).await,
            Err(error) => Ok(Err(error)),
        }
    }

    async fn fork(
        &mut self,
        conversation: Resource<ConversationHandle>,
        name: String,
    ) -> wasmtime::Result<Result<Resource<ConversationHandle>, Error>> {
        inference::HostConversation::fork(self, conversation, name).await
    }

    fn clear(&mut self, conversation: Resource<ConversationHandle>) -> wasmtime::Result<()> {
        inference::HostConversation::clear(self, conversation)
    }

    fn usage(&mut self, conversation: Resource<ConversationHandle>) -> wasmtime::Result<Usage> {
        inference::HostConversation::usage(self, conversation)
    }

    fn drop(&mut self, conversation: Resource<ConversationHandle>) -> wasmtime::Result<()> {
        inference::HostConversation::drop(self, conversation)
    }
}
