//! Settings for conversations that grow too long for the model's context.

/// The policy for an answer that would no longer fit into the context.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CompactionPolicy {
    /// The model first summarizes the conversation. The system message and the most recent messages stay.
    #[default]
    Auto,
    /// The generation fails with [`InferenceError::ContextOverflow`](crate::InferenceError::ContextOverflow).
    Off,
    /// Same as `Auto`, with this text as the summary.
    Summary(String),
}

/// Options of [`Conversation::compact`](crate::Conversation::compact).
///
/// ```
/// # use skep_sdk::{AgentError, CompactOptions, Context, Message, Reply, agent};
/// /// Forgets everything but the last two messages.
/// #[agent]
/// async fn forgetful(cx: &mut Context, _message: Message) -> Result<Reply, AgentError> {
///     let options = CompactOptions::new().with_keep_recent(2).with_summary("We talked.");
///     let compaction = cx.conversation().compact(options).await?;
///     Ok(Reply::text(format!("{} messages are summarized", compaction.dropped)))
/// }
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CompactOptions {
    /// Number of messages at the end that stay unchanged; 8 if not set. A tool call and its result are kept
    /// or dropped together.
    pub keep_recent: Option<u32>,
    /// The summary. If not set, the model writes it, invisibly to the caller.
    pub summary: Option<String>,
    /// Maximum number of tokens of a summary that the model writes.
    pub max_tokens: Option<u32>,
}

impl CompactOptions {
    /// Creates options that keep 8 messages and let the model write the summary.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of messages at the end that stay unchanged.
    pub fn with_keep_recent(mut self, messages: u32) -> Self {
        self.keep_recent = Some(messages);
        self
    }

    /// Sets the summary, so that the model does not write it.
    pub fn with_summary(mut self, summary: impl Into<String>) -> Self {
        self.summary = Some(summary.into());
        self
    }

    /// Sets the maximum number of tokens of a summary that the model writes.
    pub fn with_max_tokens(mut self, tokens: u32) -> Self {
        self.max_tokens = Some(tokens);
        self
    }
}

/// The outcome of a compaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compaction {
    /// Number of messages that the summary replaces; 0 if there was nothing to summarize.
    pub dropped: u32,
    /// The summary.
    pub summary: String,
}
