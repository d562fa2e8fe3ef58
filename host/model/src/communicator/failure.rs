//! What can become of a rank.

use std::time::Duration;

/// Why the ranks of a model could not finish a step together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RankFault {
    #[error("made no progress for {} ms while others waited for it", .deadline.as_millis())]
    Stalled { deadline: Duration },
    #[error("is at {found} where rank {other} is at {expected}; all ranks must make the same calls")]
    Disagrees { other: usize, expected: String, found: String },
    #[error("failed: {reason}")]
    Failed { reason: String },
    #[error("has ended, and the others need it")]
    Ended,
    #[error("is not one of the {ranks} ranks of the group")]
    Unknown { ranks: usize },
}
