//! `skep.toml`: the settings of a host's operator. Flags override them.
//!
//! Every field is optional, and its default is the same as without a file. An unknown field is an error that
//! names the nearest known one, so that a misspelt limit never silently means no limit.

mod agents;
mod ai;
mod auth;
mod batch;
mod cluster;
mod engine;
mod grants;
mod http;
mod kv_cluster;
mod kv_disk;
mod listen;
mod mcp;
mod model;
mod outbound;
mod prices;
mod requests;
mod secrets;
mod sessions;
mod tenants;
mod webhook;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use skep_model::{DeviceChoice, MemoryFraction};
use skep_runtime::LimitsToml;
use skep_store::Durability;

use crate::database_flag::DatabaseAddress;
use crate::file_settings::FileSettings;
use crate::model_prices::PricesConfig;
use crate::number::number;
use crate::server_options::{DataDir, ServerOptions};
use crate::upstreams::{RouteConfig, UpstreamConfig};
use agents::AgentConfig;
pub use ai::AiConfig;
pub use auth::{AuthConfig, AuthFlag};
pub use batch::{BatchConfig, ResponseConfig};
pub use cluster::{ClusterConfig, RoleSetting};
pub use engine::{EngineConfig, KvConfig, RoutingConfig, SpeculationConfig};
use grants::GrantsConfig;
pub use http::HttpConfig;
use kv_disk::KvDiskConfig;
pub use listen::listen_address;
pub use mcp::McpConfig;
use model::ModelSetting;
use outbound::OutboundConfig;
use requests::RequestsConfig;
use secrets::SecretsConfig;
use sessions::SessionsConfig;
use tenants::TenantConfig;
pub use tenants::rates_of_open_host;
pub use webhook::WebhookConfig;

/// Maximum total size of stored data.
const BYTES: u64 = 1 << 50;
/// Maximum size of data that is taken into memory in one block.
const MAX_BLOCK_BYTES: u64 = 1 << 30;

/// The file as written.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    #[serde(deserialize_with = "listen::field")]
    pub listen: Option<SocketAddr>,
    /// Folder of the database, relative to the file.
    pub data: Option<PathBuf>,
    /// The database, if it is not the one in the data folder.
    pub database: Option<DatabaseAddress>,
    /// Whether the host waits while another one uses the database.
    pub standby: Option<bool>,
    /// The other hosts that use the database.
    pub cluster: ClusterConfig,
    pub durability: Option<DurabilityConfig>,
    /// A catalog name, `hf:OWNER/REPO[:FILE]`, `pip:PACKAGE==VERSION/FILE`, or a path; or several models as `[[model]]`.
    pub model: Option<ModelSetting>,
    /// Device that the model runs on: auto, cpu, cuda, or cuda:0,1 for some devices.
    #[serde(deserialize_with = "parsed")]
    pub device: Option<DeviceChoice>,
    /// Whether a sequence gets the same logits, bit for bit, whatever is computed beside it. On the CPU this
    /// always holds; on CUDA devices it is slower.
    pub deterministic: Option<bool>,
    #[serde(deserialize_with = "number::<1, 256, _, _>")]
    pub threads: Option<usize>,
    pub engine: EngineConfig,
    /// KV pages on disk.
    pub kv: KvDiskConfig,
    /// Ceilings: an agent gets the smaller of its own limit and this one.
    pub limits: LimitsToml,
    pub runtime: RuntimeConfig,
    pub sessions: SessionsConfig,
    pub http: HttpConfig,
    pub ai: AiConfig,
    pub auth: AuthConfig,
    pub grants: GrantsConfig,
    pub batch: BatchConfig,
    pub responses: ResponseConfig,
    pub outbound: OutboundConfig,
    /// MCP servers, by name.
    pub mcp: BTreeMap<String, McpConfig>,
    pub agents: BTreeMap<String, AgentConfig>,
    /// Limits of tenants, by name; `default` covers all others.
    pub tenants: BTreeMap<String, TenantConfig>,
    /// Prices of models, by name. They can also be set with the models.
    pub prices: BTreeMap<String, PricesConfig>,
    /// The log of requests to models.
    pub requests: RequestsConfig,
    pub telemetry: TelemetryConfig,
    /// The keys that secrets are sealed with.
    pub secrets: SecretsConfig,
    /// Servers that compute models.
    pub upstream: Vec<UpstreamConfig>,
    /// Names for several models.
    pub route: Vec<RouteConfig>,
    /// Webhooks that events are sent to.
    pub webhook: Vec<WebhookConfig>,
    /// The settings as they were written.
    #[serde(skip)]
    pub written: FileSettings,
}

