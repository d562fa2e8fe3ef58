//! Fetches pages from another host, for the engine of this one.
//!
//! A fetch ends when its engine no longer waits, but not before the other host has had its time: so a host that does not answer
//! is known as one after a request or two, however short these wait.

use super::{
    super::{peers, routes},
    ClusterPages, Count, Shared,
    direct::Place,
    figures::Lane,
};
use axum::body::{Body, BodyDataStream, Bytes, to_bytes};
use futures::{StreamExt, stream::FuturesUnordered};
use skep_engine::{
    FetchEnding, PageNamer, PagePeers, PageQuestion, PageStream, PrefillOrder, PrefillView, PrefilledPages,
};
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
pub(super) const PAGE_TIME: Duration = Duration::from_secs(2);
/// Fewer pages are not worth a second request.
const MIN_PAGES: usize = 2;
/// Number of pages that wait until the engine takes them.
const READ_AHEAD: usize = 16;
/// Maximum number of bytes of pages in flight, over all requests. A single request is always allowed.
const MAX_FETCHING_BYTES: u64 = 256 << 20;
/// Interval at which the fetch checks whether the engine has room for a page.
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
        let Some((room, sender, pages)) = stream(&self.shared, &question) else {
            self.shared.figures.record_end(FetchEnding::Busy, Duration::ZERO);
            return None;
        };
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

    fn names(&self) -> Option<&PageNamer> {
        Some(&self.shared.names)
    }

    fn prefill_view(&self, model: &str) -> Option<PrefillView> {
        self.shared.prefill_view(model)
    }

    fn prefill(&self, order: PrefillOrder) -> Option<PrefilledPages> {
        self.shared.prefill(order)
    }
}

/// Returns the room that a fetch of these pages takes, and a stream for them; `None` if there is no room.
pub(super) fn stream(
    shared: &Arc<Shared>,
    question: &PageQuestion,
) -> Option<(Room, SyncSender<Vec<u8>>, PageStream)> {
    let ahead = READ_AHEAD.min(question.names.len()).max(1);
    // The pages that wait, the one that is handed over, and the one that arrives.
    let room = Room::take(shared, (ahead as u64 + 2) * question.image_bytes() as u64)?;
    let (sender, pages) = PageStream::bounded(ahead);
    Some((room, sender, pages))
}

/// Bytes of a fetch among those of all.
pub(super) struct Room {
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
    async fn fetch(self: &Arc<Self>, mut question: PageQuestion, pages: &SyncSender<Vec<u8>>) -> FetchEnding {
        let Some((host, found)) = self.ask(self.askable(), &question).await else {
            return FetchEnding::Absent;
        };
        question.names.truncate(found);
        let ending = self.read(&host, question, pages).await;
        match ending {
            FetchEnding::Late => self.let_rest(&host, "it did not send a page in time"),
            FetchEnding::Broken => self.let_rest(&host, "it did not send its pages"),
            FetchEnding::Rejected => self.let_rest(&host, "it sent a page that was not requested"),
            _ => {}
        }
        ending
    }

