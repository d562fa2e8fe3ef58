//! The interface of all models: those that an engine of this process runs, and those of other servers.
//!
//! Callers ask a [`Model`] for answers, and everything above it (grants, budgets, journals, prices) is the same for both. A
//! [`RemoteModel`] gets messages and returns events; its tokens mean nothing here, so conversations keep its answers as text.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;
use skep_model::{ModelDigest, Sampling};

use crate::chat::{
    ChatMessage, ChatOptions, ChatStream, Dialect, Input, Opening, RemoteAnswer, RemoteStream, Sender,
    Transcript, chat, continue_text, encode_chat, estimated_tokens, fitting, observed, refuse_images, said,
};
use crate::{Abilities, Cancel, Engine, EngineError, Priority, PromptMessage};

/// Context length that is assumed for a remote model if none is configured. Its server refuses longer prompts.
const UNKNOWN_CONTEXT: usize = 1 << 20;

/// A model that answers. Clones share it.
#[derive(Clone)]
pub enum Model {
    Local(Engine),
    Remote(Arc<dyn RemoteModel>),
}

/// The properties of a remote model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteInfo {
    /// The name that callers use, which contains the name of the upstream: `NAME/model`.
    pub name: String,
    /// Identifies the server and the model, because there are no weights to hash.
    pub digest: ModelDigest,
    pub context_length: Option<usize>,
    pub created_unix_s: u64,
}

/// A model that another server computes, or a route that chooses among several models.
pub trait RemoteModel: Send + Sync {
    fn info(&self) -> &RemoteInfo;

