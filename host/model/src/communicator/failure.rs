//! The ways in which a rank can fail.

use std::time::Duration;

/// The reason why the ranks of a model could not finish a step together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RankFault {
    #[error("made no progress for {} ms while others waited for it", .deadline.as_millis())]
    Stalled { deadline: Duration },
    #[error("is at {found} where rank {other} is at {expected}; all ranks must make the same calls")]
    Disagrees { other: usize, expected: String, found: String },
    #[error("failed: {reason}")]
    Failed { reason: String },
    #[error("has terminated, but the other ranks need it")]
    Ended,
    #[error("is not one of the {ranks} ranks of the group")]
    Unknown { ranks: usize },
}
