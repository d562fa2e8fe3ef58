//! The thread that reads pages, one job after the other. A job ends early when nobody waits for it.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

use super::Shared;
use super::index::{LayoutId, PageKey};
use super::writer::Command;
use crate::image::{HEADER_BYTES, Header};
use crate::{Digest, metric};

/// Number of read pages that wait for their reader.
const READ_AHEAD: usize = 16;

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
    /// Returns a job for the reading thread, and where its pages arrive.
    pub fn new(layout: LayoutId, prefixes: Vec<Digest>, payload_bytes: u64) -> (ReadJob, Pages) {
        let (pages, received) = sync_channel(READ_AHEAD);
        (ReadJob { layout, prefixes, payload_bytes, pages }, PageStream(received))
    }

    /// Returns the number of bytes of all pages of the job.
    pub fn bytes(&self) -> u64 {
        self.payload_bytes * self.prefixes.len() as u64
    }
}

impl PageStream {
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

/// Reads until all senders are gone. `damaged` receives the pages that must be removed.
pub(super) fn run(shared: &Shared, jobs: &Receiver<ReadJob>, damaged: &SyncSender<Command>) {
    for job in jobs {
        let ReadJob { layout, prefixes, payload_bytes, pages } = job;
        let mut unread = prefixes.len() as u64;
        for prefix in prefixes {
            if shared.is_closing.load(Relaxed) {
                return;
            }
            let key = PageKey { layout, prefix };
            let started = Instant::now();
            let Some(page) = read(shared, key, damaged) else { break };
            shared.rate.record(payload_bytes, started.elapsed(), Instant::now());
            shared.totals.read_pages.fetch_add(1, Relaxed);
            shared.totals.read_bytes.fetch_add(payload_bytes, Relaxed);
            metrics::counter!(metric::READ_BYTES).increment(payload_bytes);
            shared.queued_read_bytes.fetch_sub(payload_bytes, Relaxed);
            unread -= 1;
            if pages.send(page).is_err() {
                break;
            }
        }
        shared.queued_read_bytes.fetch_sub(unread * payload_bytes, Relaxed);
    }
}

fn read(shared: &Shared, key: PageKey, damaged: &SyncSender<Command>) -> Option<Vec<u8>> {
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
    match read.and_then(|()| expected.check(&header, &payload).map_err(|error| error.to_string())) {
        Ok(()) => Some(payload),
        Err(problem) => {
            // The slot may have got another page meanwhile.
            if shared.state().index.slot(&key) == Some(slot) {
                tracing::warn!(slot, problem, "a KV page on disk is damaged and will be recomputed");
                // If the queue is full, the next reader finds it again.
                let _ = damaged.try_send(Command::Damaged { key });
            }
            None
        }
    }
}
