//! A conversation with the model: its messages, how to answer, and the loop through the tools.
//!
//! The host keeps the messages, so a [`Conversation`] is a handle with the options of the next generation. An
//! error of an append is kept and returned by the call that ends the chain, so that a chain needs only one
//! `?`.

use std::rc::Rc;

use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::compaction::{CompactOptions, Compaction, CompactionPolicy};
use crate::context::Context;
use crate::error::{AgentError, InferenceError};
use crate::example::OutputExample;
use crate::generation::{Entry, GenerateOptions, Generation, Output, ToolCall, ToolChoice, Usage};
use crate::host::{HostConversation, HostStream};
use crate::host_tools::{OfferedTool, OfferedTools};
use crate::join::join_all;
use crate::message::Reply;
use crate::options::option_methods;
use crate::{attempt, schema};

/// The name of the conversation that [`Context::conversation`] opens.
const MAIN_CONVERSATION: &str = "main";
const DEFAULT_MAX_ROUNDS: u32 = 8;

/// A conversation of the session. Build it step by step, and end it with [`run`](Self::run),
/// [`generate`](Self::generate), [`stream`](Self::stream) or [`extract`](Self::extract).
///
/// Its methods fall into three groups. Those under [Messages](#messages) change what the host keeps. Those
/// under [Options](#options) only configure the next answer. Those under [Generation](#generation) generate
/// it.
///
/// ```
/// # use skep_sdk::{AgentError, Context, Message, Reply, agent};
/// /// Answers in one sentence.
/// #[agent]
/// async fn terse(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
///     cx.conversation().system("Answer in one sentence.").user(message.text).max_tokens(60).run().await
/// }
/// ```
#[must_use = "a conversation does nothing until `run`, `generate`, `stream` or `extract` is called"]
#[derive(Clone)]
pub struct Conversation<'a> {
    cx: &'a Context,
    host: Result<Rc<dyn HostConversation>, InferenceError>,
    options: GenerateOptions,
    tools: Option<Vec<String>>,
    host_tools: Vec<OfferedTool>,
    answer_format: Option<AnswerFormat<'a>>,
    max_rounds: u32,
}

/// Computes the format of an answer from the results of the tools.
type AnswerFormat<'a> = Rc<dyn Fn(&[Result<Value, String>]) -> Output + 'a>;

impl Context {
    /// Opens the session's main conversation. The host keeps its messages between turns, so append only new
    /// ones.
    pub fn conversation(&self) -> Conversation<'_> {
        self.conversation_named(MAIN_CONVERSATION)
    }

    /// Opens the session's conversation with this name.
    pub fn conversation_named(&self, name: &str) -> Conversation<'_> {
        Conversation::open(self, name, self.model())
    }

    /// Does the same as [`conversation_named`](Self::conversation_named), but a conversation that does not exist yet
    /// starts with this model.
    pub fn conversation_with_model(&self, name: &str, model: &str) -> Conversation<'_> {
        Conversation::open(self, name, Some(model))
    }
}

impl<'a> Conversation<'a> {
    fn open(cx: &'a Context, name: &str, model: Option<&str>) -> Self {
        Self::new(cx, cx.host().open(name, model))
    }

    fn new(cx: &'a Context, host: Result<Rc<dyn HostConversation>, InferenceError>) -> Self {
        let options = GenerateOptions::default();
        Self {
            cx,
            host,
            options,
            tools: None,
            host_tools: Vec::new(),
            answer_format: None,
            max_rounds: DEFAULT_MAX_ROUNDS,
        }
    }
}

/// # Messages
///
/// These methods change the conversation that the host keeps, immediately.
impl<'a> Conversation<'a> {
    /// Sets the system message. Setting the same text again changes nothing; a new text loses the cached
    /// prefix.
    pub fn system(self, text: impl AsRef<str>) -> Self {
        self.append(|host| host.set_system(text.as_ref()))
    }

    /// Appends a user message.
    pub fn user(self, text: impl AsRef<str>) -> Self {
        self.append(|host| host.append_user(text.as_ref()))
    }

    /// Answers a tool call of the last [`generate`](Self::generate). [`run`](Self::run) does this
    /// automatically.
    pub fn tool_result(self, call_id: &str, outcome: Result<Value, String>) -> Self {
        self.append(|host| host.append_tool_result(call_id, &outcome))
    }

    /// Removes all messages.
    pub fn clear(self) -> Self {
        self.append(|host| {
            host.clear();
            Ok(())
        })
    }

