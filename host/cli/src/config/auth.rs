//! `[auth]` in `skep.toml`: whether the host requires API keys.

use serde::Deserialize;

use crate::server_options::AuthOptions;

/// The section as written in the file.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuthConfig {
    /// Defaults to true unless only this machine can connect.
    pub required: Option<bool>,
    /// Whether `/metrics` can be read without a key.
    pub open_metrics: Option<bool>,
}

/// Values of `--auth`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum AuthFlag {
    Required,
    Off,
}

impl AuthConfig {
    /// Sets the options that the section has.
    pub(super) fn apply(&self, options: &mut AuthOptions) {
        options.required = self.required.or(options.required);
        options.open_metrics = self.open_metrics.unwrap_or(options.open_metrics);
    }
}