/// The failures that a committed turn survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DurabilityConfig {
    /// A crash of the process.
    Process,
    /// A power cut as well: each commit waits for the disk.
    Power,
}

/// The section `[runtime]`: bounds of the host for agents and their sessions.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuntimeConfig {
    #[serde(deserialize_with = "number::<1, 1_000_000, _, _>")]
    pub max_agents: Option<usize>,
    #[serde(deserialize_with = "number::<1, 10_000_000, _, _>")]
    pub max_sessions_loaded: Option<usize>,
    /// Maximum size of the state and conversations that idle sessions keep in memory.
    #[serde(deserialize_with = "number::<0, BYTES, _, _>")]
    pub max_session_bytes: Option<usize>,
    #[serde(deserialize_with = "number::<1, 100_000, _, _>")]
    pub max_instances: Option<usize>,
    #[serde(deserialize_with = "number::<1024, MAX_BLOCK_BYTES, _, _>")]
    pub max_component_bytes: Option<usize>,
    /// Time that a deployment waits for the compiler.
    #[serde(deserialize_with = "number::<1, 86_400, _, _>")]
    pub compile_s: Option<u64>,
    /// Maximum size of the compiled code that is kept for the next start.
    #[serde(deserialize_with = "number::<0, BYTES, _, _>")]
    pub max_artifact_bytes: Option<u64>,
    /// Free space on the disk of the database below which a warning is logged.
    #[serde(deserialize_with = "number::<0, BYTES, _, _>")]
    pub disk_warning_bytes: Option<u64>,
    /// Size of the stack of an agent's calls. Less than the minimum is too little for what toolchains emit,
    /// and each slot for an instance reserves as much address space.
    #[serde(deserialize_with = "number::<64, 16_384, _, _>")]
    pub stack_kb: Option<u32>,
    /// Maximum number of messages that wait for one session.
    #[serde(deserialize_with = "number::<1, 1_000_000, _, _>")]
    pub mailbox: Option<usize>,
    /// Maximum size of the messages that wait or whose turns run, over all tenants.
    #[serde(deserialize_with = "number::<1_024, BYTES, _, _>")]
    pub max_waiting_bytes: Option<usize>,
    /// The same for one tenant.
    #[serde(deserialize_with = "number::<1_024, BYTES, _, _>")]
    pub max_waiting_bytes_per_tenant: Option<usize>,
    /// The same for one session.
    #[serde(deserialize_with = "number::<1_024, BYTES, _, _>")]
    pub max_waiting_bytes_per_session: Option<usize>,
}

/// The section `[telemetry]`: where traces are sent.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TelemetryConfig {
    /// OTLP/HTTP address of a collector; traces are sent if it is set.
    pub otlp_endpoint: Option<String>,
}

