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

/// The outcome of a compaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compaction {
    /// Number of messages that the summary replaces; 0 if there was nothing to summarize.
    pub dropped: u32,
    /// The summary.
    pub summary: String,
}
