//! The cluster cache of a host: its settings, and the threads that get and put pages.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use skep_cache::{Digest, DiskTier, FetchEnding, PageQuestion, PageStream, SealingSecret};

use crate::arena::Lane;
use crate::client::Client;
use crate::connection::Connect;
use crate::fetching::{self, FetchJob};
use crate::figures::{self, CacheStatus};
use crate::keeping;
use crate::library::{Library, LibraryError};
use crate::objects::Objects;
use crate::settings::Settings;
use crate::state::Shared;
use crate::work::KeptPages;

/// Number of threads that get pages.
const FETCHERS: usize = 2;
/// Number of fetches that wait for a thread.
const WAITING_FETCHES: usize = 8;
/// Number of pages that wait until the engine takes them, for each fetch.
const READ_AHEAD: usize = 16;
/// Time that the threads have to end when the cache is closed, and that the library then has to leave the store. A call that
/// hangs does not keep the process from ending.
const CLOSE_TIME: Duration = Duration::from_millis(if cfg!(test) { 2_000 } else { 5_000 });
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// The pages that the hosts of a cluster keep in their memory together.
#[derive(Debug)]
pub struct ClusterCache {
    shared: Arc<Shared>,
    fetches: Mutex<Option<SyncSender<FetchJob>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl ClusterCache {
    /// Loads the library, and begins to connect. Hosts with the same secret and the same namespace share pages, which this one
    /// puts from its tier.
    pub fn open(
        settings: Settings,
        (secret, namespace): (&SealingSecret, u64),
        tier: Arc<DiskTier>,
    ) -> Result<ClusterCache, LibraryError> {
        let library = Library::open(settings.library.as_deref())?;
        let lane_bytes = usize::try_from(settings.buffer_bytes).unwrap_or(usize::MAX) / (FETCHERS + 1);
        let lanes: Vec<Lane> = (0..=FETCHERS).map(|_| Lane::new(lane_bytes)).collect();
        let regions: Vec<_> = lanes.iter().map(Lane::region).collect();
        let connect: Connect = Box::new(move || {
            let client: Arc<dyn Objects> = Arc::new(Client::connect(&library, &settings, &regions)?);
            Ok(client)
        });
        Ok(ClusterCache::start(connect, lanes, (secret, namespace), tier))
    }

    /// Starts the threads, one for each lane; the first lane puts pages.
    pub(crate) fn start(
        connect: Connect,
        lanes: Vec<Lane>,
        named: (&SealingSecret, u64),
        tier: Arc<DiskTier>,
    ) -> ClusterCache {
        figures::begin();
        let shared = Arc::new(Shared::new(connect, named, tier));
        let erasing = Arc::downgrade(&shared);
        shared.tier.when_erased(move |erased| {
            if let Some(shared) = erasing.upgrade() {
                shared.work.remove(erased);
            }
        });
        let (fetches, jobs) = sync_channel(WAITING_FETCHES);
        let jobs = Arc::new(Mutex::new(jobs));
        let mut threads = Vec::new();
        let mut start = |name: &str, run: Box<dyn FnOnce() + Send>| match std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(run)
        {
            Ok(thread) => threads.push(thread),
            Err(error) => tracing::error!(%error, "a thread of the cluster cache does not start"),
        };
        for (at, lane) in lanes.into_iter().enumerate() {
            let (shared, jobs) = (shared.clone(), jobs.clone());
            match at {
                0 => start("cache-put", Box::new(move || keeping::run(&shared, lane))),
                _ => start("cache-get", Box::new(move || fetching::run(&shared, &jobs, lane))),
            }
        }
        ClusterCache { shared, fetches: Mutex::new(Some(fetches)), threads: Mutex::new(threads) }
    }

    /// Returns whether pages can be asked for now.
    pub fn is_up(&self) -> bool {
        self.shared.is_up()
    }

    /// Estimates the time until `bytes` bytes of pages have come, from recent fetches.
    pub fn fetch_time(&self, bytes: u64) -> Duration {
        self.shared.rate.estimate(bytes, Instant::now())
    }

    /// Begins to get pages, in order and from the first on. The stream ends with the last one, or before the first one that
    /// is missing or invalid. Returns `None` if too many fetches are under way. It does not wait.
    pub fn fetch(&self, question: PageQuestion) -> Option<PageStream> {
        let (pages, stream) = PageStream::bounded(READ_AHEAD.min(question.names.len()).max(1));
        let job = FetchJob { question, pages, asked: Instant::now() };
        let fetches = self.fetches.lock().unwrap_or_else(PoisonError::into_inner);
        if fetches.as_ref().is_some_and(|fetches| fetches.try_send(job).is_ok()) {
            return Some(stream);
        }
        self.shared.figures.record_end(FetchEnding::Busy, Duration::ZERO);
        None
    }

    /// Puts those of these pages that the cache lacks, once they are on the disk. It does not wait.
    pub fn keep(&self, layout: Digest, payload_bytes: usize, names: Vec<Digest>) {
        if names.is_empty() || !self.is_up() {
            return;
        }
        let kept = KeptPages { layout, payload_bytes, names, asked: Instant::now() };
        let dropped = self.shared.work.put(kept);
        self.shared.figures.record_dropped(dropped as u64);
    }

    /// Returns the state of the cache, and what went to and came from it since the start.
    pub fn status(&self) -> CacheStatus {
        let Shared { figures, connection, .. } = &*self.shared;
        figures.now(connection.problem(), self.is_up())
    }

    /// Ends the threads and leaves the store, which then forgets the pages in this host's memory. Pages that wait are not
    /// put. Those that wait to be removed are removed, as far as there is time. It waits for calls, for a while.
    pub fn close(&self) {
        self.shared.is_closing.store(true, Relaxed);
        *self.fetches.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.shared.work.wake();
        let until = Instant::now() + CLOSE_TIME;
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if !has_ended(thread, until) {
                tracing::warn!("the cluster cache does not answer; pages that wait to be put are not put");
            }
        }
        self.shared.work.abandon();
        let Some(objects) = self.shared.connection.leave() else { return };
        let leaving = std::thread::Builder::new().name("cache-leave".to_owned()).spawn(move || drop(objects));
        match leaving {
            Ok(thread) => {
                if !has_ended(thread, Instant::now() + CLOSE_TIME) {
                    tracing::warn!(
                        "the cluster cache does not answer; this host ends without signing off from it"
                    );
                }
            }
            Err(error) => tracing::error!(%error, "a thread of the cluster cache does not start"),
        }
    }
}

/// Waits for the end of a thread. Returns false if it has not ended by then.
fn has_ended(thread: JoinHandle<()>, until: Instant) -> bool {
    while !thread.is_finished() && Instant::now() < until {
        std::thread::sleep(LOOK_INTERVAL);
    }
    if !thread.is_finished() {
        return false;
    }
    if thread.join().is_err() {
        tracing::error!("a thread of the cluster cache panicked");
    }
    true
}

impl Drop for ClusterCache {
    fn drop(&mut self) {
        self.close();
    }
}
