//! Sessions of agents.

use crate::{Message, Usage, marker};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// Summary of a session.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Session {
    #[schema(inline)]
    pub object: marker::Session,
    pub id: String,
    /// Number of committed turns.
    pub turns: u64,
    pub created_at_ms: u64,
    pub updated_at_ms: u64,
}

/// Contents of a session.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SessionDetail {
    #[serde(flatten)]
    pub session: Session,
    /// Conversations ordered by name.
    pub conversations: Vec<Conversation>,
    /// The first messages, one conversation after the other, up to one page.
    pub messages: Vec<Message>,
    /// Whether there are more messages.
    pub has_more: bool,
    /// Sum over all conversations.
    pub usage: Usage,
    pub state_keys: Vec<String>,
    /// Size of the state's keys and values.
    pub state_bytes: u64,
}

/// Summary of a conversation of a session.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Conversation {
    pub name: String,
    pub model: String,
    /// Number of messages.
    pub messages: u64,
    /// Size in the store.
    pub bytes: u64,
}

/// A request to copy a session.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkSession {
    /// The id of the copy. A session with this id must not exist.
    pub session: String,
}

/// A session in a listing of the sessions of several agents.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RecentSession {
    #[schema(inline)]
    pub object: marker::Session,
    pub agent: String,
    pub id: String,
    /// Number of committed turns.
    pub turns: u64,
    pub created_at_ms: u64,
    pub updated_at_ms: u64,
    /// The place in the listing, for `before`.
    pub cursor: String,
    /// The first message in which the words were said, if the listing was asked for some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub said: Option<SaidMessage>,
}

/// A message in which the words of a search were said.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SaidMessage {
    pub conversation: String,
    /// Number of the message in its conversation.
    pub number: u64,
    pub role: String,
    /// The part of the message around the first word, on one line.
    pub excerpt: String,
}

/// A page of the sessions of all agents.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RecentSessionPage {
    #[schema(inline)]
    pub object: marker::List,
    pub data: Vec<RecentSession>,
    /// Whether the listing continues after this page.
    pub has_more: bool,
    /// The place up to which the words were searched for, if there are more sessions: the next page is `before` it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub searched_to: Option<String>,
}

/// The form of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum StateKind {
    Json,
    /// Text in UTF-8 that is not JSON.
    Text,
    Binary,
}

/// A value of a session's state.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct StateValue {
    pub key: String,
    /// Size of the value.
    pub bytes: u64,
    pub kind: StateKind,
    /// The value, if it is JSON; JSON's `null` is one.
    #[schema(required)]
    pub value: Option<Value>,
    /// The value as text, if it is text and not JSON.
    #[schema(required)]
    pub text: Option<String>,
}
