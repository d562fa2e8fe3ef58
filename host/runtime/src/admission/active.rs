//! Turns that are accepted and have not ended, by agent and tenant.

use super::Admission;
use crate::{RuntimeError, agent::Agent, tenancy::Shares};
use std::{collections::HashMap, sync::Arc};
use tokio::sync::watch;

/// Retry delay reported to a caller whose agent is busy.
const RETRY_AFTER_MS: u32 = 1_000;

#[derive(Default)]
pub(super) struct ActiveTurns {
    total: usize,
    of_agent: HashMap<String, Shares>,
}

impl ActiveTurns {
    pub(super) fn total(&self) -> usize {
        self.total
    }

    pub(super) fn of_agent(&self, agent: &str) -> usize {
        self.of_agent.get(agent).map_or(0, Shares::all)
    }
}

/// An accepted turn. Dropped when the turn has ended.
pub(crate) struct Active {
    turns: Arc<watch::Sender<ActiveTurns>>,
    agent: String,
    tenant: String,
}

impl Admission {
    /// Counts a turn, unless the agent has reached its limit of concurrent turns or the tenant its
    /// share of them, or the agent or the tenant has used up its tokens.
    pub(super) fn count(&self, agent: &Agent, tenant: &str) -> Result<Active, RuntimeError> {
        let (name, limit) = (agent.manifest.name.as_str(), agent.limits.concurrent_turns);
        self.tokens.share(tenant, Some((name, agent.limits.tokens_per_day))).check()?;
        let (mut taken, mut of_all) = (false, 0);
        self.active.send_modify(|turns| {
            let of_agent = turns.of_agent.entry(name.to_owned()).or_default();
            taken = of_agent.may_take(tenant, 1, limit as usize, self.tenancy.has_several());
            of_all = of_agent.all();
            if taken {
                of_agent.take(tenant, 1);
                turns.total += 1;
            }
        });
        if taken {
            return Ok(Active {
                turns: self.active.clone(),
                agent: name.to_owned(),
                tenant: tenant.to_owned(),
            });
        }
        let has_place = of_all < limit as usize;
        let whose = if has_place { " (this tenant's share)" } else { "" };
        let limit = u32::try_from(of_all).unwrap_or(limit);
        Err(RuntimeError::TooManyTurns {
            agent: name.to_owned(),
            whose,
            limit,
            retry_after_ms: RETRY_AFTER_MS,
        })
    }

    /// Counts a turn that was accepted earlier, regardless of the current limit.
    pub(super) fn count_again(&self, agent: &str, tenant: &str) -> Active {
        self.active.send_modify(|turns| {
            turns.of_agent.entry(agent.to_owned()).or_default().take(tenant, 1);
            turns.total += 1;
        });
        Active { turns: self.active.clone(), agent: agent.to_owned(), tenant: tenant.to_owned() }
    }

    /// Resolves when no accepted turn is left.
    pub(crate) async fn quiet(&self) {
        let mut active = self.active.subscribe();
        // The sender is part of `self`, so it is not dropped meanwhile.
        let _ = active.wait_for(|turns| turns.total == 0).await;
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.turns.send_modify(|turns| {
            turns.total -= 1;
            if let Some(of_agent) = turns.of_agent.get_mut(&self.agent) {
                of_agent.give_back(&self.tenant, 1);
                if of_agent.all() == 0 {
                    turns.of_agent.remove(&self.agent);
                }
            }
        });
    }
}
