//! Work that a restored host holds.

use crate::marker;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The work that a restored host holds. All numbers are 0 if nothing is held.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Held {
    #[schema(inline)]
    pub object: marker::Held,
    pub is_restored: bool,
    #[schema(required)]
    pub backup_at_ms: Option<u64>,
    #[schema(required)]
    pub restored_at_ms: Option<u64>,
    pub turns: u64,
    /// Number of events in flight to sessions and webhooks.
    pub deliveries: u64,
    pub schedules: u64,
    pub batches: u64,
    /// The decision that the request made. It is missing where none was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub decision: Option<HeldDecision>,
}

/// A decision about all held work.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DecideHeld {
    /// A request without a decision is refused with an error that lists the values.
    #[schema(required, nullable = false)]
    pub decision: Option<HeldDecision>,
}

/// Resume or drop the held work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum HeldDecision {
    Resume,
    Drop,
}

impl HeldDecision {
    /// Returns the word of the API.
    pub fn as_str(self) -> &'static str {
        match self {
            HeldDecision::Resume => "resume",
            HeldDecision::Drop => "drop",
        }
    }
}
