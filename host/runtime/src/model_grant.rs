//! Whether an agent may generate with a model: its developer asked for it, and the operator allows it.
//!
//! An agent's own model, which `agent.toml` names or the host chooses, is asked for by that. An operator who says nothing
//! allows the host's default model and no other.

use crate::{
    Manifest, RuntimeOptions, bindings::types::Error, capability::engine_error, component::Deployed,
};
use serde::{Deserialize, Serialize};
use skep_engine::{Engine, ModelSet};
use std::sync::Arc;

const MAX_BYTES: usize = 256;

/// A line of `models` under `[grants]`: the name of a model, or `*` for all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ModelGrant(String);

/// The host's models, and which of them agents may use at most.
#[derive(Clone)]
pub(crate) struct GrantedModels {
    set: ModelSet,
    ceiling: Arc<Vec<ModelGrant>>,
}

impl ModelGrant {
    fn covers(&self, model: &str) -> bool {
        self.0 == "*" || self.0 == model
    }
}

impl TryFrom<String> for ModelGrant {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        if (1..=MAX_BYTES).contains(&name.len()) {
            return Ok(ModelGrant(name));
        }
        Err(format!("a model's name has 1 to {MAX_BYTES} bytes, not {}; `*` is all models", name.len()))
    }
}

impl From<ModelGrant> for String {
    fn from(grant: ModelGrant) -> Self {
        grant.0
    }
}

impl GrantedModels {
    pub(crate) fn new(set: ModelSet, options: &RuntimeOptions) -> Self {
        let default = || vec![ModelGrant(set.default_engine().info().name.clone())];
        let ceiling = Arc::new(options.granted_models.clone().unwrap_or_else(default));
        GrantedModels { set, ceiling }
    }

    pub(crate) fn set(&self) -> &ModelSet {
        &self.set
    }

    /// The engine of a model that the agent may use; without a name, of its own.
    pub(crate) fn engine(&self, agent: &Deployed, model: Option<&str>) -> Result<Engine, Error> {
        let engine = self.set.get(Some(model.unwrap_or(&agent.model))).map_err(engine_error)?;
        check(&agent.manifest, &agent.model, &self.ceiling, &engine.info().name).map_err(Error::Denied)?;
        Ok(engine)
    }

    /// All that the agent may use.
    pub(crate) fn of<'a>(&'a self, agent: &'a Deployed) -> impl Iterator<Item = &'a Engine> {
        let may_use = |name: &str| check(&agent.manifest, &agent.model, &self.ceiling, name).is_ok();
        self.set.iter().filter(move |engine| may_use(&engine.info().name))
    }
}

/// The error names the line that would allow it.
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
    fn both_must_allow_and_a_denial_names_the_line() {
        let manifest = |models: &str| {
            Manifest::from_toml(&format!("name = \"a\"\n[grants]\nmodels = [{models}]")).expect("valid")
        };
        let ceiling = |text: &str| [ModelGrant::try_from(text.to_owned()).expect("a grant")];
        let denied = check(&manifest(""), "own", &ceiling("*"), "big").expect_err("nobody asked for it");
        assert!(denied.contains("add \"big\" to `models` under [grants] in agent.toml"), "{denied}");
        check(&manifest(""), "own", &ceiling("*"), "own").expect("its own is asked for");
        for asked in ["\"big\"", "\"*\""] {
            check(&manifest(asked), "own", &ceiling("big"), "big").expect("both allow it");
        }
        let denied = check(&manifest("\"*\""), "own", &ceiling("own"), "big").expect_err("the operator not");
        assert!(denied.contains("under [grants] in skep.toml"), "{denied}");
        check(&manifest("\"*\""), "own", &[], "own").expect_err("an empty list allows none");
    }
}
