//! The thread that reads pages. Jobs take turns with their pages, and a job whose reader does not take its pages lets the
//! others go first. A job ends early when nobody waits for it. While the thread checks a page, the system reads the next ones of its
//! job.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use super::index::{LayoutId, PageKey};
use super::writer::{Command, Undone, change};
use super::{Shared, State};
use crate::image::{HEADER_BYTES, Header};
use crate::{Digest, metric};

/// Number of read pages that wait for their reader.
pub(super) const READ_AHEAD: usize = 16;
/// Number of pages of a job that the system reads while the ones before are checked.
const SYSTEM_READ_AHEAD: usize = 16;
/// Time after which jobs whose readers have no room are tried again.
const FULL_WAIT: Duration = Duration::from_millis(1);

/// Pages to read.
pub(super) struct ReadJob {
    layout: LayoutId,
    prefixes: Vec<Digest>,
    payload_bytes: u64,
    pages: SyncSender<Vec<u8>>,
}

/// The pages of a read, as they arrive, in order. Dropping it ends the read.
#[derive(Debug)]
pub struct PageStream(Receiver<Vec<u8>>);

/// The state of a read.
#[derive(Debug, PartialEq, Eq)]
pub enum PageRead {
    /// The next page.
    Page(Vec<u8>),
    NotYet,
    /// No further page comes: all were read, or the next one could not be.
    Ended,
}

impl ReadJob {
    /// Returns a job for the reading thread, and where its pages arrive. At most `ahead` pages wait for their reader.
    pub fn new(
        layout: LayoutId,
        prefixes: Vec<Digest>,
        payload_bytes: u64,
        ahead: usize,
    ) -> (ReadJob, PageStream) {
        let (pages, received) = sync_channel(ahead);
        (ReadJob { layout, prefixes, payload_bytes, pages }, PageStream(received))
    }

    /// Returns the number of bytes of all pages of the job.
    pub fn bytes(&self) -> u64 {
        self.payload_bytes * self.prefixes.len() as u64
    }
}

impl PageStream {
    /// Returns a stream of pages that come from elsewhere, and the end that takes them. At most `pages` wait for their
    /// reader; the stream ends when the other end is dropped.
    pub fn bounded(pages: usize) -> (SyncSender<Vec<u8>>, PageStream) {
        let (sender, received) = sync_channel(pages);
        (sender, PageStream(received))
    }

    /// Returns the next page if it has arrived.
    pub fn poll(&mut self) -> PageRead {
        match self.0.try_recv() {
            Ok(page) => PageRead::Page(page),
            Err(TryRecvError::Empty) => PageRead::NotYet,
            Err(TryRecvError::Disconnected) => PageRead::Ended,
        }
    }

    /// Waits for the next page for at most `time`.
    pub fn next_within(&mut self, time: Duration) -> PageRead {
        match self.0.recv_timeout(time) {
            Ok(page) => PageRead::Page(page),
            Err(RecvTimeoutError::Timeout) => PageRead::NotYet,
            Err(RecvTimeoutError::Disconnected) => PageRead::Ended,
        }
    }
}

/// A job of which the thread reads pages.
struct RunningJob {
    layout: LayoutId,
    prefixes: std::vec::IntoIter<Digest>,
    /// Number of the next pages that the system was asked to read.
    asked: usize,
    payload_bytes: u64,
    pages: SyncSender<Vec<u8>>,
    /// A page that the reader had no room for.
    kept: Option<Vec<u8>>,
}

/// The state of a job after its turn.
enum Turn {
    Read,
    /// The reader has no room for a page.
    Full,
    Ended,
}

/// Reads until all senders are gone. `writer` receives the damaged pages, which must be erased.
pub(super) fn run(shared: &Shared, jobs: &Receiver<ReadJob>, writer: &SyncSender<Command>) {
    let mut running: VecDeque<RunningJob> = VecDeque::new();
    // The number of turns in a row in which no job read a page.
    let mut idle = 0;
    loop {
        let next = match () {
            () if running.is_empty() => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
            () if idle >= running.len() => jobs.recv_timeout(FULL_WAIT),
            () => jobs.try_recv().map_err(|error| match error {
                TryRecvError::Empty => RecvTimeoutError::Timeout,
                TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
            }),
        };
        match next {
            Ok(ReadJob { layout, prefixes, payload_bytes, pages }) => {
                let prefixes = prefixes.into_iter();
                let (asked, kept) = (0, None);
                running.push_back(RunningJob { layout, prefixes, asked, payload_bytes, pages, kept });
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) if running.is_empty() => return,
            Err(RecvTimeoutError::Disconnected) if idle >= running.len() => std::thread::sleep(FULL_WAIT),
            Err(RecvTimeoutError::Disconnected) => {}
        }
        if shared.is_closing.load(Relaxed) {
            return;
        }
        let Some(mut job) = running.pop_front() else { continue };
        match job.turn(shared, writer) {
            Turn::Read => {
                idle = 0;
                running.push_back(job);
            }
            Turn::Full => {
                idle += 1;
                running.push_back(job);
            }
            Turn::Ended => {
                idle = 0;
                let unread = job.prefixes.len() as u64 * job.payload_bytes;
                shared.queued_read_bytes.fetch_sub(unread, Relaxed);
            }
        }
    }
}

