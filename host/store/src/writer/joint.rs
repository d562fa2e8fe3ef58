//! Writes that are made together: each statement of PostgreSQL is a round trip, so what most turns write, one statement writes for
//! many of them.
//!
//! Invariant: a write that a statement leaves, because it is a special case, is made alone after the others of its kind, so its
//! outcome is the one that it would have had by itself.

use super::{Working, pending_write::AnyWrite};
use crate::{
    StoreError,
    faults::{Faults, Moment},
    sql::{Connection, Dialect},
};
use std::{
    collections::VecDeque,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    task::Poll,
};

/// Maximum number of bytes of writes that are made together, so that their transaction does not last long.
const MAX_JOINT_BYTES: usize = 4 << 20;

/// The statements that make several writes of one kind. The result is `None` for those that it leaves.
pub(crate) type JointWork<D, T> = for<'c> fn(&'c mut Connection, &'c [&'c D]) -> Working<'c, Vec<Option<T>>>;

/// The way in which a write is made together with others of its kind.
pub(crate) struct Joint<D, T> {
    pub(crate) kind: JointKind,
    /// Size of what is written, without small columns.
    pub(crate) bytes: usize,
    pub(crate) work: JointWork<D, T>,
}

/// The kinds of writes that are made together, in the order in which a turn makes them, each of which needs the one before.
/// Writes of different turns can be made in any order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum JointKind {
    /// Messages that are accepted.
    Messages,
    /// Records of journals.
    Records,
    /// Turns that are committed.
    Commits,
}

/// Returns a write with the joint ones that follow it in the queue, sorted by their kinds.
pub(super) fn with_followers(
    write: Box<dyn AnyWrite>,
    waiting: &mut VecDeque<Box<dyn AnyWrite>>,
) -> Vec<Box<dyn AnyWrite>> {
    let mut bytes = write.bytes();
    let mut writes = vec![write];
    while bytes < MAX_JOINT_BYTES
        && let Some(next) = waiting.pop_front_if(|next| next.joint_kind().is_some())
    {
        bytes += next.bytes();
        writes.push(next);
    }
    writes.sort_by_key(|write| write.joint_kind());
    writes
}

/// Runs the statements of one write, or of joint ones, which are sorted by their kinds.
pub(super) async fn make(
    faults: &Faults,
    connection: &mut Connection,
    writes: &mut [Box<dyn AnyWrite>],
) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("committed a group of writes");
    for alike in writes.chunk_by_mut(|a, b| a.joint_kind() == b.joint_kind()) {
        for _ in 0..alike.len() {
            faults.meet(Moment::Write, connection).await.map_err(failed())?;
        }
        let is_joint = connection.dialect() == Dialect::Postgres && alike[0].joint_kind().is_some();
        if let (true, Some((first, others))) = (is_joint, alike.split_first_mut()) {
            caught(first.run_jointly(others, connection)).await?;
        }
        for write in alike.iter_mut().filter(|write| !is_joint || !write.has_result()) {
            caught(write.run(connection)).await?;
        }
    }
    Ok(())
}

/// Runs a write. A panic becomes an error, and does not terminate the task that writes for everyone.
async fn caught<T>(mut work: Working<'_, T>) -> Result<T, StoreError> {
    poll_fn(|task| {
        let polled = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(task)));
        polled.unwrap_or(Poll::Ready(Err(StoreError::Panicked)))
    })
    .await
}
