//! Erasures, which overtake the pages that wait to be written.
//!
//! Invariants:
//! - A page that was queued before an erasure that includes it is not written after it. Each queued command has a ticket, and an
//!   erasure counts for the tickets before its own.
//! - An erasure that takes long is noted in the folder before its caller gives up, as far as the disk takes the note. A thread of
//!   its own writes the note, because the writer is what the caller waits for.

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TrySendError, channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::index::{EraseFilter, PageKey};
use super::unfinished::UnfinishedErasures;
use super::writer::Command;
use super::{DiskTier, Shared};
use crate::{Digest, Owner, TenantTag};

/// Interval at which a caller that waits for an erasure looks whether the writer still runs.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Time after which an erasure is noted in the folder. Most erasures are made before.
const NOTE_TIME: Duration = Duration::from_secs(1);

/// The erasures that are requested, those that commands in the queue still have to respect, and those that the disk did not take.
#[derive(Default)]
pub(super) struct Erasures {
    state: Mutex<State>,
    arrived: Condvar,
    /// The list in the folder, which is locked while it is written. It is locked before the state.
    unfinished: Mutex<UnfinishedErasures>,
}

#[derive(Default)]
struct State {
    last_ticket: u64,
    /// The last ticket of a command that was queued, and of one that the writer took.
    queued: u64,
    taken: u64,
    wanted: VecDeque<Erasure>,
    /// The erasures that the writer took last, until the disk has taken them.
    making: Vec<EraseFilter>,
    /// Erasures up to this ticket were noted in the folder if they were not made by then.
    noted: u64,
    /// The problem with the last note.
    note_failure: Option<String>,
    /// Filters of finished erasures, with the tickets before which they count.
    done: Vec<(EraseFilter, u64)>,
}

/// Pages that were erased, as the holder of copies is notified of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ErasedPages {
    All,
    /// The layouts and the names of the pages.
    Pages(Vec<(Digest, Digest)>),
}

/// The callback of a holder of copies of pages.
pub(super) type ErasureListener = Box<dyn Fn(ErasedPages) + Send + Sync>;

impl Shared {
    /// Tells the listener about pages that were erased here and whose copies elsewhere go, too. It must not wait.
    pub(super) fn tell_erased(&self, which: &[EraseFilter], pages: Vec<PageKey>) {
        let Some(listener) = self.erasure_listener.get() else { return };
        if which.contains(&EraseFilter::All) {
            return listener(ErasedPages::All);
        }
        if pages.is_empty() {
            return;
        }
        let layouts: Vec<Digest> =
            self.state().layouts.iter().map(|layout| layout.files.head.layout).collect();
        let named = pages.into_iter().filter_map(|key| Some((*layouts.get(key.layout.0)?, key.prefix)));
        listener(ErasedPages::Pages(named.collect()));
    }
}

impl DiskTier {
    /// Erases pages, and waits for the disk for at most `time`.
    pub(super) fn erase_within(&self, which: Vec<EraseFilter>, time: Duration) -> io::Result<u64> {
        let erasures = &self.shared.erasures;
        let no_writer = || {
            // Nobody makes the erasure before the next start.
            self.note_erasures();
            io::Error::new(io::ErrorKind::BrokenPipe, "the writer of KV pages has ended")
        };
        let ((answer, gone), count) = (channel(), which.len());
        let ticket = erasures.want(which, answer);
        let Some(writes) = &self.writes else { return Err(no_writer()) };
        // A writer whose queue is full looks for erasures before its next command.
        if matches!(writes.try_send(Command::Erase), Err(TrySendError::Disconnected(_))) {
            return Err(no_writer());
        }
        let (begun, note_time) = (Instant::now(), NOTE_TIME.min(time / 2));
        loop {
            let waited = begun.elapsed();
            if waited >= time {
                return Err(erasures.timed_out(ticket, count, time));
            }
            if waited >= note_time {
                self.note_erasures();
            }
            let left = if waited < note_time { note_time - waited } else { time - waited };
            match gone.recv_timeout(left.min(LOOK_INTERVAL)) {
                Ok(erased) => return erased,
                Err(RecvTimeoutError::Timeout) if !self.threads.iter().any(JoinHandle::is_finished) => {}
                Err(_) => return Err(no_writer()),
            }
        }
    }

    /// Has the erasures noted that are not made yet. It does not wait.
    fn note_erasures(&self) {
        if let Some(notes) = &self.notes {
            // A request that waits already includes them.
            let _ = notes.try_send(());
        }
    }
}

/// Notes erasures in the folder whenever that is requested, until all senders are gone.
pub(super) fn note(shared: &Shared, requests: &Receiver<()>) {
    for () in requests {
        shared.erasures.note_wanted(&shared.options.folder);
    }
}

