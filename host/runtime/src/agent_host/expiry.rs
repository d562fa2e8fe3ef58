//! Sessions whose time is over are deleted, from time to time and a few at a time.
//!
//! Invariant: a session that has a turn which waits or runs is not deleted: its own actor does it, after the turns in its
//! mailbox, and only if nothing was committed meanwhile.

use super::{AgentHost, Services};
use crate::{
    RuntimeError,
    capability::log::now_ms,
    session::{Command, SessionKey, Sessions},
};
use std::{
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::{
    sync::oneshot,
    time::{MissedTickBehavior, interval},
};

/// Times are given in hours.
const INTERVAL: Duration = Duration::from_secs(600);
/// Read at once.
const BATCH: u32 = 256;

#[derive(Clone)]
pub(super) struct Expiry {
    services: Arc<Services>,
    sessions: Weak<Sessions>,
    /// The operator's.
    ceiling: Option<Duration>,
}

impl AgentHost {
    /// Deletes the sessions whose time is over at `now_ms`, as the host does by itself every ten minutes. How many it
    /// were.
    pub async fn expire_sessions(&self, now_ms: u64) -> Result<u64, RuntimeError> {
        self.inner.expiry.pass(now_ms).await
    }
}

impl Expiry {
    pub(super) fn new(services: &Arc<Services>, sessions: &Arc<Sessions>, ceiling: Option<Duration>) -> Self {
        Expiry { services: services.clone(), sessions: Arc::downgrade(sessions), ceiling }
    }

    /// Until the host ends.
    pub(super) async fn run(self) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            match self.pass(now_ms()).await {
                Ok(0) => {}
                Ok(expired) => tracing::info!(expired, "deleted sessions whose time is over"),
                Err(RuntimeError::ShuttingDown) => return,
                Err(error) => tracing::error!("expired sessions cannot be deleted: {error}"),
            }
        }
    }

    async fn pass(&self, now_ms: u64) -> Result<u64, RuntimeError> {
        let mut expired = 0;
        for (agent, ttl) in self.services.session_ttls(self.ceiling) {
            let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
            let before_ms = now_ms.saturating_sub(ttl_ms);
            let mut after: Option<String> = None;
            loop {
                self.services.admit()?;
                let store = &self.services.store;
                let batch = store.expired_sessions(&agent, before_ms, after.as_deref(), BATCH).await?;
                for session in &batch {
                    expired += u64::from(self.expire(&agent, session, before_ms).await?);
                }
                match batch.into_iter().next_back() {
                    Some(last) => after = Some(last),
                    None => break,
                }
            }
        }
        Ok(expired)
    }

    async fn expire(&self, agent: &str, session: &str, before_ms: u64) -> Result<bool, RuntimeError> {
        let sessions = self.sessions.upgrade().ok_or(RuntimeError::ShuttingDown)?;
        let key = SessionKey { agent: agent.to_owned(), session: session.to_owned() };
        let (answer, expired) = oneshot::channel();
        match sessions.send(&self.services, key, Command::Expire { before_ms, answer }) {
            Ok(_) => expired.await.map_err(|_ended| RuntimeError::ShuttingDown)?,
            // It waits for people, is busy, or all sessions in memory are; the next pass finds it again.
            Err(RuntimeError::WaitingForApproval { .. } | RuntimeError::MailboxFull { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
