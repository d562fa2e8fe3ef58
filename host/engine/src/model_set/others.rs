//! The models of the other hosts of a cluster, under the names that they have there.
//!
//! A model or an alias of this host hides one of the same name, so a request that can be answered here stays here.

use std::collections::BTreeMap;

use super::ServedModel;

/// Models that other hosts of the cluster compute, with their aliases.
#[derive(Default, Clone)]
pub struct OtherModels {
    pub models: Vec<ServedModel>,
    /// The alias → the name of its model.
    pub aliases: BTreeMap<String, String>,
    /// The model that requests without a model get if this host has no default of its own.
    pub default: Option<String>,
}