    /// Returns the names of the models that may answer, if they differ from the model itself.
    fn members(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns the length of the model's context in tokens, if it is known: a local member of a route has to be loaded first.
    fn context_length(&self) -> Option<usize> {
        self.info().context_length
    }

    /// Returns whether this host computes the model. A route is not local, whatever its members are.
    fn is_local(&self) -> bool {
        false
    }

    /// Returns the numbers of the hosts that compute the model, if they are other hosts of this host's cluster.
    fn hosts(&self) -> Vec<i64> {
        Vec::new()
    }

    /// Waits until the model can take a request: a model of this host may have to be loaded first.
    fn ready(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Returns the maximum number of requests to a server for one answer that are billed, if no attempt is cut off.
    fn most_asks(&self, _options: &ChatOptions) -> u32 {
        1
    }

    /// Returns whether the model ignores the reasoning that a request asks for.
    fn ignores_reasoning(&self, _options: &ChatOptions) -> bool {
        false
    }

    /// Returns the model's abilities.
    fn abilities(&self) -> Abilities {
        Abilities::unknown()
    }

    /// Refuses a request that the model cannot serve, whatever its messages are.
    fn check(&self, _options: &ChatOptions) -> Result<(), EngineError> {
        Ok(())
    }

    /// Refuses an input that the model cannot read. Unless a model says otherwise, it reads text only.
    fn accepts(&self, input: &Input) -> Result<(), EngineError> {
        refuse_images(input.messages(), &self.info().name)
    }

    /// Starts an answer and returns at once. A request that is refused fails with the stream's first event.
    fn ask(&self, input: Input, options: ChatOptions) -> RemoteStream;

    /// Returns the number of requests that could be sent now without waiting.
    fn free_slots(&self) -> usize;

    /// Returns the reason that the model cannot be used at the moment, if there is one.
    fn problem(&self) -> Option<String>;
}

impl Model {
    /// Refuses an input that the model cannot read.
    pub fn accepts(&self, input: &Input) -> Result<(), EngineError> {
        match self {
            Model::Local(engine) => refuse_images(input.messages(), &engine.info().name),
            Model::Remote(remote) => remote.accepts(input),
        }
    }

    /// Returns the engine, if the model is computed in this process.
    pub fn engine(&self) -> Option<&Engine> {
        match self {
            Model::Local(engine) => Some(engine),
            Model::Remote(_) => None,
        }
    }

    /// Returns the name that requests use for the model.
    pub fn name(&self) -> &str {
        match self {
            Model::Local(engine) => &engine.info().name,
            Model::Remote(remote) => &remote.info().name,
        }
    }

    /// Returns the digest that conversations keep of the model that made their tokens.
    pub fn digest(&self) -> &ModelDigest {
        match self {
            Model::Local(engine) => &engine.info().digest,
            Model::Remote(remote) => &remote.info().digest,
        }
    }

    /// Returns the length of the model's context in tokens, if it is known.
    pub fn context_length(&self) -> Option<usize> {
        match self {
            Model::Local(engine) => Some(engine.info().context_length),
            Model::Remote(remote) => remote.context_length(),
        }
    }

    /// Returns the sampling parameters of a request that sets none. Another server has its own.
    pub fn sampling(&self) -> Sampling {
        match self {
            Model::Local(engine) => engine.info().sampling.clone(),
            Model::Remote(_) => Sampling::default(),
        }
    }

    /// Returns the number of tokens that prompt and output may have together.
    pub fn sequence_limit(&self) -> usize {
        match self {
            Model::Local(engine) => engine.sequence_limit(),
            Model::Remote(remote) => remote.context_length().unwrap_or(UNKNOWN_CONTEXT),
        }
    }

    /// Returns the names of the models that may answer: the model's own, and those that a route may choose.
    pub fn names(&self) -> Vec<String> {
        let others = match self {
            Model::Local(_) => Vec::new(),
            Model::Remote(remote) => remote.members(),
        };
        std::iter::once(self.name().to_owned()).chain(others).collect()
    }

    /// Returns whether this host computes the model.
    pub fn is_local(&self) -> bool {
        match self {
            Model::Local(_) => true,
            Model::Remote(remote) => remote.is_local(),
        }
    }

    /// Waits until the model can take a request.
    pub async fn ready(&self) -> Result<(), EngineError> {
        match self {
            Model::Local(_) => Ok(()),
            Model::Remote(remote) => remote.ready().await,
        }
    }

    /// Returns whether the model ignores the reasoning that a request asks for, because another server does not get it.
    pub fn ignores_reasoning(&self, options: &ChatOptions) -> bool {
        match self {
            Model::Local(_) => false,
            Model::Remote(remote) => remote.ignores_reasoning(options),
        }
    }

    /// Returns the maximum number of requests that are billed for one answer.
    pub fn most_asks(&self, options: &ChatOptions) -> u32 {
        match self {
            Model::Local(_) => 1,
            Model::Remote(remote) => remote.most_asks(options),
        }
    }

    /// Returns the model's abilities.
    pub fn abilities(&self) -> Abilities {
        match self {
            Model::Local(engine) => Abilities::local(Some(Dialect::of_engine(engine).reasons())),
            Model::Remote(remote) => remote.abilities(),
        }
    }

    /// Returns whether the model's chat template reads a variable of this name, if the template is known: that of another
    /// server is not.
    pub fn reads_variable(&self, name: &str) -> Option<bool> {
        Some(self.engine()?.template().source().contains(name))
    }

    /// Refuses a request that the model cannot serve, whatever its messages are. An engine finds that out when it
    /// gets the request.
    pub fn check(&self, options: &ChatOptions) -> Result<(), EngineError> {
        match self {
            Model::Local(_) => Ok(()),
            Model::Remote(remote) => remote.check(options),
        }
    }

    /// Answers `messages` without keeping a transcript.
    pub fn chat(&self, messages: &[ChatMessage], options: ChatOptions) -> Result<ChatStream, EngineError> {
        let fitting = match options.drops_oldest {
            true => self.fitting(messages, &options)?,
            false => Cow::Borrowed(messages),
        };
        let messages = &*fitting;
        observed(self.name(), &mut said(messages), options, |options| match self {
            Model::Local(engine) => {
                refuse_images(messages, self.name())?;
                chat(engine, messages, options)
            }
            Model::Remote(remote) => {
                options.validate()?;
                ask(remote.as_ref(), messages.to_vec().into(), options)
            }
        })
    }

    /// Returns the messages without the oldest ones, if the chat is too long for the model.
    fn fitting<'a>(
        &self,
        messages: &'a [ChatMessage],
        options: &ChatOptions,
    ) -> Result<Cow<'a, [ChatMessage]>, EngineError> {
        options.validate()?;
        fitting(messages, (self.sequence_limit(), options.max_tokens), |messages| match self {
            Model::Local(engine) => {
                let tokens = encode_chat(engine, messages, options.opening(), true, Sender::of(options))?;
                Ok(tokens.len())
            }
            Model::Remote(_) => Ok(estimated_tokens(messages, options.opening())),
        })
    }

