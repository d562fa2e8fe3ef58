//! Orders the pages of a prompt at a prefill host, and hands them to the engine as they arrive.
//!
//! An order ends with its last page, with the first thing that goes wrong, or when its time is over. The engine then computes what it has
//! not got. A host that is silent, does not answer or sends a wrong page is not asked again for a while; one that is full is.

use super::{
    super::{
        Shared,
        direct::{Place, TransferPlace},
        fetching::{self, Images},
        figures::Lane,
    },
    choice::Known,
    figures::{self, Outcome},
    lane,
    messages::{Line, PrefillOrderBody, TransferName, TransferPart},
};
use crate::cluster::{lines::Reader, peers, routes};
use axum::http::StatusCode;
use skep_engine::{FetchEnding, PrefillOrder, PrefillReport, PrefillView, PrefilledPages};
use skep_runtime::{Member, PeerError, WorkingHost};
use std::{
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc::SyncSender},
    time::{Duration, Instant},
};
use tokio::time::{self, timeout, timeout_at};

/// Number of hosts that are asked for one prompt.
const MAX_ASKED: usize = 2;
/// Time within which a host takes an order or refuses it.
const ANSWER_TIME: Duration = Duration::from_secs(2);
/// Time after which a host that says nothing about an order counts as gone.
const SILENCE: Duration = Duration::from_secs(3);
/// Time for the last line about an order, after its last page.
const LAST_LINE_TIME: Duration = Duration::from_secs(1);
/// Time that the pages which are left may take once all are computed. If computing took longer, they may take as long as that.
const LAST_PAGES_TIME: Duration = Duration::from_secs(10);
/// The pages are fetched instead of computed if another host has this part of them, as a divisor.
const FETCHED_PART: usize = 2;

/// The prefill hosts that compute a model.
type PrefillHosts = Box<dyn Fn(&str) -> Vec<WorkingHost> + Send + Sync>;

/// The prompts that a decode host has computed elsewhere.
pub(in crate::cluster::pages) struct PrefillOrders {
    min_tokens: usize,
    hosts: OnceLock<PrefillHosts>,
    known: Mutex<Known>,
}

/// An order that a host has taken.
struct Taken {
    host: Member,
    transfer: String,
    lines: Reader,
}

/// Tokens of an order among those that were sent to a host.
struct Sent<'a> {
    orders: &'a PrefillOrders,
    host: i64,
    tokens: u64,
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        self.orders.known().note_ended(self.host, self.tokens);
    }
}

impl PrefillOrders {
    pub(in crate::cluster::pages) fn new(min_tokens: usize) -> Self {
        PrefillOrders { min_tokens, hosts: OnceLock::new(), known: Mutex::default() }
    }

