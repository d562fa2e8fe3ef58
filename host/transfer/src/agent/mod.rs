//! The host's side of transfers: it starts the helper, starts it again under a new name when it dies, and decides who uses
//! which slots of the ring.
//!
//! Invariant: slots that a READ was posted into become free only by the end of the READ or after the helper's process was
//! reaped. A READ belongs to one incarnation of the helper, and is never sent to the next one.

mod lending;
mod process;
mod reading;
mod state;

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::TransferError;
use crate::message::Peer;
use crate::ring::Ring;
use crate::slots::SlotCounts;

pub use lending::Loan;
pub use reading::{Arrived, Reservation};
use state::Shared;

/// The settings of transfers.
#[derive(Clone, Debug)]
pub struct AgentOptions {
    /// The name of this start of the host, which no other host and no other start has. The helper's name is this one and the
    /// number of its incarnation.
    pub name: String,
    /// The file of NIXL's C library.
    pub library: PathBuf,
    /// The program of the helper, which calls [`crate::serve`] with its standard input.
    pub program: PathBuf,
    pub arguments: Vec<String>,
    /// Variables that the helper has beside those of this process that it needs.
    pub environment: Vec<(String, String)>,
    /// Maximum number of bytes of the ring. Half of it is lent, half of it is read into.
    pub ring_bytes: u64,
}

/// The state of the helper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentStatus {
    /// It loads the library.
    Starting,
    /// It can be used, under this name.
    Ready { name: String },
    /// It has ended for this reason, and is started again later.
    Down { why: String },
}

/// The transfers of a host. Clones are the same; the helper ends with the last one.
#[derive(Clone, Debug)]
pub struct TransferAgent {
    supervisor: Arc<Supervisor>,
}

/// Ends the helper when it is dropped.
#[derive(Debug)]
struct Supervisor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl TransferAgent {
    /// Creates the ring and begins to start the helper. Whether it works is known later.
    pub fn start(options: AgentOptions) -> Result<TransferAgent, TransferError> {
        let shared = Arc::new(Shared::new(Ring::create(options.ring_bytes)?));
        let thread = std::thread::Builder::new().name("skep-kv-agent".to_owned()).spawn({
            let shared = shared.clone();
            move || process::supervise(&shared, &options)
        });
        let thread = thread.map_err(|error| TransferError::Down { why: error.to_string() })?;
        Ok(TransferAgent { supervisor: Arc::new(Supervisor { shared, thread: Some(thread) }) })
    }

    /// Returns what the helper does.
    pub fn status(&self) -> AgentStatus {
        self.shared().state().status()
    }

    /// Returns the id of the helper's process, while it is ready.
    pub fn helper_process(&self) -> Option<u32> {
        self.shared().state().connection().map(|connection| connection.process)
    }

    /// Returns how many slots are in each state.
    pub fn slots(&self) -> SlotCounts {
        self.shared().ring.slots().counts()
    }

    /// Waits until the helper is ready. Returns the reason if it has ended before, or takes too long.
    pub fn wait_until_ready(&self, patience: Duration) -> Result<Peer, TransferError> {
        let until = Instant::now() + patience;
        let mut state = self.shared().state();
        loop {
            if let Some(connection) = state.connection() {
                return Ok(connection.peer.clone());
            }
            if let AgentStatus::Down { why } = state.status() {
                return Err(TransferError::Down { why });
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TransferError::Down { why: format!("it did not start within {patience:?}") });
            }
            state = self.shared().wait(state, left);
        }
    }

    /// Takes slots for at most `images` images that other hosts will read, and for one at least. `None` if there is no room, or
    /// no helper that others could read from.
    pub fn lend(&self, images: usize, image_bytes: usize) -> Option<Loan> {
        Loan::take(self.shared(), images, image_bytes)
    }

    /// Takes slots for at most `images` images of another host, and for one at least. `None` if there is no room, or no helper
    /// that could read.
    pub fn reserve(&self, images: usize, image_bytes: usize) -> Option<Reservation> {
        Reservation::take(self.shared(), images, image_bytes)
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.supervisor.shared
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(thread) = self.thread.take() {
            // A thread that has panicked has nothing left to do.
            let _ = thread.join();
        }
    }
}
