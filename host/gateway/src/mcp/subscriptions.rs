//! Subscriptions of one client to resources, and the notifications that a resource may have changed.

use super::resources::Named;
use rmcp::{Peer, RoleServer, model::ResourceUpdatedNotificationParam};
use skep_runtime::{AgentHost, SessionChange, Tenant, tenant_of};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{sync::broadcast::error::RecvError, task::JoinSet};

/// Maximum number of subscriptions of one client.
const MAX_WATCHED: usize = 128;
/// Changes within this time after the first one are reported together.
const TOGETHER: Duration = Duration::from_millis(100);

/// The subscriptions of one client.
#[derive(Default)]
pub(super) struct Subscriptions {
    watched: Arc<Mutex<BTreeMap<String, Watched>>>,
    /// The task that notifies the client, from the first subscription on. It is aborted when this is dropped.
    telling: Mutex<JoinSet<()>>,
}

struct Watched {
    named: Named,
    tenant: Tenant,
}

impl Watched {
    /// Returns whether a turn may have changed the resource. A resource that an agent declares may depend on all sessions of the
    /// tenant, and reading it is a turn too.
    fn is_touched_by(&self, change: &SessionChange) -> bool {
        match &self.named {
            Named::Session { agent, session } => change.agent == *agent && change.session == *session,
            Named::Declared { agent } => {
                let is_own = tenant_of(&change.session) == self.tenant.as_str();
                change.agent == *agent && is_own && !change.read_only
            }
        }
    }
}

impl Subscriptions {
    /// Adds a subscription. Fails if there are too many.
    pub(super) fn add(
        &self,
        host: &AgentHost,
        peer: &Peer<RoleServer>,
        uri: String,
        named: Named,
        tenant: Tenant,
    ) -> Result<(), String> {
        let mut watched = lock(&self.watched);
        if watched.len() >= MAX_WATCHED && !watched.contains_key(&uri) {
            return Err(format!(
                "a client may subscribe to {MAX_WATCHED} resources; unsubscribe from others first"
            ));
        }
        watched.insert(uri, Watched { named, tenant });
        drop(watched);
        let mut telling = lock(&self.telling);
        if telling.is_empty() {
            telling.spawn(tell(host.clone(), peer.clone(), self.watched.clone()));
        }
        Ok(())
    }

    pub(super) fn remove(&self, uri: &str) {
        lock(&self.watched).remove(uri);
    }
}

async fn tell(host: AgentHost, peer: Peer<RoleServer>, watched: Arc<Mutex<BTreeMap<String, Watched>>>) {
    let mut changes = host.session_changes();
    drop(host);
    loop {
        let mut touched: Vec<String> = Vec::new();
        let mut note = |change: Result<SessionChange, RecvError>| {
            let watched = lock(&watched);
            let concerns = |one: &Watched| match &change {
                Ok(change) => one.is_touched_by(change),
                // Some were missed, so any may have changed.
                Err(_lagged) => true,
            };
            let found = watched.iter().filter(|(_, one)| concerns(one)).map(|(uri, _)| uri.clone());
            let found: Vec<String> = found.filter(|uri| !touched.contains(uri)).collect();
            touched.extend(found);
        };
        match changes.recv().await {
            Err(RecvError::Closed) => return,
            change => note(change),
        }
        tokio::time::sleep(TOGETHER).await;
        while let Ok(change) = changes.try_recv() {
            note(Ok(change));
        }
        for uri in touched {
            if peer.notify_resource_updated(ResourceUpdatedNotificationParam::new(uri)).await.is_err() {
                return;
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