    pub(in crate::cluster::pages) fn meet(&self, hosts: PrefillHosts) {
        // A second call changes nothing, because the other hosts are those of one cluster.
        let _ = self.hosts.set(hosts);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Returns the hosts that can be asked now to compute prompts of a model.
    fn prefill_hosts(&self, orders: &PrefillOrders, model: &str) -> Vec<WorkingHost> {
        let Some(hosts) = orders.hosts.get() else { return Vec::new() };
        let found = hosts(model);
        self.can_be_asked(found, |host: &WorkingHost| host.member.number)
    }

    pub(in crate::cluster::pages) fn prefill_view(&self, model: &str) -> Option<PrefillView> {
        let orders = self.orders.as_ref()?;
        let hosts = self.prefill_hosts(orders, model);
        let known = orders.known();
        let least_busy = hosts.iter().min_by_key(|host| known.ahead(host))?;
        Some(PrefillView {
            min_tokens: orders.min_tokens,
            tokens_ahead: usize::try_from(known.ahead(least_busy)).unwrap_or(usize::MAX),
            tokens_per_s: known.rate(model, least_busy.member.number),
        })
    }

    pub(in crate::cluster::pages) fn prefill(
        self: &Arc<Self>,
        order: PrefillOrder,
    ) -> Option<PrefilledPages> {
        let Some((room, sender, pages)) = fetching::stream(self, &order.question) else {
            figures::record_end(Outcome::Busy, Duration::ZERO);
            return None;
        };
        let report = Arc::<PrefillReport>::default();
        let (shared, reported) = (self.clone(), report.clone());
        self.runtime.spawn(async move {
            let _room = room;
            let began = Instant::now();
            let until = time::Instant::now() + order.within;
            let ordering = shared.order(&order, until, (&sender, &reported));
            let outcome = timeout_at(until, ordering).await.unwrap_or(Outcome::Late);
            figures::record_end(outcome, began.elapsed());
            tracing::debug!(
                outcome = outcome.as_str(),
                tokens = order.tokens.len(),
                "an order of a prompt ended"
            );
            // The engine sees the end of its pages after it was counted.
            drop(sender);
        });
        Some(PrefilledPages { pages, report })
    }

    /// Gets the pages of an order from a host that has them, or has a prefill host compute them.
    async fn order(
        self: &Arc<Self>,
        order: &PrefillOrder,
        until: time::Instant,
        (pages, report): (&SyncSender<Vec<u8>>, &PrefillReport),
    ) -> Outcome {
        let Some(orders) = self.orders.as_ref() else { return Outcome::Absent };
        let wanted = order.question.names.len();
        let hosts = self.prefill_hosts(orders, &order.model);
        // A session that has moved has its pages at its last host. A prefill host uses what is on its disk when it gets the order, and is
        // not asked before: one that computes is slow to answer.
        let mut others = self.askable();
        others.retain(|other| hosts.iter().all(|host| host.member.number != other.number));
        if let Some((host, found)) = self.ask(others, &order.question).await
            && found * FETCHED_PART >= wanted
        {
            let mut question = order.question.clone();
            question.names.truncate(found);
            return match self.read(&host, question, pages).await {
                FetchEnding::Fetched => Outcome::Fetched,
                ending => self.gone_wrong(&host, ending),
            };
        }
        let page_tokens = order.tokens.len() / order.names.len().max(1);
        let ranked = {
            let mut known = orders.known();
            known.retain(&order.model, &hosts);
            known.ranked(&order.model, hosts, &order.names, page_tokens)
        };
        let mut last = Outcome::Absent;
        for WorkingHost { member, .. } in ranked.into_iter().take(MAX_ASKED) {
            let tokens = (wanted * page_tokens) as u64;
            orders.known().note_sent(member.number, tokens);
            let _sent = Sent { orders, host: member.number, tokens };
            match self.send_order(&member, order, until).await {
                Ok(taken) => {
                    let receiving = self.receive(orders, taken, order, (pages, report));
                    let received = timeout_at(until, receiving).await;
                    return received.unwrap_or_else(|_| self.gone_wrong(&member, FetchEnding::Late));
                }
                Err(outcome) => last = outcome,
            }
        }
        last
    }

    /// Sends an order to a host, which answers in time and before the order ends.
    async fn send_order(
        &self,
        host: &Member,
        order: &PrefillOrder,
        until: time::Instant,
    ) -> Result<Taken, Outcome> {
        let transfer = uuid::Uuid::now_v7().simple().to_string();
        let body = PrefillOrderBody::new(transfer.clone(), order);
        let body = serde_json::to_vec(&body).map_err(|_| Outcome::Broken)?;
        let asked = peers::call(&self.link, host, routes::PREFILL, body);
        match timeout_at(until.min(time::Instant::now() + ANSWER_TIME), asked).await {
            Ok(Ok(answer)) => {
                let lines = Reader::new(answer.into_body(), SILENCE);
                Ok(Taken { host: host.clone(), transfer, lines })
            }
            Ok(Err(PeerError::Refused { status: 429 | 503, .. })) => Err(Outcome::Full),
            Ok(Err(PeerError::Refused { code, message, status, .. })) => {
                tracing::warn!(host = host.number, code, "a prefill host refuses a prompt: {message}");
                // A prompt that is too long for it says nothing about others.
                if status != StatusCode::BAD_REQUEST.as_u16() {
                    self.let_rest(host, "it refused an order");
                }
                Err(Outcome::Refused)
            }
            Ok(Err(error)) => {
                self.let_rest(host, &error.to_string());
                Err(Outcome::Unreached)
            }
            Err(_) => {
                self.let_rest(host, "it did not answer an order in time");
                Err(Outcome::Late)
            }
        }
    }

    /// Receives the pages of an order, and tells the host at the end that nobody fetches any more of them.
    async fn receive(
        self: &Arc<Self>,
        orders: &PrefillOrders,
        mut taken: Taken,
        order: &PrefillOrder,
        (pages, report): (&SyncSender<Vec<u8>>, &PrefillReport),
    ) -> Outcome {
        let _notice =
            EndNotice { shared: self.clone(), host: taken.host.clone(), transfer: taken.transfer.clone() };
        let reused = match started(&mut taken.lines).await {
            Ok(reused) => reused,
            Err(ending) => return self.gone_wrong(&taken.host, ending),
        };
        report.set_reused(reused);
        let began = Instant::now();
        let (ending, done) = {
            let reading = self.read_order((&taken.host, taken.transfer.as_str()), order, (pages, report));
            tokio::pin!(reading);
            let mut done = None;
            let mut last_pages_until = time::Instant::now();
            let ending = loop {
                tokio::select! {
                    ending = &mut reading => break ending,
                    // A host that is stopped now sends neither pages nor their end.
                    () = time::sleep_until(last_pages_until), if done.is_some() => break FetchEnding::Late,
                    line = taken.lines.next::<Line>(), if done.is_none() => match line {
                        Some(Ok(Line::Done { computed_tokens, compute_us, .. })) => {
                            done = Some((computed_tokens, Duration::from_micros(compute_us)));
                            last_pages_until = time::Instant::now() + began.elapsed().max(LAST_PAGES_TIME);
                        }
                        Some(Ok(Line::Alive {} | Line::Started { .. })) => {}
                        Some(Ok(Line::Failed { code, message })) => {
                            tracing::debug!(host = taken.host.number, code, "a prompt was not computed: {message}");
                            break FetchEnding::Cut;
                        }
                        Some(Err(_)) | None => break FetchEnding::Broken,
                    },
                }
            };
            (ending, done)
        };
        if ending != FetchEnding::Fetched {
            return self.gone_wrong(&taken.host, ending);
        }
        let done = match done {
            Some(done) => Some(done),
            None => last_line(&mut taken.lines).await,
        };
        let (computed, spent) = done.unwrap_or((0, began.elapsed()));
        report.set_spent(spent);
        let number = taken.host.number;
        let computing = (computed, spent.as_secs_f64());
        orders.known().note_computed(number, (&order.model, &order.names), computing);
        figures::record_used(computed as u64, reused as u64);
        Outcome::Used
    }

    /// Takes all pages of an order, and reports for how long it has waited for those that came. It reads them in the memory of the host as
    /// far as that works, and the others come over HTTP.
    async fn read_order(
        self: &Arc<Self>,
        (host, transfer): (&Member, &str),
        order: &PrefillOrder,
        (pages, report): (&SyncSender<Vec<u8>>, &PrefillReport),
    ) -> FetchEnding {
        let (began, first) = (Instant::now(), order.first);
        let place = Place::Transfer(TransferPlace { name: transfer, first, report, began });
        let (handed, ended) = self.read_directly(host, (place, &order.question), pages).await;
        if let Some(ending) = ended {
            return ending;
        }
        let held = first + handed;
        let part = TransferPart { transfer: transfer.to_owned(), from: Some(held), held };
        let opened = timeout(ANSWER_TIME, lane::fetch(self, host, &part, order.within)).await;
        let ending = match opened {
            Ok(Ok(images)) => self.read_images(host, (order, handed), images, (pages, (report, began))).await,
            Ok(Err(_)) | Err(_) => FetchEnding::Broken,
        };
        Lane::Http.record_ending(ending);
        ending
    }

    /// Takes the pages of an order from this one on in the answer that has them.
    async fn read_images(
        self: &Arc<Self>,
        host: &Member,
        (order, from): (&PrefillOrder, usize),
        mut images: Images,
        (pages, (report, began)): (&SyncSender<Vec<u8>>, (&PrefillReport, Instant)),
    ) -> FetchEnding {
        let mut ending = FetchEnding::Fetched;
        for number in from..order.question.names.len() {
            if let Err(why) = self.take(host, (&order.question, number), &mut images, pages).await {
                ending = why;
                break;
            }
            report.set_spent(began.elapsed());
        }
        let (bytes, time) = images.moved();
        if bytes > 0 {
            Lane::Http.record(bytes, time);
        }
        // Pages that have waited before they were sent say nothing about the network.
        if !time.is_zero() {
            self.rate.record(bytes, time, Instant::now());
        }
        ending
    }

    /// Returns the outcome of an order that a host did not fulfill, and does not ask that host again for a while if it is to blame.
    fn gone_wrong(&self, host: &Member, ending: FetchEnding) -> Outcome {
        match ending {
            FetchEnding::Late => self.let_rest(host, "it did not send a page in time"),
            FetchEnding::Broken => self.let_rest(host, "it did not fulfill an order"),
            FetchEnding::Rejected => self.let_rest(host, "it sent a page that was not requested"),
            FetchEnding::Fetched
            | FetchEnding::Absent
            | FetchEnding::Busy
            | FetchEnding::Cut
            | FetchEnding::Unwanted => {}
        }
        Outcome::of(ending)
    }
}

/// Waits until a host has begun with an order. Returns how many tokens of the prompt it had.
async fn started(lines: &mut Reader) -> Result<usize, FetchEnding> {
    loop {
        match lines.next::<Line>().await {
            Some(Ok(Line::Started { reused_tokens })) => return Ok(reused_tokens),
            Some(Ok(Line::Alive {})) => {}
            Some(Ok(Line::Failed { .. } | Line::Done { .. })) => return Err(FetchEnding::Cut),
            Some(Err(_)) | None => return Err(FetchEnding::Broken),
        }
    }
}

/// Waits briefly for the line that ends an order. Returns how many tokens were computed, and for how long.
async fn last_line(lines: &mut Reader) -> Option<(usize, Duration)> {
    let reading = async {
        loop {
            match lines.next::<Line>().await?.ok()? {
                Line::Done { computed_tokens, compute_us, .. } => {
                    return Some((computed_tokens, Duration::from_micros(compute_us)));
                }
                Line::Failed { .. } => return None,
                Line::Alive {} | Line::Started { .. } => {}
            }
        }
    };
    timeout(LAST_LINE_TIME, reading).await.ok().flatten()
}

/// Tells a host, when it is dropped, that nobody fetches more pages of a transfer.
struct EndNotice {
    shared: Arc<Shared>,
    host: Member,
    transfer: String,
}

impl Drop for EndNotice {
    fn drop(&mut self) {
        let (shared, host) = (self.shared.clone(), self.host.clone());
        let name = TransferName { transfer: std::mem::take(&mut self.transfer) };
        self.shared.runtime.spawn(async move {
            let Ok(body) = serde_json::to_vec(&name) else { return };
            // A host that does not get it waits until the lease ends.
            let _ = timeout(ANSWER_TIME, peers::call(&shared.link, &host, routes::PREFILL_END, body)).await;
        });
    }
}
