//! The disk tier: pages that outlive memory and the process, in large files of slots in the data folder.
//!
//! One thread writes and one reads; callers only queue, and both queues are bounded. A page that does not fit into a queue
//! is not written, and one that cannot be read in time is computed. A third one notes erasures that take long. Budgets hold for
//! all layouts together.
//!
//! Invariant: callers see every fault of the disk as a missing page.

mod erasing;
#[cfg(test)]
mod erasure_tests;
mod erasures;
mod eviction;
#[cfg(any(test, feature = "faults"))]
mod faults;
mod index;
mod layout_files;
mod leftovers;
mod open;
mod pins;
mod reader;
mod record;
pub(crate) mod sealing;
#[cfg(test)]
mod share_tests;
mod shares;
mod small_file;
mod space;
#[cfg(test)]
mod tests;
mod unfinished;
mod writer;
mod written_days;

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{Digest, Owner, PageNamer, TenantTag, TransferRate};

pub use erasures::ErasedPages;
use erasures::{ErasureListener, Erasures};
#[cfg(any(test, feature = "faults"))]
pub use faults::Faults;
use index::{Changes, Index, PageKey};
pub use index::{EraseFilter, LayoutId};
use layout_files::LayoutFiles;
use pins::Pins;
pub use pins::{Pin, PinError, PinStatus};
pub use reader::{PageRead, PageStream};
use reader::{READ_AHEAD, ReadJob};
use sealing::PageCipher;
use shares::ByteShares;
pub use shares::TierShares;
use writer::Command;
use written_days::{WrittenDays, today};

/// Maximum number of reads that wait.
const READ_QUEUE: usize = 64;
/// Maximum number of commands that wait to be written. Pages are bounded by their bytes as well.
const WRITE_QUEUE: usize = 1 << 14;
/// Time for which nothing is written after a write failed.
const AFTER_FAILURE: Duration = Duration::from_secs(10);
/// Time that a caller waits for an erasure.
const ERASE_TIME: Duration = Duration::from_secs(30);
/// Time that a tier that is closed gives its threads. A disk that hangs does not keep the process from ending.
const CLOSE_TIME: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 10 });

/// The operator's settings of the tier.
#[derive(Clone, Debug)]
pub struct TierOptions {
    pub folder: PathBuf,
    /// Maximum number of bytes of all pages.
    pub max_bytes: u64,
    /// Percentage of the disk that stays free; a write that would leave less is not made.
    pub min_free_percent: u8,
    pub write_bytes_per_s: u64,
    /// Maximum rate of reads, with which a benchmark simulates a slow disk; `None` reads at the speed of the disk.
    pub read_bytes_per_s: Option<u64>,
    /// Maximum number of bytes that wait to be written.
    pub queue_bytes: u64,
    /// Whether callers should read every prefix, even if computing it is expected to be quicker.
    pub reads_always: bool,
    pub shares: TierShares,
    /// The key that pages are encrypted with; `None` leaves them as they are.
    pub key: Option<SealingSecret>,
    /// The key under which pages are named, if several hosts name them alike; `None` takes the folder's own key. Pages that
    /// have names under another key are removed.
    pub name_key: Option<SealingSecret>,
}

/// A key for pages, which is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct SealingSecret(pub [u8; 32]);

impl std::fmt::Debug for SealingSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SealingSecret")
    }
}

/// The reason that the tier cannot start.
#[derive(Debug, thiserror::Error)]
pub enum TierError {
    #[error("cannot use {path} for KV pages: {source}", path = path.display())]
    Folder { path: PathBuf, source: std::io::Error },
    #[error("cannot start the threads of the KV tier: {0}")]
    Threads(std::io::Error),
}

/// The contents of the tier, and its work since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStatus {
    pub max_bytes: u64,
    pub used_bytes: u64,
    pub pages: u64,
    pub tenants: u64,
    /// Pages that were found when the tier was opened.
    pub pages_at_start: u64,
    pub written_bytes: u64,
    pub written_pages: u64,
    pub read_bytes: u64,
    pub read_pages: u64,
    /// Pages that were evicted for others.
    pub evicted_pages: u64,
    /// Pages that were removed with their sessions, agents or tenants, or by a purge.
    pub erased_pages: u64,
    /// Pages whose bytes were not those that had been written.
    pub damaged_pages: u64,
    /// Pages that were not written, because the disk was full or too slow.
    pub dropped_pages: u64,
    /// Bytes that wait to be written.
    pub queued_bytes: u64,
    /// Bytes written on this UTC day, by earlier processes too.
    pub written_today_bytes: u64,
    /// Bytes written on the day before.
    pub written_yesterday_bytes: u64,
}

