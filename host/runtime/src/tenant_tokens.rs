//! Tokens that a tenant gets without an agent: requests that name a model themselves count for its day, too.
//!
//! They are counted when a generation ends, in the background: nobody who waits for an answer waits for that.

use crate::{
    AgentHost, TokensUsedUp,
    token_budget::{DayShare, Spend},
};
use skep_store::Store;
use std::sync::Arc;

/// What a tenant has left of the day, which was more than nothing when this was made.
#[derive(Clone)]
pub struct TenantBudget {
    share: Arc<DayShare>,
    store: Store,
}

/// Counts one generation. Dropped, it writes down what was produced.
pub struct TenantTokens {
    budget: TenantBudget,
    produced: usize,
}

impl AgentHost {
    /// For work of a tenant that is about to begin without an agent.
    pub fn tenant_budget(&self, tenant: &str) -> Result<TenantBudget, TokensUsedUp> {
        let services = self.services();
        let share = services.tokens.share(tenant, None);
        share.check()?;
        Ok(TenantBudget { share: Arc::new(share), store: services.store.clone() })
    }
}

impl TenantBudget {
    pub fn meter(&self) -> TenantTokens {
        TenantTokens { budget: self.clone(), produced: 0 }
    }
}

impl TenantTokens {
    /// So many so far.
    pub fn produced(&mut self, tokens: usize) {
        self.produced = tokens;
    }
}

impl Drop for TenantTokens {
    fn drop(&mut self) {
        let spend = Spend::new(&self.budget.share, self.produced as u64);
        let Some(used) = spend.row() else { return };
        // Who asks next is refused even if it is not written yet.
        spend.counted();
        let store = self.budget.store.clone();
        let writing = async move {
            if let Err(error) = store.count_tokens(used).await {
                tracing::error!("tokens of a tenant were not counted: {error}");
            }
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(writing)),
            Err(_) => tracing::error!("tokens of a tenant were not counted: the host has ended"),
        }
    }
}
