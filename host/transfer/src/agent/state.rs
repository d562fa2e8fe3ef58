//! The state that the threads of a host share: whether its helper runs, and the READs that have not ended.

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::AgentStatus;
use crate::error::TransferError;
use crate::frame::{self, FrameError};
use crate::message::{Command, Peer};
use crate::ring::Ring;
use crate::slots::Run;

/// Time for which slots are quarantined before the helper is killed to get them back.
const MAX_QUARANTINE: Duration = Duration::from_secs(60);

/// The ring and the state of the helper.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) ring: Ring,
    state: Mutex<State>,
    changed: Condvar,
}

/// The state of the helper.
#[derive(Debug)]
pub(super) struct State {
    helper: Helper,
    is_stopping: bool,
    transfers: HashMap<u64, Transfer>,
    next_transfer: u64,
}

#[derive(Debug)]
enum Helper {
    Starting,
    Ready(Connection),
    Down { why: String },
}

/// The connection to one incarnation of the helper. Commands written to it reach no other one.
#[derive(Clone, Debug)]
pub(super) struct Connection {
    /// The helper, as other hosts need to know it.
    pub(super) peer: Peer,
    /// The address of the ring in the helper.
    pub(super) base: u64,
    pub(super) process: u32,
    stream: Arc<Mutex<UnixStream>>,
}

/// How a READ ended: with the slots of its images, or with the reason why they were given back.
pub(super) type Outcome = Result<Vec<Run>, String>;

/// A READ that has not ended.
#[derive(Debug)]
struct Transfer {
    runs: Vec<Run>,
    waiting: Waiting,
}

#[derive(Debug)]
enum Waiting {
    /// Somebody waits for its end.
    For(SyncSender<Outcome>),
    /// Nobody does, since this time, and its slots are quarantined.
    Nobody(Instant),
}

impl Connection {
    pub(super) fn new(peer: Peer, base: u64, process: u32, stream: UnixStream) -> Self {
        Connection { peer, base, process, stream: Arc::new(Mutex::new(stream)) }
    }

