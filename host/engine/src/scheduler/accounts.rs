//! The service that each tenant has received from the model, and within a tenant each of its agents. The one
//! with the least service for its weight is next.
//!
//! These are the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
//! 2024), with weights, two levels deep. Two accounts that always have work waiting get service in the ratio of
//! their weights, up to the cost of one admission, so no account waits forever. An account that returns after a
//! pause is lifted to the least of those that wait, so none saves up service for later.

use std::cmp::Ordering;
use std::collections::HashMap;

use crate::service::Service;
use crate::{Affinity, LiveSetting, Weights};

/// Cost of an output token in prompt tokens, as in the paper: it needs a step of its own.
const OUTPUT_COST: usize = 2;
/// Maximum number of accounts. Past it, all accounts are dropped and everyone is equal again.
pub(super) const MAX_ACCOUNTS: usize = 4_096;

/// The service received per unit of weight: first by the tenant, then by the agent within it.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServicePerWeight {
    tenant: f64,
    agent: f64,
}

#[derive(Default)]
pub(super) struct Accounts {
    weights: LiveSetting<Weights>,
    tenants: Level,
    agents: HashMap<String, Level>,
    /// Number of accounts of agents.
    count: usize,
}

/// The accounts that share one resource.
#[derive(Default)]
struct Level {
    /// Service by tenant or agent. Requests without an agent use the empty name.
    service: HashMap<String, f64>,
    /// The account that had the last turn.
    last: String,
}

impl ServicePerWeight {
    /// Compares by tenant first. The lesser one is next.
    pub fn total_cmp(&self, other: &ServicePerWeight) -> Ordering {
        self.tenant.total_cmp(&other.tenant).then(self.agent.total_cmp(&other.agent))
    }
}

impl Accounts {
    /// Creates accounts without any service. Changed weights apply to later charges.
    pub fn new(weights: LiveSetting<Weights>) -> Self {
        Accounts { weights, ..Accounts::default() }
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.agents.values().map(|agents| agents.service.len()).sum()
    }

    /// Returns the service so far; an unknown account has received none.
    pub fn service(&self, tenant: &str, agent: Option<&str>) -> ServicePerWeight {
        let agent = self.agents.get(tenant).map_or(0.0, |agents| agents.service(name(agent)));
        ServicePerWeight { tenant: self.tenants.service(tenant), agent }
    }

    /// Records that an agent without waiting work has some now. `waiting` lists the agents that wait already.
    pub fn come<'a>(
        &mut self,
        affinity: &Affinity,
        waiting: impl Iterator<Item = (&'a str, Option<&'a str>)> + Clone,
    ) {
        if self.count >= MAX_ACCOUNTS {
            *self = Accounts::new(self.weights.clone());
        }
        let (tenant, agent) = (&affinity.tenant, affinity.agent.as_deref());
        let others = waiting.clone().map(|(tenant, _)| tenant);
        self.tenants.lift(tenant, others);
        let beside = waiting.filter(|(other, _)| other == tenant).map(|(_, agent)| name(agent));
        let is_new = self.agents.entry(tenant.clone()).or_default().lift(name(agent), beside);
        self.count += usize::from(is_new);
    }

    /// Records that an agent has its turn.
    pub fn take_turn(&mut self, affinity: &Affinity) {
        self.tenants.last.clone_from(&affinity.tenant);
        if let Some(agents) = self.agents.get_mut(&affinity.tenant) {
            agents.last = name(affinity.agent.as_deref()).to_owned();
        }
    }

    /// Charges service to a tenant and its agent, divided by their weights. An output token costs as much as two of
    /// the prompt.
    pub fn charge(&mut self, affinity: &Affinity, service: Service) {
        let cost = (service.prompt + OUTPUT_COST * service.output) as f64;
        let (tenant, agent) = (affinity.tenant.as_str(), affinity.agent.as_deref());
        let weights = self.weights.now();
        self.tenants.charge(tenant, cost / weights.tenant_weight(tenant));
        if let Some(agents) = self.agents.get_mut(tenant) {
            agents.charge(name(agent), cost / weights.agent_weight(agent));
        }
    }
}

impl Level {
    fn service(&self, who: &str) -> f64 {
        self.service.get(who).copied().unwrap_or(0.0)
    }

    /// Lifts an account to the least of `others`, which wait alongside it. Returns whether the account is new.
    fn lift<'a>(&mut self, who: &str, others: impl Iterator<Item = &'a str>) -> bool {
        let least = others.map(|other| self.service(other)).min_by(f64::total_cmp);
        let floor = least.unwrap_or_else(|| self.service(&self.last));
        match self.service.get_mut(who) {
            Some(service) => {
                *service = service.max(floor);
                false
            }
            None => self.service.insert(who.to_owned(), floor).is_none(),
        }
    }

    /// Charges an account, unless it has been dropped in the meantime.
    fn charge(&mut self, who: &str, cost: f64) {
        if let Some(service) = self.service.get_mut(who) {
            *service += cost;
        }
    }
}

fn name(agent: Option<&str>) -> &str {
    agent.unwrap_or_default()
}
