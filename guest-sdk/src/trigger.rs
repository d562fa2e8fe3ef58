//! What begins a turn beside a message: a schedule that is due, or an event.

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::AgentError;

/// A schedule of the session that is due. The function of `#[agent(on_alarm = …)]` gets it, at least once for each time.
#[derive(Debug, Clone, PartialEq)]
pub struct Alarm {
    /// The schedule's id.
    pub id: String,
    /// The schedule's name.
    pub name: String,
    /// JSON that was set with it.
    pub data: Option<Value>,
    /// The session it is for.
    pub session: String,
    /// 1 for the session's first turn.
    pub turn: u64,
    /// When it was due, in milliseconds since 1970-01-01 UTC.
    pub due_at_ms: u64,
    /// When the host began with it.
    pub received_at_ms: u64,
    /// 1 for the first try.
    pub attempt: u32,
    /// How many earlier times of the schedule passed while nobody was there.
    pub missed: u32,
}

/// Something that happened. The function of `#[agent(on_event = …)]` gets it, at least once.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The same when it is delivered again.
    pub id: String,
    /// Such as `order.paid`.
    pub topic: String,
    /// JSON.
    pub data: Option<Value>,
    /// The session it is for.
    pub session: String,
    /// 1 for the session's first turn.
    pub turn: u64,
    /// When it happened, in milliseconds since 1970-01-01 UTC.
    pub at_ms: u64,
    /// When the host began with it.
    pub received_at_ms: u64,
    /// 1 for the first try.
    pub attempt: u32,
}

impl Alarm {
    /// The data as a `T`. Absent or unfitting data is an [`AgentError::InvalidMessage`].
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, AgentError> {
        decode("alarm", self.data.as_ref())
    }
}

impl Event {
    /// The data as a `T`. Absent or unfitting data is an [`AgentError::InvalidMessage`].
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, AgentError> {
        decode("event", self.data.as_ref())
    }
}

fn decode<T: DeserializeOwned>(kind: &str, data: Option<&Value>) -> Result<T, AgentError> {
    let data = data.ok_or_else(|| AgentError::InvalidMessage(format!("the {kind} has no data")))?;
    T::deserialize(data)
        .map_err(|error| AgentError::InvalidMessage(format!("the data of the {kind} does not fit: {error}")))
}
