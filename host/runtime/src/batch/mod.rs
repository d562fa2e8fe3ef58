//! Asynchronous batches of inference requests and agent turns, which are durable and yield to
//! interactive work.
//!
//! An item takes these steps:
//!
//! 1. [`AgentHost::queue_batch`] stores it.
//! 2. `puller` takes it when its model has room.
//! 3. `work` runs it at background priority, after interactive work.
//! 4. Its result is stored once.
//! 5. The client fetches the result ([`AgentHost::batch_results`]).
//!
//! Items that run when the process terminates are rerun by the next one.
//!
//! [`AgentHost::queue_batch`]: crate::AgentHost::queue_batch
//! [`AgentHost::batch_results`]: crate::AgentHost::batch_results

mod announcement;
mod answer;
mod choices;
mod live;
mod puller;
mod queue;
pub(crate) mod response;
mod stored;
mod work;

pub use answer::{BatchAnswer, ScoredToken};
pub(crate) use live::LiveAnswers;
pub use live::{LiveAnswer, PartialAnswer};
pub(crate) use queue::{BatchQueue, RESPONSE_PREFIX};
pub use skep_store::ItemCounts;
pub(crate) use work::batch_session_pattern;

use crate::{
    Clock, Compute, Json, KeyRing, NewResponse, RequestLog, ResponseOptions, deployment::Deployments,
    event::Outbox, models::GrantedModels, shutdown::Shutdown, tenancy::Tenancy, token_budget::TokenBudgets,
    use_queue::UseQueue,
};
use serde::{Deserialize, Serialize};
use skep_engine::{
    ModelSet,
    chat::{ChatMessage, ChatOptions},
};
use skep_store::Store;
use std::{sync::Arc, time::Duration};

/// The parts of the host that batches use.
pub(crate) struct Context {
    pub(crate) store: Store,
    pub(crate) clock: Clock,
    pub(crate) shutdown: Shutdown,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) tenancy: Tenancy,
    pub(crate) models: ModelSet,
    pub(crate) granted: GrantedModels,
    pub(crate) keys: KeyRing,
    pub(crate) tokens: TokenBudgets,
    pub(crate) uses: UseQueue,
    pub(crate) compute: Arc<Compute>,
    pub(crate) deployments: Arc<Deployments>,
    pub(crate) requests: RequestLog,
    pub(crate) live: LiveAnswers,
    pub(crate) responses: ResponseOptions,
}

/// Prefix of a model name that refers to an agent.
pub const AGENT_MODEL: &str = "agent:";

/// Requests to be processed asynchronously.
#[derive(Clone, Debug)]
pub struct NewBatch {
    pub principal: String,
    /// Id of the API key that sent the requests, for usage reports.
    pub key: Option<String>,
    /// A model's name, or [`AGENT_MODEL`] followed by an agent's name.
    pub model: String,
    pub items: Vec<BatchItem>,
    pub terms: BatchTerms,
}

/// The part of a batch that its client's API adds.
#[derive(Clone, Debug, Default)]
pub struct BatchTerms {
    /// A JSON object, which is stored with the batch and not interpreted here. Only a batch with details may be empty.
    pub details: Option<String>,
    /// Maximum time from now to the end of the batch. Items that have not finished by then are cancelled.
    pub window: Option<Duration>,
    /// Time for which the batch is kept after its end, at most [`BatchOptions::file_retention`]; without it,
    /// [`BatchOptions::retention`] applies.
    ///
    /// [`BatchOptions::file_retention`]: crate::BatchOptions::file_retention
    /// [`BatchOptions::retention`]: crate::BatchOptions::retention
    pub keep: Option<Duration>,
}

/// A request of a new batch.
#[derive(Clone, Debug)]
pub struct BatchItem {
    pub request: BatchRequest,
    /// The response format requested by the client. It is stored with the answer and not
    /// interpreted here.
    pub form: String,
    /// The response to store with the answer. Its turn is set when there is one.
    pub keep: Option<NewResponse>,
    /// The client's name for the item.
    pub reference: Option<String>,
}

/// The work of one item.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum BatchRequest {
    /// A conversation to be answered.
    Chat {
        messages: Vec<ChatMessage>,
        options: Box<ChatOptions>,
        /// Number of answers. Requests stored by earlier versions lack it.
        #[serde(default = "one", skip_serializing_if = "is_one")]
        choices: u32,
    },
    /// Texts to be continued without a template.
    Texts {
        prompts: Vec<BatchPrompt>,
        /// The format of the texts is `output`.
        options: Box<ChatOptions>,
        /// Number of continuations of each prompt.
        choices: u32,
        /// Whether each answer begins with its prompt.
        echo: bool,
    },
    /// A message to an agent, in a new session.
    Turn { text: String, data: Option<Json> },
    /// Panics until the item has failed this many times, to simulate a bug in the host.
    #[cfg(test)]
    Panics { times: u32 },
}

/// A text to be continued.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum BatchPrompt {
    Text(String),
    /// Tokens of a model of this process.
    Ids(Vec<u32>),
}

fn one() -> u32 {
    1
}

fn is_one(number: &u32) -> bool {
    *number == 1
}

impl BatchRequest {
    /// Returns the session that the client has named.
    fn session(&self) -> Option<&str> {
        match self {
            BatchRequest::Chat { options, .. } | BatchRequest::Texts { options, .. } => {
                options.affinity.session.as_deref()
            }
            _ => None,
        }
    }
}

/// The state of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchStatus {
    pub id: String,
    pub model: String,
    pub created_at_ms: u64,
    pub started_at_ms: Option<u64>,
    /// Time at which the unfinished items are cancelled.
    pub expires_at_ms: Option<u64>,
    /// Time at which the batch is deleted, once it has ended.
    pub kept_until_ms: Option<u64>,
    pub phase: BatchPhase,
    /// Whether the batch is cancelled, although items may still be running.
    pub cancelled: bool,
    /// Whether it was cancelled because its time was over.
    pub expired: bool,
    /// The JSON object of the client's API.
    pub details: Option<String>,
    pub items: ItemCounts,
}

/// The progress of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchPhase {
    /// None of the items has been started.
    Queued,
    /// Some items have been started, and not all have finished.
    Running,
    /// All items have finished.
    Ended { at_ms: u64, cancelled: bool },
}

/// A batch that has ended.
#[derive(Clone, Debug)]
pub struct BatchResults {
    pub status: BatchStatus,
    /// Results in the order of the requests.
    pub items: Vec<BatchResult>,
}

/// The result of one item.
#[derive(Clone, Debug)]
pub struct BatchResult {
    /// Position of the request in its batch, starting at 0.
    pub index: u64,
    /// The client's name for the item.
    pub reference: Option<String>,
    pub outcome: BatchOutcome,
}

/// The end of an item.
#[derive(Clone, Debug)]
pub enum BatchOutcome {
    /// The item has an answer.
    Done(Box<BatchAnswer>),
    /// The item failed permanently.
    Failed { code: &'static str, message: String },
    /// The item was cancelled before it had an answer.
    Cancelled,
}
