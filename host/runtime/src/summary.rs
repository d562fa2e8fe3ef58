//! Descriptions of agents, sessions and turns for users of the host.

use crate::{Json, Limits, McpToml, Outcome};
use serde::Deserialize;
use serde_json::Value;
use skep_engine::{Usage, chat::ChatMessage};
use skep_outbound::ToolHints;

/// Summary of a deployed agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentSummary {
    pub name: String,
    /// The active version.
    pub version: u64,
    /// The agent's own description.
    pub description: String,
    /// SHA-256 of the component, in hex.
    pub digest: String,
    pub model: String,
    pub deployed_at_ms: u64,
    pub tools: Vec<String>,
    pub routes: Vec<String>,
}

/// A deployed agent with everything its author specified.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentDetail {
    pub summary: AgentSummary,
    pub manifest_toml: String,
    pub tools: Vec<ToolDefinition>,
    /// Whether others may call the agent's tools, because the agent exports `tool-handler`.
    pub takes_tool_calls: bool,
    /// The prompts and resources for clients of the Model Context Protocol.
    pub mcp: McpToml,
    /// The limits in effect.
    pub limits: Limits,
}

/// A version of an agent that can be activated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentVersion {
    /// Number of the version; 1 is the agent's first deployment.
    pub version: u64,
    pub is_active: bool,
    /// SHA-256 of the component, in hex.
    pub digest: String,
    pub deployed_at_ms: u64,
    /// The identity of whoever deployed the version, as known to the host.
    pub deployed_by: String,
    pub manifest_toml: String,
}

/// A tool that an agent offers to its model.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolDefinition {
    pub name: String,
    pub description: String,
    pub input_schema: Value,
    pub output_schema: Option<Value>,
    pub hints: ToolHints,
    /// Maximum duration of one call.
    pub timeout_ms: Option<u32>,
    /// Number of times that a failed call is retried.
    pub retries: u32,
    /// Whether a person decides on each call before it is made.
    pub needs_approval: bool,
}

/// A stored agent that could not be restarted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedAgent {
    pub name: String,
    pub reason: String,
}

/// A session without its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionSummary {
    /// The session's id, without its tenant.
    pub id: String,
    /// Number of committed turns.
    pub turns: u64,
    pub created_at_ms: u64,
    pub updated_at_ms: u64,
}

/// A session with the beginning of its contents, as last committed.
#[derive(Clone, Debug)]
pub struct SessionDetail {
    pub summary: SessionSummary,
    /// Conversations ordered by name.
    pub conversations: Vec<ConversationSummary>,
    /// The first messages, one conversation after the other, up to one page.
    pub messages: Vec<ChatMessage>,
    /// Whether there are more messages. [`crate::AgentHost::messages`] returns those of each
    /// conversation.
    pub has_more: bool,
    /// Sum over all conversations.
    pub usage: Usage,
    /// Keys of the session's state.
    pub state_keys: Vec<String>,
    /// Size of keys and values.
    pub state_bytes: u64,
}

/// A conversation without its messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConversationSummary {
    pub name: String,
    /// Name of the conversation's model.
    pub model: String,
    /// Number of messages.
    pub messages: u64,
    /// Size in the store.
    pub bytes: u64,
}

/// Messages of one conversation, as last committed.
#[derive(Clone, Debug)]
pub struct MessagePage {
    /// Number of messages in the whole conversation.
    pub total: u64,
    /// Messages with their numbers, starting at 1 for the first message of the conversation.
    pub messages: Vec<(u64, ChatMessage)>,
    /// Name of the conversation's model.
    pub model: String,
}

/// A turn, open or ended.
#[derive(Clone, Debug, PartialEq)]
pub struct TurnDetail {
    pub id: String,
    pub session: String,
    pub accepted_at_ms: u64,
    /// The message of the turn. Listings and timelines leave it out.
    pub message: Option<TurnMessage>,
    pub phase: TurnPhase,
}

/// The message of a turn.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TurnMessage {
    pub text: String,
    pub data: Option<Json>,
}

/// The progress of a turn.
#[derive(Clone, Debug, PartialEq)]
pub enum TurnPhase {
    /// The turn waits for other turns of its session.
    Waiting,
    /// The turn runs as the session's turn with this number.
    Running { turn: u64 },
    /// The turn was committed.
    Done { outcome: Outcome, ended_at_ms: u64 },
    /// The turn failed; nothing of it was committed.
    Failed { code: String, message: String, ended_at_ms: u64 },
}

/// A line logged by an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    /// Increases with every line, so that a reader can request what follows the last line it saw.
    pub id: i64,
    pub agent: String,
    /// The host's id of the session.
    pub session: String,
    pub turn: u64,
    pub at_ms: u64,
    pub level: String,
    pub message: String,
}
