//! The models of one process, by name: those that engines of this process compute, which are loaded and unloaded
//! while it runs, and those of other servers.
//!
//! Reads take a snapshot and never wait for a load. An alias is another name of a model and can be pointed at
//! another model at any time; a request that has its model keeps it.

mod changes;
mod device_turns;
mod load_progress;
mod local_model;
mod route_member;
mod served;
mod slot;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;

use crate::{Engine, EngineError, Model};
pub use changes::ModelChanges;
use device_turns::DeviceTurns;
pub use load_progress::LoadProgress;
pub use local_model::{DEFAULT_LOAD_WAIT, Loader, LocalModel};
use route_member::RouteMember;
pub use served::{ModelState, ServedModel};
use slot::{Reload, Slot};

/// Maximum number of models and of aliases.
const MAX_MODELS: usize = 1024;

/// Named models, one of which is the default. Clones share them.
#[derive(Clone)]
pub struct ModelSet {
    shared: Arc<Shared>,
}

/// A set of models that does not keep the models alive, for what the set itself holds.
pub struct WeakModelSet {
    shared: Weak<Shared>,
}

struct Shared {
    names: RwLock<Arc<Names>>,
    turns: DeviceTurns,
}

/// The models of all names at one point in time.
#[derive(Clone)]
struct Names {
    models: Vec<ServedModel>,
    /// The alias → the name of its model.
    aliases: BTreeMap<String, String>,
    default: String,
}

impl ModelSet {
    /// Returns a set with one model, which is the default.
    pub fn new(default: impl Into<ServedModel>) -> Self {
        let model = default.into();
        let names = Names { default: model.name().to_owned(), models: vec![model], aliases: BTreeMap::new() };
        ModelSet {
            shared: Arc::new(Shared { names: RwLock::new(Arc::new(names)), turns: DeviceTurns::default() }),
        }
    }

    /// Adds a model, which replaces a model of the same name, and returns the set.
    pub fn with(self, model: impl Into<ServedModel>) -> Self {
        let model = model.into();
        self.change(|names| {
            names.put(model);
            Ok(())
        })
        .expect("adding a model checks nothing");
        self
    }

    /// Returns a handle that does not keep the set and its engines alive.
    pub fn downgrade(&self) -> WeakModelSet {
        WeakModelSet { shared: Arc::downgrade(&self.shared) }
    }

    /// Returns a snapshot of the set, which later changes do not affect.
    pub fn pinned(&self) -> ModelSet {
        let turns = self.shared.turns.clone();
        ModelSet { shared: Arc::new(Shared { names: RwLock::new(self.names()), turns }) }
    }

    /// Makes a model the default.
    pub fn set_default(&self, name: &str) -> Result<(), EngineError> {
        self.change(|names| {
            names.default = names.find(name)?.name().to_owned();
            Ok(())
        })
    }

    /// Points an alias at a model. Requests that begin afterwards get this model.
    pub fn set_alias(&self, alias: &str, model: &str) -> Result<(), EngineError> {
        self.change(|names| names.set_alias(alias, model))
    }

    /// Returns the aliases of a model.
    pub fn aliases_of(&self, name: &str) -> Vec<String> {
        let names = self.names();
        names.aliases.iter().filter(|(_, model)| *model == name).map(|(alias, _)| alias.clone()).collect()
    }

    /// Returns whether the name is an alias. A model's own name is not one.
    pub fn is_alias(&self, name: &str) -> bool {
        self.names().aliases.contains_key(name)
    }

    /// Returns the name of the model that requests without a model get.
    pub fn default_name(&self) -> String {
        self.names().default.clone()
    }

    /// Returns the model of this name or alias, whether it is loaded or not. Without a name it is the default
    /// model.
    pub fn find(&self, name: Option<&str>) -> Result<ServedModel, EngineError> {
        let names = self.names();
        names.find(name.unwrap_or(&names.default)).cloned()
    }

    /// Returns the model of this name or alias if it can be used now; otherwise the error says why it cannot.
    pub fn get(&self, name: Option<&str>) -> Result<Model, EngineError> {
        match self.find(name)? {
            ServedModel::Local(slot) => slot.loaded().map(Model::Local),
            ServedModel::Remote(remote) => Ok(Model::Remote(remote)),
        }
    }

    /// Returns the model of this name or alias. One that is not loaded is loaded first; a load that takes longer
    /// than the model's bound continues, and the request fails with [`EngineError::ModelLoading`]. So does one for
    /// which too many others wait already.
    pub async fn ready(&self, name: Option<&str>) -> Result<Model, EngineError> {
        match self.find(name)? {
            ServedModel::Local(slot) => slot.ready(&self.shared.turns).await.map(Model::Local),
            ServedModel::Remote(remote) => Ok(Model::Remote(remote)),
        }
    }