    /// Copies this conversation under another name. Both share their KV cache up to this point.
    pub fn fork(&self, name: &str) -> Result<Conversation<'a>, InferenceError> {
        let host = self.host.clone()?.fork(name)?;
        Ok(Conversation::new(self.cx, Ok(host)))
    }

    /// Replaces everything between the system message and the most recent messages with a summary, now. For
    /// the policy when a conversation grows too long, see [`with_compaction`](Self::with_compaction).
    pub async fn compact(&self, options: CompactOptions) -> Result<Compaction, InferenceError> {
        let host = self.host.clone()?;
        host.compact(options).await
    }

    /// Returns all messages so far, the system message first.
    pub fn messages(&self) -> Result<Vec<Entry>, InferenceError> {
        Ok(self.host.clone()?.messages())
    }

    /// Returns the messages after the first `skip`, at most `limit` of them.
    pub fn messages_page(&self, skip: u32, limit: u32) -> Result<Vec<Entry>, InferenceError> {
        Ok(self.host.clone()?.messages_page(skip, limit))
    }

    /// Returns the reasoning of the last assistant message, if its model reported it separately from the text. The
    /// host keeps it with the message, in later turns too. After [`run`](Self::run), the last message is the answer.
    pub fn reasoning(&self) -> Result<Option<String>, InferenceError> {
        Ok(self.host.clone()?.reasoning())
    }

    /// Returns the sum over all generations of this conversation.
    pub fn usage(&self) -> Result<Usage, InferenceError> {
        Ok(self.host.clone()?.usage())
    }
}

/// # Options
///
/// These methods configure how the next answer is generated. They change no message and generate nothing.
impl<'a> Conversation<'a> {
    /// Sets which of the agent's tools the model may call. By default, [`run`](Self::run) allows all of them,
    /// and the other methods none.
    pub fn tools<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.tools = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Sets which tools of others the model may call in [`run`](Self::run): names such as
    /// `agent:orders/find_order`, `mcp:files/*` or `http/fetch`, or references of type
    /// [`HostTool`](crate::HostTool). The host calls them. Each tool has to be granted under `[grants] tools`
    /// in `agent.toml`.
    pub fn host_tools<T: Into<OfferedTool>>(mut self, tools: impl IntoIterator<Item = T>) -> Self {
        self.host_tools = tools.into_iter().map(Into::into).collect();
        self
    }

    /// Sets whether the model calls a tool. [`run`](Self::run) applies `Required` and `Named` only to its
    /// first round, so that it terminates: after `Required` the model decides, after `Named` it answers.
    pub fn tool_choice(mut self, choice: ToolChoice) -> Self {
        self.options.tool_choice = choice;
        self
    }

    /// Sets the format of the answer that the model gives in [`run`](Self::run) after tools have run, computed
    /// from their results. This holds an answer to the facts:
    ///
    /// ```
    /// # use skep_sdk::{AgentError, Context, Message, Output, Reply, agent, tool};
    /// /// Tells how many seats are free.
    /// #[tool]
    /// fn free_seats() -> u32 {
    ///     7
    /// }
    ///
    /// /// Knows the seats.
    /// #[agent(tools = [free_seats])]
    /// async fn usher(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    ///     let chat = cx.conversation().user(message.text);
    ///     let chat = chat.answer_format(|results| match results {
    ///         [Ok(seats)] => Output::Regex(format!("(Yes|Certainly|Sure), there are {seats} free seats\\.")),
    ///         _ => Output::Text,
    ///     });
    ///     chat.run().await
    /// }
    /// ```
    pub fn answer_format(mut self, format: impl Fn(&[Result<Value, String>]) -> Output + 'a) -> Self {
        self.answer_format = Some(Rc::new(format));
        self
    }

    /// Does the same as [`answer_format`](Self::answer_format).
    #[deprecated(since = "0.1.0", note = "renamed to `answer_format`")]
    pub fn answer_form(self, form: impl Fn(&[Result<Value, String>]) -> Output + 'a) -> Self {
        self.answer_format(form)
    }

    /// Sets the maximum number of generations of one [`run`](Self::run). The default is 8.
    pub fn max_rounds(mut self, rounds: u32) -> Self {
        self.max_rounds = rounds.max(1);
        self
    }

