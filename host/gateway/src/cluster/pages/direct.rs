//! Reads pages in the memory of another host, instead of getting them in an answer.
//!
//! The other host lends a few pages at a time, and the next ones are asked for while these are checked. They are checked as
//! those of an answer are. Whatever fails, the rest of the pages is asked for over HTTP, and the host is not read for a while.

use super::{
    super::{peers, routes},
    Shared,
    fetching::PAGE_TIME,
    figures::Lane,
    lending::{LEASE, MAX_LENT, Offer, Return},
};
use axum::body::to_bytes;
use skep_engine::{FetchEnding, PageQuestion};
use skep_runtime::{Member, PeerError};
use skep_transfer::{AgentStatus, Arrived, Reservation, TransferAgent};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc::SyncSender},
    time::{Duration, Instant},
};
use tokio::time::timeout;

/// Time for which a host is not read that has no library, or whose pages were wrong.
const LONG_REST: Duration = Duration::from_secs(60);
/// Time for which a host is not read after a READ failed or was late.
const SHORT_REST: Duration = Duration::from_secs(10);
const MAX_OFFER_BYTES: usize = 512 << 10;

/// The reads of other hosts' memory.
pub(super) struct Direct {
    agent: TransferAgent,
    /// Hosts that are not read, and until when.
    resting: Mutex<HashMap<i64, Instant>>,
}

/// Pages that another host lends, and the memory for them.
struct Borrowed {
    reservation: Reservation,
    offer: Offer,
    asked_at: Instant,
    /// Time that the other host took to lend them.
    took: Duration,
}

impl Direct {
    pub(super) fn new(agent: TransferAgent) -> Self {
        Direct { agent, resting: Mutex::default() }
    }

    pub(super) fn agent(&self) -> &TransferAgent {
        &self.agent
    }

