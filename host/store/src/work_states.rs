//! The states of items of batches and of responses, as rows have them.

pub(crate) const WAITING: i64 = 0;
pub(crate) const RUNNING: i64 = 1;
pub(crate) const DONE: i64 = 2;
pub(crate) const FAILED: i64 = 3;
pub(crate) const CANCELLED: i64 = 4;
