//! Sessions whose conversations use models that the host no longer has, or that have changed.

use super::AgentHost;
use crate::RuntimeError;
use skep_engine::ServedModel;
use std::collections::BTreeMap;

/// Number of sessions affected by a model that is gone or was replaced by another one of the same
/// name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelMismatch {
    pub model: String,
    /// Whether the host has a model of this name.
    pub is_served: bool,
    pub sessions: u64,
}

impl AgentHost {
    /// Returns the mismatches by model. A conversation whose model is gone continues with the
    /// agent's own model. In both cases the tokens are recomputed from the messages at the next
    /// use.
    pub async fn model_mismatches(&self) -> Result<Vec<ModelMismatch>, RuntimeError> {
        let mut mismatches: BTreeMap<String, ModelMismatch> = BTreeMap::new();
        for used in self.host().store.models_in_use().await? {
            let served = self.models().find(Some(&used.model)).ok();
            let is_same = |digest: &String| match served.as_ref().and_then(ServedModel::loaded) {
                Some(model) => model.digest().to_string() == *digest,
                // The digest of a model that is not loaded is compared when a conversation is opened.
                None => true,
            };
            // Conversations stored by early versions have no digest; their tokens are checked when
            // they are read.
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