impl RunningJob {
    /// Has the system begin to read the next pages.
    fn read_ahead(&mut self, shared: &Shared) {
        let next = self.prefixes.as_slice();
        let next = &next[..next.len().min(SYSTEM_READ_AHEAD)];
        let Some(new) = next.get(self.asked..) else { return };
        let (files, slots) = {
            let state = shared.state();
            let Some(layout) = state.layouts.get(self.layout.0) else { return };
            let slot = |prefix: &Digest| state.index.slot(&PageKey { layout: self.layout, prefix: *prefix });
            (layout.files.clone(), new.iter().filter_map(slot).collect::<Vec<u32>>())
        };
        slots.into_iter().for_each(|slot| files.read_ahead(slot));
        self.asked = next.len();
    }

    /// Reads the next page, if the reader has room for it.
    fn turn(&mut self, shared: &Shared, writer: &SyncSender<Command>) -> Turn {
        let page = match self.kept.take() {
            Some(page) => page,
            None => {
                self.read_ahead(shared);
                let Some(prefix) = self.prefixes.next() else { return Turn::Ended };
                self.asked = self.asked.saturating_sub(1);
                let key = PageKey { layout: self.layout, prefix };
                let started = Instant::now();
                let page = read(shared, key, writer);
                if let Some(rate) = shared.options.read_bytes_per_s {
                    let least = Duration::from_secs_f64(self.payload_bytes as f64 / rate.max(1) as f64);
                    std::thread::sleep(least.saturating_sub(started.elapsed()));
                }
                shared.queued_read_bytes.fetch_sub(self.payload_bytes, Relaxed);
                let Some(page) = page else { return Turn::Ended };
                shared.rate.record(self.payload_bytes, started.elapsed(), Instant::now());
                shared.totals.read_pages.fetch_add(1, Relaxed);
                shared.totals.read_bytes.fetch_add(self.payload_bytes, Relaxed);
                metrics::counter!(metric::READ_BYTES).increment(self.payload_bytes);
                page
            }
        };
        match self.pages.try_send(page) {
            Ok(()) => Turn::Read,
            Err(TrySendError::Full(page)) => {
                self.kept = Some(page);
                Turn::Full
            }
            Err(TrySendError::Disconnected(_)) => Turn::Ended,
        }
    }
}

fn read(shared: &Shared, key: PageKey, writer: &SyncSender<Command>) -> Option<Vec<u8>> {
    let (files, slot) = {
        let state = shared.state();
        (state.layouts.get(key.layout.0)?.files.clone(), state.index.slot(&key)?)
    };
    #[cfg(any(test, feature = "faults"))]
    shared.faults.read();
    let (mut header, mut payload) = ([0; HEADER_BYTES], vec![0; files.head.payload_bytes]);
    let expected =
        Header { layout: files.head.layout, prefix: key.prefix, payload_bytes: files.head.payload_bytes };
    let read = files.read_page(slot, &mut header, &mut payload).map_err(|error| error.to_string());
    let checked = read.and_then(|()| expected.check(&header, &payload).map_err(|error| error.to_string()));
    let opened = checked.and_then(|()| match &shared.cipher {
        None => Ok(payload),
        Some(cipher) => {
            let opened = cipher.open(expected.layout, expected.prefix, payload);
            opened.ok_or_else(|| "it does not open with the key of this host".to_owned())
        }
    });
    match opened {
        Ok(payload) => Some(payload),
        Err(problem) => {
            if remove_damaged(shared, key, slot, writer) {
                tracing::warn!(slot, problem, "a KV page on disk is damaged and will be recomputed");
            }
            None
        }
    }
}

/// Takes a damaged page out of use, with the pages after it, and has the writer erase them. Whoever computes them again can write
/// them from now on. Returns false if the slot no longer has the page.
fn remove_damaged(shared: &Shared, key: PageKey, slot: u32, writer: &SyncSender<Command>) -> bool {
    let changes = change(shared, |state| {
        let State { index, layouts, .. } = state;
        let is_there = index.slot(&key) == Some(slot);
        is_there.then(|| index.remove_tree(key, State::slot_bytes(layouts)))
    });
    let pages = changes.removed.len() as u64;
    if pages == 0 {
        return false;
    }
    shared.totals.damaged_pages.fetch_add(1, Relaxed);
    metrics::counter!(metric::REMOVED_PAGES, "reason" => "damaged").increment(pages);
    if let Err(error) = writer.try_send(Command::Remove { changes }) {
        let (TrySendError::Full(command) | TrySendError::Disconnected(command)) = error;
        let Command::Remove { changes } = command else { return true };
        // The next erasure removes them.
        let _ = Undone { changes, error: None }.keep(shared);
    }
    true
}
