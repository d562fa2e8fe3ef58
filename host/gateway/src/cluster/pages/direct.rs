//! Reads pages in the memory of another host, instead of getting them in an answer.
//!
//! The other host lends a few pages at a time, of its disk or of a prompt that it computes, and the next ones are asked for while these
//! are checked. They are checked as those of an answer are. Whatever fails, the rest of the pages is asked for over HTTP, and the host
//! is not read for a while.

use super::{
    super::{peers, routes},
    Shared,
    fetching::PAGE_TIME,
    figures::Lane,
    lending::{LEASE, MAX_LENT, Offer, Return},
    split::{TransferOffer, TransferPart},
};
use axum::{body::to_bytes, http::HeaderValue};
use serde::de::DeserializeOwned;
use skep_engine::{FetchEnding, PageQuestion, PrefillReport};
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

/// The place at which the other host has the pages of a question.
#[derive(Clone, Copy)]
pub(super) enum Place<'a> {
    Disk,
    Transfer(TransferPlace<'a>),
}

/// A transfer whose pages the other host computes.
#[derive(Clone, Copy)]
pub(super) struct TransferPlace<'a> {
    pub(super) name: &'a str,
    /// The number of the question's first page in the prompt.
    pub(super) first: usize,
    pub(super) report: &'a PrefillReport,
    pub(super) began: Instant,
}

/// Pages that another host lends, and the memory for them.
struct Borrowed {
    reservation: Reservation,
    offer: Offer,
    /// The time of the question, or of the answer where the question waits for pages. The loan began about then.
    since: Instant,
    /// Time that the other host took to lend them, if it says something about the way of the pages.
    took: Duration,
}

/// The end of the loans of a host.
enum NoLoan {
    /// The pages are asked for over HTTP.
    AskOverHttp,
    /// The host has no further pages.
    Over,
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
        tracing::debug!(
            host = host.number,
            why,
            "the memory of this host is not read for a while, and pages come over HTTP"
        );
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
        (place, question): (Place<'_>, &PageQuestion),
        pages: &SyncSender<Vec<u8>>,
    ) -> (usize, Option<FetchEnding>) {
        let Some(direct) = self.direct.get() else { return (0, None) };
        let (mut handed, mut borrowed) = (0, None);
        while handed < question.names.len() {
            let is_fresh = |borrowed: &Borrowed| borrowed.since.elapsed() < LEASE / 2;
            let current = match borrowed.take() {
                Some(Ok(borrowed)) if is_fresh(&borrowed) => Ok(borrowed),
                Some(Err(none)) => Err(none),
                Some(Ok(_)) | None => self.borrow(direct, host, (place, question), (handed, handed)).await,
            };
            let current = match current {
                Ok(current) => current,
                Err(NoLoan::AskOverHttp) => return (handed, None),
                Err(NoLoan::Over) => return (handed, Some(FetchEnding::Cut)),
            };
            let Some(arrived) = self.read_borrowed(direct, host, question, current).await else {
                return (handed, None);
            };
            let next = handed + arrived.images();
            let handing = self.hand_over_arrived(host, question, handed, arrived, pages);
            let borrowing = async {
                if next < question.names.len() {
                    Some(self.borrow(direct, host, (place, question), (next, handed)).await)
                } else {
                    None
                }
            };
            let ((count, ending), lent) = tokio::join!(handing, borrowing);
            handed += count;
            borrowed = lent;
            if let Place::Transfer(TransferPlace { report, began, .. }) = place {
                report.set_spent(began.elapsed());
            }
            match ending {
                None => {}
                Some(FetchEnding::Unwanted) => return (handed, Some(FetchEnding::Unwanted)),
                Some(_) => {
                    Lane::Nixl.record_error();
                    direct.let_rest(host, LONG_REST, "it sent a page that was not requested");
                    return (handed, None);
                }
            }
        }
        (handed, Some(FetchEnding::Fetched))
    }