/// A page to write. The page before it must have been written earlier.
#[derive(Debug)]
pub struct PageWrite {
    pub layout: LayoutId,
    pub prefix: Digest,
    pub parent: Option<Digest>,
    pub tenant: TenantTag,
    pub owner: Owner,
    pub bytes: Vec<u8>,
}

/// The tier. Dropping it writes what is queued, as far as the disk takes it in time, and ends its threads.
pub struct DiskTier {
    shared: Arc<Shared>,
    writes: Option<SyncSender<Command>>,
    reads: Option<SyncSender<ReadJob>>,
    /// Requests to note erasures that are not made yet.
    notes: Option<SyncSender<()>>,
    threads: Vec<JoinHandle<()>>,
}

/// The state that callers and both threads share.
struct Shared {
    options: TierOptions,
    keys: PageNamer,
    state: Mutex<State>,
    rate: TransferRate,
    erasures: Erasures,
    erasure_listener: OnceLock<ErasureListener>,
    queued_write_bytes: AtomicU64,
    queued_read_bytes: AtomicU64,
    failed: Mutex<Option<Instant>>,
    is_closing: AtomicBool,
    totals: Totals,
    shares: ByteShares,
    pins: Pins,
    days: Mutex<WrittenDays>,
    cipher: Option<PageCipher>,
    #[cfg(any(test, feature = "faults"))]
    faults: Faults,
}

struct State {
    index: Index,
    layouts: Vec<Layout>,
    /// Pages that wait to be written.
    queued: HashSet<PageKey>,
    /// Changes that the disk did not take, or the writer's queue. Those of earlier processes are included. No page has these slots.
    unerased: Changes,
    used_bytes: u64,
}

/// The slots of one layout.
struct Layout {
    files: Arc<LayoutFiles>,
    free: Vec<u32>,
    /// Number of slots that the files have.
    slots: u32,
}

#[derive(Default)]
struct Totals {
    pages_at_start: AtomicU64,
    written_bytes: AtomicU64,
    written_pages: AtomicU64,
    read_bytes: AtomicU64,
    read_pages: AtomicU64,
    evicted_pages: AtomicU64,
    erased_pages: AtomicU64,
    damaged_pages: AtomicU64,
    dropped_pages: AtomicU64,
}

