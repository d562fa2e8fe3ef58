//! Tokens that a tenant uses without an agent: requests that name a model directly count toward its
//! daily budget too.
//!
//! They are recorded in the background when a generation ends, so that nobody who waits for an
//! answer waits for the write.

use crate::{
    TokensUsedUp,
    token_budget::{DayShare, TokenBudgets, TokenSpend},
};
use skep_store::Store;
use std::sync::Arc;

/// The rest of a tenant's daily budget, which was not used up when this was created.
#[derive(Clone)]
pub struct TenantBudget {
    share: Arc<DayShare>,
    store: Store,
}

/// Counts the tokens of one generation. When dropped, it records what was produced.
pub struct TenantTokens {
    budget: TenantBudget,
    produced: usize,
}

impl TenantBudget {
    /// Returns the budget for work of a tenant that starts without an agent. Fails if the budget is
    /// used up.
    pub(crate) fn open(tokens: &TokenBudgets, store: &Store, tenant: &str) -> Result<Self, TokensUsedUp> {
        let share = tokens.share(tenant, None);
        share.check()?;
        Ok(TenantBudget { share: Arc::new(share), store: store.clone() })
    }

    pub fn meter(&self) -> TenantTokens {
        TenantTokens { budget: self.clone(), produced: 0 }
    }
}

impl TenantTokens {
    /// Sets the number of tokens produced so far.
    pub fn produced(&mut self, tokens: usize) {
        self.produced = tokens;
    }
}

impl Drop for TenantTokens {
    fn drop(&mut self) {
        let spend = TokenSpend::new(&self.budget.share, self.produced as u64);
        let Some(used) = spend.row() else { return };
        // Counted before the write, so that the next request is refused even if the write is
        // pending.
        spend.counted();
        let store = self.budget.store.clone();
        let writing = async move {
            if let Err(error) = store.count_tokens(used).await {
                tracing::error!("cannot record the tokens of a tenant: {error}");
            }
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(writing)),
            Err(_) => tracing::error!("cannot record the tokens of a tenant: the host has stopped"),
        }
    }
}
