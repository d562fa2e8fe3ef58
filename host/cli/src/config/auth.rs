//! `[auth]` in `skep.toml`: whether the host requires API keys.

use anyhow::{Result, bail};
use serde::Deserialize;
use skep_gateway::AccessOptions;
use std::net::IpAddr;

/// The section as written in the file.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuthConfig {
    /// Defaults to true unless only this machine can connect.
    pub required: Option<bool>,
    /// Whether `/metrics` can be read without a key.
    pub open_metrics: Option<bool>,
}

/// Settings for API keys, before it is known where the host listens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AuthOptions {
    pub required: Option<bool>,
    /// Whether the operator has accepted that anyone who can connect may do everything.
    pub insecure: bool,
    pub open_metrics: bool,
}

/// Values of `--auth`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum AuthFlag {
    Required,
    Off,
}

impl AuthConfig {
    pub(super) fn apply(&self, options: &mut AuthOptions) {
        options.required = self.required.or(options.required);
        options.open_metrics = self.open_metrics.unwrap_or(options.open_metrics);
    }
}

impl AuthOptions {
    /// Returns the access options of a host that listens on `address`.
    pub fn at(self, address: IpAddr) -> Result<AccessOptions> {
        let is_local = address.is_loopback();
        let keys_required = self.required.unwrap_or(!is_local);
        if !keys_required && !is_local && !self.insecure {
            bail!(
                "anyone who can connect to {address} could do everything, because no API key is required\n  hint: remove \
                 `required = false` under [auth] and --auth off, and create a key with `skep key create`; or listen on \
                 127.0.0.1; or accept this with --insecure"
            );
        }
        let local_names_only = is_local && !keys_required;
        Ok(AccessOptions { keys_required, open_metrics: self.open_metrics, local_names_only })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_required_unless_only_this_machine_can_connect_or_the_operator_insists() {
        let at = |required, insecure, address: &str| {
            let options = AuthOptions { required, insecure, open_metrics: false };
            let access = options.at(address.parse().expect("an address"))?;
            assert_eq!(access.local_names_only, !access.keys_required && !insecure, "{address}");
            anyhow::Ok(access.keys_required)
        };
        for local in ["127.0.0.1", "::1", "127.8.0.1"] {
            assert!(!at(None, false, local).expect("the default"));
            assert!(at(Some(true), false, local).expect("asked for"));
        }
        for open in ["0.0.0.0", "::", "10.0.0.7"] {
            assert!(at(None, false, open).expect("the default"));
            let refusal = at(Some(false), false, open).expect_err("open to everyone").to_string();
            assert!(refusal.contains("skep key create") && refusal.contains("--insecure"), "{refusal}");
            assert!(!at(Some(false), true, open).expect("the operator insists"));
        }
    }
}
