//! Fetches pages from another host, for the engine of this one.
//!
//! A fetch ends when its engine no longer waits, but not before the other host has had its time: so a host that does not answer
//! is known as one after a request or two, however short these wait.

use super::{
    super::{peers, routes},
    ClusterPages, Count, Shared,
    figures::Ending,
};
use axum::body::{BodyDataStream, Bytes, to_bytes};
use futures::{StreamExt, stream::FuturesUnordered};
use skep_engine::{PagePeers, PageQuestion, PageStream};
use skep_runtime::{Member, PeerError};
use std::{
    sync::{
        Arc,
        atomic::Ordering::Relaxed,
        mpsc::{SyncSender, TrySendError},
    },
    time::{Duration, Instant},
};
use tokio::time::{sleep, timeout};

/// Maximum number of hosts that are asked for the same pages.
const MAX_ASKED_HOSTS: usize = 16;
/// Time within which a host answers how many pages it has.
const ASK_TIME: Duration = Duration::from_millis(500);
/// Time within which the next page arrives.
const PAGE_TIME: Duration = Duration::from_secs(2);
/// Fewer pages are not worth a second request.
const MIN_PAGES: usize = 2;
/// Number of pages that wait until the engine takes them.
const READ_AHEAD: usize = 16;
/// Maximum number of bytes of pages in flight, over all requests. A single request is always allowed.
const MAX_FETCHING_BYTES: u64 = 256 << 20;
/// Interval at which it is looked whether the engine has room for a page.
const FULL_WAIT: Duration = Duration::from_millis(1);
const MAX_COUNT_BYTES: usize = 1 << 10;

impl PagePeers for ClusterPages {
    fn are_there(&self) -> bool {
        !self.shared.askable().is_empty()
    }

    fn fetch_time(&self, bytes: u64) -> Duration {
        self.shared.rate.estimate(bytes, Instant::now())
    }

    fn fetch(&self, question: PageQuestion) -> Option<PageStream> {
        let ahead = READ_AHEAD.min(question.names.len()).max(1);
        // The pages that wait, the one that is handed over, and the one that arrives.
        let Some(room) = Room::take(&self.shared, (ahead as u64 + 2) * question.image_bytes() as u64) else {
            self.shared.figures.record_end(Ending::Busy, Duration::ZERO);
            return None;
        };
        let (sender, pages) = PageStream::bounded(ahead);
        let shared = self.shared.clone();
        self.shared.runtime.spawn(async move {
            let _room = room;
            let began = Instant::now();
            let ending = shared.fetch(question, &sender).await;
            shared.figures.record_end(ending, began.elapsed());
            // The engine sees the end of its pages after it was counted.
            drop(sender);
        });
        Some(pages)
    }
}

/// Bytes of a fetch among those of all.
struct Room {
    shared: Arc<Shared>,
    bytes: u64,
}

impl Room {
    fn take(shared: &Arc<Shared>, bytes: u64) -> Option<Room> {
        let room = Room { shared: shared.clone(), bytes };
        let before = shared.fetching_bytes.fetch_add(bytes, Relaxed);
        (before == 0 || before + bytes <= MAX_FETCHING_BYTES).then_some(room)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.shared.fetching_bytes.fetch_sub(self.bytes, Relaxed);
    }
}

impl Shared {
    async fn fetch(self: &Arc<Self>, mut question: PageQuestion, pages: &SyncSender<Vec<u8>>) -> Ending {
        let mut hosts = self.askable();
        hosts.truncate(MAX_ASKED_HOSTS);
        let Some((host, found)) = self.ask(hosts, &question).await else { return Ending::Absent };
        question.names.truncate(found);
        let ending = self.read(&host, question, pages).await;
        match ending {
            Ending::Late => self.let_rest(&host, "it did not send a page in time"),
            Ending::Broken => self.let_rest(&host, "it did not send its pages"),
            Ending::Rejected => self.let_rest(&host, "a page was not the one that it was asked for"),
            _ => {}
        }
        ending
    }

    /// Asks hosts how many of the pages they have, from the first on. Returns the one with most, and their number.
    async fn ask(&self, hosts: Vec<Member>, question: &PageQuestion) -> Option<(Member, usize)> {
        let (body, wanted) = (question.encode(), question.names.len());
        let mut answers: FuturesUnordered<_> =
            hosts.into_iter().map(|host| self.count_at(host, body.clone())).collect();
        let mut best: Option<(Member, usize)> = None;
        while let Some((host, pages)) = answers.next().await {
            let pages = pages.min(wanted);
            if pages >= MIN_PAGES && best.as_ref().is_none_or(|(_, most)| pages > *most) {
                best = Some((host, pages));
            }
            if pages == wanted {
                break;
            }
        }
        best
    }

