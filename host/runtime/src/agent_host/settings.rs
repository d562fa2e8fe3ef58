//! Replaces the operator's settings while the host runs. Turns and requests end with the settings with which they began.

use super::{AgentHost, Inner};
use crate::{NewWebhook, RuntimeError, RuntimeOptions, options::Rules};
use skep_outbound::ToolServer;
use std::{collections::BTreeMap, sync::Arc};

impl AgentHost {
    /// Applies the grants, prices, budgets, ceilings and the log of requests of these options. Their other fields have no effect, nor have
    /// the ceilings [`Limits::OF_POOL`](crate::Limits::OF_POOL).
    pub async fn set_rules(&self, options: &RuntimeOptions) {
        // A version that is deployed meanwhile gets the new ceilings.
        let _one = self.inner.deploying.lock().await;
        let rules = &self.inner.rules;
        let ceilings = options.ceilings.with_pool_of(&rules.now().ceilings);
        rules.replace(Rules { ceilings, ..Rules::from(options) });
        self.requests().configure(options.requests.clone(), options.prices.clone());
        self.host().deployments.renew_limits();
    }

    /// Replaces the servers whose tools agents may be granted. A server that is no longer there is dropped when the last
    /// turn that began with it has ended.
    pub fn set_tool_servers(&self, servers: BTreeMap<String, Arc<dyn ToolServer>>) {
        self.host().reach.tools.servers.replace(servers);
    }

    /// Replaces the webhooks that the operator configures. One that is as before stays untouched.
    pub async fn set_webhooks(&self, webhooks: &[NewWebhook]) -> Result<(), RuntimeError> {
        self.inner.webhooks.configure(&self.host().outbox.router, webhooks).await
    }

    /// Starts the agents again that could not start because the host lacked their model, if it has the model now.
    pub async fn restart_waiting_agents(&self) -> Result<(), RuntimeError> {
        self.inner.restart_waiting_agents().await
    }
}

impl Inner {
    pub(super) async fn restart_waiting_agents(&self) -> Result<(), RuntimeError> {
        let _one = self.deploying.lock().await;
        for name in self.dispatch.host.deployments.restore_waiting().await? {
            self.dispatch.adopt_turns(Some(&name)).await?;
        }
        Ok(())
    }
}
