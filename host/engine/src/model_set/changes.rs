//! Changes of several models, aliases and the default that are made in one step, or not at all.

use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, join_all};

use super::{ModelSet, Names, Reload, ServedModel, Slot};
use crate::EngineError;

/// Time that running requests may continue after their local model was removed or replaced.
const RETIRE_DEADLINE: Duration = Duration::from_secs(600);

/// Changes of a set. They are made in the order of the fields.
#[derive(Default, Clone)]
pub struct ModelChanges {
    /// Models that are no longer served; their aliases are removed as well.
    pub removed: Vec<String>,
    pub removed_aliases: Vec<String>,
    /// Models that are added, or replace the model of the same name. An alias of this name ends.
    pub put: Vec<ServedModel>,
    /// Aliases with the models that they will point to.
    pub aliases: Vec<(String, String)>,
    /// The model that will be the default.
    pub default: Option<String>,
}

impl ModelSet {
    /// Returns another set in which the changes are made, while this one and all models stay as they are.
    pub fn with_changes(&self, changes: ModelChanges) -> Result<ModelSet, EngineError> {
        let set = self.pinned();
        set.change(|names| {
            *names = names.changed(changes)?;
            Ok(())
        })?;
        Ok(set)
    }

    /// Makes changes. Requests and turns that have a model keep it. Local models that were removed or replaced are
    /// unloaded, and the future ends when that is done.
    pub fn make_changes(&self, changes: ModelChanges) -> Result<BoxFuture<'static, ()>, EngineError> {
        let mut before = Vec::new();
        self.change(|names| {
            before.clone_from(&names.models);
            *names = names.changed(changes)?;
            Ok(())
        })?;
        let after = self.served();
        let mut retired: Vec<Arc<Slot>> = Vec::new();
        for model in before {
            let ServedModel::Local(slot) = model else { continue };
            let stays =
                |model: &ServedModel| matches!(model, ServedModel::Local(kept) if Arc::ptr_eq(kept, &slot));
            // A model that is still being loaded is freed when its load has ended, and one that was given as a running
            // engine when nobody has it anymore.
            if !after.iter().any(stays) && slot.unload(RETIRE_DEADLINE, Reload::ByRequest).is_ok() {
                retired.push(slot);
            }
        }
        Ok(Box::pin(async move {
            join_all(retired.iter().map(|slot| slot.settled())).await;
        }))
    }
}

impl Names {
    fn changed(&self, changes: ModelChanges) -> Result<Names, EngineError> {
        let ModelChanges { removed, removed_aliases, put, aliases, default } = changes;
        let mut names = self.clone();
        names.models.retain(|model| !removed.iter().any(|name| name == model.name()));
        names.aliases.retain(|alias, model| !removed.contains(model) && !removed_aliases.contains(alias));
        for model in put {
            names.aliases.remove(model.name());
            names.put(model);
        }
        for (alias, model) in aliases {
            names.set_alias(&alias, &model)?;
        }
        if let Some(default) = default.or_else(|| names.default.clone()) {
            names.default = Some(names.find(&default)?.name().to_owned());
        }
        Ok(names)
    }
}
