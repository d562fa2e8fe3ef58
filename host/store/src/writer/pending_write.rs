//! A write that waits for its transaction.

use super::{Joint, JointKind, Work, Working};
use crate::{StoreError, sql::Connection};
use std::any::Any;
use tokio::sync::oneshot;

/// A write with its data and its caller.
pub(super) trait AnyWrite: Any + Send {
    /// Returns the kind of a write that can be made together with others of its kind.
    fn joint_kind(&self) -> Option<JointKind>;
    /// Returns the size of a write that can be made together with others.
    fn bytes(&self) -> usize;
    /// Runs the statements that make this write and others of its kind. Those that have no result then are left.
    fn run_jointly<'c>(
        &'c mut self,
        others: &'c mut [Box<dyn AnyWrite>],
        connection: &'c mut Connection,
    ) -> Working<'c, ()>;
    fn has_result(&self) -> bool;
    /// Runs the statements. An error rolls the transaction back; a refusal does not count as an error.
    fn run<'c>(&'c mut self, connection: &'c mut Connection) -> Working<'c, ()>;
    /// Returns whether the write changed nothing because the state of the database refuses it.
    fn is_refused(&self) -> bool;
    /// Returns whether the write changes rows that other hosts may change at the same time.
    fn is_common(&self) -> bool;
    /// Reports the outcome. The write is made even if its caller has stopped waiting.
    fn report(self: Box<Self>, committed: Result<(), StoreError>);
}

pub(super) struct PendingWrite<D, T> {
    pub(super) data: D,
    pub(super) work: Work<D, T>,
    pub(super) joint: Option<Joint<D, T>>,
    pub(super) is_common: bool,
    /// The result of the statements, once they have run.
    pub(super) result: Option<Result<T, StoreError>>,
    pub(super) reply: oneshot::Sender<Result<T, StoreError>>,
}

impl<D: Send + Sync + 'static, T: Send + 'static> AnyWrite for PendingWrite<D, T> {
    fn joint_kind(&self) -> Option<JointKind> {
        self.joint.as_ref().map(|joint| joint.kind)
    }

    fn bytes(&self) -> usize {
        self.joint.as_ref().map_or(0, |joint| joint.bytes)
    }

    fn run_jointly<'c>(
        &'c mut self,
        others: &'c mut [Box<dyn AnyWrite>],
        connection: &'c mut Connection,
    ) -> Working<'c, ()> {
        Box::pin(async move {
            let Some(joint) = self.joint.as_ref().map(|joint| joint.work) else { return Ok(()) };
            let others = others.iter_mut().filter_map(|other| {
                let other: &mut dyn Any = &mut **other;
                other.downcast_mut::<Self>()
            });
            let mut writes: Vec<&mut Self> = std::iter::once(self).chain(others).collect();
            let data: Vec<&D> = writes.iter().map(|write| &write.data).collect();
            let results = joint(connection, &data).await?;
            for (write, result) in writes.iter_mut().zip(results) {
                write.result = result.map(Ok);
            }
            Ok(())
        })
    }

    fn has_result(&self) -> bool {
        self.result.is_some()
    }

    fn run<'c>(&'c mut self, connection: &'c mut Connection) -> Working<'c, ()> {
        Box::pin(async move {
            match (self.work)(connection, &self.data).await {
                Err(error) if !error.is_refusal() => Err(error),
                result => {
                    self.result = Some(result);
                    Ok(())
                }
            }
        })
    }

    fn is_refused(&self) -> bool {
        matches!(self.result, Some(Err(_)))
    }

    fn is_common(&self) -> bool {
        self.is_common
    }

    fn report(self: Box<Self>, committed: Result<(), StoreError>) {
        let PendingWrite { result, reply, .. } = *self;
        let _ = reply.send(committed.and_then(|()| result.unwrap_or(Err(StoreError::Closed))));
    }
}
