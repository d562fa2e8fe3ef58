//! How the model is shared out while more of it is wanted than there is, and who is told what was had.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;

/// Shares of tenants, and of agents beside the others of their tenant. Whoever is not named has a weight of one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Weights {
    pub tenants: BTreeMap<String, NonZeroU32>,
    /// Of tenants that are not named.
    pub other_tenants: Option<NonZeroU32>,
    pub agents: BTreeMap<String, NonZeroU32>,
}

/// Told as tokens are computed, from the loop's thread: it must be quick and must not wait.
pub trait TokenMeter: fmt::Debug + Send + Sync {
    /// Interactive work of the tenant got so many: prompt tokens that were not cached, and tokens of the output.
    fn count(&self, tenant: &str, tokens: usize);
}

impl Weights {
    pub(crate) fn of_tenant(&self, tenant: &str) -> f64 {
        number(self.tenants.get(tenant).copied().or(self.other_tenants))
    }

    /// Requests that name a model themselves are together as one agent.
    pub(crate) fn of_agent(&self, agent: Option<&str>) -> f64 {
        number(agent.and_then(|agent| self.agents.get(agent)).copied())
    }
}

fn number(weight: Option<NonZeroU32>) -> f64 {
    weight.map_or(1.0, |weight| f64::from(weight.get()))
}
