//! KV pages on disk, as operators and clients see them: what there is, what is erased, read ahead and kept.

use super::AgentHost;
use crate::{RuntimeError, WarmedConversation, disk_pages::pin_of, dispatch::session_not_found, warming};
use skep_engine::{EraseScope, PinStatus, TierStatus};

impl AgentHost {
    /// Returns what the disk holds of the KV cache; `None` if it holds nothing.
    pub fn kv_disk(&self) -> Option<TierStatus> {
        self.host().reach.disk.status()
    }

    /// Erases KV pages from the disk and returns their number. After an error pages may be left, which the disk tier tries to
    /// remove later.
    pub async fn purge_kv_disk(&self, pages: EraseScope) -> Result<u64, RuntimeError> {
        let erased = self.host().reach.disk.try_erase(pages).await;
        erased.map_err(|error| RuntimeError::Internal {
            message: format!("KV pages are not erased from the disk: {error}"),
        })
    }

    /// Reads the pages of a session's conversations from the disk into memory, before its next turn needs them. It takes only
    /// room that running requests leave, and computes nothing.
    pub async fn warm_session(
        &self,
        agent: &str,
        session: &str,
    ) -> Result<Vec<WarmedConversation>, RuntimeError> {
        let host = self.host();
        host.shutdown.admit()?;
        host.deployments.known(agent)?;
        warming::warm(host, agent, session).await
    }

    /// Makes the pages of a session the last to be evicted from the disk. Returns whether it was not pinned before.
    pub async fn pin_session(&self, agent: &str, session: &str) -> Result<bool, RuntimeError> {
        let host = self.host();
        host.deployments.known(agent)?;
        let exists = async || match host.store.conversation_names(agent, session).await? {
            Some(_) => Ok(()),
            None => Err(session_not_found(agent, session)),
        };
        exists().await?;
        let is_new = host.reach.disk.set_pin(pin_of(agent, session), true).await?;
        if let Err(error) = exists().await {
            // A deletion has removed the pins of the session before this one was there.
            host.reach.disk.set_pin(pin_of(agent, session), false).await?;
            return Err(error);
        }
        Ok(is_new)
    }

    /// Undoes a pin. Returns whether the session was pinned.
    pub async fn unpin_session(&self, agent: &str, session: &str) -> Result<bool, RuntimeError> {
        self.host().reach.disk.set_pin(pin_of(agent, session), false).await
    }

    /// Returns the pinned sessions, which have the host's ids, in the order in which they were pinned.
    pub fn pinned_sessions(&self) -> Vec<PinStatus> {
        self.host().reach.disk.pins()
    }
}
