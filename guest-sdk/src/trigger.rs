//! Triggers of a turn other than a message: a schedule that is due, or an event.

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::AgentError;

/// A due time of a schedule. The function of `#[agent(on_alarm = …)]` receives it at least once for each due
/// time.
#[derive(Debug, Clone, PartialEq)]
pub struct Alarm {
    /// The id of the schedule.
    pub id: String,
    /// The name of the schedule.
    pub name: String,
    /// JSON that was set with the schedule.
    pub data: Option<Value>,
    /// The id of the session.
    pub session: String,
    /// 1 for the session's first turn.
    pub turn: u64,
    /// The time at which the alarm was due, in milliseconds since 1970-01-01 UTC.
    pub due_at_ms: u64,
    /// The time at which the host started the alarm, in milliseconds since 1970-01-01 UTC.
    pub received_at_ms: u64,
    /// 1 for the first attempt.
    pub attempt: u32,
    /// Number of earlier due times of the schedule that passed while the host could not call the agent.
    pub missed: u32,
}

/// An event. The function of `#[agent(on_event = …)]` receives it at least once.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The id of the event. A redelivery of the same event has the same id.
    pub id: String,
    /// The topic, such as `order.paid`.
    pub topic: String,
    /// The payload, as JSON.
    pub data: Option<Value>,
    /// The id of the session.
    pub session: String,
    /// 1 for the session's first turn.
    pub turn: u64,
    /// The time at which the event happened, in milliseconds since 1970-01-01 UTC.
    pub at_ms: u64,
    /// The time at which the host started the turn, in milliseconds since 1970-01-01 UTC.
    pub received_at_ms: u64,
    /// 1 for the first attempt.
    pub attempt: u32,
}

impl Alarm {
    /// Returns the data as a `T`. If the data is absent or does not fit, the error is an
    /// [`AgentError::InvalidMessage`].
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, AgentError> {
        decode("alarm", self.data.as_ref())
    }
}

impl Event {
    /// Returns the data as a `T`. If the data is absent or does not fit, the error is an
    /// [`AgentError::InvalidMessage`].
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, AgentError> {
        decode("event", self.data.as_ref())
    }
}

fn decode<T: DeserializeOwned>(kind: &str, data: Option<&Value>) -> Result<T, AgentError> {
    let data = data.ok_or_else(|| AgentError::InvalidMessage(format!("the {kind} has no data")))?;
    T::deserialize(data).map_err(|error| {
        AgentError::InvalidMessage(format!("the data of the {kind} does not fit the expected type: {error}"))
    })
}
