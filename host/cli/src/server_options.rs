//! Options of a host, as the flags and `skep.toml` set them before it starts.
//!
//! Configuration fills them in and the server reads them, so they depend on neither.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use skep_engine::{EngineOptions, Speculation, Weights};
use skep_gateway::{AccessOptions, GatewayOptions, RateOptions};
use skep_model::{DeviceChoice, ExecutorOptions};
use skep_runtime::{RuntimeOptions, ToolServer};
use skep_store::Durability;

use crate::catalog;
use crate::cluster_setup::ClusterSetup;
use crate::database_flag::DatabaseAddress;
use crate::file_settings::FileSettings;
use crate::kv_disk::KvDiskOptions;
use crate::model_options::ModelOptions;
use crate::upstreams::RemoteOptions;

/// Options of a host.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Port 0 picks a free one.
    pub listen: SocketAddr,
    pub data: DataDir,
    /// The database, if it is not the one in the data folder.
    pub database: Option<DatabaseAddress>,
    /// Whether the host waits while another one uses the database.
    pub standby: bool,
    /// The cluster that the host is in.
    pub cluster: ClusterSetup,
    pub durability: Durability,
    /// A catalog name, `hf:OWNER/REPO[:FILE]`, `pip:PACKAGE==VERSION/FILE`, or a path.
    pub model: String,
    /// The host's models, if there are several or one with settings of its own; `model` is then unused. The first is
    /// the default unless another one says that it is.
    pub models: Vec<ModelOptions>,
    /// Time that a request waits for its model to be loaded.
    pub load_wait: Option<Duration>,
    /// Threads for the model's computation, over all replicas; `None` is one per physical core.
    pub threads: Option<usize>,
    /// Engines of the same model, each with its own KV cache of `executor.kv_tokens` and its share of the threads.
    pub replicas: NonZeroUsize,
    pub executor: ExecutorOptions,
    pub engine: EngineOptions,
    /// KV pages on disk.
    pub kv_disk: KvDiskOptions,
    pub runtime: RuntimeOptions,
    /// MCP servers whose tools agents call, by name.
    pub tool_servers: BTreeMap<String, Arc<dyn ToolServer>>,
    pub gateway: GatewayOptions,
    /// Models of other servers, and routes.
    pub remote: RemoteOptions,
    pub auth: AuthOptions,
    pub rates: RateOptions,
    /// The shares of tenants and agents in each model.
    pub weights: Weights,
    /// Aliases of models on the routes of Workers AI.
    pub model_names: BTreeMap<String, String>,
    /// The origin of the options.
    pub source: Source,
}

/// The origin of a host's options.
#[derive(Clone, Default)]
pub struct Source {
    /// The file that the host was started with.
    pub file: Option<PathBuf>,
    /// The settings of the file and the flags.
    pub written: FileSettings,
    /// Reads the file again and applies the same flags.
    pub reread: Option<Reread>,
}

/// Reads options again.
pub type Reread = Arc<dyn Fn() -> Result<ServerOptions> + Send + Sync>;

/// Leaves out the function that reads the file again.
impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source")
            .field("file", &self.file)
            .field("written", &self.written)
            .finish_non_exhaustive()
    }
}

/// Storage for agents, sessions and conversations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DataDir {
    Path(PathBuf),
    /// Lost when the host stops.
    InMemory,
}

/// Settings for API keys, before it is known where the host listens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AuthOptions {
    pub required: Option<bool>,
    /// Whether the operator has accepted that anyone who can connect may do everything.
    pub insecure: bool,
    pub open_metrics: bool,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            data: DataDir::InMemory,
            database: None,
            standby: false,
            cluster: ClusterSetup::default(),
            durability: Durability::default(),
            model: catalog::DEFAULT_MODEL.to_owned(),
            models: Vec::new(),
            load_wait: None,
            threads: None,
            replicas: NonZeroUsize::MIN,
            executor: ExecutorOptions { device: DeviceChoice::Auto, ..ExecutorOptions::default() },
            engine: EngineOptions { speculation: Speculation::Auto, ..EngineOptions::default() },
            kv_disk: KvDiskOptions::default(),
            runtime: RuntimeOptions::default(),
            tool_servers: BTreeMap::new(),
            gateway: GatewayOptions::default(),
            remote: RemoteOptions::default(),
            auth: AuthOptions::default(),
            rates: RateOptions::default(),
            weights: Weights::default(),
            model_names: BTreeMap::new(),
            source: Source::default(),
        }
    }
}

impl ServerOptions {
    /// Returns the models that the host computes, of which a gateway and a balancer have none.
    pub fn local_models(&self) -> Vec<ModelOptions> {
        if !self.cluster.role.computes() {
            return Vec::new();
        }
        match self.models.is_empty() {
            true => vec![ModelOptions::of(&*self.model)],
            false => self.models.clone(),
        }
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
