//! The hosts of a cluster.

use crate::words::words;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The hosts that share one database. A host that is not in a cluster is the only one.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ClusterHosts {
    /// The hosts that are alive, by number.
    pub hosts: Vec<ClusterHost>,
}

/// A host of a cluster.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ClusterHost {
    /// The number of this start of the host, which is never given again.
    pub number: i64,
    /// The host's address without its scheme.
    pub name: String,
    /// The address at which the other hosts reach it.
    pub url: String,
    pub version: String,
    /// Absent if the host that answers is too old to report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub versions: Option<ClusterVersions>,
    pub state: ClusterHostState,
    /// Whether this host gave the answer.
    pub this: bool,
    /// The time of its start, as in RFC 3339.
    pub started_at: String,
    /// Milliseconds since the host was last heard from.
    pub seen_ms_ago: u64,
    /// Milliseconds until others take over what the host has, unless they hear from it before. Absent without a cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_left_ms: Option<u64>,
    #[serde(default)]
    pub role: ClusterHostRole,
    /// The models that the host has itself.
    pub models: Vec<String>,
    #[serde(flatten)]
    pub work: ClusterHostWork,
}

/// The work that a host of a cluster has.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ClusterHostWork {
    /// Number of sessions that the host owns.
    pub sessions: u64,
    pub running_turns: u64,
    /// Percentage of the host's capacity that is in use, by turns or by the KV pages of its models, whichever is more. It
    /// exceeds 100 if turns wait. Absent if the host does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_percent: Option<u32>,
    /// Number of requests that wait for the host's models.
    #[serde(default)]
    pub waiting_requests: u64,
    /// Prompt tokens that the host has to compute for the requests that it has.
    #[serde(default)]
    pub prefill_tokens: u64,
    /// Tokens that are expected of the answers to these requests, by those of earlier answers.
    #[serde(default)]
    pub decode_tokens: u64,
}

/// The versions that decide which hosts work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterVersions {
    /// The version of the protocol between hosts. Hosts work together if theirs are at most one apart.
    pub protocol: i64,
    /// The newest schema of the database that the host knows.
    pub schema: i64,
}

words! {
    /// The state of a host in a cluster.
    pub enum ClusterHostState {
        /// The host takes new sessions.
        Serving = "serving",
        /// The host hands its sessions over to others, and then ends.
        Draining = "draining",
    }
}

words! {
    /// The part that a host takes in a cluster.
    pub enum ClusterHostRole {
        /// The host runs agents and computes its models.
        All = "all",
        /// The host runs agents, and other hosts compute their generations.
        Gateway = "gateway",
        /// The host computes prompts for hosts with the role `decode`.
        Prefill = "prefill",
        /// The host runs agents and computes its models, and prefill hosts compute long prompts for it.
        Decode = "decode",
        /// The host passes all requests on to other hosts.
        Balancer = "balancer",
    }
}

impl Default for ClusterHostRole {
    /// Returns the role of a host that is too old to name one.
    fn default() -> Self {
        ClusterHostRole::All
    }
}
