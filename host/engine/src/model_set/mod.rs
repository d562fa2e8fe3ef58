//! The models of one process, by name: those that engines of this process compute, which are loaded and unloaded
//! while it runs, those of other servers, and those of the other hosts of a cluster (`others`).
//!
//! Reads take a snapshot and never wait for a load. An alias is another name of a model and can be pointed at
//! another model at any time; a request that has its model keeps it.

mod changes;
mod device_turns;
mod load_progress;
mod local_model;
mod others;
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
pub use others::OtherModels;
use route_member::RouteMember;
pub use served::{ModelState, ServedModel};
use slot::{Reload, Slot};

/// Maximum number of models and of aliases.
const MAX_MODELS: usize = 1024;
/// The name in the error of a request without a model, if there is no default. No model can have it.
const NO_NAME: &str = "default";

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
#[derive(Clone, Default)]
struct Names {
    models: Vec<ServedModel>,
    /// The alias → the name of its model.
    aliases: BTreeMap<String, String>,
    /// `None` if the set was created without a model. The default is then one of the other hosts of the cluster.
    default: Option<String>,
    others: OtherModels,
}

impl ModelSet {
    /// Returns a set with one model, which is the default.
    pub fn new(default: impl Into<ServedModel>) -> Self {
        let model = default.into();
        let default = Some(model.name().to_owned());
        Self::of(Names { default, models: vec![model], ..Names::default() })
    }

    /// Returns a set without models, for a host whose models other hosts of its cluster compute.
    pub fn empty() -> Self {
        Self::of(Names::default())
    }

    fn of(names: Names) -> Self {
        let names = RwLock::new(Arc::new(names));
        ModelSet { shared: Arc::new(Shared { names, turns: DeviceTurns::default() }) }
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
            names.default = Some(names.find(name)?.name().to_owned());
            Ok(())
        })
    }

    /// Replaces the models of the other hosts of the cluster.
    pub fn set_others(&self, others: OtherModels) {
        let replaced = self.change(|names| {
            names.others = others;
            Ok(())
        });
        replaced.expect("replacing them checks nothing");
    }

    /// Points an alias at a model. Requests that begin afterwards get this model.
    pub fn set_alias(&self, alias: &str, model: &str) -> Result<(), EngineError> {
        self.change(|names| names.set_alias(alias, model))
    }

    /// Returns the aliases of a model.
    pub fn aliases_of(&self, name: &str) -> Vec<String> {
        let names = self.names();
        let own = names.aliases.iter();
        let others = names.others.aliases.iter().filter(|(alias, _)| !names.hides(alias));
        own.chain(others).filter(|(_, model)| *model == name).map(|(alias, _)| alias.clone()).collect()
    }

    /// Returns whether the name is an alias. A model's own name is not one.
    pub fn is_alias(&self, name: &str) -> bool {
        let names = self.names();
        names.aliases.contains_key(name) || names.others.aliases.contains_key(name) && !names.hides(name)
    }

    /// Returns the name of the model that requests without a model get; an empty text if there is none.
    pub fn default_name(&self) -> String {
        self.names().default_name().unwrap_or_default().to_owned()
    }

    /// Returns the model of this name or alias, whether it is loaded or not. Without a name it is the default
    /// model.
    pub fn find(&self, name: Option<&str>) -> Result<ServedModel, EngineError> {
        let names = self.names();
        let name = name.or(names.default_name()).unwrap_or(NO_NAME);
        names.find(name).cloned()
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

    /// Returns the models of this host as members of a route: a local one is loaded when the route chooses it.
    pub fn for_routes(&self) -> Vec<Model> {
        let turns = &self.shared.turns;
        let form = |model: ServedModel| match model {
            ServedModel::Local(slot) => Model::Remote(Arc::new(RouteMember::new(slot, turns.clone()))),
            ServedModel::Remote(remote) => Model::Remote(remote),
        };
        self.own().into_iter().map(form).collect()
    }

    /// Returns a model that this process computes, for another host of the cluster. It is loaded when it is asked.
    pub fn computed_here(&self, name: &str) -> Option<Model> {
        let ServedModel::Local(slot) = self.find(Some(name)).ok()? else { return None };
        Some(Model::Remote(Arc::new(RouteMember::new(slot, self.shared.turns.clone()))))
    }

    /// Returns the engine of a model that this process computes, for another host of the cluster that does not wait for a load. The load
    /// begins nevertheless, unless a person has unloaded the model.
    pub fn engine_at_once(&self, name: &str) -> Result<Engine, EngineError> {
        self.local(name)?.at_once(&self.shared.turns)
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

    /// Returns all models, loaded or not. Those of the other hosts of the cluster come last.
    pub fn served(&self) -> Vec<ServedModel> {
        self.names().all().cloned().collect()
    }

    /// Returns the models that are not those of other hosts of the cluster, loaded or not.
    pub fn own(&self) -> Vec<ServedModel> {
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
                format!(
                    "{} is computed elsewhere; only its server can load or unload it",
                    remote.info().name
                ),
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
        let own = self.aliases.get(name);
        let others = || self.others.aliases.get(name).filter(|_| !self.hides(name));
        let of = own.or_else(others).map_or(name, String::as_str);
        // A model of this host comes first.
        let mut models = self.models.iter().chain(&self.others.models);
        models.find(|model| model.name() == of).ok_or_else(|| EngineError::ModelUnknown {
            name: name.to_string(),
            known: self.all().map(|model| model.name().to_owned()).collect(),
        })
    }

    /// Returns the models of this host, and those of other hosts that it does not hide.
    fn all(&self) -> impl Iterator<Item = &ServedModel> {
        self.models.iter().chain(self.others.models.iter().filter(|model| !self.hides(model.name())))
    }

    /// Returns whether a name means a model of this host, whatever it means at others.
    fn hides(&self, name: &str) -> bool {
        self.aliases.contains_key(name) || self.models.iter().any(|model| model.name() == name)
    }

    /// Returns the name of the model that requests without a model get.
    fn default_name(&self) -> Option<&str> {
        self.default.as_deref().or(self.others.default.as_deref())
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
