//! Tool calls that wait for a person's decision.

use crate::marker;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// A call that waits for a person's decision.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(bound = "")]
pub struct Approval<J = Value> {
    #[schema(inline)]
    pub object: marker::Approval,
    pub id: String,
    pub agent: String,
    pub session: String,
    pub turn_id: String,
    pub tool: String,
    #[schema(value_type = Value)]
    pub arguments: J,
    pub created_at_ms: u64,
    /// When the call is refused if nobody decides.
    pub expires_at_ms: u64,
    /// The decision that the request made. It is missing in a listing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub decision: Option<Decision>,
}

/// A decision about a call.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Decide {
    /// A request without a decision is refused with an error that lists the values.
    #[schema(required, nullable = false)]
    pub decision: Option<Decision>,
    /// Reason that is given to the agent's model.
    pub reason: Option<String>,
}

/// Approve or deny a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Decision {
    Approve,
    Deny,
}

impl Decision {
    /// Returns the word of the API for the decision.
    pub fn as_str(self) -> &'static str {
        match self {
            Decision::Approve => "approve",
            Decision::Deny => "deny",
        }
    }
}