    /// Asks a host to lend pages of a question from this one on, of which all before `held` are here.
    async fn borrow(
        &self,
        direct: &Direct,
        host: &Member,
        (place, question): (Place<'_>, &PageQuestion),
        (from, held): (usize, usize),
    ) -> Result<Borrowed, NoLoan> {
        match place {
            Place::Disk => self.borrow_from_disk(direct, host, question, from).await,
            Place::Transfer(TransferPlace { name, first, .. }) => {
                let (transfer, from) = (name.to_owned(), first + from);
                let part = TransferPart { transfer, from: Some(from), held: first + held };
                self.borrow_from_transfer(direct, host, question, part).await
            }
        }
    }

    async fn borrow_from_disk(
        &self,
        direct: &Direct,
        host: &Member,
        question: &PageQuestion,
        from: usize,
    ) -> Result<Borrowed, NoLoan> {
        let wanted = &question.names[from..];
        // Pages are asked for only if there is room for them.
        let reservation = direct.agent.reserve(wanted.len().min(MAX_LENT), question.image_bytes());
        let reservation = reservation.ok_or(NoLoan::AskOverHttp)?;
        let names = wanted[..reservation.images().min(wanted.len())].to_vec();
        let asked = PageQuestion { names, ..*question };
        let since = Instant::now();
        let body = (peers::BYTES, asked.encode());
        let offer: Offer = self.ask_for_loan(direct, host, routes::PAGES_LEND, body).await?;
        // A page that is missing ends the pages of an answer as well.
        let is_usable = (1..=asked.names.len()).contains(&offer.addresses.len());
        if !is_usable {
            return Err(NoLoan::AskOverHttp);
        }
        Ok(Borrowed { reservation, offer, since, took: since.elapsed() })
    }

    /// Waits for the next pages of a transfer. Memory is taken for them once they are there, because computing them takes long.
    async fn borrow_from_transfer(
        &self,
        direct: &Direct,
        host: &Member,
        question: &PageQuestion,
        part: TransferPart,
    ) -> Result<Borrowed, NoLoan> {
        let body = serde_json::to_vec(&part).map_err(|_| NoLoan::AskOverHttp)?;
        let mut offer = loop {
            let body = (peers::JSON, body.clone());
            match self.ask_for_loan(direct, host, routes::PREFILL_LEND, body).await? {
                TransferOffer::Pages(offer) => break offer,
                TransferOffer::NotYet {} => {}
                TransferOffer::Over {} => return Err(NoLoan::Over),
            }
        };
        let lent = offer.addresses.len();
        if !(1..=MAX_LENT).contains(&lent) {
            return Err(NoLoan::AskOverHttp);
        }
        let reservation = direct.agent.reserve(lent, question.image_bytes()).ok_or(NoLoan::AskOverHttp)?;
        // Those that have no room here are lent again.
        offer.addresses.truncate(reservation.images());
        Ok(Borrowed { reservation, offer, since: Instant::now(), took: Duration::ZERO })
    }

    /// Asks a host for a loan.
    async fn ask_for_loan<Answer: DeserializeOwned>(
        &self,
        direct: &Direct,
        host: &Member,
        route: &'static str,
        (content_type, body): (HeaderValue, Vec<u8>),
    ) -> Result<Answer, NoLoan> {
        if !direct.is_ready() || !direct.may_read(host) {
            return Err(NoLoan::AskOverHttp);
        }
        let asking = async {
            let answer = peers::post(&self.link, host, route, content_type, body).await?;
            let body = to_bytes(answer.into_body(), MAX_OFFER_BYTES).await.map_err(broken)?;
            serde_json::from_slice(&body).map_err(broken)
        };
        match timeout(PAGE_TIME, asking).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(PeerError::Refused { code, .. })) if code == "transfer_not_found" => {
                return Err(NoLoan::Over);
            }
            // Its memory is in use at this moment.
            Ok(Err(PeerError::Refused { status: 503, .. })) => {}
            Ok(Err(error)) => {
                if !matches!(error, PeerError::Refused { status: 404, .. }) {
                    Lane::Nixl.record_error();
                }
                direct.let_rest(host, LONG_REST, &error.to_string());
            }
            Err(_) => {
                Lane::Nixl.record_error();
                direct.let_rest(host, SHORT_REST, "it did not lend its pages in time");
            }
        }
        Err(NoLoan::AskOverHttp)
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
