//! What the host tells about events.

use crate::{Json, RuntimeError};
use skep_store::EventRow;

/// An event, and how its deliveries stand.
#[derive(Clone, Debug, PartialEq)]
pub struct EventSummary {
    /// Grows, so that a reader asks for those before.
    pub key: i64,
    pub id: String,
    pub source: String,
    pub topic: String,
    pub data: Option<Json>,
    pub at_ms: u64,
    pub published_at_ms: u64,
    /// Deliveries that are still tried.
    pub pending: u32,
    /// Deliveries that failed for good.
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
