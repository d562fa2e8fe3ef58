//! KV pages that the hosts of a cluster give each other.
//!
//! A host that lacks the pages of a prompt asks the others how many of them they have, and fetches them from the host that
//! has the most (`fetching`). A host that is asked gives what is on its disk (`giving`), and nothing that was erased. Its
//! pages come in the body of an answer, or, where both hosts can, it lends them (`lending`) and the other one reads its
//! memory (`direct`). A decode host has a prefill host compute the pages of long prompts (`split`). All of this happens
//! beside the engines, within bounds of memory, time and rate.
//!
//! Invariant: pages that are not exactly those that were asked for are never handed to the engine. Whatever fails is a miss,
//! and the pages are computed.

mod direct;
mod fetching;
mod figures;
mod giving;
mod lending;
mod split;

pub use figures::PageFigures;
pub(super) use split::{PrefillOrderBody, TransferName, TransferOffer, TransferPart};

use super::{key::ClusterKey, link::Link};
use crate::ApiError;
use axum::{body::Body, http::StatusCode, response::Response};
use direct::Direct;
use figures::{Figures, Lane};
use lending::{Loans, Offer, Return};
use serde::{Deserialize, Serialize};
use skep_engine::{DiskTier, ModelSet, PageNamer, PageQuestion, SealingSecret, TransferRate, TransitSeal};
use skep_runtime::{Member, WorkingHost};
use skep_transfer::TransferAgent;
use split::{PrefillDesk, PrefillOrders};
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

/// The pages that a host exchanges with others.
#[derive(Clone, Debug)]
pub struct PageOptions {
    /// Keeps pages whose names the other hosts use too. Without a disk, a host gives only what it computes for others.
    pub disk: Option<Arc<DiskTier>>,
    /// The names of pages, which all hosts use. They are those of `disk`, if there is one.
    pub names: PageNamer,
    pub stage: PageStage,
}

/// The part that a host takes in the division of prompts and answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageStage {
    /// The host computes its prompts itself.
    #[default]
    Whole,
    /// The host computes prompts for others.
    Prefill,
    /// Prefill hosts compute prompts with at least `min_tokens` tokens, if that pays.
    Decode { min_tokens: usize },
}

impl PageOptions {
    /// Returns the options of a host that computes its prompts itself and keeps pages on a disk.
    pub fn of(disk: Arc<DiskTier>) -> Self {
        PageOptions { names: disk.keys().clone(), disk: Some(disk), stage: PageStage::Whole }
    }
}

/// The pages that this host gives to the other hosts of its cluster and gets from them. Clones are the same.
#[derive(Clone)]
pub struct ClusterPages {
    shared: Arc<Shared>,
}