impl Config {
    /// Reads the file at `path`. Mistakes that only the combination of all settings shows are errors of
    /// [`Config::apply`].
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut config = Self::parse(&text).with_context(|| is_invalid(path))?;
        if let (Some(model), Some(dir)) = (&mut config.model, path.parent()) {
            model.relative_to(dir);
        }
        mcp::relative_to(&mut config.mcp, path.parent().unwrap_or(Path::new(".")));
        if let (Some(data), Some(dir)) = (&config.data, path.parent()) {
            config.data = Some(dir.join(data));
        }
        config.secrets.relative_to(path.parent().unwrap_or(Path::new(".")));
        config.cluster.relative_to(path.parent().unwrap_or(Path::new(".")));
        config.kv.relative_to(path.parent().unwrap_or(Path::new(".")));
        Ok(config)
    }

    /// Parses the text of a file.
    pub fn parse(text: &str) -> Result<Self> {
        let config: Config = skep_runtime::parse_toml(text).map_err(anyhow::Error::msg)?;
        let written = skep_runtime::parse_toml(text).map_err(anyhow::Error::msg)?;
        Ok(Config { written: FileSettings::new(&written), ..config })
    }

    /// Applies the settings in the file to `options`.
    pub fn apply(&self, options: &mut ServerOptions) -> Result<()> {
        options.source.written.clone_from(&self.written);
        set(&mut options.listen, &self.listen);
        self.model.iter().try_for_each(|model| model.apply(options))?;
        if let Some(durability) = self.durability {
            options.durability = match durability {
                DurabilityConfig::Process => Durability::Process,
                DurabilityConfig::Power => Durability::Power,
            };
        }
        if let Some(data) = &self.data {
            options.data = DataDir::Path(data.clone());
        }
        options.database = self.database.clone().or(options.database.take());
        set(&mut options.standby, &self.standby);
        self.cluster.apply(&mut options.cluster);
        set(&mut options.executor.device, &self.device);
        set(&mut options.executor.deterministic, &self.deterministic);
        options.threads = self.threads.or(options.threads);
        self.engine.apply(options)?;
        self.kv.apply(&mut options.kv_disk)?;
        set(&mut options.runtime.max_agents, &self.runtime.max_agents);
        set(&mut options.runtime.max_sessions_loaded, &self.runtime.max_sessions_loaded);
        set(&mut options.runtime.max_session_bytes, &self.runtime.max_session_bytes);
        set(&mut options.runtime.max_instances, &self.runtime.max_instances);
        set(&mut options.runtime.max_component_bytes, &self.runtime.max_component_bytes);
        set(&mut options.gateway.max_component_bytes, &self.runtime.max_component_bytes);
        set(&mut options.runtime.compile_timeout, &self.runtime.compile_s.map(Duration::from_secs));
        set(&mut options.runtime.max_artifact_bytes, &self.runtime.max_artifact_bytes);
        set(&mut options.runtime.disk_warning_bytes, &self.runtime.disk_warning_bytes);
        set(&mut options.runtime.stack_kb, &self.runtime.stack_kb);
        set(&mut options.runtime.mailbox, &self.runtime.mailbox);
        let waiting = &mut options.runtime.waiting_bytes;
        set(&mut waiting.host, &self.runtime.max_waiting_bytes);
        set(&mut waiting.tenant, &self.runtime.max_waiting_bytes_per_tenant);
        set(&mut waiting.session, &self.runtime.max_waiting_bytes_per_session);
        self.http.apply(&mut options.gateway)?;
        self.auth.apply(&mut options.auth);
        self.ai.apply(options);
        set(&mut options.runtime.sealing_key, &self.secrets.sealing_key()?);
        self.sessions.apply(options)?;
        self.grants.apply(&mut options.runtime);
        self.requests.apply(&mut options.runtime.requests);
        tenants::apply(&self.tenants, options)?;
        options.runtime.prices = prices::list(self)?;
        agents::apply(&self.agents, &mut options.weights, &mut options.runtime.public_prompts)?;
        mcp::apply(&self.mcp, &mut options.tool_servers)?;
        self.batch.apply(&mut options.runtime.batch);
        self.responses.apply(&mut options.runtime.responses);
        self.outbound.apply(&mut options.runtime);
        webhook::apply(&self.webhook, &mut options.runtime)?;
        options.remote.upstreams.clone_from(&self.upstream);
        options.remote.routes.clone_from(&self.route);
        options.runtime.ceilings = self.limits.over(&options.runtime.ceilings);
        Ok(())
    }
}

/// Replaces a value by the one of the file, if it has one.
fn set<T: Clone>(target: &mut T, value: &Option<T>) {
    if let Some(value) = value {
        *target = value.clone();
    }
}

/// Reads a value that is written as its type is parsed and printed everywhere.
fn parsed<'de, D, T>(reader: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: std::fmt::Display>,
{
    String::deserialize(reader)?.parse().map(Some).map_err(D::Error::custom)
}

/// Reads a fraction of a device's memory, which is a number.
fn fraction<'de, D: Deserializer<'de>>(reader: D) -> Result<Option<MemoryFraction>, D::Error> {
    MemoryFraction::new(f64::deserialize(reader)?).map(Some).map_err(D::Error::custom)
}