    /// Adds an example of an answer in the requested format: a user message, and the answer to it. Use it with
    /// [`extract`](Self::extract), or with an [`output`](Self::output) with a JSON Schema. Examples of a tool
    /// belong in `#[tool(example(…))]`.
    ///
    /// The model sees the examples after the system message and before all real messages. They are not
    /// messages of the conversation. Their answers have to validate against the schema.
    ///
    /// ```
    /// # use skep_sdk::{AgentError, Context, Message, Reply, agent};
    /// # use schemars::JsonSchema;
    /// # use serde::{Deserialize, Serialize};
    /// #[derive(Serialize, Deserialize, JsonSchema)]
    /// struct Guest {
    ///     name: String,
    /// }
    ///
    /// /// Greets you by your name.
    /// #[agent]
    /// async fn greeter(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    ///     let chat = cx.conversation().clear().user(message.text);
    ///     let chat = chat.example("Hi, I'm Bob.", &Guest { name: "Bob".to_owned() });
    ///     let guest: Guest = chat.hidden().extract().await?;
    ///     Ok(Reply::text(format!("Welcome, {}!", guest.name)))
    /// }
    /// ```
    pub fn example<T: Serialize + ?Sized>(mut self, user: impl Into<String>, answer: &T) -> Self {
        match serde_json::to_value(answer) {
            Ok(answer) => self.options.examples.push(OutputExample { user: user.into(), answer }),
            Err(error) => {
                let why = format!("the answer of an example is not JSON: {error}");
                self.host = self.host.and_then(|_| Err(InferenceError::InvalidArgument(why)));
            }
        }
        self
    }

    /// Sets what happens in this turn when an answer would no longer fit into the model's context. The
    /// default is the `compaction` setting under `[sessions]` in `agent.toml`, which itself defaults to
    /// summarizing. To compact a conversation now, see [`compact`](Self::compact).
    ///
    /// ```
    /// # use skep_sdk::{AgentError, CompactionPolicy, Context, Message, Reply, agent};
    /// /// Refuses to forget anything.
    /// #[agent]
    /// async fn precise(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    ///     cx.conversation().user(message.text).with_compaction(CompactionPolicy::Off).run().await
    /// }
    /// ```
    pub fn with_compaction(self, policy: CompactionPolicy) -> Self {
        self.append(|host| {
            host.set_compaction(&policy);
            Ok(())
        })
    }

    /// Does the same as [`with_compaction`](Self::with_compaction).
    #[deprecated(
        since = "0.1.0",
        note = "renamed to `with_compaction`, because it does not compact anything"
    )]
    pub fn compaction(self, policy: CompactionPolicy) -> Self {
        self.with_compaction(policy)
    }

    option_methods!();
}

/// # Generation
///
/// These methods end the chain: they generate, and return what the model said.
impl<'a> Conversation<'a> {
    /// Generates, calls the tools that the model asks for, gives it their results, and repeats this until the
    /// model answers.
    ///
    /// The calls of one round run concurrently. The model receives a tool's error as the result of the call,
    /// and the run continues. A tool that returns no result within its `timeout_ms` has failed; a tool with
    /// `retries` is called again first. A call that a person has to approve (`needs_approval`) waits for the
    /// decision, for days if necessary: the turn is suspended and later replayed from its journal.
    pub async fn run(mut self) -> Result<Reply, AgentError> {
        let host = self.host.clone()?;
        let mut options =
            self.take_options(|cx| cx.tools().iter().map(|tool| tool.name.to_owned()).collect())?;
        let offered = OfferedTools::find(self.cx.host(), &self.host_tools).await?;
        options.tools.extend(offered.model_names().cloned());
        if options.tools.is_empty() && options.tool_choice == ToolChoice::Auto {
            options.tool_choice = ToolChoice::None;
        }
        for _ in 0..self.max_rounds {
            let generation = host.generate(options.clone()).await?;
            if generation.tool_calls.is_empty() {
                return Ok(Reply::text(generation.text));
            }
            let cx = self.cx;
            let outcomes =
                join_all(generation.tool_calls.iter().map(|call| call_tool(cx, &offered, call))).await;
            for (call, outcome) in generation.tool_calls.iter().zip(&outcomes) {
                host.append_tool_result(&call.id, outcome)?;
            }
            if let Some(format) = &self.answer_format {
                options.output = format(&outcomes);
                options.examples.clear();
            }
            options.tool_choice = match options.tool_choice {
                ToolChoice::Auto | ToolChoice::Required => ToolChoice::Auto,
                ToolChoice::Named(_) | ToolChoice::None => ToolChoice::None,
            };
        }
        Err(AgentError::TooManyRounds { limit: self.max_rounds })
    }

