//! The handle to the actor of a loaded session, and the statistics that decide when it is unloaded.

use super::actor::Command;
use crate::{cluster::Owned, feed::SuspensionWatch, name::SessionKey};
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};
use tokio::sync::{
    mpsc::{self, error::TrySendError},
    watch,
};

/// Handle to one actor. Dropping it stops the running turn.
pub(super) struct Loaded {
    /// Number of the actor, unique among all actors that were started.
    pub(super) number: u64,
    pub(super) mailbox: mpsc::Sender<Envelope>,
    /// Number of commands that are waiting or running.
    pub(super) pending: Arc<AtomicUsize>,
    /// Whether the session's turn is waiting for people.
    pub(super) suspension: SuspensionWatch,
    pub(super) remembered: Remembered,
    pub(super) used_at: Instant,
    /// The actor terminates when this is dropped.
    pub(super) _alive: watch::Sender<()>,
}

/// Bytes that one session keeps in memory, counted into the sum over all sessions.
pub(super) struct Remembered {
    bytes: usize,
    sum: Arc<AtomicUsize>,
}

/// A command that counts as pending until it is dropped.
pub(super) struct Envelope {
    pub(super) command: Command,
    /// Keeps the session with this host. A turn keeps it longer, until its end is stored.
    pub(super) _owned: Owned,
    pub(super) _pending: Pending,
}

pub(super) struct Pending(Arc<AtomicUsize>);

impl Loaded {
    /// Puts a command into the mailbox. The session stays with this host until the command is executed.
    pub(super) fn send(&self, command: Command, owned: Owned) -> Result<(), TrySendError<Envelope>> {
        if let Command::Turn(turn) = &command {
            turn.end.feed().queued_in(self.suspension.clone());
        }
        let _pending = Pending::new(&self.pending);
        self.mailbox.try_send(Envelope { command, _owned: owned, _pending })
    }
}

impl Remembered {
    pub(super) fn new(sum: Arc<AtomicUsize>) -> Self {
        Remembered { bytes: 0, sum }
    }

    pub(super) fn set(&mut self, bytes: usize) {
        self.sum.fetch_add(bytes, Ordering::AcqRel);
        self.sum.fetch_sub(std::mem::replace(&mut self.bytes, bytes), Ordering::AcqRel);
    }
}

impl Drop for Remembered {
    fn drop(&mut self) {
        self.set(0);
    }
}

impl Pending {
    pub(super) fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Pending(count.clone())
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Removes the actor of `key` if it has this number.
pub(super) fn remove(loaded: &mut HashMap<SessionKey, Loaded>, key: &SessionKey, number: u64) {
    // The actor may have been evicted and another loaded for the same session.
    if loaded.get(key).is_some_and(|session| session.number == number) {
        loaded.remove(key);
    }
}

/// Returns the sessions without pending commands, the least recently used first.
pub(super) fn idle_longest(loaded: &HashMap<SessionKey, Loaded>) -> Vec<SessionKey> {
    let idle = loaded.iter().filter(|(_, session)| session.pending.load(Ordering::Acquire) == 0);
    let mut idle: Vec<(Instant, &SessionKey)> = idle.map(|(key, session)| (session.used_at, key)).collect();
    idle.sort_unstable_by_key(|(used_at, _)| *used_at);
    idle.into_iter().map(|(_, key)| key.clone()).collect()
}