/// Returns the text that errors in this file start with.
pub fn is_invalid(path: &Path) -> String {
    format!("{} is not a valid skep.toml", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_engine::{Routing, Speculation};
    use skep_kernels::Isa;
    use skep_model::{CpuAffinity, KvDtype};

    #[test]
    fn file_overrides_defaults_and_leaves_the_rest() {
        let config = Config::parse(
            "listen = \"0.0.0.0:9000\"\nthreads = 3\n[engine]\nreplicas = 2\nrouting = \"round-robin\"\nkv = \"f32\"\nmax_queue = 7\nspeculation = \"prompt-lookup\"\n[limits]\nmemory_mb = 16\n[http]\ndrain_s = 2\norigins = [\"https://app.example\"]\n",
        )
        .expect("valid");
        let mut options = ServerOptions::default();
        let before = options.clone();
        config.apply(&mut options).expect("sensible values");
        assert_eq!(options.listen.port(), 9000);
        assert_eq!(options.threads, Some(3));
        assert_eq!(options.executor.kv, KvDtype::F32);
        assert_eq!((options.replicas.get(), options.engine.routing), (2, Routing::RoundRobin));
        assert_eq!(options.engine.max_queue, 7);
        assert_eq!(options.engine.speculation, Speculation::prompt_lookup());
        assert_eq!(options.runtime.ceilings.memory_mb, 16);
        assert_eq!(options.runtime.ceilings.cpu_ms, before.runtime.ceilings.cpu_ms);
        assert_eq!(options.gateway.drain, Duration::from_secs(2));
        assert_eq!(options.gateway.origins, ["https://app.example"]);
        assert_eq!(options.model, before.model);
    }

    #[test]
    fn ranks_in_the_file_reach_the_executor() {
        let text = "[engine]\ntensor_parallel = 3\npipeline_parallel = 2\nrank_deadline_s = 40\n";
        let mut options = ServerOptions::default();
        assert_eq!((options.executor.tensor_parallel, options.executor.pipeline_parallel), (1, 1));
        Config::parse(text).expect("valid").apply(&mut options).expect("in range");
        assert_eq!((options.executor.tensor_parallel, options.executor.pipeline_parallel), (3, 2));
        assert_eq!(options.executor.rank_deadline, Duration::from_secs(40));
    }

    #[test]
    fn compute_options_can_be_set() {
        let apply = |text: &str| {
            let mut options = ServerOptions::default();
            Config::parse(text).expect("valid").apply(&mut options).map(|()| options.executor)
        };
        let executor =
            apply("[engine]\nkv = \"i8\"\nisa = \"portable\"\npin_threads = true\n").expect("known");
        assert_eq!(
            (executor.kv, executor.isa, executor.affinity),
            (KvDtype::I8, Some(Isa::Portable), CpuAffinity::Pinned(0))
        );
        assert_eq!(apply("[engine]\nkv = \"fp8\"\n").expect("known").kv, KvDtype::Fp8);
        let error = apply("[engine]\nisa = \"sse9\"\n").expect_err("unknown").to_string();
        assert!(error.contains("sse9") && error.contains("avx2"), "{error}");
    }

    #[test]
    fn batches_and_aliases_of_models_can_be_set() {
        let text = "[ai.models]\n\"@cf/a/b\" = \"tiny\"\n[batch]\nretention_h = 2\nfile_retention_h = 5\nmax_stored_mb = 3\n\
                    [responses]\nretention_days = 2\nmax_stored_mb = 5\n";
        let mut options = ServerOptions::default();
        Config::parse(text).expect("valid").apply(&mut options).expect("in range");
        assert_eq!(options.model_names["@cf/a/b"], "tiny");
        let responses = &options.runtime.responses;
        assert_eq!((responses.retention.as_secs(), responses.max_stored_bytes), (172_800, 5 << 20));
        let batch = options.runtime.batch;
        assert_eq!((batch.retention.as_secs(), batch.max_stored_bytes), (7200, 3 << 20));
        assert_eq!(batch.file_retention.as_secs(), 18_000);
    }

    #[test]
    fn an_invalid_value_is_an_error_with_its_field_and_range() {
        for (text, expected) in [
            (
                "model = \"x\"\ndevice = \"gpu\"\n",
                "line 2: device: unknown device \"gpu\"; expected one of auto, cpu, cuda, cuda:0,1",
            ),
            ("deterministic = \"yes\"\n", "deterministic: invalid type: string \"yes\", expected a boolean"),
            ("threads = 0\n", "line 1: threads: 0 is out of range; it must be between 1 and 256"),
            (
                "[engine]\nkv_tokens = 10\n",
                "[engine] kv_tokens: 10 is out of range; it must be between 256 and",
            ),
            (
                "[engine]\ngpu_memory = 0.01\n",
                "line 2: [engine] gpu_memory: 0.01 is out of range; a fraction",
            ),
            (
                "[engine]\ngpu_memory = \"half\"\n",
                "[engine] gpu_memory: invalid type: string \"half\", expected",
            ),
            (
                "[engine]\nreplicas = 0\n",
                "line 2: [engine] replicas: 0 is out of range; it must be between 1 and 64",
            ),
            (
                "[engine]\nmax_sequences = 0\n",
                "[engine] max_sequences: 0 is out of range; it must be between 1 and",
            ),
            (
                "[engine]\nmax_queue = -1\n",
                "[engine] max_queue: -1 is out of range; it must be between 1 and",
            ),
            (
                "[http]\nmax_body_bytes = 0\n",
                "[http] max_body_bytes: 0 is out of range; it must be between 1024 and",
            ),
            (
                "[batch]\nmax_running = 0\n",
                "[batch] max_running: 0 is out of range; it must be between 1 and 100000",
            ),
            (
                "[outbound]\nmax_running = 0\n",
                "[outbound] max_running: 0 is out of range; it must be between 1 and",
            ),
            (
                "[mcp.files]\ntimeout_ms = 0\n",
                "[mcp.files] timeout_ms: 0 is out of range; it must be between 1 and",
            ),
            (
                "[limits]\nstate_kb = 1\nmemory_mb = 0\n",
                "line 3: [limits] memory_mb: 0 is out of range; it must be between 1 and 4096",
            ),
            (
                "[limits]\nfetch_kb = 99999999\n",
                "line 2: [limits] fetch_kb: 99999999 is out of range; it must be between 0 and",
            ),
            ("[limits]\ncpu_ms = -1\n", "[limits] cpu_ms: -1 is out of range; it must be between 1 and"),
            (
                "[runtime]\nstack_kb = 63\n",
                "[runtime] stack_kb: 63 is out of range; it must be between 64 and 16384",
            ),
            (
                "[runtime]\nmax_agents = \"x\"\n",
                "[runtime] max_agents: invalid type: string \"x\", expected a whole",
            ),
        ] {
            let error = Config::parse(text).expect_err(text).to_string();
            assert!(error.contains(expected), "{error}");
        }
        let config = Config::parse("[runtime]\nstack_kb = 64\n[limits]\ntables = 3\n").expect("numbers");
        let mut options = ServerOptions::default();
        config.apply(&mut options).expect("in range");
        assert_eq!((options.runtime.stack_kb, options.runtime.ceilings.tables), (64, 3));
    }

    #[test]
    fn unknown_field_names_the_nearest_one() {
        let error = Config::parse("[limits]\nmemroy_mb = 1\n").expect_err("misspelt").to_string();
        assert!(
            error.starts_with("line 2: unknown field `memroy_mb`; did you mean `memory_mb`? ("),
            "{error}"
        );
        let error = Config::parse("lisen = \"127.0.0.1:1\"\n").expect_err("misspelt").to_string();
        assert!(error.contains("did you mean `listen`?"), "{error}");
    }

    #[test]
    fn data_folder_is_relative_to_the_file() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("skep.toml");
        std::fs::write(&path, "data = \"here\"\ndurability = \"power\"\n").expect("file");
        let config = Config::read(&path).expect("valid");
        assert_eq!(config.data, Some(dir.path().join("here")));
        let mut options = ServerOptions::default();
        config.apply(&mut options).expect("in range");
        assert_eq!(options.durability, Durability::Power);
    }
}
