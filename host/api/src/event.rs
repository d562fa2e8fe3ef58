//! Events, which sessions and webhooks receive.

use crate::{marker, words::words};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// An event and the state of its deliveries.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(bound = "")]
pub struct Event<J = Value> {
    #[schema(inline)]
    pub object: marker::Event,
    /// Increases with every event, so that a reader can request those before it.
    pub key: i64,
    pub id: String,
    pub source: String,
    pub topic: String,
    #[schema(value_type = Value, required)]
    pub data: Option<J>,
    pub at_ms: u64,
    pub published_at_ms: u64,
    /// Deliveries that are still being attempted.
    pub pending: u32,
    /// Deliveries that failed permanently.
    pub dead: u32,
}

/// An event to publish.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(bound = "")]
#[serde(deny_unknown_fields)]
pub struct NewEvent<J = Value> {
    pub topic: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Value, required = false)]
    pub data: Option<J>,
    /// The event's unique id. Publishing it again refers to the same event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// A time in RFC 3339; the default is now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<String>,
    /// The default is `http`. It must not start with what can be the name of another tenant and `/`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// A CloudEvent in structured JSON. Extensions are allowed and ignored.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(bound = "")]
pub struct CloudEvent<J = Value> {
    /// The version of the specification, `1.0`.
    pub specversion: String,
    pub id: String,
    pub source: String,
    /// The topic of the event.
    #[serde(rename = "type")]
    pub kind: String,
    /// A time in RFC 3339; the default is now.
    pub time: Option<String>,
    #[schema(value_type = Value, required = false)]
    pub data: Option<J>,
    /// This attribute is not supported; an event with it is refused.
    #[schema(ignore)]
    pub data_base64: Option<String>,
}

/// Result of publishing an event.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct PublishedEvent {
    #[schema(inline)]
    pub object: marker::Event,
    pub id: String,
    pub state: PublishedState,
    /// Number of sessions and webhooks that receive the event.
    pub deliveries: u64,
}

words! {
    /// Whether an event is new.
    pub enum PublishedState {
        Accepted = "accepted",
        /// The same event was published before, and nothing was done.
        Known = "known",
    }
}
