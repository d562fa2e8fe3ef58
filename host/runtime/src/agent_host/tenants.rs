//! Tenants as a whole: which ones there are, and their deletion.
//!
//! Invariant: the keys of a deleted tenant are gone before anything else is removed, so that nobody brings back what was removed. Whatever
//! interrupts the deletion, repeating it removes the rest.

use super::AgentHost;
use crate::{RuntimeError, Tenant, name, requests::Askers, session::Command};
use skep_engine::EraseScope;
use skep_store::{TenantRow, TenantRows};
use std::time::{Duration, Instant};

/// Number of sessions that are looked for at once.
const PAGE: u32 = 256;
/// Time for which a deletion waits for the turns that it has cancelled.
const PATIENCE: Duration = Duration::from_secs(60);
/// Delay before sessions that are in use are tried again.
const AGAIN: Duration = Duration::from_millis(50);

/// Whether the usage of a deleted tenant is kept for bills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TenantUsage {
    /// Keeps it until it is too old, without the names of sessions.
    Keep,
    Forget,
}

/// Numbers of what was deleted of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeletedTenant {
    pub keys: u64,
    pub sessions: u64,
    pub rows: TenantRows,
    /// KV pages that were on disk.
    pub kv_pages: u64,
    /// Rows of usage.
    pub usage: u64,
}

impl AgentHost {
    /// Returns the tenants that have valid keys or sessions, by name.
    pub async fn tenants(&self) -> Result<Vec<TenantRow>, RuntimeError> {
        Ok(self.host().store.tenants(Tenant::local().as_str()).await?)
    }

    /// Deletes a tenant: its API keys, sessions, batches, files, responses, events, records of requests and KV pages. Its
    /// running turns are cancelled. The operator's tenant cannot be deleted.
    pub async fn delete_tenant(
        &self,
        tenant: &Tenant,
        usage: TenantUsage,
    ) -> Result<DeletedTenant, RuntimeError> {
        let host = self.host();
        host.shutdown.admit()?;
        if tenant.is_local() {
            let rule = "the operator's tenant cannot be deleted, because the operator's keys belong to it; delete its \
                        sessions instead";
            return Err(name::invalid("tenant", tenant.as_str(), rule));
        }
        let store = &host.store;
        let keys = self.inner.keys.remove_of(tenant).await?;
        // Items of batches start turns, so they end first.
        self.inner.batches.cancel_all(tenant.as_str()).await?;
        let sessions = self.delete_sessions_of(tenant).await?;
        host.reach.requests.forget(Askers::Tenant(tenant.to_string())).await;
        let kv_pages = host.reach.disk.erase(EraseScope::Tenant(tenant.to_string())).await;
        let rows = store.remove_rows_of_tenant(tenant.as_str()).await?;
        let usage = match usage {
            TenantUsage::Keep => 0,
            TenantUsage::Forget => store.forget_usage_of(tenant.as_str()).await?,
        };
        let deleted = DeletedTenant { keys, sessions, rows, kv_pages, usage };
        if deleted == DeletedTenant::default() {
            return Err(RuntimeError::TenantNotFound { name: tenant.to_string() });
        }
        let DeletedTenant { keys, sessions, .. } = deleted;
        tracing::info!(tenant = tenant.as_str(), keys, sessions, "deleted a tenant");
        Ok(deleted)
    }

    /// Deletes all sessions of a tenant, of all agents. Returns the number of those that were stored.
    async fn delete_sessions_of(&self, tenant: &Tenant) -> Result<u64, RuntimeError> {
        let (store, folder) = (&self.host().store, tenant.folder());
        let until = Instant::now() + PATIENCE;
        let mut deleted = 0;
        for agent in self.host().deployments.names() {
            loop {
                for (session, turn) in store.open_turns_in(&agent, &folder).await? {
                    match self.cancel_turn(&agent, &session, &turn).await {
                        Ok(()) | Err(RuntimeError::TurnNotFound { .. }) => {}
                        Err(error) => return Err(error),
                    }
                }
                let sessions = store.sessions_with_rows(&agent, &folder, PAGE).await?;
                if sessions.is_empty() {
                    break;
                }
                let mut is_used = false;
                for session in sessions {
                    match self.write(&agent, &session, Command::Delete).await {
                        Ok(was_there) => deleted += u64::from(was_there),
                        // A turn has not ended yet, or others wait for the session.
                        Err(RuntimeError::WaitingForApproval { .. } | RuntimeError::MailboxFull { .. }) => {
                            is_used = true;
                        }
                        // Its owner has no reason to use it again, because the tenant's keys are gone. If it does, its
                        // turn fails, because the session has changed.
                        Err(RuntimeError::SessionElsewhere { .. }) => {
                            deleted += u64::from(store.delete_session(&agent, &session).await?);
                        }
                        Err(error) => return Err(error),
                    }
                }
                if Instant::now() > until {
                    return Err(RuntimeError::TenantInUse { name: tenant.to_string() });
                }
                if is_used {
                    tokio::time::sleep(AGAIN).await;
                }
            }
        }
        Ok(deleted)
    }
}
