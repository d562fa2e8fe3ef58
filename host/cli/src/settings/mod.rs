//! The active settings of a running host, which its operator can reload from the file.
//!
//! A reload reads the file and the flags again, checks and builds everything that they ask for, and only then hands each
//! part of the host its settings. Unchanged parts are not touched: an upstream keeps its limits and its circuit breaker,
//! an MCP server its connection, a model its memory.

mod models;
mod names;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use futures::future::BoxFuture;
use skep_api::{Config, ConfigReload, SettingChange, marker};
use skep_engine::{EngineOptions, LiveSetting, Weights};
use skep_gateway::{Configuration, RateLimiter, RateOptions, ReloadError};
use skep_runtime::{AgentHost, ToolServer};

use crate::catalog;
use crate::cluster_setup::KEY_VARIABLE;
use crate::config::{self, rates_of_open_host};
use crate::file_settings::FileSettings;
use crate::local_models;
use crate::memory_budget::MemoryBudget;
use crate::progress::{Progress, Silent};
use crate::server_options::{Reread, ServerOptions};
use crate::upstreams::VaultKeys;
use models::{ModelPlan, Models};
pub use names::{unknown_to_host, warnings};

/// The settings of a running host.
pub struct Settings {
    host: AgentHost,
    parts: Parts,
    reread: Option<Reread>,
    /// The file's path, as it is shown.
    file: Option<String>,
    /// The options with which the host was started.
    started: ServerOptions,
    /// One reload at a time; the options are those that were applied last.
    applied: tokio::sync::Mutex<ServerOptions>,
    shown: LiveSetting<Shown>,
}

/// The content of [`Configuration::show`].
struct Shown {
    active: FileSettings,
    needs_restart: Vec<SettingChange>,
}

/// The parts of a host that take settings while it runs, beside those of [`AgentHost`].
pub struct Parts {
    pub rates: Arc<RateLimiter>,
    /// Whether other machines can connect.
    pub is_open: bool,
    pub weights: LiveSetting<Weights>,
    pub model_names: LiveSetting<BTreeMap<String, String>>,
    pub vault: VaultKeys,
    /// The options of engines that are started from now on.
    pub engine: EngineOptions,
    pub budget: Arc<MemoryBudget>,
    pub progress: Arc<dyn Progress + Send>,
}

impl Settings {
    /// Returns the settings of a host that was started with these options.
    pub fn new(host: AgentHost, parts: Parts, started: ServerOptions) -> Self {
        let source = &started.source;
        Settings {
            host,
            parts,
            reread: source.reread.clone(),
            file: source.file.as_ref().map(|file| file.display().to_string()),
            shown: LiveSetting::new(Shown { active: source.written.clone(), needs_restart: Vec::new() }),
            applied: tokio::sync::Mutex::new(started.clone()),
            started,
        }
    }

    async fn reload(&self) -> Result<ConfigReload, ReloadError> {
        let (Some(reread), Some(file)) = (self.reread.clone(), self.file.clone()) else {
            return Err(ReloadError::NoFile);
        };
        let mut applied = self.applied.lock().await;
        let read = tokio::task::spawn_blocking(move || reread());
        let read =
            read.await.map_err(|_| ReloadError::Failed("reading the configuration panicked".to_owned()))?;
        let mut options = read.map_err(invalid)?;
        // A host changes its role, and with it whether it has models, only when it starts.
        options.cluster.role = self.started.cluster.role;
        let plan = self.models(&applied, &options).with_context(|| config::is_invalid(file.as_ref()));
        let plan = plan.map_err(invalid)?;
        keep_tool_servers(&applied, &mut options);
        self.apply(plan, &options).await.map_err(|error| ReloadError::Failed(format!("{error:#}")))?;

        let before = self.shown.now();
        let active = options.source.written.reloaded(&self.started.source.written);
        let needs_restart = active.changes(&options.source.written);
        let changed = before.active.changes(&active);
        let mut warnings = warnings(&options, self.host.models());
        if let Err(error) = self.host.restart_waiting_agents().await {
            warnings.push(format!("cannot restart agents whose model is available again: {error}"));
        }
        warnings.extend(names::agents_without_model(&self.host));
        warnings.extend(names::unknown_to_host(&options, &self.host).await);
        self.shown.replace(Shown { active, needs_restart: needs_restart.clone() });
        *applied = options;
        Ok(ConfigReload { object: marker::ConfigReload, file, changed, needs_restart, warnings })
    }

