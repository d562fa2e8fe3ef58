//! Summaries of events for the operator.

use crate::{Json, RuntimeError};
use skep_store::EventRow;

/// An event and the state of its deliveries.
#[derive(Clone, Debug, PartialEq)]
pub struct EventSummary {
    /// Increases with every event, so that a reader can request those before it.
    pub key: i64,
    pub id: String,
    pub source: String,
    pub topic: String,
    pub data: Option<Json>,
    pub at_ms: u64,
    pub published_at_ms: u64,
    /// Deliveries that are still being attempted.
    pub pending: u32,
    /// Deliveries that failed permanently.
    pub dead: u32,
}

impl EventSummary {
    pub(crate) fn of(row: EventRow) -> Result<Self, RuntimeError> {
        let EventRow { key, source, id, topic, data, at_ms, published_at_ms, pending, dead, .. } = row;
        let data = data.map(|data| serde_json::from_slice(&data)).transpose();
        let data = data.map_err(|error| RuntimeError::Internal {
            message: format!("the data of event {id} is unreadable: {error}"),
        })?;
        Ok(EventSummary { key, id, source, topic, data, at_ms, published_at_ms, pending, dead })
    }
}
