//! What becomes of a conversation that grows too long for the model's context.

/// What the host does when an answer would not fit into the context any more.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CompactionPolicy {
    /// The model first summarises what was said; the system message and the most recent messages stay.
    #[default]
    Auto,
    /// The generation fails with [`InferenceError::ContextOverflow`](crate::InferenceError::ContextOverflow).
    Off,
    /// As `Auto`, with this text as the summary.
    Summary(String),
}

/// How a conversation is compacted by [`Conversation::compact`](crate::Conversation::compact).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CompactOptions {
    /// Messages at the end that stay as they are; 8 without it. A tool call and its result stay or go together.
    pub keep_recent: Option<u32>,
    /// The summary; without it the model writes it, unseen by the caller.
    pub summary: Option<String>,
    /// Upper bound of the tokens of a summary by the model.
    pub max_tokens: Option<u32>,
}

/// What came of a compaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compaction {
    /// Messages that the summary stands for; 0 if there was nothing to be summarised.
    pub dropped: u32,
    /// The summary.
    pub summary: String,
}
