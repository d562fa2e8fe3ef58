//! Timelines of turns.

use crate::{LimitStatus, Usage, marker};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The timeline of a turn: its host calls and their times.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Timeline {
    #[schema(inline)]
    pub object: marker::Timeline,
    pub turn_id: String,
    pub session: String,
    /// Number of the turn in its session, if it has one.
    #[schema(required)]
    pub turn: Option<u64>,
    /// `waiting`, `running`, `done` or `failed`.
    pub state: String,
    pub accepted_at_ms: u64,
    /// `null` while the turn waits for other turns of its session.
    #[schema(required)]
    pub started_at_ms: Option<u64>,
    #[schema(required)]
    pub ended_at_ms: Option<u64>,
    /// Time from the start until the guest was called, in microseconds.
    #[schema(required)]
    pub called_us: Option<u64>,
    /// Time from the start until the guest returned, in microseconds; the commit follows.
    #[schema(required)]
    pub returned_us: Option<u64>,
    /// Time that the commit took, in microseconds; `null` before the commit, and for all but the latest 1024 turns of this process.
    #[schema(required)]
    pub commit_us: Option<u64>,
    /// The use of each limit of the turn, rounded up to the unit in the limit's name. A running turn shows its use so
    /// far; the list is empty before a turn starts. A turn that continues after an approval counts from zero, except
    /// for `turn_ms`.
    #[serde(default)]
    #[schema(required)]
    pub limits: Vec<LimitStatus>,
    /// Number of calls that are left out, because there were too many.
    pub left_out: u32,
    pub calls: Vec<TimelineCall>,
}

/// A host call of a turn. Times are in microseconds.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TimelineCall {
    /// Number of the call in the turn.
    pub call: u32,
    /// Name of the call, such as `generate`; `append-tool-result` is a tool that the agent ran itself.
    pub name: String,
    /// Time from the start of the turn.
    pub began_us: u64,
    /// `null` if the call still runs, or had not ended when the turn did.
    #[schema(required)]
    pub took_us: Option<u64>,
    /// Whether the journal answered the call, because it was made before a restart.
    pub repeated: bool,
    /// The tool that was called, or the origin that was fetched from.
    #[schema(required)]
    pub label: Option<String>,
    #[schema(required)]
    pub model: Option<String>,
    /// Tokens of a generation.
    #[schema(required)]
    pub usage: Option<Usage>,
    /// Time that a generation waited in the engine's queue; `null` while it waits.
    #[schema(required)]
    pub queue_us: Option<u64>,
    /// Time from the beginning of a generation to its first token; `null` while there is none.
    #[schema(required)]
    pub first_token_us: Option<u64>,
    /// Whether a tool failed.
    pub failed: bool,
}

/// A turn in a listing of a session's turns.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TurnSummary {
    #[schema(inline)]
    pub object: marker::Turn,
    pub turn_id: String,
    /// Number of the turn in its session, if it has one.
    #[schema(required)]
    pub turn: Option<u64>,
    /// `waiting`, `running`, `done` or `failed`.
    pub state: String,
    pub accepted_at_ms: u64,
    #[schema(required)]
    pub ended_at_ms: Option<u64>,
    /// Tokens of a turn that has completed.
    #[schema(required)]
    pub usage: Option<Usage>,
    /// The code of the error of a failed turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub code: Option<String>,
}