    fn models(&self, before: &ServerOptions, after: &ServerOptions) -> Result<ModelPlan> {
        let Parts { engine, vault, progress, budget, .. } = &self.parts;
        let started = &self.started;
        Models { set: self.host.models(), started, engine, vault, progress, budget }.plan(before, after)
    }

    /// Applies everything. Only the database can fail, and it is asked first.
    async fn apply(&self, plan: ModelPlan, options: &ServerOptions) -> Result<()> {
        let host = &self.host;
        host.set_webhooks(&options.runtime.webhooks).await.context("[[webhook]]")?;
        plan.put_into_force(host.models())?;
        host.set_tool_servers(options.tool_servers.clone());
        host.set_rules(&options.runtime).await;
        let Parts { rates, is_open, weights, model_names, .. } = &self.parts;
        rates.replace(rates_of(options, *is_open));
        weights.replace(options.weights.clone());
        model_names.replace(options.model_names.clone());
        Ok(())
    }
}

impl Configuration for Settings {
    fn show(&self) -> Config {
        let shown = self.shown.now();
        Config {
            object: marker::Config,
            file: self.file.clone(),
            settings: shown.active.settings(),
            needs_restart: shown.needs_restart.clone(),
        }
    }

    fn reload(&self) -> BoxFuture<'_, Result<ConfigReload, ReloadError>> {
        Box::pin(self.reload())
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings").field("file", &self.file).finish_non_exhaustive()
    }
}

/// Returns the rate limits of a host.
pub fn rates_of(options: &ServerOptions, is_open: bool) -> RateOptions {
    let rates = options.rates.clone();
    if is_open { rates_of_open_host(rates) } else { rates }
}

/// Reads a file, checks it as a host's start would, without loading anything, and returns its options and what is likely
/// a mistake in it.
pub fn check(file: &std::path::Path) -> Result<(ServerOptions, Vec<String>)> {
    let config = config::Config::read(file)?;
    let mut options = ServerOptions::default();
    let is_invalid = || config::is_invalid(file);
    config.apply(&mut options).with_context(is_invalid)?;
    options.cluster.check_role(config.model.is_some()).with_context(is_invalid)?;
    let warnings = check_together(&options, &config).with_context(is_invalid)?;
    Ok((options, warnings))
}

fn check_together(options: &ServerOptions, config: &config::Config) -> Result<Vec<String>> {
    options.auth.at(options.listen.ip())?;
    let key = std::env::var(KEY_VARIABLE).ok();
    options.cluster.place(options.listen, options.database.as_ref(), options.standby, key)?;
    let local = options.local_models();
    config.ai.check(options)?;
    local.iter().try_for_each(|model| catalog::name_of(&model.source).map(drop))?;
    let progress: Arc<dyn Progress + Send> = Arc::new(Silent);
    let models = local_models::declare(options, &options.engine, &progress, &Arc::default())?;
    let models = options.remote.add_to(models, &options.runtime.prices, &VaultKeys::default())?;
    Ok(warnings(options, &models))
}

/// Replaces servers that did not change by those that are connected.
fn keep_tool_servers(before: &ServerOptions, after: &mut ServerOptions) {
    for (name, server) in &mut after.tool_servers {
        let is_same = after.source.written.has_same(&before.source.written, &["mcp", name]);
        if let Some(known) = before.tool_servers.get(name).filter(|_| is_same) {
            *server = Arc::<dyn ToolServer>::clone(known);
        }
    }
}

fn invalid(error: anyhow::Error) -> ReloadError {
    ReloadError::Invalid(format!("{error:#}"))
}
