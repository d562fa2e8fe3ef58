//! The division of a step's prompt tokens among sequences that want more than the step has: by the weights of
//! their tenants, within a tenant by the weights of its agents, and equally within an agent.

use std::collections::HashMap;

use crate::sequence::Sequence;
use crate::{Affinity, Weights};

type Agent<'a> = (&'a str, Option<&'a str>);

/// Returns the share of each sequence, in the order of `sequences`; the shares add up to one.
pub(super) fn shares<'a>(
    weights: &Weights,
    sequences: impl Iterator<Item = &'a Sequence> + Clone,
) -> Vec<f64> {
    let mut in_agent: HashMap<Agent<'_>, f64> = HashMap::new();
    for sequence in sequences.clone() {
        *in_agent.entry(agent(&sequence.request.affinity)).or_default() += 1.0;
    }
    let mut agents_of: HashMap<&str, f64> = HashMap::new();
    for (tenant, agent) in in_agent.keys() {
        *agents_of.entry(tenant).or_default() += weights.agent_weight(*agent);
    }
    let tenants: f64 = agents_of.keys().map(|tenant| weights.tenant_weight(tenant)).sum();
    let share = |sequence: &Sequence| {
        let (tenant, agent) = agent(&sequence.request.affinity);
        let tenant_share = weights.tenant_weight(tenant) / tenants;
        tenant_share * weights.agent_weight(agent) / agents_of[tenant] / in_agent[&(tenant, agent)]
    };
    sequences.map(share).collect()
}

fn agent(affinity: &Affinity) -> Agent<'_> {
    (&affinity.tenant, affinity.agent.as_deref())
}
