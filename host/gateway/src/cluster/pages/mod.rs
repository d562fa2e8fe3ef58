//! KV pages that the hosts of a cluster give each other.
//!
//! A host that lacks the pages of a prompt asks the others how many of them they have, and fetches those of the one with most
//! (`fetching`). A host that is asked gives what is on its disk (`giving`), and nothing that was erased. Both do it beside
//! their engines, within bounds of memory, time and rate.
//!
//! Invariant: pages that are not exactly those that were asked for are never handed to the engine. Whatever fails is a miss,
//! and the pages are computed.

mod fetching;
mod figures;
mod giving;

pub use figures::PageFigures;

use super::{key::ClusterKey, link::Link};
use crate::ApiError;
use axum::{body::Body, http::StatusCode};
use figures::Figures;
use serde::{Deserialize, Serialize};
use skep_engine::{DiskTier, PageQuestion, SealingSecret, TransferRate, TransitSeal};
use skep_runtime::Member;
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, atomic::AtomicU64},
    time::{Duration, Instant},
};
use tokio::{runtime::Handle, sync::Semaphore};

/// The purpose of the key that seals pages, which is derived from that of the cluster.
const SEAL: &str = "kv pages in transit";
/// Time for which a host is not asked again that did not answer as it should.
const REST: Duration = Duration::from_secs(30);
/// Number of answers with pages that are given at the same time.
const MAX_GIVEN: usize = 4;
/// Assumed time until the first page of another host is here.
const FETCH_LATENCY_S: f64 = 0.005;
/// Assumed rate of a fetch, until it has been measured: that of a network with a gigabit per second.
const FETCH_BYTES_PER_S: f64 = 100e6;

/// The hosts that may be asked, as of now.
type OtherHosts = Box<dyn Fn() -> Vec<Member> + Send + Sync>;

/// The pages that this host gives to the other hosts of its cluster and gets from them. Clones are the same.
#[derive(Clone)]
pub struct ClusterPages {
    shared: Arc<Shared>,
}

struct Shared {
    tier: Arc<DiskTier>,
    seal: TransitSeal,
    link: Link,
    runtime: Handle,
    others: OnceLock<OtherHosts>,
    /// Hosts that did not answer as they should, and when.
    resting: Mutex<HashMap<i64, Instant>>,
    rate: TransferRate,
    /// Bytes of pages that are being fetched.
    fetching_bytes: AtomicU64,
    giving: Arc<Semaphore>,
    /// The time from which on the next page may be given.
    next_given: Mutex<Instant>,
    figures: Figures,
}

/// The answer to the question how many pages a host has.
#[derive(Debug, Serialize, Deserialize)]
struct Count {
    pages: usize,
}

impl ClusterPages {
    /// Creates the pages of a host that has this key and keeps pages in this tier, whose names the other hosts use too. Its tasks
    /// run where it is created, which must be in a runtime of tokio.
    pub fn new(key: &ClusterKey, tier: Arc<DiskTier>) -> Self {
        figures::begin();
        let shared = Shared {
            tier,
            seal: TransitSeal::new(&SealingSecret(key.derived(SEAL))),
            link: Link::new(key.clone()),
            runtime: Handle::current(),
            others: OnceLock::new(),
            resting: Mutex::default(),
            rate: TransferRate::assumed(FETCH_LATENCY_S, FETCH_BYTES_PER_S),
            fetching_bytes: AtomicU64::new(0),
            giving: Arc::new(Semaphore::new(MAX_GIVEN)),
            next_given: Mutex::new(Instant::now()),
            figures: Figures::default(),
        };
        ClusterPages { shared: Arc::new(shared) }
    }

    /// Begins to ask the hosts that `others` returns. Before, nobody is asked.
    pub fn meet(&self, others: impl Fn() -> Vec<Member> + Send + Sync + 'static) {
        // A second call changes nothing, because the other hosts are those of one cluster.
        let _ = self.shared.others.set(Box::new(others));
    }

    /// Returns what was fetched and given since the start.
    pub(crate) fn figures(&self) -> PageFigures {
        self.shared.figures.now()
    }

    /// Answers how many of the pages of a question are here, from the first on.
    pub(super) fn count(&self, body: &[u8]) -> Result<Vec<u8>, ApiError> {
        let pages = giving::find(&self.shared.tier, &parse(body)?).map_or(0, |(_, pages)| pages);
        serde_json::to_vec(&Count { pages }).map_err(|error| {
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", error.to_string())
        })
    }

    /// Answers a question with the images of the pages that are here, from the first on.
    pub(super) fn give(&self, body: &[u8]) -> Result<Body, ApiError> {
        giving::give(&self.shared, parse(body)?)
    }
}

impl fmt::Debug for ClusterPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterPages")
    }
}

impl Shared {
    /// Returns the hosts that can be asked now.
    fn askable(&self) -> Vec<Member> {
        let Some(others) = self.others.get() else { return Vec::new() };
        let mut hosts = others();
        let mut resting = self.resting();
        resting.retain(|_, since| since.elapsed() < REST);
        hosts.retain(|host| !resting.contains_key(&host.number));
        hosts
    }

    /// Asks a host no more for a while.
    fn let_rest(&self, host: &Member, why: &str) {
        tracing::debug!(host = host.number, why, "this host is not asked for KV pages for a while");
        self.resting().insert(host.number, Instant::now());
    }

    fn resting(&self) -> MutexGuard<'_, HashMap<i64, Instant>> {
        self.resting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn parse(body: &[u8]) -> Result<PageQuestion, ApiError> {
    PageQuestion::decode(body).map_err(|error| {
        let message = format!("the question for KV pages cannot be answered: {error}");
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_question", message)
    })
}
