//! The status of a host.

use crate::marker;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The state of a host, and the work that it has.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct HostStatus {
    #[schema(inline)]
    pub object: marker::Status,
    pub version: String,
    pub build: String,
    pub uptime_s: u64,
    /// The address that the host listens on, as the host knows it.
    #[schema(required)]
    pub address: Option<String>,
    pub models: Vec<ModelStatus>,
    pub agents: AgentCounts,
    pub sessions: SessionCounts,
    pub queues: QueueDepths,
    /// Work that a restored host holds; `None` if it holds nothing.
    #[schema(required)]
    pub held: Option<HeldWork>,
    pub data: DataPlace,
    /// `None` if the data is not in a folder of the host's machine.
    #[schema(required)]
    pub disk: Option<DiskStatus>,
    pub limits: Vec<LimitStatus>,
}

/// A model and what it computes.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ModelStatus {
    pub name: String,
    pub device: String,
    pub replicas: u64,
    pub context_length: u64,
    pub kv_pages: KvPages,
    pub running: u64,
    pub waiting: u64,
    /// Why the model cannot compute.
    #[schema(required)]
    pub problem: Option<String>,
}

/// Pages of the KV cache. Cached pages that no sequence uses do not count as used.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct KvPages {
    pub total: u64,
    pub used: u64,
    pub cached: u64,
}

/// Numbers of agents.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AgentCounts {
    pub ready: u64,
    /// Agents that the host could not start again.
    pub failed: u64,
}

/// Numbers of sessions.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SessionCounts {
    pub total: u64,
    pub active_turns: u64,
    pub waiting_for_approval: u64,
}

/// The number of entries that wait in each queue.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct QueueDepths {
    pub messages: u64,
    pub alarms: u64,
    pub events: u64,
    pub webhooks: u64,
    pub dead_letters: u64,
    pub batches: u64,
    pub batch_requests: u64,
}

/// Work of a restored host that waits for its operator.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct HeldWork {
    /// Sessions that accept nothing until the operator decides.
    pub sessions: u64,
    pub turns: u64,
    pub deliveries: u64,
    pub schedules: u64,
    pub batches: u64,
}

/// The place of a host's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DataPlace {
    Folder,
    /// A server of PostgreSQL.
    Postgres,
    /// The memory of the process: the data is lost when the host stops.
    Memory,
}

/// Disk usage of the host's data.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct DiskStatus {
    pub database_bytes: u64,
    pub wal_bytes: u64,
    #[schema(required)]
    pub free_bytes: Option<u64>,
    /// Whether less space is free than `disk_warning_bytes` in skep.toml.
    pub is_low: bool,
}

/// How far a limit is used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LimitStatus {
    /// The setting in skep.toml or agent.toml, or a name that the guide to operations explains.
    pub name: String,
    /// The model or the API key that the limit is of, where each has one of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub of: Option<String>,
    pub used: u64,
    pub limit: u64,
}

impl LimitStatus {
    /// Returns whether at least four fifths of the limit are used.
    pub fn is_near(&self) -> bool {
        u128::from(self.used) * 5 >= u128::from(self.limit) * 4
    }
}