/// Pages to erase together.
pub(super) struct Erasure {
    pub which: Vec<EraseFilter>,
    pub answer: Sender<io::Result<u64>>,
    ticket: u64,
}

impl Erasures {
    /// Creates the erasures of a folder in which earlier ones are unfinished.
    pub fn after(unfinished: UnfinishedErasures) -> Self {
        Erasures { unfinished: Mutex::new(unfinished), ..Erasures::default() }
    }

    /// Returns whether the folder has a note of erasures. It may wait for the disk.
    pub fn are_noted(&self) -> bool {
        !self.unfinished().list().is_empty()
    }

    /// Notes erasures that the disk did not take. It waits for the disk.
    pub fn note(&self, which: &[EraseFilter], folder: &Path) -> io::Result<()> {
        self.unfinished().add(which.iter().copied(), folder)
    }

    /// Notes all erasures that are not made yet. It waits for the disk.
    pub fn note_wanted(&self, folder: &Path) {
        let mut unfinished = self.unfinished();
        let (wanted, last): (Vec<EraseFilter>, u64) = {
            let state = self.lock();
            let wanted = state.wanted.iter().flat_map(|erasure| &erasure.which);
            (state.making.iter().chain(wanted).copied().collect(), state.last_ticket)
        };
        let noted = unfinished.add(wanted, folder);
        let mut state = self.lock();
        match noted {
            Ok(()) => (state.noted, state.note_failure) = (last, None),
            Err(error) => state.note_failure = Some(error.to_string()),
        }
    }

    /// Removes the notes, because the disk has taken all erasures up to those that the writer took last. Notes stay while
    /// further ones are wanted, some of which they may be of. It waits for the disk.
    pub fn finish(&self, folder: &Path) -> io::Result<()> {
        let mut unfinished = self.unfinished();
        {
            let mut state = self.lock();
            state.making.clear();
            if !state.wanted.is_empty() {
                return Ok(());
            }
        }
        unfinished.clear(folder)
    }

    fn unfinished(&self) -> MutexGuard<'_, UnfinishedErasures> {
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the error of erasures that were not made in time.
    fn timed_out(&self, ticket: u64, count: usize, time: Duration) -> io::Error {
        let state = self.lock();
        let restart = match &state.note_failure {
            _ if ticket <= state.noted => "or at the next start".to_owned(),
            Some(failure) => {
                format!("but a restart would bring them back, because this cannot be noted: {failure}")
            }
            None => "but a restart would bring them back, because the disk has not taken a note of this"
                .to_owned(),
        };
        let left = if count == 1 { String::new() } else { format!(" of all {count} erasures") };
        let problem = format!(
            "the disk has not answered for {time:?}; the pages{left} are erased once it does, {restart}"
        );
        io::Error::new(io::ErrorKind::TimedOut, problem)
    }

    /// Queues a command with its ticket. `send` must not wait, and returns whether the command was queued.
    pub fn queue(&self, send: impl FnOnce(u64) -> bool) -> bool {
        let mut state = self.lock();
        state.last_ticket += 1;
        let ticket = state.last_ticket;
        let sent = send(ticket);
        if sent {
            state.queued = ticket;
        }
        sent
    }

    /// Asks for erasures, and wakes the writer if it waits for its pace. Returns the ticket of the erasures.
    pub fn want(&self, which: Vec<EraseFilter>, answer: Sender<io::Result<u64>>) -> u64 {
        let mut state = self.lock();
        state.last_ticket += 1;
        let ticket = state.last_ticket;
        state.wanted.push_back(Erasure { which, answer, ticket });
        drop(state);
        self.arrived.notify_all();
        ticket
    }

    /// Takes the next erasures. From now on they count for the commands that were queued before them.
    pub fn take(&self) -> Option<Erasure> {
        let mut state = self.lock();
        let erasure = state.wanted.pop_front()?;
        state.making.clone_from(&erasure.which);
        if state.taken < state.queued {
            state.done.extend(erasure.which.iter().map(|which| (*which, erasure.ticket)));
        }
        Some(erasure)
    }

    /// Takes a command from the queue, and returns whether its pages were erased after it was queued.
    pub fn includes(&self, ticket: u64, owner: Owner, tenant: Option<TenantTag>) -> bool {
        let mut state = self.lock();
        state.taken = ticket;
        state.done.retain(|(_, until)| ticket < *until);
        state.done.iter().any(|(which, _)| which.includes(owner, tenant))
    }

    /// Waits for `time`, or until an erasure is wanted.
    pub fn wait(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut state = self.lock();
        while state.wanted.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            (state, _) = self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
