//! The operator's settings for the runtime.

mod batch;
mod responses;
mod rules;
mod waiting_bytes;

pub use batch::BatchOptions;
pub use responses::ResponseOptions;
pub(crate) use rules::Rules;
pub use waiting_bytes::WaitingBytes;

use crate::{
    Limits, ModelGrant, Money, NewWebhook, PriceList, RequestLogOptions, SealingKey, ToolGrant,
    placement::Placement,
};
use skep_outbound::Origins;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

/// Settings and bounds of the whole host, as plain data. `Default` suits a single machine.
#[derive(Clone, Debug)]
pub struct RuntimeOptions {
    /// Number of sessions kept in memory. The least recently used one is evicted first, and is read from the store when it
    /// is needed again.
    pub max_sessions_loaded: usize,
    /// Bytes of state and conversations that all idle sessions together keep in memory. Eviction uses the same order.
    pub max_session_bytes: usize,
    /// Time for which a session stays in memory without a turn.
    pub session_idle: Duration,
    /// Time for which a session is kept after its last turn; an agent may set less. `None`: the agent's own setting applies.
    pub session_ttl: Option<Duration>,
    /// Time for which the outcome of an idempotency key is kept, unless its session is deleted earlier.
    pub outcome_retention: Duration,
    /// Number of messages that may wait in one session while a turn runs.
    pub mailbox: usize,
    /// Bounds on the bytes of messages that are waiting or whose turns are running.
    pub waiting_bytes: WaitingBytes,
    /// The operator's ceilings. The effective limits are the smaller of these and those of `agent.toml`.
    pub ceilings: Limits,
    /// Maximum size of a component, and of the code that it may compile to, in bytes.
    pub max_component_bytes: usize,
    /// Time for which a deployment waits for the compiler before it fails.
    pub compile_timeout: Duration,
    /// Folder for compiled components, from which a restart loads them. `None`: every start compiles.
    pub artifact_dir: Option<PathBuf>,
    /// Maximum size of all compiled components in the folder. The least recently used ones are removed.
    pub max_artifact_bytes: u64,
    /// A warning is logged when the disk of the database has less free space than this.
    pub disk_warning_bytes: u64,
    /// Number of turns that run at once, each in its own instance; others wait.
    pub max_instances: usize,
    /// Stack size of each instance, in KiB. It is the same for all agents, because it is a setting of the engine that compiles
    /// them.
    pub stack_kb: u32,
    /// Maximum number of deployed agents.
    pub max_agents: usize,
    /// Models that agents may use if their manifests ask for them. `None`: only the host's default model.
    pub granted_models: Option<Vec<ModelGrant>>,
    /// Models that may be used for a tenant, by tenant name; `default` applies to all others. A tenant without an entry
    /// may use what its agents are granted, and without an agent the models that this host computes.
    pub tenant_models: BTreeMap<String, Vec<ModelGrant>>,
    /// Agents whose system messages tenants may share in the KV cache, because the operator says that they are public.
    pub public_prompts: BTreeSet<String>,
    /// Origins to which agents may send requests if their manifests ask for them. Empty by default.
    pub granted_hosts: Origins,
    /// The keys that encrypt secrets in the store.
    pub sealing_key: SealingKey,
    /// Options for HTTP requests of agents and deliveries to webhooks.
    pub outbound: skep_outbound::Options,
    /// External tools that agents may call if their manifests ask for them. Empty by default.
    pub granted_tools: Vec<ToolGrant>,
    /// Number of tokens that models may produce for a tenant on one UTC day, by tenant name; `default` applies to all
    /// others.
    pub tenant_tokens_per_day: BTreeMap<String, u32>,
    /// The money that models may cost a tenant on one UTC day, by tenant name; `default` applies to all others.
    pub tenant_money_per_day: BTreeMap<String, Money>,
    /// The prices of models.
    pub prices: PriceList,
    /// Days for which usage is kept by session; afterwards it is part of the agent's usage. At most
    /// [`RuntimeOptions::USAGE_DAYS`].
    pub usage_session_days: u32,
    /// Webhooks that the operator configured.
    pub webhooks: Vec<NewWebhook>,
    pub batch: BatchOptions,
    /// Responses that clients read again and continue.
    pub responses: ResponseOptions,
    /// The log of requests to models.
    pub requests: RequestLogOptions,
    /// Time before an alarm is due at which the KV pages of its session are read from the disk. Zero reads none ahead.
    pub warm_ahead: Duration,
    /// The host of a cluster at which a session without an owner begins.
    pub placement: Placement,
}

impl RuntimeOptions {
    /// Days for which usage is kept.
    pub const USAGE_DAYS: u32 = 400;
}

impl Default for RuntimeOptions {
    fn default() -> Self {
        RuntimeOptions {
            max_sessions_loaded: 10_000,
            max_session_bytes: 256 << 20,
            session_idle: Duration::from_secs(600),
            session_ttl: None,
            outcome_retention: Duration::from_secs(30 * 24 * 3600),
            mailbox: 64,
            waiting_bytes: WaitingBytes::default(),
            ceilings: Limits::default(),
            max_component_bytes: 64 << 20,
            // A 20 MB component with an interpreter in it takes half a minute on two CPUs.
            compile_timeout: Duration::from_secs(300),
            artifact_dir: None,
            max_artifact_bytes: 1 << 30,
            disk_warning_bytes: 1 << 30,
            max_instances: 1_000,
            stack_kb: 512,
            max_agents: 10_000,
            granted_models: None,
            tenant_models: BTreeMap::new(),
            public_prompts: BTreeSet::new(),
            granted_hosts: Origins::default(),
            sealing_key: SealingKey::default(),
            outbound: skep_outbound::Options::default(),
            granted_tools: Vec::new(),
            tenant_tokens_per_day: BTreeMap::new(),
            tenant_money_per_day: BTreeMap::new(),
            prices: PriceList::default(),
            usage_session_days: 31,
            webhooks: Vec::new(),
            batch: BatchOptions::default(),
            responses: ResponseOptions::default(),
            requests: RequestLogOptions::default(),
            warm_ahead: Duration::from_secs(2),
            placement: Placement::default(),
        }
    }
}
