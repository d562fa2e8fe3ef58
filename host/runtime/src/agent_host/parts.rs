//! The parts that a host is built from.

use crate::{Clock, HostRole, Peers, SharedCounts};
use skep_engine::{DiskTier, ModelSet};
use skep_outbound::ToolServer;
use skep_store::Store;
use std::{collections::BTreeMap, sync::Arc};

/// The parts of a host, beside its settings in [`RuntimeOptions`](crate::RuntimeOptions).
#[derive(Clone)]
pub struct HostParts {
    pub store: Store,
    pub models: ModelSet,
    /// MCP servers whose tools agents call as `mcp:NAME/TOOL`, by that name: 1 to 64 of the characters a-z, 0-9 and -.
    pub tool_servers: BTreeMap<String, Arc<dyn ToolServer>>,
    /// Keeps KV pages on disk. The engines of `models` use the same.
    pub disk: Option<Arc<DiskTier>>,
    /// The wall clock of everything that the host does.
    pub clock: Clock,
    /// The part that the host takes in its cluster. One that has no model needs other hosts with models.
    pub role: HostRole,
    /// The model of requests without one, if the host has no default of its own. Without a name it is the one that the cluster has
    /// chosen.
    pub default_model: Option<String>,
    /// Whether the host gives KV pages of `disk` to the other hosts.
    pub gives_pages: bool,
    /// Asks the other hosts of the cluster. `None` without a cluster.
    pub peers: Option<Arc<dyn Peers>>,
    /// The amounts that all hosts of the cluster count together, such as those of rate limits.
    pub counts: Option<Arc<dyn SharedCounts>>,
}

impl HostParts {
    /// Returns the parts of a host with the system's clock and without tool servers.
    pub fn new(store: Store, models: ModelSet) -> Self {
        let (tool_servers, clock, role) = (BTreeMap::new(), Clock::default(), HostRole::All);
        HostParts {
            store,
            models,
            tool_servers,
            disk: None,
            clock,
            role,
            default_model: None,
            gives_pages: false,
            peers: None,
            counts: None,
        }
    }
}
