//! Starts an executor again whose device has failed, on the same devices and with the same number of pages.
//!
//! Invariant: replicas that share the weights on a device share them again, unless they are in a context that is spoiled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::CudaExecutor;
use super::start::{CudaModel, Open, RankPosition};
use super::weights::DeviceWeights;
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::executor::{ExecutorOptions, Ordinals};

/// The weights that replicas of a model which were started again have on devices.
#[derive(Clone, Default)]
pub(crate) struct SharedWeights {
    loaded: Arc<Mutex<HashMap<RankPosition, Weak<DeviceWeights>>>>,
}

/// The inputs for starting one replica again.
pub(crate) struct Restarted {
    pub(crate) checkpoint: Arc<Checkpoint>,
    /// The options of the replica, with its number of tokens.
    pub(crate) options: ExecutorOptions,
    /// The devices of this replica.
    pub(crate) devices: Ordinals,
    pub(crate) weights: SharedWeights,
}

impl Restarted {
    /// Starts the replica. Replicas of a model start one after the other.
    pub(crate) fn executor<'a>(&'a self, open: Open<'a>) -> Result<CudaExecutor, ModelError> {
        self.start(open, |model| model)
    }

    /// Starts the replica, and leaves out the preparation of steps, which takes an emulated device seconds.
    #[cfg(test)]
    pub(super) fn executor_without_warm_up<'a>(&'a self, open: Open<'a>) -> Result<CudaExecutor, ModelError> {
        self.start(open, CudaModel::without_warm_up)
    }

    fn start<'a>(
        &'a self,
        open: Open<'a>,
        with: impl FnOnce(CudaModel<'a>) -> CudaModel<'a>,
    ) -> Result<CudaExecutor, ModelError> {
        let Restarted { checkpoint, options, devices, weights } = self;
        let mut loaded = weights.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let mut model = with(CudaModel::new(checkpoint, options.clone(), *devices, 1, open)?.again());
        model.loaded = loaded
            .iter()
            .filter_map(|(position, weights)| Some((*position, weights.upgrade()?)))
            .filter(|(_, weights)| weights.buffer.device().fault().is_none())
            .collect();
        let executor = model.executor(0)?;
        *loaded =
            model.loaded.iter().map(|(position, weights)| (*position, Arc::downgrade(weights))).collect();
        Ok(executor)
    }
}