    /// Writes a command. After a failure, which may have cut it, the connection is closed, so that the helper ends.
    pub(super) fn write(&self, command: &Command) -> Result<(), FrameError> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        frame::write(&mut *stream, command).inspect_err(|_| {
            let _ = stream.shutdown(Shutdown::Both);
        })
    }

    /// Closes the connection, after which the supervisor kills the helper. It does not wait for a writer.
    fn close(&self) {
        if let Ok(stream) = self.stream.try_lock() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    pub(super) fn new(ring: Ring) -> Self {
        let state = State {
            helper: Helper::Starting,
            is_stopping: false,
            transfers: HashMap::new(),
            next_transfer: 0,
        };
        Shared { ring, state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the state has changed, or for this long.
    pub(super) fn wait<'a>(&self, state: MutexGuard<'a, State>, at_most: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, at_most).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Asks the supervisor to end the helper and itself.
    pub(super) fn stop(&self) {
        let mut state = self.state();
        state.is_stopping = true;
        if let Some(connection) = state.connection() {
            connection.close();
        }
        self.changed.notify_all();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.state().is_stopping
    }

    /// Waits before the helper is started again. Returns false if it is not to be.
    pub(super) fn pause(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = self.state();
        while !state.is_stopping {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            state = self.wait(state, left);
        }
        false
    }

    pub(super) fn starting(&self) {
        self.state().helper = Helper::Starting;
        self.changed.notify_all();
    }

    pub(super) fn ready(&self, connection: Connection) {
        self.state().helper = Helper::Ready(connection);
        self.changed.notify_all();
    }

    /// Ends everything that an incarnation did. Its process must have been reaped, so that it writes nothing more.
    pub(super) fn dead(&self, why: &str) {
        let mut state = self.state();
        state.helper = Helper::Down { why: why.to_owned() };
        for (_, Transfer { runs, waiting }) in state.transfers.drain() {
            self.settle(runs);
            if let Waiting::For(caller) = waiting {
                // The caller waits, or finds the outcome once it looks again.
                let _ = caller.try_send(Err(why.to_owned()));
            }
        }
        self.changed.notify_all();
    }

    /// Notes that a READ is about to be posted into these slots. Its commands go to the connection that is returned.
    pub(super) fn post(
        &self,
        runs: Vec<Run>,
        caller: SyncSender<Outcome>,
    ) -> Result<(u64, Connection), TransferError> {
        let mut state = self.state();
        let Some(connection) = state.connection().cloned() else {
            self.free(runs);
            return Err(TransferError::Down { why: state.reason() });
        };
        {
            let mut slots = self.ring.slots();
            runs.iter().for_each(|run| slots.post(run));
        }
        let transfer = state.next_transfer;
        state.next_transfer += 1;
        state.transfers.insert(transfer, Transfer { runs, waiting: Waiting::For(caller) });
        Ok((transfer, connection))
    }

    /// Notes that a READ has ended. Returns false if there is no such READ.
    pub(super) fn ended(&self, transfer: u64, fault: Option<String>) -> bool {
        let Some(Transfer { runs, waiting }) = self.state().transfers.remove(&transfer) else { return false };
        match (waiting, fault) {
            (Waiting::For(caller), None) => {
                {
                    let mut slots = self.ring.slots();
                    runs.iter().for_each(|run| slots.arrive(run));
                }
                if let Err(error) = caller.try_send(Ok(runs)) {
                    let (std::sync::mpsc::TrySendError::Full(back)
                    | std::sync::mpsc::TrySendError::Disconnected(back)) = error;
                    back.into_iter().for_each(|runs| self.free(runs));
                }
            }
            (Waiting::For(caller), Some(fault)) => {
                self.settle(runs);
                let _ = caller.try_send(Err(fault));
            }
            (Waiting::Nobody(_), _) => self.settle(runs),
        }
        true
    }

    /// Quarantines the slots of a READ that nobody waits for anymore. Returns false if it has ended meanwhile.
    pub(super) fn abandon(&self, transfer: u64) -> bool {
        let mut state = self.state();
        let Some(Transfer { runs, waiting }) = state.transfers.get_mut(&transfer) else { return false };
        let mut slots = self.ring.slots();
        runs.iter().for_each(|run| slots.quarantine(run));
        *waiting = Waiting::Nobody(Instant::now());
        true
    }

    /// Returns whether so many slots are quarantined, or for so long, that the helper has to be killed.
    pub(super) fn is_clogged(&self) -> bool {
        let state = self.state();
        let is_old = |transfer: &Transfer| match &transfer.waiting {
            Waiting::Nobody(since) => since.elapsed() >= MAX_QUARANTINE,
            Waiting::For(_) => false,
        };
        if state.transfers.values().any(is_old) {
            return true;
        }
        let slots = self.ring.slots();
        slots.counts().quarantined * 2 > slots.half()
    }

    pub(super) fn free(&self, runs: Vec<Run>) {
        let mut slots = self.ring.slots();
        runs.into_iter().for_each(|run| slots.free(run));
    }

    fn settle(&self, runs: Vec<Run>) {
        let mut slots = self.ring.slots();
        runs.into_iter().for_each(|run| slots.settle(run));
    }
}

impl State {
    pub(super) fn connection(&self) -> Option<&Connection> {
        match &self.helper {
            Helper::Ready(connection) => Some(connection),
            Helper::Starting | Helper::Down { .. } => None,
        }
    }

    pub(super) fn status(&self) -> AgentStatus {
        match &self.helper {
            Helper::Starting => AgentStatus::Starting,
            Helper::Ready(connection) => AgentStatus::Ready { name: connection.peer.name.clone() },
            Helper::Down { why } => AgentStatus::Down { why: why.clone() },
        }
    }

    fn reason(&self) -> String {
        match &self.helper {
            Helper::Starting => "it is starting".to_owned(),
            Helper::Ready(_) => "it has just started".to_owned(),
            Helper::Down { why } => why.clone(),
        }
    }
}
