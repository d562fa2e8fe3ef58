//! The shares of tenants and agents in a model while demand exceeds capacity, and the meter of the tokens that
//! they got.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;

/// Weights of tenants, and of agents among the agents of their tenant. A tenant or agent that is not named has
/// a weight of one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Weights {
    pub tenants: BTreeMap<String, NonZeroU32>,
    /// Weight of tenants that are not named.
    pub other_tenants: Option<NonZeroU32>,
    pub agents: BTreeMap<String, NonZeroU32>,
}

/// Receives token counts as tokens are computed. The loop's thread calls it, so it must be quick and must not
/// wait.
pub trait TokenMeter: fmt::Debug + Send + Sync {
    /// Counts tokens that interactive work of the tenant got: prompt tokens that were not cached, and output
    /// tokens.
    fn count(&self, tenant: &str, tokens: usize);
}

impl Weights {
    pub(crate) fn tenant_weight(&self, tenant: &str) -> f64 {
        number(self.tenants.get(tenant).copied().or(self.other_tenants))
    }

    /// Returns the weight of an agent. All requests that name a model themselves count as one agent.
    pub(crate) fn agent_weight(&self, agent: Option<&str>) -> f64 {
        number(agent.and_then(|agent| self.agents.get(agent)).copied())
    }
}

fn number(weight: Option<NonZeroU32>) -> f64 {
    weight.map_or(1.0, |weight| f64::from(weight.get()))
}