impl DiskTier {
    /// Opens the tier of a folder, which no other process may use, or creates it.
    pub fn open(options: TierOptions) -> Result<DiskTier, TierError> {
        let shared = Arc::new(open::open(options)?);
        crate::metric::begin();
        let (writes, commands) = sync_channel(WRITE_QUEUE);
        let (reads, jobs) = sync_channel(READ_QUEUE);
        let (notes, requests) = sync_channel(1);
        let (writes, reads, notes) = (Some(writes), Some(reads), Some(notes));
        let mut tier = DiskTier { shared, writes, reads, notes, threads: Vec::new() };
        let thread = |name: &str, run: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.to_owned()).spawn(run).map_err(TierError::Threads)
        };
        let shared = tier.shared.clone();
        tier.threads.push(thread("kv-writer", Box::new(move || writer::run(&shared, &commands)))?);
        let shared = tier.shared.clone();
        let writer = tier.writes.clone().expect("the channel was just made");
        tier.threads.push(thread("kv-reader", Box::new(move || reader::run(&shared, &jobs, &writer)))?);
        let shared = tier.shared.clone();
        tier.threads.push(thread("kv-notes", Box::new(move || erasures::note(&shared, &requests)))?);
        Ok(tier)
    }

    /// Returns the keys under which pages are named. They belong to this folder, or to the hosts that share the key.
    pub fn keys(&self) -> &PageNamer {
        &self.shared.keys
    }

    /// Returns the folder of the tier, in which this process alone writes.
    pub fn folder(&self) -> &Path {
        &self.shared.options.folder
    }

    /// Returns the number of a layout, whose files are created if they are missing.
    pub fn layout(&self, layout: Digest, payload_bytes: usize) -> Result<LayoutId, TierError> {
        self.shared.layout(layout, payload_bytes)
    }

    /// Returns whether a page is on disk or will be.
    pub fn has(&self, layout: LayoutId, prefix: Digest) -> bool {
        let key = PageKey { layout, prefix };
        let state = self.shared.state();
        state.index.contains(&key) || state.queued.contains(&key)
    }

    /// Returns how many of these pages, from the first on, are on disk.
    pub fn leading(&self, layout: LayoutId, prefixes: &[Digest]) -> usize {
        let state = self.shared.state();
        prefixes
            .iter()
            .take_while(|prefix| state.index.contains(&PageKey { layout, prefix: **prefix }))
            .count()
    }

    /// Returns whether `bytes` more would be accepted for writing now.
    pub fn accepts(&self, bytes: u64) -> Acceptance {
        let shared = &self.shared;
        let failed = *shared.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > shared.options.max_bytes || failed.is_some_and(|at| at.elapsed() < AFTER_FAILURE) {
            return Acceptance::Never;
        }
        match shared.queued_write_bytes.load(Relaxed).saturating_add(bytes) <= shared.options.queue_bytes {
            true => Acceptance::Now,
            false => Acceptance::Later,
        }
    }

    /// Queues a page. Returns false if the queue is full.
    pub fn write(&self, page: PageWrite) -> bool {
        let key = PageKey { layout: page.layout, prefix: page.prefix };
        let bytes = page.bytes.len() as u64;
        self.shared.queued_write_bytes.fetch_add(bytes, Relaxed);
        self.shared.state().queued.insert(key);
        if self.send(|ticket| Command::Write { page: Box::new(page), ticket }) {
            return true;
        }
        self.shared.state().queued.remove(&key);
        self.shared.queued_write_bytes.fetch_sub(bytes, Relaxed);
        self.shared.drop_page();
        false
    }

    /// Records that a page is the last one of an owner's prefix, and that it was used.
    pub fn mark(&self, layout: LayoutId, prefix: Digest, owner: Owner) {
        self.send(|ticket| Command::Mark { key: PageKey { layout, prefix }, owner, ticket });
    }

    /// Counts pages that a caller could not hand over in time.
    pub fn record_dropped(&self, pages: usize) {
        (0..pages).for_each(|_| self.shared.drop_page());
    }

    /// Starts to read pages, in order. Returns `None` if too many reads wait.
    pub fn read(&self, layout: LayoutId, prefixes: Vec<Digest>) -> Option<PageStream> {
        self.read_ahead(layout, prefixes, READ_AHEAD)
    }

    /// Starts to read pages, in order, of which as many as `ahead` may wait until they are taken. Returns `None` if too many
    /// reads wait.
    pub fn read_ahead(&self, layout: LayoutId, prefixes: Vec<Digest>, ahead: usize) -> Option<PageStream> {
        let payload_bytes = self.shared.state().layouts.get(layout.0)?.files.head.payload_bytes;
        let (job, pages) = ReadJob::new(layout, prefixes, payload_bytes as u64, ahead);
        let bytes = job.bytes();
        self.shared.queued_read_bytes.fetch_add(bytes, Relaxed);
        let sent = self.reads.as_ref().is_some_and(|reads| reads.try_send(job).is_ok());
        if !sent {
            self.shared.queued_read_bytes.fetch_sub(bytes, Relaxed);
        }
        sent.then_some(pages)
    }

    /// Returns whether every prefix shall be read, however long it takes.
    pub fn reads_always(&self) -> bool {
        self.shared.options.reads_always
    }

    /// Estimates the time until `bytes` have been read, after the reads that wait.
    pub fn read_time(&self, bytes: u64) -> Duration {
        let waiting = self.shared.queued_read_bytes.load(Relaxed);
        self.shared.rate.estimate(bytes.saturating_add(waiting), Instant::now())
    }

    /// Erases the pages that any of the filters includes from the disk, and those that wait to be written, with the pins of their
    /// sessions. Returns the number of pages on disk once they are gone. However many filters there are, it waits once for the disk.
    ///
    /// Pages that the disk does not remove are not used anymore. They are removed by a later call, which fails until then, or at
    /// the next start. The error says if the folder cannot keep a note for that. A disk that does not answer in time is an error,
    /// too, and erases the pages once it does; the folder has a note of that by then, unless the error says otherwise.
    pub fn erase(&self, which: Vec<EraseFilter>) -> io::Result<u64> {
        match which.is_empty() {
            true => Ok(0),
            false => self.erase_within(which, ERASE_TIME),
        }
    }

    /// Calls `listener` with the pages that are erased from now on, those of evictions, of damages and of
    /// [`EraseFilter::AllHere`] not included. A second listener is not called. It must not wait.
    pub fn when_erased(&self, listener: impl Fn(ErasedPages) + Send + Sync + 'static) {
        // A tier belongs to one host, which has copies in one place.
        let _ = self.shared.erasure_listener.set(Box::new(listener));
    }

    /// Waits until everything that is queued has been written, and free slots have nothing of earlier pages.
    pub fn flush(&self) {
        let (done, written) = channel();
        self.answer(Command::Flush { done }, &written);
    }

    /// Returns the current use and the totals since the start.
    pub fn status(&self) -> TierStatus {
        let shared = &self.shared;
        let totals = &shared.totals;
        let [written_today_bytes, written_yesterday_bytes] = shared.days().on(today());
        let state = shared.state();
        TierStatus {
            max_bytes: shared.options.max_bytes,
            used_bytes: state.used_bytes,
            pages: state.index.len() as u64,
            tenants: state.index.bytes_by_tenant().count() as u64,
            pages_at_start: totals.pages_at_start.load(Relaxed),
            written_bytes: totals.written_bytes.load(Relaxed),
            written_pages: totals.written_pages.load(Relaxed),
            read_bytes: totals.read_bytes.load(Relaxed),
            read_pages: totals.read_pages.load(Relaxed),
            evicted_pages: totals.evicted_pages.load(Relaxed),
            erased_pages: totals.erased_pages.load(Relaxed),
            damaged_pages: totals.damaged_pages.load(Relaxed),
            dropped_pages: totals.dropped_pages.load(Relaxed),
            queued_bytes: shared.queued_write_bytes.load(Relaxed),
            written_today_bytes,
            written_yesterday_bytes,
        }
    }

    /// Makes the pages of a session the last to be evicted, as far as the share of pins allows. Returns whether the session
    /// was not pinned before. It waits for the disk.
    pub fn pin(&self, pin: Pin) -> Result<bool, PinError> {
        self.shared.pins.add(pin, &self.shared.keys, self.folder())
    }

    /// Undoes a pin. Returns whether the session was pinned. It waits for the disk.
    pub fn unpin(&self, pin: &Pin) -> Result<bool, PinError> {
        self.shared.pins.remove(pin, self.folder())
    }

    /// Returns the pinned sessions in the order in which they were pinned.
    pub fn pins(&self) -> Vec<PinStatus> {
        let state = self.shared.state();
        let State { index, layouts, .. } = &*state;
        self.shared.pins.status(index, self.shared.shares.pinned, &State::slot_bytes(layouts))
    }

    /// Returns the faults that a test switches on.
    #[cfg(any(test, feature = "faults"))]
    pub fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    fn send(&self, command: impl FnOnce(u64) -> Command) -> bool {
        let Some(writes) = &self.writes else { return false };
        self.shared.erasures.queue(|ticket| writes.try_send(command(ticket)).is_ok())
    }

    /// Sends a command that must not be lost, and waits for its answer.
    fn answer<T>(&self, command: Command, answer: &Receiver<T>) -> Option<T> {
        self.writes.as_ref()?.send(command).ok()?;
        answer.recv().ok()
    }
}