    /// Generates one assistant message, and leaves its tool calls to the caller.
    pub async fn generate(mut self) -> Result<Generation, InferenceError> {
        let host = self.host.clone()?;
        let generation = host.generate(self.take_options(|_| Vec::new())?).await?;
        Ok(Generation { reasoning: host.reasoning(), ..generation })
    }

    /// Generates one assistant message and streams its text.
    pub async fn stream(mut self) -> Result<TextStream, InferenceError> {
        let host = self.host.clone()?;
        let inner = host.stream(self.take_options(|_| Vec::new())?).await?;
        Ok(TextStream { inner, conversation: host, ended: false })
    }

    /// Generates one message that is a `T`. Its JSON Schema is enforced while decoding.
    ///
    /// ```
    /// # use skep_sdk::{AgentError, Context, Message, Reply, agent};
    /// # use schemars::JsonSchema;
    /// # use serde::{Deserialize, Serialize};
    /// #[derive(Serialize, Deserialize, JsonSchema)]
    /// struct Mood {
    ///     happy: bool,
    /// }
    ///
    /// /// Reads the mood of a text.
    /// #[agent]
    /// async fn mood(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    ///     let mood: Mood = cx.conversation().user(message.text).hidden().extract().await?;
    ///     Reply::json("Read.", &mood)
    /// }
    /// ```
    pub async fn extract<T: DeserializeOwned + JsonSchema>(self) -> Result<T, InferenceError> {
        let generation =
            self.output(Output::JsonSchema(schema::input_schema::<T>())).tools([""; 0]).generate().await?;
        serde_json::from_str(&generation.text).and_then(schema::from_model).map_err(|error| {
            InferenceError::SchemaInvalid(format!(
                "the answer fits the schema but not the Rust type ({error}); put the rule into the schema too: {}",
                generation.text
            ))
        })
    }
}

impl Conversation<'_> {
    fn append(mut self, action: impl FnOnce(&dyn HostConversation) -> Result<(), InferenceError>) -> Self {
        if let Ok(host) = &self.host
            && let Err(error) = action(&**host)
        {
            self.host = Err(error);
        }
        self
    }

    fn take_options(
        &mut self,
        default_tools: impl FnOnce(&Context) -> Vec<String>,
    ) -> Result<GenerateOptions, InferenceError> {
        let mut options = std::mem::take(&mut self.options);
        if !options.examples.is_empty() && !matches!(options.output, Output::JsonSchema(_)) {
            return Err(InferenceError::InvalidArgument(
                "`example` needs an answer with a JSON Schema: end the conversation with `extract`, or give examples of a tool in \
                 `#[tool(example(…))]`"
                    .to_owned(),
            ));
        }
        options.tools = self.tools.take().unwrap_or_else(|| default_tools(self.cx));
        Ok(options)
    }
}

/// The text of a message while it is generated. Dropping it cancels the generation.
pub struct TextStream {
    inner: Box<dyn HostStream>,
    conversation: Rc<dyn HostConversation>,
    /// The host's stream must not be read again after it has reported its end.
    ended: bool,
}

impl TextStream {
    /// Returns the next chunk, or `None` at the end.
    pub async fn next(&mut self) -> Option<String> {
        if self.ended {
            return None;
        }
        let piece = self.inner.next().await;
        self.ended = piece.is_none();
        piece
    }

    /// Reads the rest and returns the whole message, which is then part of the conversation.
    pub async fn finish(mut self) -> Result<Generation, InferenceError> {
        while self.next().await.is_some() {}
        let generation = self.inner.finish().await?;
        Ok(Generation { reasoning: self.conversation.reasoning(), ..generation })
    }
}

async fn call_tool(cx: &Context, offered: &OfferedTools, call: &ToolCall) -> Result<Value, String> {
    if let Some(tool) = offered.get(&call.name) {
        let called = cx.host().call_tool(&tool.name, &call.arguments, tool.timeout_ms).await;
        return called.map_err(|error| error.to_string());
    }
    let Some(tool) = cx.tools().iter().find(|tool| tool.name == call.name) else {
        return Err(format!("there is no tool `{}`", call.name));
    };
    cx.host().approve(&call.id).await?;
    attempt::call(cx, tool, &call.id, &call.arguments).await
}
