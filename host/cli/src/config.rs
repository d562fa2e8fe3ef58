//! `skep.toml`: what the operator of a host decides. Flags override it.
//!
//! Every field is optional and has the same default as without a file. A field that nobody knows is an error that
//! names the nearest one, so that a misspelt limit is never silently none.

mod agents;
mod ai;
mod auth;
mod batch;
mod grants;
mod http;
mod mcp;
mod outbound;
mod sessions;
mod tenants;
mod webhook;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use skep_engine::{Routing, Speculation};
use skep_model::{KvDtype, Placement};
use skep_runtime::LimitsToml;
use skep_store::Durability;

use crate::server::{DataDir, ServerOptions};
use agents::AgentConfig;
pub use ai::AiConfig;
pub use auth::{AuthConfig, AuthFlag, AuthOptions};
pub use batch::BatchConfig;
use grants::GrantsConfig;
pub use http::HttpConfig;
pub use mcp::McpConfig;
use outbound::OutboundConfig;
use sessions::SessionsConfig;
use tenants::TenantConfig;
pub use tenants::rates_of_open_host;
pub use webhook::WebhookConfig;

/// Less is too little for what toolchains emit; each place for an instance reserves as much address space.
const STACK_KB: RangeInclusive<u32> = 64..=16_384;

/// The file as it is written.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    pub listen: Option<SocketAddr>,
    /// Folder of the database, relative to the file.
    pub data: Option<PathBuf>,
    pub durability: Option<DurabilityConfig>,
    /// A catalog name, `hf:OWNER/REPO[:FILE]`, or a path.
    pub model: Option<String>,
    pub threads: Option<usize>,
    pub engine: EngineConfig,
    /// Ceilings: an agent gets the smaller of its own limit and this one.
    pub limits: LimitsToml,
    pub runtime: RuntimeConfig,
    pub sessions: SessionsConfig,
    pub http: HttpConfig,
    pub ai: AiConfig,
    pub auth: AuthConfig,
    pub grants: GrantsConfig,
    pub batch: BatchConfig,
    pub outbound: OutboundConfig,
    /// Servers of tools, by name.
    pub mcp: BTreeMap<String, McpConfig>,
    pub agents: BTreeMap<String, AgentConfig>,
    /// By name; `default` is for all others.
    pub tenants: BTreeMap<String, TenantConfig>,
    pub telemetry: TelemetryConfig,
    /// Addresses that events are sent to.
    pub webhook: Vec<WebhookConfig>,
}

/// What a committed turn survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DurabilityConfig {
    /// A crash of the process.
    Process,
    /// A power cut too: each commit waits for the disk.
    Power,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineConfig {
    /// Engines of the same model in this process; the threads are shared out among them.
    pub replicas: Option<NonZeroUsize>,
    pub routing: Option<RoutingConfig>,
    /// Requests that may wait at each replica.
    pub max_queue: Option<usize>,
    /// Sequences that run at the same time on each replica.
    pub max_sequences: Option<usize>,
    /// Token budget of one step.
    pub step_tokens: Option<usize>,
    /// The longest step in which prompts are computed beside decodes.
    pub step_target_ms: Option<u64>,
    /// Tokens that the KV cache of each replica holds, over all sequences.
    pub kv_tokens: Option<usize>,
    pub kv: Option<KvConfig>,
    /// Instructions to compute with: portable, avx2 or avx512.
    pub isa: Option<String>,
    /// Whether each thread of the model's computation stays on a CPU of its own.
    pub pin_threads: Option<bool>,
    pub default_deadline_s: Option<u64>,
    pub speculation: Option<SpeculationConfig>,
    /// Ranks that share each layer.
    pub tensor_parallel: Option<usize>,
    /// Ranks that share the layers out.
    pub pipeline_parallel: Option<usize>,
    /// How long ranks wait while none of them makes progress.
    pub rank_deadline_s: Option<u64>,
}

/// How requests are spread over replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RoutingConfig {
    Affinity,
    RoundRobin,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvConfig {
    F16,
    F32,
    I8,
}

