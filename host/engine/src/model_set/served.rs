//! A model as the set knows it, loaded or not.

use std::sync::Arc;

use skep_model::{ModelDigest, Sampling};

use super::local_model::LocalModel;
use super::slot::Slot;
use crate::{Abilities, Engine, Model, RemoteModel};

/// A model that the set serves. Clones share it.
#[derive(Clone)]
pub enum ServedModel {
    Local(LocalSlot),
    Remote(Arc<dyn RemoteModel>),
}

/// A model of this process with its state.
pub type LocalSlot = Arc<Slot>;

/// The state of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelState {
    Unloaded,
    Loading {
        /// The current step, for people.
        step: String,
        percent: Option<u8>,
    },
    Loaded,
    /// New requests do not get it, and running ones may finish.
    Unloading,
    /// The last load failed for this reason.
    Failed(String),
    /// Another server computes the model.
    Remote,
}

impl ModelState {
    /// Returns the state's name, which is stable, for programs.
    pub fn name(&self) -> &'static str {
        match self {
            ModelState::Unloaded => "unloaded",
            ModelState::Loading { .. } => "loading",
            ModelState::Loaded => "loaded",
            ModelState::Unloading => "unloading",
            ModelState::Failed(_) => "failed",
            ModelState::Remote => "remote",
        }
    }
}

impl ServedModel {
    /// Returns the model's own name, which is not an alias.
    pub fn name(&self) -> &str {
        match self {
            ServedModel::Local(slot) => slot.name(),
            ServedModel::Remote(remote) => &remote.info().name,
        }
    }

    /// Returns the names of the models that may answer: the model's own, and those that a route may choose.
    pub fn names(&self) -> Vec<String> {
        let others = match self {
            ServedModel::Local(_) => Vec::new(),
            ServedModel::Remote(remote) => remote.members(),
        };
        std::iter::once(self.name().to_owned()).chain(others).collect()
    }

    /// Returns the model's state now. Models of other servers are always `Remote`.
    pub fn state(&self) -> ModelState {
        match self {
            ServedModel::Local(slot) => slot.state(),
            ServedModel::Remote(_) => ModelState::Remote,
        }
    }

    /// Returns the model if it can be used now.
    pub fn loaded(&self) -> Option<Model> {
        match self {
            ServedModel::Local(slot) => slot.engine().map(Model::Local),
            ServedModel::Remote(remote) => Some(Model::Remote(remote.clone())),
        }
    }

    /// Returns the length of the model's context in tokens. Of a model that was never loaded it is not known.
    pub fn context_length(&self) -> Option<usize> {
        match self {
            ServedModel::Local(slot) => slot.known().map(|known| known.context_length),
            ServedModel::Remote(remote) => remote.context_length(),
        }
    }

    /// Returns the digest of the model's weights, tokens and template. It is not known of a model of this process that was never
    /// loaded.
    pub fn digest(&self) -> Option<&ModelDigest> {
        match self {
            ServedModel::Local(slot) => slot.known().map(|known| &known.digest),
            ServedModel::Remote(remote) => Some(&remote.info().digest),
        }
    }

    /// Returns the numbers of the hosts that compute the model, if they are other hosts of this host's cluster.
    pub fn hosts(&self) -> Vec<i64> {
        match self {
            ServedModel::Local(_) => Vec::new(),
            ServedModel::Remote(remote) => remote.hosts(),
        }
    }

    /// Returns the model's abilities, as far as they are known while it is not loaded.
    pub fn abilities(&self) -> Abilities {
        match self {
            ServedModel::Local(slot) => {
                slot.engine().map_or(Abilities::local(None), |engine| Model::Local(engine).abilities())
            }
            ServedModel::Remote(remote) => remote.abilities(),
        }
    }

    /// Returns the format of the most bytes of the weights, if it is known.
    pub fn weights(&self) -> Option<&str> {
        match self {
            ServedModel::Local(slot) => slot.known()?.weights.as_deref(),
            ServedModel::Remote(_) => None,
        }
    }

    /// Returns the Unix time in seconds that listings report; 0 for a model of this process that was never loaded.
    pub fn created_unix_s(&self) -> u64 {
        match self {
            ServedModel::Local(slot) => slot.known().map_or(0, |known| known.created_unix_s),
            ServedModel::Remote(remote) => remote.info().created_unix_s,
        }
    }

    /// Returns the name of the markup in which the model writes tool calls, if it is known.
    pub fn markup(&self) -> Option<&'static str> {
        match self {
            ServedModel::Local(slot) => slot.known()?.markup,
            ServedModel::Remote(_) => None,
        }
    }

    /// Returns the sampling parameters of a request that sets none, if they are known.
    pub fn sampling(&self) -> Option<Sampling> {
        match self {
            ServedModel::Local(slot) => slot.sampling(),
            ServedModel::Remote(_) => None,
        }
    }
}

impl From<Model> for ServedModel {
    fn from(model: Model) -> Self {
        match model {
            Model::Local(engine) => engine.into(),
            Model::Remote(remote) => ServedModel::Remote(remote),
        }
    }
}

impl From<Engine> for ServedModel {
    fn from(engine: Engine) -> Self {
        ServedModel::Local(Slot::fixed(engine))
    }
}

impl From<LocalModel> for ServedModel {
    fn from(declared: LocalModel) -> Self {
        ServedModel::Local(Slot::declared(declared))
    }
}
