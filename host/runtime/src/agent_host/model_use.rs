//! Sessions whose conversations are with models that the host does not have, or not any more as they were.

use super::AgentHost;
use crate::RuntimeError;
use std::collections::BTreeMap;

/// How many sessions a model concerns that is gone, or is another one under the same name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelMismatch {
    pub model: String,
    /// Whether the host has a model of this name.
    pub is_served: bool,
    pub sessions: u64,
}

impl AgentHost {
    /// By model. A conversation of one that is gone goes on with its agent's own; the tokens of all of them are made anew
    /// from the messages when they are next used.
    pub async fn model_mismatches(&self) -> Result<Vec<ModelMismatch>, RuntimeError> {
        let mut mismatches: BTreeMap<String, ModelMismatch> = BTreeMap::new();
        for used in self.inner.services.store.models_in_use().await? {
            let served = self.models().get(Some(&used.model)).ok();
            let is_same = |digest: &String| {
                served.as_ref().is_some_and(|engine| engine.info().digest.to_string() == *digest)
            };
            // What early versions stored has no digest: its tokens tell when they are read.
            if served.is_some() && used.digest.as_ref().is_none_or(is_same) {
                continue;
            }
            let mismatch = mismatches.entry(used.model.clone()).or_default();
            (mismatch.model, mismatch.is_served) = (used.model, served.is_some());
            mismatch.sessions += used.sessions;
        }
        Ok(mismatches.into_values().collect())
    }
}
