//! The recorded steps of an executor, one recording for each rank and shape.

use std::collections::{HashMap, HashSet};

use skep_kernels::cuda::device::Recording;

use super::CudaExecutor;
use super::launching::exit;
use super::rank::{Peers, Rank};
use super::step::{DecodeShape, Step};
use crate::error::ModelError;

/// The recorded steps of an executor.
pub(super) struct Recordings {
    /// The recordings of every shape, ordered by stage and rank.
    pub(super) made: HashMap<DecodeShape, Vec<Vec<Recording>>>,
    /// Shapes of the steps that have been launched.
    pub(super) launched: HashSet<DecodeShape>,
    /// Maximum number of shapes to record. Steps of other shapes are enqueued launch by launch.
    pub(super) max_shapes: usize,
}

impl CudaExecutor {
    /// Records a step whose shape has been launched before. Everything that the shape needs has then been planned and
    /// loaded.
    pub(super) fn record(&mut self, step: &Step) {
        let Some(shape) = step.shape.filter(|shape| !self.recordings.made.contains_key(shape)) else {
            return;
        };
        let is_first = self.recordings.launched.insert(shape);
        if is_first || self.recordings.made.len() == self.recordings.max_shapes {
            return;
        }
        match self.recordings_of(step) {
            Ok(recordings) => drop(self.recordings.made.insert(shape, recordings)),
            Err(error) => {
                // Single launches may still work; if not, their error says why.
                tracing::warn!(%error, "cannot record a step; no more steps will be recorded");
                self.recordings.max_shapes = self.recordings.made.len();
            }
        }
    }

    fn recordings_of(&self, step: &Step) -> Result<Vec<Vec<Recording>>, ModelError> {
        let mut of_stages = Vec::new();
        for (stage, ranks) in self.stages.iter().enumerate() {
            let mut of_ranks = Vec::new();
            for own in 0..ranks.len() {
                let peers = Peers { ranks, own };
                let whole = || {
                    for part in peers.parts(stage > 0) {
                        peers.compute(part, step)?;
                        peers.add_up(part, step)?;
                    }
                    exit(&self.stages, peers, step, 0)
                };
                // The buffers of all ranks, because ranks write to each other's buffers.
                let buffers = self.stages.iter().flatten().flat_map(Rank::buffers).collect();
                of_ranks.push(ranks[own].device.record(buffers, whole)?);
            }
            of_stages.push(of_ranks);
        }
        // The driver's initial work for a recording must not wait for a rank that waits for another rank.
        for rank in self.stages.iter().flatten() {
            rank.device.synchronize()?;
        }
        Ok(of_stages)
    }
}