/// Whether the engine guesses ahead, and from what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum SpeculationConfig {
    Off,
    PromptLookup,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuntimeConfig {
    pub max_agents: Option<usize>,
    pub max_sessions_loaded: Option<usize>,
    /// State and conversations that idle sessions keep in memory.
    pub max_session_bytes: Option<usize>,
    pub max_instances: Option<usize>,
    pub max_component_bytes: Option<usize>,
    /// How long a deployment waits for the compiler.
    pub compile_s: Option<u64>,
    /// Of the compiled code that is kept for the next start.
    pub max_artifact_bytes: Option<u64>,
    /// Of the stack of an agent's calls.
    pub stack_kb: Option<u32>,
    /// Messages that may wait for one session.
    pub mailbox: Option<usize>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TelemetryConfig {
    /// The OTLP/HTTP address of a collector; traces are sent if there is one.
    pub otlp_endpoint: Option<String>,
}

impl Config {
    /// Reads `path`.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut config =
            Self::parse(&text).with_context(|| format!("{} is not a valid skep.toml", path.display()))?;
        mcp::relative_to(&mut config.mcp, path.parent().unwrap_or(Path::new(".")));
        if let (Some(data), Some(dir)) = (&config.data, path.parent()) {
            config.data = Some(dir.join(data));
        }
        Ok(config)
    }

    fn parse(text: &str) -> Result<Self> {
        toml::from_str(text).map_err(|error| {
            let hint = nearest_field(error.message()).map(|name| format!("\n  hint: did you mean `{name}`?"));
            anyhow::anyhow!("{}{}", error.to_string().trim_end(), hint.unwrap_or_default())
        })
    }

    /// Puts what the file says over `options`.
    pub fn apply(&self, options: &mut ServerOptions) -> Result<()> {
        fn set<T: Clone>(target: &mut T, value: &Option<T>) {
            if let Some(value) = value {
                *target = value.clone();
            }
        }
        set(&mut options.listen, &self.listen);
        set(&mut options.model, &self.model);
        if let Some(durability) = self.durability {
            options.durability = match durability {
                DurabilityConfig::Process => Durability::Process,
                DurabilityConfig::Power => Durability::Power,
            };
        }
        if let Some(data) = &self.data {
            options.data = DataDir::Path(data.clone());
        }
        options.threads = self.threads.or(options.threads);
        let engine = &self.engine;
        set(&mut options.replicas, &engine.replicas);
        set(&mut options.engine.routing, &engine.routing.map(Routing::from));
        set(&mut options.engine.max_queue, &engine.max_queue);
        set(&mut options.engine.max_sequences, &engine.max_sequences);
        set(&mut options.engine.step_tokens, &engine.step_tokens);
        options.engine.step_target =
            engine.step_target_ms.map(Duration::from_millis).or(options.engine.step_target);
        set(&mut options.executor.kv_tokens, &engine.kv_tokens);
        set(&mut options.executor.tensor_parallel, &engine.tensor_parallel);
        set(&mut options.executor.pipeline_parallel, &engine.pipeline_parallel);
        set(&mut options.executor.rank_deadline, &engine.rank_deadline_s.map(Duration::from_secs));
        set(&mut options.engine.default_deadline, &engine.default_deadline_s.map(Duration::from_secs));
        set(&mut options.engine.speculation, &engine.speculation.map(Speculation::from));
        set(&mut options.executor.kv, &engine.kv.map(KvDtype::from));
        if let Some(isa) = &engine.isa {
            let isa = isa.parse().map_err(|problem| anyhow::anyhow!("[engine] isa: {problem}"))?;
            options.executor.isa = Some(isa);
        }
        if engine.pin_threads == Some(true) {
            options.executor.placement = Placement::Pinned(0);
        }
        set(&mut options.runtime.max_agents, &self.runtime.max_agents);
        set(&mut options.runtime.max_sessions_loaded, &self.runtime.max_sessions_loaded);
        set(&mut options.runtime.max_session_bytes, &self.runtime.max_session_bytes);
        set(&mut options.runtime.max_instances, &self.runtime.max_instances);
        set(&mut options.runtime.max_component_bytes, &self.runtime.max_component_bytes);
        set(&mut options.gateway.max_component_bytes, &self.runtime.max_component_bytes);
        set(&mut options.runtime.compile_timeout, &self.runtime.compile_s.map(Duration::from_secs));
        set(&mut options.runtime.max_artifact_bytes, &self.runtime.max_artifact_bytes);
        if self.runtime.stack_kb.is_some_and(|kb| !STACK_KB.contains(&kb)) {
            bail!("[runtime] stack_kb may be {} to {}", STACK_KB.start(), STACK_KB.end());
        }
        set(&mut options.runtime.stack_kb, &self.runtime.stack_kb);
        set(&mut options.runtime.mailbox, &self.runtime.mailbox);
        self.http.apply(&mut options.gateway)?;
        self.auth.apply(&mut options.auth);
        self.ai.apply(options);
        self.sessions.apply(options)?;
        self.grants.apply(&mut options.runtime);
        tenants::apply(&self.tenants, options)?;
        agents::apply(&self.agents, &mut options.engine)?;
        mcp::apply(&self.mcp, &mut options.runtime)?;
        self.batch.apply(&mut options.runtime.batch);
        self.outbound.apply(&mut options.runtime);
        options.runtime.webhooks.extend(self.webhook.iter().map(Into::into));
        self.limits.check().map_err(anyhow::Error::msg)?;
        options.runtime.ceilings = self.limits.over(&options.runtime.ceilings);
        if options.engine.max_sequences == 0 || options.engine.step_tokens == 0 {
            bail!("[engine] max_sequences and step_tokens must be at least 1");
        }
        Ok(())
    }
}