    /// Returns whether the helper of this host runs.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.agent.status(), AgentStatus::Ready { .. })
    }

    fn may_read(&self, host: &Member) -> bool {
        let mut resting = self.resting();
        resting.retain(|_, until| *until > Instant::now());
        !resting.contains_key(&host.number)
    }

    fn let_rest(&self, host: &Member, time: Duration, why: &str) {
        tracing::debug!(host = host.number, why, "the memory of this host is not read for a while");
        self.resting().insert(host.number, Instant::now() + time);
    }

    fn resting(&self) -> MutexGuard<'_, HashMap<i64, Instant>> {
        self.resting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Reads the pages of a question as far as that works, and hands them over. Returns how many were handed over, and how the
    /// fetch has ended, unless the others are to be asked for over HTTP.
    pub(super) async fn read_directly(
        self: &Arc<Self>,
        host: &Member,
        question: &PageQuestion,
        pages: &SyncSender<Vec<u8>>,
    ) -> (usize, Option<FetchEnding>) {
        let Some(direct) = self.direct.get() else { return (0, None) };
        let (mut handed, mut borrowed) = (0, None);
        while handed < question.names.len() {
            let is_fresh = |borrowed: &Borrowed| borrowed.asked_at.elapsed() < LEASE / 2;
            let current = match borrowed.take().filter(is_fresh) {
                Some(borrowed) => Some(borrowed),
                None => self.borrow(direct, host, question, handed).await,
            };
            let Some(current) = current else { return (handed, None) };
            let Some(arrived) = self.read_borrowed(direct, host, question, current).await else {
                return (handed, None);
            };
            let next = handed + arrived.images();
            let handing = self.hand_over_arrived(host, question, handed, arrived, pages);
            let borrowing = async {
                if next < question.names.len() {
                    self.borrow(direct, host, question, next).await
                } else {
                    None
                }
            };
            let ((count, ending), lent) = tokio::join!(handing, borrowing);
            handed += count;
            borrowed = lent;
            match ending {
                None => {}
                Some(FetchEnding::Unwanted) => return (handed, Some(FetchEnding::Unwanted)),
                Some(_) => {
                    Lane::Nixl.record_error();
                    direct.let_rest(host, LONG_REST, "a page was not the one that it was asked for");
                    return (handed, None);
                }
            }
        }
        (handed, Some(FetchEnding::Fetched))
    }

    /// Asks a host to lend pages of a question, from this one on. `None` if it does not, or if there is no room for them.
    async fn borrow(
        &self,
        direct: &Direct,
        host: &Member,
        question: &PageQuestion,
        from: usize,
    ) -> Option<Borrowed> {
        if !direct.may_read(host) {
            return None;
        }
        let wanted = &question.names[from..];
        let reservation = direct.agent.reserve(wanted.len().min(MAX_LENT), question.image_bytes())?;
        let names = wanted[..reservation.images().min(wanted.len())].to_vec();
        let asked = PageQuestion { names, ..*question };
        let asked_at = Instant::now();
        let asking = async {
            let answer =
                peers::post(&self.link, host, routes::PAGES_LEND, peers::BYTES, asked.encode()).await?;
            let body = to_bytes(answer.into_body(), MAX_OFFER_BYTES).await.map_err(broken)?;
            serde_json::from_slice::<Offer>(&body).map_err(broken)
        };
        let offer = match timeout(PAGE_TIME, asking).await {
            Ok(Ok(offer)) => offer,
            // Its memory is in use at this moment.
            Ok(Err(PeerError::Refused { status: 503, .. })) => return None,
            Ok(Err(error)) => {
                if !matches!(error, PeerError::Refused { status: 404, .. }) {
                    Lane::Nixl.record_error();
                }
                direct.let_rest(host, LONG_REST, &error.to_string());
                return None;
            }
            Err(_) => {
                Lane::Nixl.record_error();
                direct.let_rest(host, SHORT_REST, "it did not lend its pages in time");
                return None;
            }
        };
        // A page that is missing ends the pages of an answer as well.
        let is_usable = (1..=asked.names.len()).contains(&offer.addresses.len());
        is_usable.then(|| Borrowed { reservation, offer, asked_at, took: asked_at.elapsed() })
    }

    /// Reads the pages that a host lends.
    async fn read_borrowed(
        self: &Arc<Self>,
        direct: &Direct,
        host: &Member,
        question: &PageQuestion,
        borrowed: Borrowed,
    ) -> Option<Arrived> {
        let Borrowed { reservation, offer, took, .. } = borrowed;
        let Offer { loan, peer, addresses } = offer;
        let began = Instant::now();
        let reading = tokio::task::spawn_blocking(move || reservation.read(&peer, &addresses, PAGE_TIME));
        let arrived = match reading.await {
            Ok(Ok(arrived)) => arrived,
            Ok(Err(error)) => {
                Lane::Nixl.record_error();
                direct.let_rest(host, SHORT_REST, &error.to_string());
                return None;
            }
            Err(_) => return None,
        };
        let (shared, host, ended) = (self.clone(), host.clone(), Return { loan });
        tokio::spawn(async move {
            let body = serde_json::to_vec(&ended).unwrap_or_default();
            // If it does not arrive, the lease ends the loan.
            let _ = timeout(PAGE_TIME, peers::call(&shared.link, &host, routes::PAGES_RETURN, body)).await;
        });
        let bytes = (arrived.images() * question.image_bytes()) as u64;
        let took = took + began.elapsed();
        Lane::Nixl.record(bytes, took);
        self.rate.record(bytes, took, Instant::now());
        Some(arrived)
    }

    /// Checks the images that have arrived, of the pages from `first` on, and hands their pages over. Returns the number of these,
    /// and why it did not continue.
    async fn hand_over_arrived(
        self: &Arc<Self>,
        host: &Member,
        question: &PageQuestion,
        first: usize,
        arrived: Arrived,
        pages: &SyncSender<Vec<u8>>,
    ) -> (usize, Option<FetchEnding>) {
        let arrived = Arc::new(arrived);
        for at in 0..arrived.images() {
            let copying = {
                let arrived = arrived.clone();
                tokio::task::spawn_blocking(move || arrived.image(at))
            };
            let Ok(Ok(image)) = copying.await else { return (at, Some(FetchEnding::Broken)) };
            if let Err(ending) = self.accept(host, (question, first + at), image, pages).await {
                return (at, Some(ending));
            }
        }
        (arrived.images(), None)
    }
}

fn broken(error: impl std::fmt::Display) -> PeerError {
    PeerError::Broken(error.to_string())
}
