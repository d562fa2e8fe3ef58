//! Several hosts on one database: requests for a session go to the host that owns it.
//!
//! A client may talk to any host. `proxy` passes a request whose path names a session on to the session's owner, as it is;
//! `routes` and [`HttpPeers`] are what the runtimes of two hosts say to each other, `generation` is the answer of a model, and
//! `pages` are the KV pages that hosts give each other. All of them are requests that `key` signs and `inbound` checks, before
//! anything else sees them. Without [`ClusterOptions`], none of this exists. A balancer passes everything on (`balance`),
//! and a prefill host answers clients only about itself (`prefill_host`).
//!
//! The database decides who owns a session, and a host that is gone writes nothing more (`store`). So a request that arrives
//! at the wrong host, because something has moved meanwhile, costs time and not correctness.

mod balance;
mod generation;
mod inbound;
mod key;
mod lines;
mod link;
mod nonces;
mod owners;
mod pages;
mod peers;
mod prefill_host;
mod proxy;
mod routes;
#[cfg(test)]
mod tests;

pub(crate) use inbound::receive;
pub use key::ClusterKey;
pub use pages::{ClusterPages, PageFigures, PageOptions, PageStage};
pub use peers::HttpPeers;
pub(crate) use proxy::forward;

use crate::ApiError;
use axum::http::{HeaderName, StatusCode};
use balance::Balancer;
use link::Link;
use nonces::Nonces;
use owners::Owners;
use peers::{call, refusal_of};
use skep_runtime::{HostRole, Member, PeerError};
use std::{
    collections::HashSet,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// Response header with the number of the host that answered.
const ANSWERED_BY: HeaderName = HeaderName::from_static("x-skep-host");
/// Time for which it is remembered which hosts are alive.
const LIVE_FOR: Duration = Duration::from_secs(1);

/// Options of a host in a cluster, with which it talks to the others.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    pub key: ClusterKey,
    /// The number of this start of the host in the database.
    pub number: i64,
    /// Receives the requests to drain this host.
    pub drain: DrainRequests,
    /// The KV pages that this host gives to the others and gets from them; `None` if it does not.
    pub pages: Option<ClusterPages>,
    pub role: HostRole,
}

/// Requests that this host hands its sessions over and ends. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct DrainRequests(Arc<watch::Sender<bool>>);

impl DrainRequests {
    /// Asks for it. Asking again changes nothing.
    pub fn ask(&self) {
        self.0.send_replace(true);
    }

    /// Resolves once somebody has asked.
    pub async fn asked(&self) {
        let mut asked = self.0.subscribe();
        // The sender is part of this value, so there is always one.
        let _ = asked.wait_for(|asked| *asked).await;
    }
}

/// The state of a host's part in its cluster.
pub(crate) struct Cluster {
    key: ClusterKey,
    number: i64,
    drain: DrainRequests,
    pub(crate) pages: Option<ClusterPages>,
    role: HostRole,
    /// The work that this host has passed on, if it is a balancer.
    balancer: Option<Balancer>,
    link: Link,
    nonces: Nonces,
    owners: Arc<dyn Owners>,
    live: Mutex<Live>,
}

/// The hosts that are alive, as far as the database has said.
#[derive(Default)]
struct Live {
    asked_at: Option<Instant>,
    /// The numbers of the hosts of the last answer, and the time of its question.
    answer: Option<(Instant, HashSet<i64>)>,
}

impl Live {
    /// Returns whether a host is alive that was alive at this time. An earlier answer says nothing about it.
    fn has(&self, number: i64, since: Instant) -> bool {
        let Some((asked_at, hosts)) = &self.answer else { return true };
        *asked_at < since || hosts.contains(&number)
    }
}

impl Cluster {
    pub(crate) fn new(options: ClusterOptions, owners: Arc<dyn Owners>) -> Self {
        let ClusterOptions { key, number, drain, pages, role } = options;
        let balancer = (role == HostRole::Balancer).then(Balancer::default);
        let link = Link::new(key.clone());
        let (nonces, live) = Default::default();
        Cluster { key, number, drain, pages, role, balancer, link, nonces, owners, live }
    }

    /// Asks a host to hand its sessions over and to end.
    pub(crate) async fn drain(&self, member: &Member) -> Result<(), ApiError> {
        if member.number == self.number {
            self.drain.ask();
            return Ok(());
        }
        let asked = tokio::select! {
            asked = call(&self.link, member, routes::DRAIN, Vec::new()) => asked.map(drop),
            () = self.until_gone(member.number) => Err(PeerError::Broken("it is gone".to_owned())),
        };
        asked.map_err(|error| {
            let message = format!("host {} cannot be asked to drain: {}", member.number, refusal_of(error));
            let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, HOST_GONE, message);
            ApiError { retry_after_ms: Some(RETRY_MS), ..error }
        })
    }

    /// Resolves when a host no longer belongs to the cluster.
    async fn until_gone(&self, number: i64) {
        let since = Instant::now();
        loop {
            tokio::time::sleep(LIVE_FOR).await;
            if !self.is_live(number, since).await {
                return;
            }
        }
    }

    /// Returns whether a host is alive that was alive at this time, as far as the database says. While the database cannot be asked,
    /// nothing changes.
    async fn is_live(&self, number: i64, since: Instant) -> bool {
        let asked_at = Instant::now();
        {
            let mut live = self.live();
            if live.asked_at.is_some_and(|at| at.elapsed() < LIVE_FOR) {
                return live.has(number, since);
            }
            // One caller asks, and the others use the last answer meanwhile, also if there is no new one.
            live.asked_at = Some(asked_at);
        }
        let answer = tokio::time::timeout(LIVE_FOR, self.owners.live()).await;
        let mut live = self.live();
        match answer {
            Ok(Ok(hosts)) => live.answer = Some((asked_at, hosts)),
            Ok(Err(error)) => tracing::debug!(%error, "the hosts of the cluster cannot be listed"),
            Err(_) => {}
        }
        live.has(number, since)
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("number", &self.number).finish_non_exhaustive()
    }
}

/// The code of the error when the owner of a session cannot be reached.
const HOST_GONE: &str = "host_gone";
/// Delay until a client should try again: a host that was lost is replaced within seconds.
const RETRY_MS: u32 = 2_000;
