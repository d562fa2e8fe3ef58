//! The pages that a prefill host has computed for others and that were not fetched yet.
//!
//! Invariants: a page belongs to one transfer, and stays until its reader has it for sure. A transfer has one reader: a later one takes
//! over, and the earlier one gets nothing more. The bytes of all pages are bounded; a transfer for which there is no room ends early,
//! because the engine that computes it never waits. A transfer whose order was given up is gone at once, and one that was computed is
//! gone when its lease ends.

use crate::ApiError;
use axum::http::StatusCode;
use skep_engine::{Digest, PageSink};
use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::sync::Notify;

/// Maximum number of transfers at the same time.
const MAX_TRANSFERS: usize = 64;
/// Maximum number of bytes of pages that wait to be fetched, over all transfers.
const MAX_WAITING_BYTES: u64 = 1 << 30;
/// Time for which computed pages wait to be fetched.
pub(super) const LEASE: Duration = Duration::from_secs(30);
/// Maximum length of the name of a transfer.
const MAX_NAME_BYTES: usize = 64;

/// The transfers of a prefill host. Clones are the same.
#[derive(Clone, Default)]
pub(super) struct Transfers(Arc<Shared>);

#[derive(Default)]
struct Shared {
    open: Mutex<HashMap<String, Arc<Transfer>>>,
    waiting_bytes: AtomicU64,
}

/// The pages of one order.
pub(super) struct Transfer {
    pub(super) layout: Digest,
    /// The names of all pages of the prompt.
    names: Vec<Digest>,
    first: usize,
    state: Mutex<State>,
    /// Rung when a page was put, when another reader takes over, and at the end.
    changed: Notify,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct State {
    /// The pages that are kept, and the number of the first of them.
    kept: VecDeque<Arc<Vec<u8>>>,
    first_kept: usize,
    /// Whether no further page comes.
    is_over: bool,
    /// The number of the reader that gets the pages.
    reader: u64,
}

/// The pages of a transfer, for the one that reads them in order.
pub(super) struct Reader {
    transfer: Arc<Transfer>,
    number: u64,
    /// The number of the next page.
    at: usize,
}

/// The state of the next page of a reader.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Page(Digest, Arc<Vec<u8>>),
    /// The page is not computed yet.
    NotYet,
    /// No further page comes for this reader.
    Over,
}

impl Transfers {
    /// Opens a transfer of the pages with these names, from `first` on.
    pub(super) fn open(
        &self,
        name: &str,
        layout: Digest,
        names: Vec<Digest>,
        first: usize,
    ) -> Result<Arc<Transfer>, ApiError> {
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            let message = format!("the name of a transfer has 1 to {MAX_NAME_BYTES} bytes");
            return Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_transfer", message));
        }
        let mut open = self.0.lock();
        if open.len() >= MAX_TRANSFERS {
            let message = format!("this host has {MAX_TRANSFERS} transfers already, which is the maximum");
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "prefill_full", message));
        }
        if open.contains_key(name) {
            let message = "there is a transfer of this name already".to_owned();
            return Err(ApiError::new(StatusCode::CONFLICT, "transfer_exists", message));
        }
        let state = Mutex::new(State { first_kept: first, ..State::default() });
        let transfer = Arc::new(Transfer {
            layout,
            names,
            first,
            state,
            changed: Notify::new(),
            shared: self.0.clone(),
        });
        open.insert(name.to_owned(), transfer.clone());
        Ok(transfer)
    }

    /// Returns a reader of a transfer's pages from `from` on, or from the first one that was ordered. It has all pages before `held`,
    /// which are dropped. A reader before it gets nothing more.
    pub(super) fn read(&self, name: &str, from: Option<usize>, held: usize) -> Result<Reader, ApiError> {
        let transfer = self.0.lock().get(name).cloned().ok_or_else(|| {
            let message = "there is no such transfer; its lease has ended, or it was given up".to_owned();
            ApiError::new(StatusCode::NOT_FOUND, "transfer_not_found", message)
        })?;
        let from = from.unwrap_or(transfer.first);
        let number = {
            let mut state = transfer.lock();
            if from < state.first_kept || from >= transfer.names.len() {
                let message = format!(
                    "this transfer has no page {from} anymore; it keeps those from {} to {}",
                    state.first_kept,
                    transfer.names.len() - 1
                );
                return Err(ApiError::new(StatusCode::CONFLICT, "transfer_read", message));
            }
            transfer.drop_before(&mut state, held.min(from));
            state.reader += 1;
            state.reader
        };
        transfer.changed.notify_waiters();
        Ok(Reader { transfer, number, at: from })
    }

    /// Ends a transfer, and drops what was not fetched. A transfer that does not exist has ended.
    pub(super) fn end(&self, name: &str) {
        let transfer = self.0.lock().remove(name);
        if let Some(transfer) = transfer {
            transfer.drop_pages();
        }
    }

    #[cfg(test)]
    pub(super) fn waiting_bytes(&self) -> u64 {
        self.0.waiting_bytes.load(Relaxed)
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.0.lock().len()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Transfer>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes room for a page. Returns false if there is none.
    fn take_room(&self, bytes: u64) -> bool {
        let before = self.waiting_bytes.fetch_add(bytes, Relaxed);
        let has_room = before == 0 || before + bytes <= MAX_WAITING_BYTES;
        if !has_room {
            self.waiting_bytes.fetch_sub(bytes, Relaxed);
        }
        has_room
    }
}

