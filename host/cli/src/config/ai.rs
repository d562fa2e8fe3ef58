//! `[ai]` of `skep.toml`: the routes of Workers AI.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::server::ServerOptions;

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AiConfig {
    /// Other names of models: what clients call them → what they are called here.
    pub models: BTreeMap<String, String>,
}

impl AiConfig {
    pub(super) fn apply(&self, options: &mut ServerOptions) {
        options.gateway.model_names.extend(self.models.clone());
    }
}
