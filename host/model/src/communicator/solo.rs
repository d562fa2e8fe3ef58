//! A group of one rank, in which every collective returns its input.

use super::{Communicator, Links};
use crate::error::{ModelError, RankFault};

/// The communicator of a model that is not sharded. It does nothing and costs nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Solo;

impl Links<Solo> {
    pub(crate) const SOLO: Links<Solo> = Links { tensor: Solo, pipeline: Solo };
}

impl Communicator for Solo {
    #[inline]
    fn rank(&self) -> usize {
        0
    }

    #[inline]
    fn ranks(&self) -> usize {
        1
    }

    #[inline]
    fn all_reduce(&mut self, _: &mut [f32]) -> Result<(), ModelError> {
        Ok(())
    }

    #[inline]
    fn all_gather(
        &mut self,
        part: &[f32],
        _: usize,
        mut see: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        see(0, part);
        Ok(())
    }

    fn send(&mut self, to: usize, _: &[f32]) -> Result<(), ModelError> {
        Err(nobody(to))
    }

    fn receive(&mut self, from: usize, _: &mut [f32]) -> Result<(), ModelError> {
        Err(nobody(from))
    }
}

fn nobody(rank: usize) -> ModelError {
    ModelError::Rank { rank, fault: RankFault::NoSuchRank { ranks: 1 } }
}