    /// Returns the models as members of a route: a local one is loaded when the route chooses it.
    pub fn for_routes(&self) -> Vec<Model> {
        let turns = &self.shared.turns;
        let form = |model: ServedModel| match model {
            ServedModel::Local(slot) => Model::Remote(Arc::new(RouteMember::new(slot, turns.clone()))),
            ServedModel::Remote(remote) => Model::Remote(remote),
        };
        self.served().into_iter().map(form).collect()
    }

    /// Starts to load a model, if it is neither loaded nor being loaded, and returns at once.
    pub fn load(&self, name: &str) -> Result<(), EngineError> {
        self.local(name)?.load(&self.shared.turns)
    }

    /// Starts to unload a model and returns at once. Running requests may continue until the deadline. Requests load
    /// it again only if it is declared as loaded on demand.
    pub fn unload(&self, name: &str, deadline: Duration) -> Result<(), EngineError> {
        self.local(name)?.unload_by_hand(deadline)
    }

    /// Waits until a model is neither being loaded nor being unloaded.
    pub async fn settled(&self, name: &str) -> Result<ModelState, EngineError> {
        Ok(self.local(name)?.settled().await)
    }

    /// Returns the models that can be used now.
    pub fn iter(&self) -> impl Iterator<Item = Model> + use<> {
        self.served().into_iter().filter_map(|model| model.loaded())
    }

    /// Returns all models, the loaded ones and the others.
    pub fn served(&self) -> Vec<ServedModel> {
        self.names().models.clone()
    }

    /// Returns the engines that run in this process.
    pub fn engines(&self) -> impl Iterator<Item = Engine> + use<> {
        self.iter().filter_map(|model| model.engine().cloned())
    }

    fn local(&self, name: &str) -> Result<Arc<Slot>, EngineError> {
        match self.find(Some(name))? {
            ServedModel::Local(slot) => Ok(slot),
            ServedModel::Remote(remote) => Err(EngineError::invalid(
                "model",
                format!("{} is an upstream model; only its server can load or unload it", remote.info().name),
            )),
        }
    }

    fn names(&self) -> Arc<Names> {
        self.shared.names.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn change(&self, change: impl FnOnce(&mut Names) -> Result<(), EngineError>) -> Result<(), EngineError> {
        let mut current = self.shared.names.write().unwrap_or_else(PoisonError::into_inner);
        let mut names = current.as_ref().clone();
        change(&mut names)?;
        *current = Arc::new(names);
        Ok(())
    }
}

impl WeakModelSet {
    /// Returns the set, unless all its handles have been dropped.
    pub fn upgrade(&self) -> Option<ModelSet> {
        Some(ModelSet { shared: self.shared.upgrade()? })
    }
}

impl Names {
    fn put(&mut self, model: ServedModel) {
        match self.models.iter_mut().find(|known| known.name() == model.name()) {
            Some(known) => *known = model,
            None => self.models.push(model),
        }
    }

    fn set_alias(&mut self, alias: &str, model: &str) -> Result<(), EngineError> {
        check_name(alias).map_err(|why| EngineError::invalid("alias", why))?;
        let model = self.find(model)?.name().to_owned();
        if self.models.iter().any(|known| known.name() == alias) {
            let message = format!("{alias:?} is the name of a model; an alias needs another name");
            return Err(EngineError::invalid("alias", message));
        }
        if self.aliases.len() >= MAX_MODELS && !self.aliases.contains_key(alias) {
            let message =
                format!("there are already {MAX_MODELS} aliases, which is the maximum; change one of them");
            return Err(EngineError::invalid("alias", message));
        }
        self.aliases.insert(alias.to_owned(), model);
        Ok(())
    }

    fn find(&self, name: &str) -> Result<&ServedModel, EngineError> {
        let of = self.aliases.get(name).map_or(name, String::as_str);
        self.models.iter().find(|model| model.name() == of).ok_or_else(|| EngineError::ModelUnknown {
            name: name.to_string(),
            known: self.models.iter().map(|model| model.name().to_owned()).collect(),
        })
    }
}

/// Checks a name that a model of this process or an alias may have.
pub fn check_name(name: &str) -> Result<(), String> {
    if name.contains('/') {
        return Err(format!("{name:?} contains \"/\", which is reserved for the names of upstream models"));
    }
    let character = |c: char| c.is_ascii_alphanumeric() || "._-:".contains(c);
    if name.is_empty() || name.len() > 128 || !name.chars().all(character) {
        return Err(format!(
            "{name:?} is not a valid model name; it has 1 to 128 of the characters a-z, A-Z, 0-9, \".\", \"_\", \"-\" and \":\""
        ));
    }
    if name == "default" || name.starts_with("agent:") {
        return Err(format!("{name:?} is reserved"));
    }
    Ok(())
}
