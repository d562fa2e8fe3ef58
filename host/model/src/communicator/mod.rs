//! How the ranks of a sharded model speak to each other: the few collectives that a forward pass needs.
//!
//! Invariant: a collective gives every rank the same bits, and no call waits for ever: a rank that dies, stalls or
//! disagrees is an error on all ranks. It knows rows of numbers, not what they mean.

mod local;
mod solo;
#[cfg(test)]
mod tests;
mod world;

use crate::error::ModelError;
pub(crate) use local::{Local, buffer_bytes};
pub(crate) use solo::Solo;
pub(crate) use world::World;

/// One rank's end of a group of ranks. Every rank of a group makes the same calls in the same order.
pub(crate) trait Communicator: Send + 'static {
    /// This rank's number in its group.
    fn rank(&self) -> usize;

    fn ranks(&self) -> usize;

    /// Replaces `values` by the sum of every rank's, added in the order of the ranks.
    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), ModelError>;

    /// Shows every rank's part in the order of the ranks. `total` is what all parts have together.
    fn all_gather(
        &mut self,
        part: &[f32],
        total: usize,
        see: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError>;

    /// Hands values to a rank that will receive them; waits only if it is far behind.
    fn send(&mut self, to: usize, values: &[f32]) -> Result<(), ModelError>;

    /// Waits for what a rank sends.
    fn receive(&mut self, from: usize, values: &mut [f32]) -> Result<(), ModelError>;
}

/// The two groups that a rank is in.
pub(crate) struct Links<C> {
    /// Ranks that share every weight of one pipeline stage.
    pub(crate) tensor: C,
    /// Ranks with the same part of each weight, one in every stage, in the order of the layers.
    pub(crate) pipeline: C,
}
