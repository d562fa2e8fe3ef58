//! The models that an agent may generate with: those that its developer asked for and that the operator allows.
//!
//! An agent's own model, which is `model` in `agent.toml` or the host's default, counts as asked for. An operator who
//! configures nothing allows only the host's default model.

use crate::{Manifest, ModelGrant, RuntimeOptions, agent::Agent, bindings::types::Error};
use skep_engine::{Engine, ModelSet};
use std::sync::Arc;

/// The host's models, and the operator's ceiling on which of them agents may use.
#[derive(Clone)]
pub(crate) struct GrantedModels {
    set: ModelSet,
    ceiling: Arc<Vec<ModelGrant>>,
}

impl GrantedModels {
    pub(crate) fn new(set: ModelSet, options: &RuntimeOptions) -> Self {
        let default = || vec![ModelGrant::of(set.default_engine().info().name.clone())];
        let ceiling = Arc::new(options.granted_models.clone().unwrap_or_else(default));
        GrantedModels { set, ceiling }
    }

    pub(crate) fn set(&self) -> &ModelSet {
        &self.set
    }

    /// Returns the models that a manifest asks for and this host does not serve.
    pub(crate) fn unserved<'a>(&self, manifest: &'a Manifest) -> Vec<&'a str> {
        let names = manifest.grants.models.iter().filter_map(ModelGrant::name);
        names.filter(|name| !self.set.iter().any(|engine| engine.info().name == *name)).collect()
    }

    /// Returns the engine of a model that the agent may use; without a name, that of the agent's own model.
    pub(crate) fn engine(&self, agent: &Agent, model: Option<&str>) -> Result<Engine, Error> {
        let engine = self.set.get(Some(model.unwrap_or(&agent.model))).map_err(Error::from)?;
        check(&agent.manifest, &agent.model, &self.ceiling, &engine.info().name).map_err(Error::Denied)?;
        Ok(engine)
    }

    /// Returns the engines of all models that the agent may use.
    pub(crate) fn of<'a>(&'a self, agent: &'a Agent) -> impl Iterator<Item = &'a Engine> {
        let may_use = |name: &str| check(&agent.manifest, &agent.model, &self.ceiling, name).is_ok();
        self.set.iter().filter(move |engine| may_use(&engine.info().name))
    }
}

/// Checks that an agent may use a model. The error names the setting that would allow it.
fn check(manifest: &Manifest, own: &str, ceiling: &[ModelGrant], model: &str) -> Result<(), String> {
    let covered = |grants: &[ModelGrant]| grants.iter().any(|grant| grant.covers(model));
    let lacks = |file| {
        format!(
            "agent {} may not use the model {model}; add \"{model}\" to `models` under [grants] in {file}",
            manifest.name
        )
    };
    if model != own && !covered(&manifest.grants.models) {
        return Err(lacks("agent.toml"));
    }
    if !covered(ceiling) {
        return Err(lacks("skep.toml, which is the operator's"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn developer_and_operator_must_allow_a_model_and_a_denial_names_the_setting() {
        let manifest = |models: &str| {
            Manifest::from_toml(&format!("name = \"a\"\n[grants]\nmodels = [{models}]")).expect("valid")
        };
        let ceiling = |text: &str| [ModelGrant::try_from(text.to_owned()).expect("a grant")];
        let denied =
            check(&manifest(""), "own", &ceiling("*"), "big").expect_err("the developer did not ask for it");
        assert!(denied.contains("add \"big\" to `models` under [grants] in agent.toml"), "{denied}");
        check(&manifest(""), "own", &ceiling("*"), "own").expect("an agent's own model counts as asked for");
        for asked in ["\"big\"", "\"*\""] {
            check(&manifest(asked), "own", &ceiling("big"), "big").expect("both allow it");
        }
        let denied = check(&manifest("\"*\""), "own", &ceiling("own"), "big")
            .expect_err("the operator does not allow it");
        assert!(denied.contains("under [grants] in skep.toml"), "{denied}");
        check(&manifest("\"*\""), "own", &[], "own").expect_err("an empty list allows no model");
    }
}
