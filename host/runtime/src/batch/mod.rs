//! Batches: inference and turns that wait, durably, until nobody who waits for an answer is held up by them.
//!
//! The way of an item: [`AgentHost::queue_batch`] stores it → `queue` takes it when its model has room → `work` runs it
//! in the background, where interactive work goes first → its result is stored, once → the client comes for it
//! ([`AgentHost::batch_results`]). What runs when the process ends is run again by the next one.
//!
//! [`AgentHost::queue_batch`]: crate::AgentHost::queue_batch
//! [`AgentHost::batch_results`]: crate::AgentHost::batch_results

mod options;
mod puller;
mod queue;
mod stored;
mod told;
mod work;

pub use options::BatchOptions;
pub(crate) use queue::BatchQueue;
pub use skep_store::ItemCounts;
pub(crate) use work::batch_session_pattern;

use crate::Json;
use serde::{Deserialize, Serialize};
use skep_engine::{
    Usage,
    chat::{ChatFinish, ChatMessage, ChatOptions, ToolCall},
};

/// How a model is called that is an agent.
pub const AGENT_MODEL: &str = "agent:";

/// Requests that may wait.
#[derive(Clone, Debug)]
pub struct NewBatch {
    pub principal: String,
    /// A model's name, or [`AGENT_MODEL`] and an agent's.
    pub model: String,
    pub items: Vec<BatchItem>,
}

#[derive(Clone, Debug)]
pub struct BatchItem {
    pub request: BatchRequest,
    /// How its client wants the answer told. Kept with the answer; nothing here reads it.
    pub form: String,
    /// The client's own name for it.
    pub reference: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum BatchRequest {
    Chat {
        messages: Vec<ChatMessage>,
        options: Box<ChatOptions>,
    },
    /// A message to an agent, in a session of its own.
    Turn {
        text: String,
        data: Option<Json>,
    },
    /// As a fault in the host would have it, until the item has failed so often.
    #[cfg(test)]
    Panics {
        times: u32,
    },
}

/// How a batch stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchStatus {
    pub id: String,
    pub model: String,
    pub created_at_ms: u64,
    pub phase: BatchPhase,
    pub items: ItemCounts,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchPhase {
    /// None of its items was begun.
    Queued,
    Running,
    /// No item is left.
    Ended {
        at_ms: u64,
        cancelled: bool,
    },
}

/// A batch that has ended.
#[derive(Clone, Debug)]
pub struct BatchResults {
    pub status: BatchStatus,
    /// In the order in which they were sent.
    pub items: Vec<BatchResult>,
}

#[derive(Clone, Debug)]
pub struct BatchResult {
    pub index: u64,
    pub reference: Option<String>,
    pub outcome: BatchOutcome,
}

#[derive(Clone, Debug)]
pub enum BatchOutcome {
    Done(Box<BatchAnswer>),
    /// It was given up.
    Failed {
        code: &'static str,
        message: String,
    },
    Cancelled,
}

/// The answer to an item.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BatchAnswer {
    /// As it was sent.
    pub form: String,
    pub text: String,
    /// Of an agent's reply.
    pub data: Option<Json>,
    pub tool_calls: Vec<ToolCall>,
    pub finish: ChatFinish,
    /// What must be whole is not.
    pub cut_off: bool,
    #[serde(with = "crate::invocation::StoredUsage")]
    pub usage: Usage,
}
