//! What each tenant has had of the model, and within it each of its agents: whoever has had least for its weight is next.
//!
//! These are the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with
//! weights, two levels deep. Two that always have work waiting get service in the ratio of their weights, up to what one
//! admission costs; so nobody waits for ever. Whoever comes back after a pause is lifted to the least of those that wait,
//! so that nobody saves up service for later.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

use crate::{Affinity, Weights};

/// A token of the output costs as much as so many of the prompt, as in the paper: it needs a step of its own.
const OUTPUT_COST: usize = 2;
/// Past so many accounts the host forgets what they had: all are equal again.
pub(super) const MAX_ACCOUNTS: usize = 4_096;

/// Tokens that a sequence got.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Service {
    /// Of the prompt, but for those that were cached.
    pub prompt: usize,
    pub output: usize,
}

/// What was had for one unit of weight: first by the tenant, then by the agent within it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Had {
    tenant: f64,
    agent: f64,
}

#[derive(Default)]
pub(super) struct Accounts {
    weights: Arc<Weights>,
    tenants: Level,
    agents: HashMap<String, Level>,
    /// Accounts of agents.
    count: usize,
}

/// Those who share something.
#[derive(Default)]
struct Level {
    /// By tenant or agent; requests of no agent are at the empty name.
    had: HashMap<String, f64>,
    /// Whose turn it was last.
    last: String,
}

impl Service {
    pub fn tokens(self) -> usize {
        self.prompt + self.output
    }

    pub fn since(self, earlier: Service) -> Service {
        Service { prompt: self.prompt - earlier.prompt, output: self.output - earlier.output }
    }
}

impl Had {
    pub fn total_cmp(&self, other: &Had) -> Ordering {
        self.tenant.total_cmp(&other.tenant).then(self.agent.total_cmp(&other.agent))
    }
}

impl Accounts {
    pub fn new(weights: Arc<Weights>) -> Self {
        Accounts { weights, ..Accounts::default() }
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.agents.values().map(|agents| agents.had.len()).sum()
    }

    pub fn had(&self, tenant: &str, agent: Option<&str>) -> Had {
        let agent = self.agents.get(tenant).map_or(0.0, |agents| agents.had(name(agent)));
        Had { tenant: self.tenants.had(tenant), agent }
    }

    /// An agent that had nothing waiting has something now. `waiting`: who waits already.
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

    /// An agent has its turn.
    pub fn take_turn(&mut self, affinity: &Affinity) {
        self.tenants.last.clone_from(&affinity.tenant);
        if let Some(agents) = self.agents.get_mut(&affinity.tenant) {
            agents.last = name(affinity.agent.as_deref()).to_owned();
        }
    }

    pub fn charge(&mut self, affinity: &Affinity, service: Service) {
        let cost = (service.prompt + OUTPUT_COST * service.output) as f64;
        let (tenant, agent) = (affinity.tenant.as_str(), affinity.agent.as_deref());
        self.tenants.charge(tenant, cost / self.weights.of_tenant(tenant));
        if let Some(agents) = self.agents.get_mut(tenant) {
            agents.charge(name(agent), cost / self.weights.of_agent(agent));
        }
    }
}

impl Level {
    fn had(&self, who: &str) -> f64 {
        self.had.get(who).copied().unwrap_or(0.0)
    }

    /// `others`: who waits beside it. Says whether the account is new.
    fn lift<'a>(&mut self, who: &str, others: impl Iterator<Item = &'a str>) -> bool {
        let least = others.map(|other| self.had(other)).min_by(f64::total_cmp);
        let floor = least.unwrap_or_else(|| self.had(&self.last));
        match self.had.get_mut(who) {
            Some(had) => {
                *had = had.max(floor);
                false
            }
            None => self.had.insert(who.to_owned(), floor).is_none(),
        }
    }

    /// What was forgotten meanwhile stays so.
    fn charge(&mut self, who: &str, cost: f64) {
        if let Some(had) = self.had.get_mut(who) {
            *had += cost;
        }
    }
}

fn name(agent: Option<&str>) -> &str {
    agent.unwrap_or_default()
}
