//! The flags that make a host one of a cluster.

use std::path::PathBuf;

use anyhow::Result;

use crate::cluster_setup::ClusterSetup;
use crate::config::RoleSetting;

#[derive(Debug, Clone, clap::Args)]
pub(super) struct ClusterFlags {
    /// Share the PostgreSQL database with other hosts: each session is at one of them, and they replace each other
    #[arg(long, conflicts_with_all = ["standby", "ephemeral"])]
    pub(super) cluster: bool,
    /// Address at which the other hosts of the cluster reach this one [default: the one that it listens on]
    #[arg(long, value_name = "URL")]
    pub(super) cluster_url: Option<String>,
    /// File with the key that all hosts of the cluster have; SKEP_CLUSTER_KEY can hold the key instead
    #[arg(long, value_name = "FILE")]
    pub(super) cluster_key_file: Option<PathBuf>,
    /// What the host does in its cluster; a gateway has no model, and other hosts compute its generations [default: all]
    #[arg(long, value_name = "ROLE")]
    pub(super) role: Option<RoleSetting>,
}

impl ClusterFlags {
    /// Applies the flags that were given, and checks the role. `names_models` says whether the flags or the file name models.
    pub(super) fn apply(&self, setup: &mut ClusterSetup, names_models: bool) -> Result<()> {
        setup.enabled |= self.cluster;
        setup.url = self.cluster_url.clone().or(setup.url.take());
        setup.key_file = self.cluster_key_file.clone().or(setup.key_file.take());
        setup.role = self.role.map_or(setup.role, Into::into);
        setup.check_role(names_models)
    }
}