    /// Generates the next assistant message of a transcript, which does not change until [`Transcript::commit`].
    pub fn answer(&self, transcript: &Transcript, options: ChatOptions) -> Result<ChatStream, EngineError> {
        observed(self.name(), &mut said(transcript.messages()), options, |options| match self {
            Model::Local(engine) => {
                refuse_images(transcript.messages(), self.name())?;
                transcript.generate(engine, options)
            }
            Model::Remote(remote) => {
                options.validate()?;
                transcript.check_tool_results()?;
                ask(remote.as_ref(), transcript.messages_for_model().into_owned().into(), options)
            }
        })
    }

    /// Continues a text as it is, without a template. Not every remote model can.
    pub fn complete(&self, text: &str, options: ChatOptions) -> Result<ChatStream, EngineError> {
        let mut asked = std::iter::once(PromptMessage::prompt(text.into()));
        observed(self.name(), &mut asked, options, |options| match self {
            Model::Local(engine) => continue_text(engine, text, options),
            Model::Remote(remote) => {
                options.validate()?;
                ask(remote.as_ref(), Input::Text(text.to_owned()), options)
            }
        })
    }

    /// Returns the number of tokens of the prompt that the next answer would continue. For a remote model it is an estimate.
    pub fn prompt_tokens(
        &self,
        transcript: &Transcript,
        opening: Opening<'_>,
        cancel: &Cancel,
    ) -> Result<usize, EngineError> {
        match self {
            Model::Local(engine) => transcript.prompt_tokens(engine, opening, cancel),
            Model::Remote(_) => Ok(estimated_tokens(transcript.messages(), opening)),
        }
    }

    /// Returns the number of sequences of this class that could start now without waiting for others.
    pub fn free_slots(&self, priority: Priority) -> usize {
        match self {
            Model::Local(engine) => engine.free_slots(priority),
            Model::Remote(remote) => remote.free_slots(),
        }
    }

    /// Returns the reason that the model cannot be used at the moment, if there is one.
    pub fn problem(&self) -> Option<String> {
        match self {
            Model::Local(engine) => engine.problem(),
            Model::Remote(remote) => remote.problem(),
        }
    }
}

impl From<Engine> for Model {
    fn from(engine: Engine) -> Self {
        Model::Local(engine)
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Model").field(&self.name()).finish()
    }
}

/// Sends a request to a remote model, unless it is too long for it by an estimate.
fn ask(remote: &dyn RemoteModel, input: Input, options: ChatOptions) -> Result<ChatStream, EngineError> {
    options.cancel.check()?;
    remote.check(&options)?;
    remote.accepts(&input)?;
    if let Some(limit) = remote.context_length() {
        let prompt = input.estimated_tokens_without_reasoning(options.opening());
        let requested = options.max_tokens.unwrap_or(1);
        if prompt.saturating_add(requested) > limit {
            return Err(EngineError::ContextOverflow { limit, prompt, requested });
        }
    }
    // The caller's flag only says whether anyone waits for the start. From here on, dropping the stream cancels.
    let unreported = options.unreported.clone().or_kept();
    let options = ChatOptions { cancel: Cancel::default(), unreported: unreported.clone(), ..options };
    Ok(ChatStream::remote(RemoteAnswer::new(remote.ask(input, options), unreported)))
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
