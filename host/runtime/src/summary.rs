//! What the host tells about its agents and their sessions.

use crate::{Limits, Outcome};
use serde_json::Value;
use skep_engine::{Usage, chat::ChatMessage};
use skep_outbound::ToolHints;

/// A deployed agent, in a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentSummary {
    pub name: String,
    /// In force.
    pub version: u64,
    /// In the agent's own words.
    pub description: String,
    /// SHA-256 of the component, in hex.
    pub digest: String,
    pub model: String,
    pub deployed_at_ms: u64,
    pub tools: Vec<String>,
    pub routes: Vec<String>,
}

/// A deployed agent with everything that its author wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentDetail {
    pub summary: AgentSummary,
    pub manifest_toml: String,
    pub tools: Vec<ToolDefinition>,
    /// Whether others may call them: the agent exports `tool-handler`.
    pub takes_tool_calls: bool,
    /// In force.
    pub limits: Limits,
}

/// A version of an agent that can be put into force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentVersion {
    /// 1 is the agent's first deployment.
    pub version: u64,
    pub is_in_force: bool,
    /// SHA-256 of the component, in hex.
    pub digest: String,
    pub deployed_at_ms: u64,
    /// Who deployed it, as the host knew them.
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
    /// How long one call may take.
    pub timeout_ms: Option<u32>,
    /// How often a call that failed is made again.
    pub retries: u32,
    /// A person decides about each call before it is made.
    pub needs_approval: bool,
}

/// A stored agent that could not be started again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedAgent {
    pub name: String,
    pub reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionSummary {
    pub id: String,
    /// Committed.
    pub turns: u64,
    pub created_at_ms: u64,
    pub updated_at_ms: u64,
}

#[derive(Clone, Debug)]
pub struct SessionDetail {
    pub summary: SessionSummary,
    /// In the order of their names.
    pub conversations: Vec<ConversationSummary>,
    /// The first messages, one conversation after the other, as many as a page has.
    pub messages: Vec<ChatMessage>,
    /// Whether there are more messages than these; [`crate::AgentHost::messages`] gives those of each conversation.
    pub has_more: bool,
    /// Sum over all conversations.
    pub usage: Usage,
    pub state_keys: Vec<String>,
    /// Keys and values.
    pub state_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConversationSummary {
    pub name: String,
    pub model: String,
    pub messages: u64,
    /// What it takes in the store.
    pub bytes: u64,
}

/// Messages of one conversation, as it was last committed.
#[derive(Clone, Debug)]
pub struct MessagePage {
    /// Of the whole conversation.
    pub total: u64,
    /// With their numbers; 1 is the conversation's first.
    pub messages: Vec<(u64, ChatMessage)>,
}

/// A turn, open or ended.
#[derive(Clone, Debug, PartialEq)]
pub struct TurnDetail {
    pub id: String,
    pub session: String,
    pub accepted_at_ms: u64,
    pub phase: TurnPhase,
}

#[derive(Clone, Debug, PartialEq)]
pub enum TurnPhase {
    /// Other turns of its session come first.
    Waiting,
    Running {
        turn: u64,
    },
    Done {
        outcome: Outcome,
        ended_at_ms: u64,
    },
    Failed {
        code: String,
        message: String,
        ended_at_ms: u64,
    },
}

/// A line that an agent logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    /// Grows, so that a reader asks for what came after the last one it saw.
    pub id: i64,
    pub agent: String,
    /// The host's id of it.
    pub session: String,
    pub turn: u64,
    pub at_ms: u64,
    pub level: String,
    pub message: String,
}
