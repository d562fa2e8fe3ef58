//! The identity of a sequence within its replica.

/// Sequence number in the order of submission, so a greater id is a younger sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SequenceId(pub u64);
