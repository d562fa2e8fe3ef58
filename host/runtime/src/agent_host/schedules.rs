//! Schedules as the operator sees them.

use super::AgentHost;
use crate::{RuntimeError, ScheduleSummary, text::excerpt};

const MAX_LISTED: u32 = 10_000;

impl AgentHost {
    /// Returns the schedules of all agents, or of one, ordered by next attempt; those that failed
    /// permanently come last.
    pub async fn schedules(
        &self,
        agent: Option<&str>,
        limit: u32,
    ) -> Result<Vec<ScheduleSummary>, RuntimeError> {
        if let Some(agent) = agent {
            self.host().deployments.known(agent)?;
        }
        let rows = self.host().store.schedules(agent, limit.min(MAX_LISTED)).await?;
        rows.into_iter().map(ScheduleSummary::of).collect()
    }

    /// Removes a schedule. A schedule from a manifest is recreated by the next deployment.
    pub async fn cancel_schedule(&self, agent: &str, id: &str) -> Result<(), RuntimeError> {
        self.host().deployments.known(agent)?;
        match self.host().store.cancel_schedule(agent, id).await? {
            true => Ok(()),
            false => Err(not_found(agent, id)),
        }
    }

    /// Makes a schedule due now. A schedule that failed permanently is retried.
    pub async fn run_schedule(&self, agent: &str, id: &str) -> Result<(), RuntimeError> {
        let host = self.host();
        host.deployments.known(agent)?;
        if !host.store.run_schedule(agent, id, host.clock.now_ms()).await? {
            return Err(not_found(agent, id));
        }
        host.outbox.ring();
        Ok(())
    }
}

fn not_found(agent: &str, id: &str) -> RuntimeError {
    RuntimeError::ScheduleNotFound { agent: agent.to_owned(), id: excerpt(id) }
}
