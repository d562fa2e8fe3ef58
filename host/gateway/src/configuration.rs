//! The interface to the operator's configuration, which the gateway shows and reloads, wherever it is kept.

use crate::metrics::CONFIG_RELOADS;
use futures::future::BoxFuture;
use skep_api::{Config, ConfigReload};
use std::{fmt, sync::Arc};

/// The settings of a host, which can be read again while it runs.
pub trait Configuration: fmt::Debug + Send + Sync {
    /// Returns the active settings, without secrets.
    fn show(&self) -> Config;

    /// Reads the settings again and applies those that can change while the host runs. Settings that are not
    /// valid change nothing.
    fn reload(&self) -> BoxFuture<'_, Result<ConfigReload, ReloadError>>;
}

/// The reason why a configuration was not reloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReloadError {
    /// The host was started without a file.
    NoFile,
    /// The file cannot be read or is not valid. Nothing has changed.
    Invalid(String),
    /// The host failed. The next reload applies what is missing.
    Failed(String),
}

impl ReloadError {
    fn outcome(&self) -> &'static str {
        match self {
            ReloadError::NoFile => "no_file",
            ReloadError::Invalid(_) => "invalid",
            ReloadError::Failed(_) => "failed",
        }
    }
}

impl fmt::Display for ReloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReloadError::NoFile => f.write_str(
                "there is nothing to reload: the host was started without a file; start it with `skep up --config FILE`",
            ),
            ReloadError::Invalid(why) | ReloadError::Failed(why) => f.write_str(why),
        }
    }
}

/// Reloads a configuration, logs what has changed, and counts the reload. It is completed even if nobody waits for it.
pub async fn reload(configuration: Arc<dyn Configuration>) -> Result<ConfigReload, ReloadError> {
    let reloading = tokio::spawn(async move { logged(configuration.reload().await) });
    reloading.await.unwrap_or_else(|_| Err(ReloadError::Failed("the reload panicked".to_owned())))
}

fn logged(reloaded: Result<ConfigReload, ReloadError>) -> Result<ConfigReload, ReloadError> {
    let outcome = reloaded.as_ref().map_or_else(ReloadError::outcome, |_| "ok");
    ::metrics::counter!(CONFIG_RELOADS, "outcome" => outcome).increment(1);
    match &reloaded {
        Ok(ConfigReload { file, changed, needs_restart, warnings, .. }) => {
            tracing::info!(file, changed = changed.len(), "the configuration was reloaded");
            changed.iter().for_each(|change| tracing::info!("changed: {change}"));
            needs_restart.iter().for_each(|change| tracing::warn!("needs a restart: {change}"));
            warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        }
        Err(ReloadError::NoFile) => tracing::info!("{}", ReloadError::NoFile),
        Err(error @ ReloadError::Invalid(_)) => {
            tracing::error!("the configuration stays as it was: {error}");
        }
        Err(error) => tracing::error!("the configuration could not be reloaded completely: {error}"),
    }
    reloaded
}
