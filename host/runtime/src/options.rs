//! What the operator decides about the runtime.

use crate::{BatchOptions, Clock, Limits, ModelGrant, NewWebhook, ToolGrant, WaitingBytes};
use skep_outbound::{Origins, ToolServer};
use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

/// Bounds of the whole host. `Default` suits one machine.
#[derive(Clone, Debug)]
pub struct RuntimeOptions {
    /// Sessions kept in memory. The one unused for longest goes first; it is read from the store when it is needed.
    pub max_sessions_loaded: usize,
    /// State and conversations that idle sessions keep in memory, all together; the same order.
    pub max_session_bytes: usize,
    /// How long a session stays in memory without a turn.
    pub session_idle: Duration,
    /// How long a session is kept after its last turn; an agent may ask for less. `None`: for as long as the agent does.
    pub session_ttl: Option<Duration>,
    /// How long the answer to an idempotency key is kept, as long as its session is.
    pub outcome_retention: Duration,
    /// Messages that wait in one session while a turn runs.
    pub mailbox: usize,
    /// Bytes of messages that wait or whose turns run.
    pub waiting_bytes: WaitingBytes,
    /// Limits in force are the smaller of these and those of `agent.toml`.
    pub ceilings: Limits,
    /// Of a component, and of the code that it may compile to.
    pub max_component_bytes: usize,
    /// How long a deployment waits for the compiler.
    pub compile_timeout: Duration,
    /// Folder for compiled components, so that a restart loads them. `None`: every start compiles.
    pub artifact_dir: Option<PathBuf>,
    /// Of all compiled components in the folder; those unused for longest go.
    pub max_artifact_bytes: u64,
    /// A warning is logged when the disk of the database has less room than this.
    pub disk_warning_bytes: u64,
    /// Turns that run at once, each in an instance of its own; others wait.
    pub max_instances: usize,
    /// Of each instance's calls that nest. One for all agents: it is a setting of the engine that compiles them.
    pub stack_kb: u32,
    pub max_agents: usize,
    /// Models that agents may use, as far as they ask for them. `None`: the host's default model.
    pub granted_models: Option<Vec<ModelGrant>>,
    /// Where agents may send requests, as far as they are granted it themselves. Nowhere, unless the operator says so.
    pub granted_hosts: Origins,
    /// The key of the secrets in the store; it is made when the first one is set. `None`: it lives as long as the process.
    pub key_file: Option<PathBuf>,
    /// How those requests are made.
    pub outbound: skep_outbound::Options,
    /// Whose tools agents call as `mcp:NAME/TOOL`, by that name: 1 to 64 of the characters a-z, 0-9 and -.
    pub tool_servers: BTreeMap<String, Arc<dyn ToolServer>>,
    /// Tools of others that agents may call, as far as they are granted them themselves. None, unless the operator says so.
    pub granted_tools: Vec<ToolGrant>,
    /// Tokens that the models produce for a tenant on one day of UTC, by its name; `default` is for all others.
    pub tenant_tokens_per_day: BTreeMap<String, u32>,
    /// Addresses that the operator has events sent to.
    pub webhooks: Vec<NewWebhook>,
    /// What schedules and deliveries go by.
    pub clock: Clock,
    pub batch: BatchOptions,
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
            // A component of 20 MB with an interpreter in it takes half a minute of two processors.
            compile_timeout: Duration::from_secs(300),
            artifact_dir: None,
            max_artifact_bytes: 1 << 30,
            disk_warning_bytes: 1 << 30,
            max_instances: 1_000,
            stack_kb: 512,
            max_agents: 10_000,
            granted_models: None,
            granted_hosts: Origins::default(),
            key_file: None,
            outbound: skep_outbound::Options::default(),
            tool_servers: BTreeMap::new(),
            granted_tools: Vec::new(),
            tenant_tokens_per_day: BTreeMap::new(),
            webhooks: Vec::new(),
            clock: Clock::default(),
            batch: BatchOptions::default(),
        }
    }
}