    /// Asks a host. One that does not answer has no pages.
    async fn count_at(&self, host: Member, question: Vec<u8>) -> (Member, usize) {
        let asking = async {
            let answer = peers::post(&self.link, &host, routes::PAGES_COUNT, peers::BYTES, question).await?;
            let body = to_bytes(answer.into_body(), MAX_COUNT_BYTES).await.map_err(broken)?;
            let Count { pages } = serde_json::from_slice(&body).map_err(broken)?;
            Ok::<usize, PeerError>(pages)
        };
        let pages = match timeout(ASK_TIME, asking).await {
            Ok(Ok(pages)) => pages,
            Ok(Err(error)) => {
                self.let_rest(&host, &error.to_string());
                0
            }
            Err(_) => {
                self.let_rest(&host, "it did not answer in time");
                0
            }
        };
        (host, pages)
    }

    /// Reads the pages of a question, and hands them over as they arrive.
    async fn read(
        self: &Arc<Self>,
        host: &Member,
        question: PageQuestion,
        pages: &SyncSender<Vec<u8>>,
    ) -> Ending {
        let (began, mut handing, mut bytes) = (Instant::now(), Duration::ZERO, 0);
        let asking = peers::post(&self.link, host, routes::PAGES_READ, peers::BYTES, question.encode());
        let answer = match timeout(PAGE_TIME, asking).await {
            Ok(Ok(answer)) => answer,
            // It gives pages to others at this moment.
            Ok(Err(PeerError::Refused { status: 503, .. })) => return Ending::Busy,
            Ok(Err(_)) => return Ending::Broken,
            Err(_) => return Ending::Late,
        };
        let mut images = Images { body: answer.into_body().into_data_stream(), left: Bytes::new() };
        let (image_bytes, payload_bytes, layout) =
            (question.image_bytes(), question.payload_bytes, question.layout);
        for name in question.names {
            let image = match timeout(PAGE_TIME, images.next(image_bytes)).await {
                Ok(Ok(Some(image))) => image,
                Ok(Ok(None)) => return Ending::Cut,
                Ok(Err(_)) => return Ending::Broken,
                Err(_) => return Ending::Late,
            };
            let shared = self.clone();
            let opening = move || shared.seal.open(layout, name, payload_bytes, image);
            let page = match tokio::task::spawn_blocking(opening).await {
                Ok(Ok(page)) => page,
                Ok(Err(error)) => {
                    tracing::warn!(host = host.number, %error, "a KV page of another host is not used");
                    return Ending::Rejected;
                }
                Err(_) => return Ending::Broken,
            };
            let arrived = Instant::now();
            if !hand_over(page, pages).await {
                return Ending::Unwanted;
            }
            handing += arrived.elapsed();
            bytes += image_bytes as u64;
            self.figures.record_fetched(image_bytes as u64);
            self.rate.record(bytes, began.elapsed().saturating_sub(handing), Instant::now());
        }
        Ending::Fetched
    }
}

/// The images of an answer, as they arrive.
struct Images {
    body: BodyDataStream,
    /// Bytes that have arrived and belong to the next image.
    left: Bytes,
}

impl Images {
    /// Returns the next image, which has this many bytes, or `None` if the answer ends before.
    async fn next(&mut self, bytes: usize) -> Result<Option<Vec<u8>>, axum::Error> {
        let mut image = Vec::with_capacity(bytes);
        loop {
            let taken = self.left.len().min(bytes - image.len());
            image.extend_from_slice(&self.left.split_to(taken));
            if image.len() == bytes {
                return Ok(Some(image));
            }
            match self.body.next().await {
                Some(more) => self.left = more?,
                None => return Ok(None),
            }
        }
    }
}

/// Hands a page to the engine once it has room. Returns false if nobody waits for it any more.
async fn hand_over(mut page: Vec<u8>, pages: &SyncSender<Vec<u8>>) -> bool {
    loop {
        match pages.try_send(page) {
            Ok(()) => return true,
            Err(TrySendError::Disconnected(_)) => return false,
            Err(TrySendError::Full(back)) => page = back,
        }
        sleep(FULL_WAIT).await;
    }
}

fn broken(error: impl std::fmt::Display) -> PeerError {
    PeerError::Broken(error.to_string())
}
