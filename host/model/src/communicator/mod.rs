//! Communication between the ranks of a sharded model: the few collectives that a forward pass needs.
//!
//! Invariant: a collective gives every rank the same bits, and no call waits forever. A rank that dies, stalls or
//! makes a different call causes an error on all ranks. This module sees rows of numbers and does not know what
//! they mean.

mod local;
mod solo;
#[cfg(test)]
mod tests;
mod world;

use crate::error::ModelError;
pub(crate) use local::{Local, buffer_bytes};
pub(crate) use solo::Solo;
pub(crate) use world::World;

/// One rank's endpoint in a group of ranks. Every rank of a group makes the same calls in the same order.
pub(crate) trait Communicator: Send + 'static {
    /// Returns this rank's number in its group.
    fn rank(&self) -> usize;

    fn ranks(&self) -> usize;

    /// Replaces `values` with the sum over all ranks, added in the order of the ranks.
    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), ModelError>;

    /// Passes every rank's part to `see`, in the order of the ranks. `total` is the length of all parts together.
    fn all_gather(
        &mut self,
        part: &[f32],
        total: usize,
        see: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError>;

    /// Sends values to a rank that will receive them. Waits only if the receiver is far behind.
    fn send(&mut self, to: usize, values: &[f32]) -> Result<(), ModelError>;

    /// Waits for the values that a rank sends.
    fn receive(&mut self, from: usize, values: &mut [f32]) -> Result<(), ModelError>;
}

/// The two groups that a rank belongs to.
pub(crate) struct Links<C> {
    /// The ranks that share every weight of one pipeline stage.
    pub(crate) tensor: C,
    /// The ranks with the same part of each weight, one per stage, in the order of the layers.
    pub(crate) pipeline: C,
}