/// Whether the tier takes a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceptance {
    Now,
    /// The queue is full.
    Later,
    /// The disk is full, or the page is larger than the tier.
    Never,
}

impl Drop for DiskTier {
    fn drop(&mut self) {
        self.shared.is_closing.store(true, Relaxed);
        // The reader has a sender of the writer's channel, and ends first.
        (self.reads, self.writes, self.notes) = (None, None, None);
        let until = Instant::now() + CLOSE_TIME;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            if !thread.is_finished() {
                let folder = self.shared.options.folder.display();
                tracing::warn!(%folder, "the disk does not answer; KV pages that wait to be written are lost");
            } else if thread.join().is_err() {
                tracing::error!("a thread of the KV tier panicked");
            }
        }
    }
}

impl std::fmt::Debug for DiskTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskTier").field("options", &self.shared.options).finish_non_exhaustive()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn days(&self) -> MutexGuard<'_, WrittenDays> {
        self.days.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn drop_page(&self) {
        self.totals.dropped_pages.fetch_add(1, Relaxed);
        metrics::counter!(crate::metric::DROPPED_PAGES).increment(1);
    }
}

impl State {
    fn slot_bytes(layouts: &[Layout]) -> impl Fn(LayoutId) -> u64 {
        move |layout| layouts.get(layout.0).map_or(0, |layout| layout.files.slot_bytes())
    }
}