    /// Asks hosts how many of the pages they have, from the first on. Returns the one with most, and their number.
    pub(super) async fn ask(&self, hosts: Vec<Member>, question: &PageQuestion) -> Option<(Member, usize)> {
        let (body, wanted) = (question.encode(), question.names.len());
        let mut answers: FuturesUnordered<_> =
            hosts.into_iter().take(MAX_ASKED_HOSTS).map(|host| self.count_at(host, body.clone())).collect();
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

    /// Reads the pages of a question in the memory of a host as far as that works, and asks it for the others over HTTP. They are
    /// handed over as they arrive.
    pub(super) async fn read(
        self: &Arc<Self>,
        host: &Member,
        mut question: PageQuestion,
        pages: &SyncSender<Vec<u8>>,
    ) -> FetchEnding {
        let (handed, ended) = self.read_directly(host, (Place::Disk, &question), pages).await;
        if let Some(ending) = ended {
            return ending;
        }
        question.names.drain(..handed);
        let ending = self.read_answer(host, question, pages).await;
        Lane::Http.record_ending(ending);
        ending
    }

    /// Reads the pages of a question in the answer to it, and hands them over as they arrive.
    async fn read_answer(
        self: &Arc<Self>,
        host: &Member,
        question: PageQuestion,
        pages: &SyncSender<Vec<u8>>,
    ) -> FetchEnding {
        let began = Instant::now();
        let asking = peers::post(&self.link, host, routes::PAGES_READ, peers::BYTES, question.encode());
        let answer = match timeout(PAGE_TIME, asking).await {
            Ok(Ok(answer)) => answer,
            // It gives pages to others at this moment.
            Ok(Err(PeerError::Refused { status: 503, .. })) => return FetchEnding::Busy,
            Ok(Err(_)) => return FetchEnding::Broken,
            Err(_) => return FetchEnding::Late,
        };
        let mut images = Images::of(answer.into_body(), PAGE_TIME);
        let (image_bytes, mut handing, mut bytes) = (question.image_bytes(), Duration::ZERO, 0);
        let mut ending = FetchEnding::Fetched;
        for number in 0..question.names.len() {
            match self.take(host, (&question, number), &mut images, pages).await {
                Ok(waited) => handing += waited,
                Err(why) => {
                    ending = why;
                    break;
                }
            }
            bytes += image_bytes as u64;
            self.rate.record(bytes, began.elapsed().saturating_sub(handing), Instant::now());
        }
        if bytes > 0 {
            Lane::Http.record(bytes, began.elapsed().saturating_sub(handing));
        }
        ending
    }

    /// Takes the next image of an answer, and hands its page over. Returns for how long the engine had no room for it.
    pub(super) async fn take(
        self: &Arc<Self>,
        host: &Member,
        (question, number): (&PageQuestion, usize),
        images: &mut Images,
        pages: &SyncSender<Vec<u8>>,
    ) -> Result<Duration, FetchEnding> {
        let image = match timeout(images.patience, images.next(question.image_bytes())).await {
            Ok(Ok(Some(image))) => image,
            Ok(Ok(None)) => return Err(FetchEnding::Cut),
            Ok(Err(_)) => return Err(FetchEnding::Broken),
            Err(_) => return Err(FetchEnding::Late),
        };
        self.accept(host, (question, number), image, pages).await
    }

    /// Checks that an image is that of a page of the question, and hands the page over. Returns for how long the engine had no room
    /// for it.
    pub(super) async fn accept(
        self: &Arc<Self>,
        host: &Member,
        (question, number): (&PageQuestion, usize),
        image: Vec<u8>,
        pages: &SyncSender<Vec<u8>>,
    ) -> Result<Duration, FetchEnding> {
        let (layout, payload_bytes) = (question.layout, question.payload_bytes);
        let (shared, name) = (self.clone(), question.names[number]);
        let opening = move || shared.seal.open(layout, name, payload_bytes, image);
        let page = match tokio::task::spawn_blocking(opening).await {
            Ok(Ok(page)) => page,
            Ok(Err(error)) => {
                tracing::warn!(host = host.number, %error, "a KV page of another host is not used");
                return Err(FetchEnding::Rejected);
            }
            Err(_) => return Err(FetchEnding::Broken),
        };
        let arrived = Instant::now();
        if !hand_over(page, pages).await {
            return Err(FetchEnding::Unwanted);
        }
        self.figures.record_fetched(question.image_bytes() as u64);
        Ok(arrived.elapsed())
    }
}

/// The images of an answer, as they arrive.
pub(super) struct Images {
    body: BodyDataStream,
    /// Bytes that have arrived and belong to the next image.
    left: Bytes,
    /// Time spent waiting for the rest of images whose beginning had arrived.
    arriving: Duration,
    /// Bytes of all images that have arrived.
    bytes: u64,
    /// Time within which the next image arrives.
    patience: Duration,
}

impl Images {
    /// Returns the images of a body, each of which has to arrive within this time.
    pub(super) fn of(body: Body, patience: Duration) -> Self {
        let (body, left) = (body.into_data_stream(), Bytes::new());
        Images { body, left, arriving: Duration::ZERO, bytes: 0, patience }
    }

    /// Returns the bytes of the images that have arrived, and the time that they took from their beginning to their end, which is zero if
    /// each came at once.
    pub(super) fn moved(&self) -> (u64, Duration) {
        (self.bytes, self.arriving)
    }

    /// Returns the next image, which has this many bytes, or `None` if the answer ends before.
    pub(super) async fn next(&mut self, bytes: usize) -> Result<Option<Vec<u8>>, axum::Error> {
        let mut image = Vec::with_capacity(bytes);
        loop {
            let taken = self.left.len().min(bytes - image.len());
            image.extend_from_slice(&self.left.split_to(taken));
            if image.len() == bytes {
                self.bytes += bytes as u64;
                return Ok(Some(image));
            }
            let began = Instant::now();
            let more = self.body.next().await;
            if !image.is_empty() {
                self.arriving += began.elapsed();
            }
            match more {
                Some(more) => self.left = more?,
                None => return Ok(None),
            }
        }
    }
}

/// Hands a page to the engine once it has room. Returns false if nobody waits for it anymore.
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
