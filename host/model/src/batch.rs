//! The input of one forward step: rows of tokens by sequence, and the KV pages that hold their keys
//! and values.
//!
//! Invariant: this is plain data. It knows nothing of requests or tensors.

/// Number of tokens in one KV page.
pub const PAGE_TOKENS: usize = 16;

/// The index of a page in the KV pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

/// The pages of layers with a window, if they have fewer than other layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowLimits {
    /// The longest window in tokens.
    pub window: usize,
    /// Maximum number of pages that keep what these layers need.
    pub pages: usize,
}

/// A change of what pages keep for layers with a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowChange {
    /// No window covers the page anymore, or it is free.
    Release(PageId),
    /// A page keeps what another one kept, which has the same tokens at the same positions.
    Move { from: PageId, to: PageId },
}

/// The rows of a sequence that produce logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsWanted {
    None,
    Last,
    /// The last N rows.
    Tail(usize),
    All,
}

/// Consecutive tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSequence {
    pub tokens: Vec<u32>,
    /// Number of tokens already in the KV cache, which is the position of `tokens[0]`.
    pub start: usize,
    /// The pages of positions `0..start + tokens.len()`.
    pub pages: Vec<PageId>,
    pub logits: LogitsWanted,
}

impl BatchSequence {
    /// Returns the number of logit rows that this sequence produces.
    pub fn logit_rows(&self) -> usize {
        match self.logits {
            LogitsWanted::None => 0,
            LogitsWanted::Last => self.tokens.len().min(1),
            LogitsWanted::Tail(rows) => self.tokens.len().min(rows),
            LogitsWanted::All => self.tokens.len(),
        }
    }
}

/// One step. Logit rows are numbered in the order of the sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    pub sequences: Vec<BatchSequence>,
}

impl Batch {
    /// Returns the number of rows that the step computes, over all sequences.
    pub fn token_count(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.tokens.len()).sum()
    }

    /// Returns the number of logit rows that the step produces, over all sequences.
    pub fn logit_rows(&self) -> usize {
        self.sequences.iter().map(BatchSequence::logit_rows).sum()
    }
}