impl Transfer {
    /// Records that no further page comes.
    pub(super) fn finish(&self) {
        self.lock().is_over = true;
        self.changed.notify_waiters();
    }

    fn drop_pages(&self) {
        {
            let mut state = self.lock();
            state.is_over = true;
            self.drop_before(&mut state, self.names.len());
        }
        self.changed.notify_waiters();
    }

    /// Drops the pages before this one.
    fn drop_before(&self, state: &mut State, page: usize) {
        while state.first_kept < page
            && let Some(dropped) = state.kept.pop_front()
        {
            state.first_kept += 1;
            self.shared.waiting_bytes.fetch_sub(dropped.len() as u64, Relaxed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reader {
    /// Returns the digest of the pages' layout.
    pub(super) fn layout(&self) -> Digest {
        self.transfer.layout
    }

    /// Returns how many pages are left to read.
    pub(super) fn left(&self) -> usize {
        self.transfer.names.len() - self.at
    }

    /// Returns the next page, if it is there. It is kept.
    pub(super) fn poll(&mut self) -> Next {
        let Some(name) = self.transfer.names.get(self.at).copied() else { return Next::Over };
        let state = self.transfer.lock();
        if state.reader != self.number {
            return Next::Over;
        }
        let page = self.at.checked_sub(state.first_kept).and_then(|at| state.kept.get(at).cloned());
        match page {
            Some(page) => {
                self.at += 1;
                Next::Page(name, page)
            }
            None if state.is_over => Next::Over,
            None => Next::NotYet,
        }
    }

    /// Returns the next page and its name, once it is there; `None` after the last one. It is kept.
    pub(super) async fn next(&mut self) -> Option<(Digest, Arc<Vec<u8>>)> {
        let transfer = self.transfer.clone();
        loop {
            // It hears of everything that changes from here on.
            let changed = transfer.changed.notified();
            match self.poll() {
                Next::Page(name, page) => return Some((name, page)),
                Next::Over => return None,
                Next::NotYet => changed.await,
            }
        }
    }

    /// Drops the pages that were read.
    pub(super) fn drop_read(&self) {
        let mut state = self.transfer.lock();
        if state.reader == self.number {
            self.transfer.drop_before(&mut state, self.at);
        }
    }
}

impl PageSink for Transfer {
    fn first_page(&self) -> usize {
        self.first
    }

    fn put(&self, page: usize, bytes: Vec<u8>) -> bool {
        let mut state = self.lock();
        let is_next = page == state.first_kept + state.kept.len() && page < self.names.len();
        let is_put = !state.is_over && is_next && self.shared.take_room(bytes.len() as u64);
        if is_put {
            state.kept.push_back(Arc::new(bytes));
        } else {
            state.is_over = true;
        }
        self.changed.notify_waiters();
        is_put
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.drop_pages();
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer").field("pages", &self.names.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(transfers: &Transfers, name: &str, first: usize) -> Result<Arc<Transfer>, ApiError> {
        let names = (0..4).map(|page| Digest([page; 32])).collect();
        transfers.open(name, Digest([9; 32]), names, first)
    }

    fn page(number: u8) -> Option<(Digest, Arc<Vec<u8>>)> {
        Some((Digest([number; 32]), Arc::new(vec![number; 10])))
    }

    #[tokio::test]
    async fn pages_are_read_in_order_and_from_the_first_that_is_wanted() {
        let transfers = Transfers::default();
        let transfer = open(&transfers, "a", 1).unwrap();
        assert_eq!(transfer.first_page(), 1);
        assert!(transfer.put(1, vec![1; 10]) && transfer.put(2, vec![2; 10]));
        assert_eq!(transfers.waiting_bytes(), 20);
        let mut reader = transfers.read("a", None, 0).unwrap();
        assert_eq!(transfers.read("b", None, 0).err().unwrap().code, "transfer_not_found");
        assert_eq!((reader.left(), reader.next().await), (3, page(1)));
        reader.drop_read();
        assert_eq!(transfers.waiting_bytes(), 10);
        let later = tokio::spawn(async move {
            let read = (reader.next().await, reader.next().await, reader.next().await);
            reader.drop_read();
            read
        });
        assert!(transfer.put(3, vec![3; 10]));
        assert!(!transfer.put(4, vec![4; 10]), "the prompt has four pages");
        assert_eq!(later.await.unwrap(), (page(2), page(3), None));
        assert_eq!(transfers.waiting_bytes(), 0);
    }

    #[tokio::test]
    async fn a_page_stays_until_its_reader_has_it_and_a_later_reader_takes_over() {
        let transfers = Transfers::default();
        let transfer = open(&transfers, "a", 0).unwrap();
        assert!(transfer.put(0, vec![0; 10]) && transfer.put(1, vec![1; 10]));
        let mut first = transfers.read("a", Some(0), 0).unwrap();
        assert_eq!((first.next().await, first.next().await), (page(0), page(1)));
        assert_eq!((first.poll(), transfers.waiting_bytes()), (Next::NotYet, 20));
        let waiting = tokio::spawn(async move { (first.next().await, first) });
        tokio::task::yield_now().await;
        // The reader had page 0, and lost page 1 on its way.
        let mut second = transfers.read("a", Some(1), 1).unwrap();
        let (ended, first) = waiting.await.unwrap();
        assert_eq!((ended, transfers.waiting_bytes()), (None, 10));
        first.drop_read();
        assert_eq!((second.next().await, transfers.waiting_bytes()), (page(1), 10));
        for gone in [Some(0), Some(4), Some(usize::MAX), None] {
            assert_eq!(
                transfers.read("a", gone, usize::MAX).err().unwrap().code,
                "transfer_read",
                "{gone:?}"
            );
        }
        assert!(transfer.put(2, vec![2; 10]), "a page that was not read yet is not dropped in advance");
    }

    #[tokio::test]
    async fn a_page_that_is_missing_ends_a_transfer_and_its_end_frees_what_waits() {
        let transfers = Transfers::default();
        let transfer = open(&transfers, "a", 0).unwrap();
        let mut reader = transfers.read("a", None, 0).unwrap();
        assert!(
            transfer.put(0, vec![0; 10]) && !transfer.put(2, vec![2; 10]) && !transfer.put(1, vec![1; 10])
        );
        assert_eq!(open(&transfers, "a", 0).unwrap_err().code, "transfer_exists");
        transfers.end("a");
        assert_eq!((transfers.waiting_bytes(), transfers.count()), (0, 0));
        assert_eq!(reader.next().await, None);
        assert!(!transfer.put(1, vec![1; 10]), "nobody wants it anymore");
        transfers.end("a");
        for number in 0..MAX_TRANSFERS {
            open(&transfers, &number.to_string(), 0).unwrap();
        }
        assert_eq!(open(&transfers, "one more", 0).unwrap_err().code, "prefill_full");
        for name in [String::new(), "n".repeat(65)] {
            assert_eq!(open(&transfers, &name, 0).unwrap_err().code, "invalid_transfer");
        }
    }

    #[test]
    fn pages_that_wait_are_bounded() {
        let shared = Shared::default();
        assert!(shared.take_room(MAX_WAITING_BYTES + 1), "a single page always has room");
        assert!(!shared.take_room(1));
        shared.waiting_bytes.store(0, Relaxed);
        assert!(shared.take_room(MAX_WAITING_BYTES) && !shared.take_room(1));
        assert_eq!(shared.waiting_bytes.load(Relaxed), MAX_WAITING_BYTES);
    }
}