impl From<RoutingConfig> for Routing {
    fn from(routing: RoutingConfig) -> Self {
        match routing {
            RoutingConfig::Affinity => Routing::Affinity,
            RoutingConfig::RoundRobin => Routing::RoundRobin,
        }
    }
}

impl From<KvConfig> for KvDtype {
    fn from(kv: KvConfig) -> Self {
        match kv {
            KvConfig::F16 => KvDtype::F16,
            KvConfig::F32 => KvDtype::F32,
            KvConfig::I8 => KvDtype::I8,
        }
    }
}

impl From<SpeculationConfig> for Speculation {
    fn from(speculation: SpeculationConfig) -> Self {
        match speculation {
            SpeculationConfig::Off => Speculation::Off,
            SpeculationConfig::PromptLookup => Speculation::prompt_lookup(),
        }
    }
}

/// The known field that is nearest to the unknown one, out of serde's "unknown field `x`, expected one of `a`, `b`".
fn nearest_field(message: &str) -> Option<String> {
    let mut quoted = message.strip_prefix("unknown field ")?.split('`').skip(1).step_by(2);
    let unknown = quoted.next()?;
    let nearest = quoted.min_by_key(|name| strsim::damerau_levenshtein(unknown, name))?;
    Some(nearest.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_kernels::Isa;

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
    fn ranks_of_the_engine_are_those_of_its_executor() {
        let text = "[engine]\ntensor_parallel = 3\npipeline_parallel = 2\nrank_deadline_s = 40\n";
        let mut options = ServerOptions::default();
        assert_eq!((options.executor.tensor_parallel, options.executor.pipeline_parallel), (1, 1));
        Config::parse(text).expect("valid").apply(&mut options).expect("in range");
        assert_eq!((options.executor.tensor_parallel, options.executor.pipeline_parallel), (3, 2));
        assert_eq!(options.executor.rank_deadline, Duration::from_secs(40));
    }

    #[test]
    fn how_a_model_is_computed_can_be_set() {
        let apply = |text: &str| {
            let mut options = ServerOptions::default();
            Config::parse(text).expect("valid").apply(&mut options).map(|()| options.executor)
        };
        let executor =
            apply("[engine]\nkv = \"i8\"\nisa = \"portable\"\npin_threads = true\n").expect("known");
        assert_eq!(
            (executor.kv, executor.isa, executor.placement),
            (KvDtype::I8, Some(Isa::Portable), Placement::Pinned(0))
        );
        let error = apply("[engine]\nisa = \"sse9\"\n").expect_err("unknown").to_string();
        assert!(error.contains("sse9") && error.contains("avx2"), "{error}");
    }

    #[test]
    fn batches_and_other_names_of_models_can_be_set() {
        let text = "[ai.models]\n\"@cf/a/b\" = \"tiny\"\n[batch]\nretention_h = 2\nmax_stored_mb = 3\n";
        let mut options = ServerOptions::default();
        Config::parse(text).expect("valid").apply(&mut options).expect("in range");
        assert_eq!(options.gateway.model_names["@cf/a/b"], "tiny");
        let batch = options.runtime.batch;
        assert_eq!((batch.retention.as_secs(), batch.max_stored_bytes), (7200, 3 << 20));
    }

    #[test]
    fn a_ceiling_out_of_bounds_is_an_error() {
        for (text, expected) in [
            ("[limits]\nfetch_kb = 99999999\n", "fetch_kb under [limits] is 99999999; it may be 0 to"),
            ("[runtime]\nstack_kb = 63\n", "[runtime] stack_kb may be 64 to 16384"),
        ] {
            let config = Config::parse(text).expect("a number");
            let error = config.apply(&mut ServerOptions::default()).expect_err(text).to_string();
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
        assert!(error.contains("memroy_mb") && error.contains("did you mean `memory_mb`?"), "{error}");
        let error = Config::parse("lisen = \"127.0.0.1:1\"\n").expect_err("misspelt").to_string();
        assert!(error.contains("did you mean `listen`?"), "{error}");
    }

    #[test]
    fn webhooks_are_those_of_the_file() {
        let text =
            "[[webhook]]\nurl = \"https://example.com\"\ntopics = [\"skep.turn.*\"]\nsecret = \"whsec_x\"\n";
        let mut options = ServerOptions::default();
        Config::parse(text).expect("valid").apply(&mut options).expect("in range");
        assert_eq!(options.runtime.webhooks[0].url, "https://example.com");
        let error = Config::parse("[[webhook]]\nurl = \"x\"\ntopics = [\"or*\"]\n")
            .expect_err("no pattern")
            .to_string();
        assert!(error.contains("such as order.*"), "{error}");
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
