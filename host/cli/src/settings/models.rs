//! The difference between the models of two versions of the settings, as changes of the host's model set.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Result;
use futures::future::BoxFuture;
use skep_engine::{EngineOptions, Model, ModelChanges, ModelSet, ServedModel};

use crate::catalog;
use crate::local_models::{local_model, name_of};
use crate::memory_budget::MemoryBudget;
use crate::model_options::{LoadPolicy, ModelOptions};
use crate::progress::Progress;
use crate::server_options::ServerOptions;
use crate::upstreams::{KnownModels, VaultKeys};

/// The parts of a host that its models are made of.
pub struct Models<'a> {
    pub set: &'a ModelSet,
    /// The options with which the host was started, for what all models share.
    pub started: &'a ServerOptions,
    pub engine: &'a EngineOptions,
    pub vault: &'a VaultKeys,
    pub progress: &'a Arc<dyn Progress + Send>,
    pub budget: &'a Arc<MemoryBudget>,
}

/// Changes that can be made.
pub struct ModelPlan {
    changes: ModelChanges,
    /// New local models that are loaded without waiting for a request.
    load: Vec<String>,
}

impl Models<'_> {
    /// Checks the models of `after`, and builds those that differ from `before`.
    pub fn plan(&self, before: &ServerOptions, after: &ServerOptions) -> Result<ModelPlan> {
        let mut plan = ModelPlan { changes: ModelChanges::default(), load: Vec::new() };
        self.local(before, after, &mut plan)?;
        self.upstreams(before, after, &mut plan.changes)?;
        self.routes(before, after, &mut plan.changes)?;
        // An alias that was set by hand may contradict the file.
        self.set.with_changes(plan.changes.clone())?;
        Ok(plan)
    }

    fn local(&self, before: &ServerOptions, after: &ServerOptions, plan: &mut ModelPlan) -> Result<()> {
        let (old, new) = (before.local_models(), after.local_models());
        let named = |models: &[ModelOptions]| -> BTreeMap<String, ModelOptions> {
            models.iter().map(|model| (name_of(model), core(model))).collect()
        };
        let (old_named, new_named) = (named(&old), named(&new));
        for model in &new {
            let name = name_of(model);
            if old_named.get(&name) == new_named.get(&name) {
                continue;
            }
            catalog::name_of(&model.source)?;
            plan.changes
                .put
                .push(local_model(model, self.started, self.engine, self.progress, self.budget).into());
            if model.load == LoadPolicy::Start {
                plan.load.push(name);
            }
        }
        let changes = &mut plan.changes;
        changes.removed.extend(old_named.into_keys().filter(|name| !new_named.contains_key(name)));
        let (old_aliases, new_aliases) = (aliases(&old), aliases(&new));
        changes.removed_aliases =
            old_aliases.keys().filter(|alias| !new_aliases.contains_key(*alias)).cloned().collect();
        changes.aliases =
            new_aliases.into_iter().filter(|(alias, model)| old_aliases.get(alias) != Some(model)).collect();
        changes.default = default(&new).filter(|name| Some(name) != default(&old).as_ref());
        Ok(())
    }

    fn upstreams(
        &self,
        before: &ServerOptions,
        after: &ServerOptions,
        changes: &mut ModelChanges,
    ) -> Result<()> {
        let (old, new) = (&before.remote.upstreams, &after.remote.upstreams);
        after.remote.check_names()?;
        for upstream in new.iter().filter(|upstream| !old.contains(upstream)) {
            changes.put.extend(upstream.open(self.vault)?.into_iter().map(ServedModel::from));
        }
        let stays =
            |name: &String| new.iter().any(|upstream| upstream.model_names().any(|known| known == *name));
        changes
            .removed
            .extend(old.iter().flat_map(|upstream| upstream.model_names()).filter(|name| !stays(name)));
        Ok(())
    }

    /// Rebuilds all routes, because they hold their models and have no state.
    fn routes(
        &self,
        before: &ServerOptions,
        after: &ServerOptions,
        changes: &mut ModelChanges,
    ) -> Result<()> {
        let old: Vec<String> = before.remote.routes.iter().map(|route| route.name.clone()).collect();
        let mut without = changes.clone();
        without.removed.extend(old.iter().cloned());
        let models: Vec<Model> = self.set.with_changes(without)?.for_routes();
        let known = KnownModels::new(&models, &after.runtime.prices);
        changes.put.extend(after.remote.open_routes(&known)?.into_iter().map(ServedModel::from));
        let stays = |name: &String| after.remote.routes.iter().any(|route| route.name == *name);
        changes.removed.extend(old.into_iter().filter(|name| !stays(name)));
        Ok(())
    }
}

impl ModelPlan {
    /// Makes the changes. New models are loaded in the background, once those that they replace are unloaded.
    pub fn put_into_force(self, set: &ModelSet) -> Result<()> {
        let retired: BoxFuture<'static, ()> = set.make_changes(self.changes)?;
        let (set, load) = (set.clone(), self.load);
        tokio::spawn(async move {
            retired.await;
            for name in load {
                // Another reload may have removed the model; a load that fails is logged, and the model's state says why.
                let _ = set.load(&name);
            }
        });
        Ok(())
    }
}

/// Returns the settings of a model without its aliases and whether it is the default, which change without a load.
fn core(model: &ModelOptions) -> ModelOptions {
    ModelOptions { aliases: Vec::new(), is_default: false, ..model.clone() }
}

fn aliases(models: &[ModelOptions]) -> BTreeMap<String, String> {
    let of_model = |model: &ModelOptions| {
        let name = name_of(model);
        model.aliases.iter().map(|alias| (alias.clone(), name.clone())).collect::<Vec<_>>()
    };
    models.iter().flat_map(of_model).collect()
}

fn default(models: &[ModelOptions]) -> Option<String> {
    models.iter().find(|model| model.is_default).or(models.first()).map(name_of)
}
