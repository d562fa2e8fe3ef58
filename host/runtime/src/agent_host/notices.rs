//! Keeps what this host remembers of the database up to date with what other hosts and commands change.
//!
//! A notice names a kind of rows, which are read again. It may name what did not change, and reading twice does no harm. Each kind is
//! read by a task of its own, because agents take long to compile.

use super::Inner;
use crate::{RuntimeError, deployment::StoredChanges};
use skep_store::{NoticeKind, Notices};
use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::{sync::Notify, task::JoinSet};

/// Delay before what could not be read is read again.
const AGAIN: Duration = Duration::from_secs(1);

/// Runs until the host is gone.
pub(super) async fn run(inner: Weak<Inner>, mut notices: Notices) {
    let mut reading = JoinSet::new();
    let mut bells: BTreeMap<NoticeKind, Arc<Notify>> = BTreeMap::new();
    for kind in NoticeKind::ALL {
        let bell = bells.entry(kind).or_default();
        reading.spawn(read(inner.clone(), kind, bell.clone()));
    }
    loop {
        for kind in notices.next().await {
            if let Some(bell) = bells.get(&kind) {
                bell.notify_one();
            }
        }
    }
}

/// Reads the rows of a kind whenever the bell rings, until the host is gone.
async fn read(inner: Weak<Inner>, kind: NoticeKind, bell: Arc<Notify>) {
    loop {
        bell.notified().await;
        let Some(inner) = inner.upgrade() else { return };
        if let Err(error) = inner.reload(kind).await {
            drop(inner);
            tracing::error!(kind = kind.as_str(), "cannot read what was changed yet: {error}");
            tokio::time::sleep(AGAIN).await;
            bell.notify_one();
        }
    }
}

impl Inner {
    async fn reload(&self, kind: NoticeKind) -> Result<(), RuntimeError> {
        let host = &self.dispatch.host;
        match kind {
            NoticeKind::Agents => self.reload_agents().await,
            NoticeKind::Keys | NoticeKind::Tenants => {
                self.keys.load().await;
                host.reach.tokens.refresh(&host.store).await
            }
            NoticeKind::Webhooks => self.webhooks.reload(&host.outbox.router).await,
            // A secret is read whenever it is used.
            NoticeKind::Secrets => Ok(()),
            NoticeKind::Held => self.reload_held().await,
            NoticeKind::Deliveries => {
                host.outbox.ring();
                Ok(())
            }
            NoticeKind::Batches => {
                self.batches.wake();
                Ok(())
            }
            NoticeKind::Pages => host.reach.disk.erase_as_others(&host.store).await,
        }
    }

    /// Starts the versions that other hosts have made active, and removes the agents that they have deleted.
    async fn reload_agents(&self) -> Result<(), RuntimeError> {
        let host = &self.dispatch.host;
        if !host.cluster.role().runs_agents() {
            return Ok(());
        }
        // A deployment of this host is complete, or has not begun.
        let _one = self.deploying.lock().await;
        // A change after this one has another version.
        let version = host.store.notice_version(NoticeKind::Agents).await?;
        let StoredChanges { removed, rows } = host.deployments.stored_changes().await?;
        for name in &removed {
            host.deployments.remove(name);
            self.forget_agent(name).await;
            host.outbox.router.set_agent(name, &[]);
            tracing::info!(agent = name, "deleted by another host");
        }
        if !rows.is_empty() {
            for name in host.deployments.start_stored(rows).await {
                tracing::info!(agent = name, "deployed by another host");
                self.dispatch.adopt_turns(Some(&name)).await?;
            }
            // The schedules of new versions may be due earlier.
            host.outbox.ring();
        }
        host.deployments.note_stored_version(version);
        Ok(())
    }

    /// Reads which work is held, and continues what another host has released.
    async fn reload_held(&self) -> Result<(), RuntimeError> {
        let _one = self.holding.lock().await;
        self.dispatch.reload_held().await?;
        self.dispatch.take_over().await?;
        self.dispatch.adopt_turns(None).await?;
        self.batches.look();
        self.dispatch.host.outbox.ring();
        Ok(())
    }
}