struct Shared {
    tier: Option<Arc<DiskTier>>,
    names: PageNamer,
    /// The prompts that this host computes for others.
    desk: Option<PrefillDesk>,
    /// The prompts that others compute for this host.
    orders: Option<PrefillOrders>,
    seal: TransitSeal,
    link: Link,
    runtime: Handle,
    others: OnceLock<OtherHosts>,
    /// Reads of other hosts' memory, if there is a library for them.
    direct: OnceLock<Direct>,
    loans: Loans,
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
    /// Creates the pages of a host that has this key. Its tasks run where it is created, which must be in a runtime of tokio.
    pub fn new(key: &ClusterKey, options: PageOptions) -> Self {
        figures::begin();
        split::begin();
        let PageOptions { disk, names, stage } = options;
        let (desk, orders) = match stage {
            PageStage::Whole => (None, None),
            PageStage::Prefill => (Some(PrefillDesk::default()), None),
            PageStage::Decode { min_tokens } => (None, Some(PrefillOrders::new(min_tokens))),
        };
        let shared = Shared {
            tier: disk,
            names,
            desk,
            orders,
            seal: TransitSeal::new(&SealingSecret(key.derived(SEAL))),
            link: Link::new(key.clone()),
            runtime: Handle::current(),
            others: OnceLock::new(),
            direct: OnceLock::new(),
            loans: Loans::default(),
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

    /// Begins to order prompts at the hosts that `hosts` returns for a model, if this is a decode host.
    pub fn meet_prefill(&self, hosts: impl Fn(&str) -> Vec<WorkingHost> + Send + Sync + 'static) {
        if let Some(orders) = &self.shared.orders {
            orders.meet(Box::new(hosts));
        }
    }

    /// Reads the memory of other hosts that can be read through this agent, and lends them this host's pages in the same way.
    pub fn transfer_by(&self, agent: TransferAgent) {
        // A second call changes nothing, because a host has one helper.
        let _ = self.shared.direct.set(Direct::new(agent));
    }

    /// Returns what was fetched and given since the start.
    pub(crate) fn figures(&self) -> PageFigures {
        self.shared.figures.now()
    }

    /// Returns the lane on which pages are fetched from hosts that have it too.
    pub(crate) fn lane(&self) -> &'static str {
        let is_ready = self.shared.direct.get().is_some_and(Direct::is_ready);
        if is_ready { Lane::Nixl.as_str() } else { Lane::Http.as_str() }
    }

    /// Answers how many of the pages of a question are here, from the first on.
    pub(super) fn count(&self, body: &[u8]) -> Result<Vec<u8>, ApiError> {
        let (question, tier) = (parse(body)?, self.shared.tier.as_ref());
        let pages = tier.and_then(|tier| giving::find(tier, &question)).map_or(0, |(_, pages)| pages);
        serde_json::to_vec(&Count { pages }).map_err(|error| {
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", error.to_string())
        })
    }

    /// Answers a question with the images of the pages that are here, from the first on.
    pub(super) fn give(&self, body: &[u8]) -> Result<Body, ApiError> {
        giving::give(&self.shared, parse(body)?)
    }

    /// Answers a question with the addresses at which the pages that are here can be read for a while, from the first on.
    pub(super) async fn lend(&self, body: &[u8]) -> Result<Offer, ApiError> {
        lending::lend(&self.shared, parse(body)?).await
    }

    /// Ends a loan whose pages were read.
    pub(super) fn take_back(&self, ended: Return) {
        self.shared.loans.end(&ended);
    }

    /// Takes an order of a prompt's pages for one of these models.
    pub(super) fn order(&self, models: &ModelSet, order: PrefillOrderBody) -> Result<Response, ApiError> {
        self.desk()?.order(&self.shared, models, order)
    }

    /// Returns the images of an order's pages, as they become ready.
    pub(super) fn transfer(&self, part: &TransferPart) -> Result<Body, ApiError> {
        self.desk()?.pages(&self.shared, part)
    }

    /// Answers with the addresses at which an order's next pages can be read for a while, once some are ready.
    pub(super) async fn lend_transfer(&self, part: &TransferPart) -> Result<TransferOffer, ApiError> {
        self.desk()?.lend(&self.shared, part).await
    }

    /// Drops the pages of an order that were not fetched.
    pub(super) fn end_transfer(&self, name: &TransferName) -> Result<(), ApiError> {
        self.desk()?.end(name.as_str());
        Ok(())
    }

    /// Returns the number of transfers to others, the bytes of their pages, and the tokens in flight.
    #[cfg(test)]
    pub(super) fn held_for_others(&self) -> (usize, u64, usize) {
        self.shared.desk.as_ref().map(PrefillDesk::held).unwrap_or_default()
    }

    fn desk(&self) -> Result<&PrefillDesk, ApiError> {
        self.shared.desk.as_ref().ok_or_else(|| {
            let message = "this host computes no prompts for others; it was not started with --role prefill";
            ApiError::new(StatusCode::NOT_FOUND, "prefill_off", message)
        })
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
        self.can_be_asked(others(), |host: &Member| host.number)
    }

    /// Returns those of these hosts that have answered correctly in recent requests.
    fn can_be_asked<T>(&self, mut hosts: Vec<T>, number: impl Fn(&T) -> i64) -> Vec<T> {
        let mut resting = self.resting();
        resting.retain(|_, since| since.elapsed() < REST);
        hosts.retain(|host| !resting.contains_key(&number(host)));
        hosts
    }

    /// Asks a host no more for a while.
    fn let_rest(&self, host: &Member, why: &str) {
        tracing::debug!(host = host.number, why, "no KV pages are requested from this host for a while");
        self.resting().insert(host.number, Instant::now());
    }

    fn resting(&self) -> MutexGuard<'_, HashMap<i64, Instant>> {
        self.resting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn parse(body: &[u8]) -> Result<PageQuestion, ApiError> {
    PageQuestion::decode(body).map_err(|error| {
        let message = format!("the request for KV pages cannot be answered: {error}");
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_question", message)
    })
}
