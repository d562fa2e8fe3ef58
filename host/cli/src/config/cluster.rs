//! `[cluster]` in `skep.toml`: whether the host shares its database with others, and how they reach it.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use skep_runtime::{HostRole, placement::Placement};

use crate::cluster_setup::ClusterSetup;

/// The section as written in the file.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterConfig {
    pub enabled: Option<bool>,
    /// The address at which the other hosts reach this one.
    pub url: Option<String>,
    /// File with the key of the cluster, relative to the file of settings.
    pub key_file: Option<PathBuf>,
    pub role: Option<RoleSetting>,
    /// The model of requests without one at a host that has no model of its own.
    pub default_model: Option<String>,
    /// The host at which a session begins that nobody owns.
    pub placement: Option<Placement>,
    /// Number of tokens of a prompt from which on a prefill host may compute them.
    pub prefill_tokens: Option<u32>,
}

/// Values of `role` and of `--role`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum RoleSetting {
    /// Run agents and compute models.
    All,
    /// Run agents, without a model: the other hosts of the cluster compute its generations.
    Gateway,
    /// Compute prompts for hosts with the role decode.
    Prefill,
    /// Run agents and compute models, and have prefill hosts compute long prompts.
    Decode,
    /// Pass all requests on to the other hosts.
    Balancer,
}

impl From<RoleSetting> for HostRole {
    fn from(role: RoleSetting) -> Self {
        match role {
            RoleSetting::All => HostRole::All,
            RoleSetting::Gateway => HostRole::Gateway,
            RoleSetting::Prefill => HostRole::Prefill,
            RoleSetting::Decode => HostRole::Decode,
            RoleSetting::Balancer => HostRole::Balancer,
        }
    }
}

impl ClusterConfig {
    pub(super) fn relative_to(&mut self, dir: &Path) {
        if let Some(file) = &mut self.key_file {
            *file = dir.join(&*file);
        }
    }

    pub(super) fn apply(&self, setup: &mut ClusterSetup) {
        super::set(&mut setup.enabled, &self.enabled);
        setup.url = self.url.clone().or(setup.url.take());
        super::set(&mut setup.placement, &self.placement);
        setup.key_file = self.key_file.clone().or(setup.key_file.take());
        setup.role = self.role.map_or(setup.role, HostRole::from);
        setup.default_model = self.default_model.clone().or(setup.default_model.take());
        setup.prefill_tokens = self.prefill_tokens.or(setup.prefill_tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::server_options::ServerOptions;

    #[test]
    fn the_place_in_a_cluster_comes_from_the_file() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("skep.toml");
        let text = "[cluster]\nenabled = true\nurl = \"http://10.0.0.2:8080\"\nkey_file = \"cluster.key\"\n\
                    role = \"gateway\"\ndefault_model = \"big\"\nplacement = \"here\"\nprefill_tokens = 512\n";
        std::fs::write(&path, text).expect("file");
        let mut options = ServerOptions::default();
        assert_eq!(options.cluster, ClusterSetup::default());
        Config::read(&path).expect("valid").apply(&mut options).expect("sensible");
        let expected = ClusterSetup {
            enabled: true,
            url: Some("http://10.0.0.2:8080".to_owned()),
            key_file: Some(dir.path().join("cluster.key")),
            role: HostRole::Gateway,
            default_model: Some("big".to_owned()),
            placement: Placement::Here,
            prefill_tokens: Some(512),
        };
        assert_eq!(ClusterSetup::default().placement, Placement::Balanced);
        assert_eq!(options.cluster, expected);
        assert!(Config::parse("[cluster]\nkey = \"a secret\"\n").is_err(), "a key is not a setting");
        assert!(Config::parse("[cluster]\nrole = \"router\"\n").is_err(), "a role that does not exist");
        let unknown = Config::parse("[cluster]\nplacement = \"spread\"\n").expect_err("not a placement");
        assert!(format!("{unknown:#}").contains("balanced"), "{unknown:#}");
    }
}
