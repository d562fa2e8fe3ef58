//! The pages that a prefill host has computed for others and that were not fetched yet.
//!
//! Invariants: a page belongs to one transfer, and is given once. The bytes of all of them are bounded; a transfer for which there is
//! no room ends early, because the engine that computes it never waits. A transfer whose order was given up is gone at once, and
//! one that was computed is gone when its lease ends.

use crate::ApiError;
use axum::http::StatusCode;
use skep_engine::{Digest, PageSink};
use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
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
    /// Rung when a page was put, and at the end.
    changed: Notify,
    is_fetched: AtomicBool,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct State {
    /// The pages that wait, and the number of the first of them.
    waiting: VecDeque<Vec<u8>>,
    next: usize,
    /// Whether no further page comes.
    is_over: bool,
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
        let state = Mutex::new(State { next: first, ..State::default() });
        let transfer = Arc::new(Transfer {
            layout,
            names,
            first,
            state,
            changed: Notify::new(),
            is_fetched: AtomicBool::new(false),
            shared: self.0.clone(),
        });
        open.insert(name.to_owned(), transfer.clone());
        Ok(transfer)
    }

    /// Returns a transfer to the one that fetches it. There can only be one.
    pub(super) fn fetch(&self, name: &str) -> Result<Arc<Transfer>, ApiError> {
        let transfer = self.0.lock().get(name).cloned().ok_or_else(|| {
            let message = "there is no such transfer; its lease has ended, or it was given up".to_owned();
            ApiError::new(StatusCode::NOT_FOUND, "transfer_not_found", message)
        })?;
        if transfer.is_fetched.swap(true, Relaxed) {
            let message = "the pages of this transfer are being fetched already".to_owned();
            return Err(ApiError::new(StatusCode::CONFLICT, "transfer_fetched", message));
        }
        Ok(transfer)
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
    /// Returns the next page and its name, once it is there; `None` after the last one.
    pub(super) async fn next(&self) -> Option<(Digest, Vec<u8>)> {
        loop {
            // A permit is kept for the only reader if the bell rings before it waits.
            let changed = self.changed.notified();
            {
                let mut state = self.lock();
                if let Some(page) = state.waiting.pop_front() {
                    let name = self.names.get(state.next).copied();
                    state.next += 1;
                    self.shared.waiting_bytes.fetch_sub(page.len() as u64, Relaxed);
                    return name.map(|name| (name, page));
                }
                if state.is_over {
                    return None;
                }
            }
            changed.await;
        }
    }

    /// Records that no further page comes.
    pub(super) fn finish(&self) {
        self.lock().is_over = true;
        self.changed.notify_one();
    }

    fn drop_pages(&self) {
        let dropped = {
            let mut state = self.lock();
            state.is_over = true;
            std::mem::take(&mut state.waiting)
        };
        let bytes: u64 = dropped.iter().map(|page| page.len() as u64).sum();
        self.shared.waiting_bytes.fetch_sub(bytes, Relaxed);
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PageSink for Transfer {
    fn first_page(&self) -> usize {
        self.first
    }

    fn put(&self, page: usize, bytes: Vec<u8>) -> bool {
        let mut state = self.lock();
        let is_next = page == state.next + state.waiting.len() && page < self.names.len();
        if state.is_over || !is_next || !self.shared.take_room(bytes.len() as u64) {
            state.is_over = true;
            self.changed.notify_one();
            return false;
        }
        state.waiting.push_back(bytes);
        self.changed.notify_one();
        true
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

    #[tokio::test]
    async fn pages_are_given_once_in_order_and_from_the_first_that_is_wanted() {
        let transfers = Transfers::default();
        let transfer = open(&transfers, "a", 1).unwrap();
        assert_eq!(transfer.first_page(), 1);
        assert!(transfer.put(1, vec![1; 10]) && transfer.put(2, vec![2; 10]));
        assert_eq!(transfers.waiting_bytes(), 20);
        let fetched = transfers.fetch("a").unwrap();
        assert_eq!(transfers.fetch("a").unwrap_err().code, "transfer_fetched");
        assert_eq!(transfers.fetch("b").unwrap_err().code, "transfer_not_found");
        assert_eq!(fetched.next().await, Some((Digest([1; 32]), vec![1; 10])));
        let later =
            tokio::spawn(async move { (fetched.next().await, fetched.next().await, fetched.next().await) });
        assert!(transfer.put(3, vec![3; 10]));
        assert!(!transfer.put(4, vec![4; 10]), "the prompt has four pages");
        transfer.finish();
        let (second, third, end) = later.await.unwrap();
        assert_eq!(second.unwrap().0, Digest([2; 32]));
        assert_eq!((third.unwrap().0, end), (Digest([3; 32]), None));
        assert_eq!(transfers.waiting_bytes(), 0);
    }

    #[tokio::test]
    async fn a_page_that_is_missing_ends_a_transfer_and_its_end_frees_what_waits() {
        let transfers = Transfers::default();
        let transfer = open(&transfers, "a", 0).unwrap();
        assert!(
            transfer.put(0, vec![0; 10]) && !transfer.put(2, vec![2; 10]) && !transfer.put(1, vec![1; 10])
        );
        assert_eq!(open(&transfers, "a", 0).unwrap_err().code, "transfer_exists");
        transfers.end("a");
        assert_eq!((transfers.waiting_bytes(), transfers.count()), (0, 0));
        assert_eq!(transfer.next().await, None);
        assert!(!transfer.put(1, vec![1; 10]), "nobody wants it any more");
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
