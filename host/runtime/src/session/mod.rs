//! The sessions in memory: which are loaded, which mailboxes are full, and which are evicted.
//!
//! A session is identified by `(agent, id)`. While it is loaded, one actor owns it and runs its
//! turns one after the other. Messages are sent and actors are retired only under the single lock
//! in this module, so no message is ever sent to an actor that is gone, and no session ever has two
//! actors. An actor removes itself by its number, so it never removes its successor. An actor that
//! panics is removed too.
//!
//! In a cluster, a session is loaded only while this host owns it: each command in a mailbox keeps it,
//! and it is unloaded before it is given back, because another host may change it afterwards.

mod actor;
mod loaded;
mod message;
mod pauses;
mod settlement;
mod stored_end;
mod turn;
mod turn_host;

pub(crate) use actor::{Command, Responder};
pub(crate) use message::{Accepted, Input, Message, StoredState};
pub(crate) use settlement::Settlement;
pub(crate) use stored_end::{StoredFailure, decode_outcome};
pub(crate) use turn::TurnRequest;
pub(crate) use turn_host::{ResumePermits, TurnHost};

use crate::{RuntimeError, RuntimeOptions, cluster::Owned, feed::SuspensionWatch, name::SessionKey};
use actor::Actor;
use loaded::{Envelope, Loaded, Remembered, idle_longest, remove};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::{
    mpsc::{self, error::TrySendError},
    watch,
};

/// Retry delay reported to a caller that finds no room in a mailbox or in memory.
const RETRY_AFTER_MS: u32 = 1_000;

/// All loaded sessions. Dropping it ends them.
pub(crate) struct Sessions {
    loaded: Mutex<HashMap<SessionKey, Loaded>>,
    max_loaded: usize,
    /// Bytes that all loaded sessions keep in memory together.
    bytes: Arc<AtomicUsize>,
    max_bytes: usize,
    mailbox: usize,
    idle: Duration,
    /// Number of actors started so far, which is also the number of the latest one.
    started: AtomicU64,
}

/// An actor's registration among the loaded sessions. Dropping it, also during a panic, removes the
/// registration.
struct Registration {
    sessions: Weak<Sessions>,
    key: SessionKey,
    number: u64,
}

impl Sessions {
    pub(crate) fn new(options: &RuntimeOptions) -> Self {
        Sessions {
            loaded: Mutex::default(),
            max_loaded: options.max_sessions_loaded.max(1),
            bytes: Arc::default(),
            max_bytes: options.max_session_bytes,
            mailbox: options.mailbox.max(1),
            idle: options.session_idle,
            started: AtomicU64::new(0),
        }
    }

    /// Puts a command into the session's mailbox and loads the session if necessary. A command
    /// whose caller cannot wait is refused while the turn ahead of it waits for people. The
    /// returned handle reports when such a suspension starts later.
    pub(crate) fn send(
        self: &Arc<Self>,
        host: &Arc<TurnHost>,
        key: SessionKey,
        command: Command,
        owned: Owned,
    ) -> Result<SuspensionWatch, RuntimeError> {
        let mut loaded = self.lock();
        // The actor panicked and has not been removed yet.
        if loaded.get(&key).is_some_and(|session| session.mailbox.is_closed()) {
            loaded.remove(&key);
        }
        if !loaded.contains_key(&key) {
            self.make_room(&mut loaded)?;
            loaded.insert(key.clone(), self.load(host, key.clone(), self.mailbox));
        }
        let session = loaded.get_mut(&key).expect("the session was loaded above");
        session.used_at = Instant::now();
        if let Some(suspension) = session.suspension.current().filter(|_| !command.outlasts_a_suspension()) {
            return Err(RuntimeError::WaitingForApproval { approval: suspension.approval });
        }
        session.send(command, owned).map_err(|_full| RuntimeError::MailboxFull {
            message: format!(
                "{} messages are already waiting in session {}/{}",
                self.mailbox, key.agent, key.session
            ),
            retry_after_ms: RETRY_AFTER_MS,
        })?;
        Ok(session.suspension.clone())
    }

    /// Loads a session with these turns in its mailbox, whose capacity is increased by their
    /// number. If the session is already loaded, the turns that fit are queued; the others are
    /// found again later.
    pub(crate) fn resume(self: &Arc<Self>, host: &Arc<TurnHost>, key: SessionKey, turns: Vec<TurnRequest>) {
        let mut loaded = self.lock();
        let session = loaded
            .entry(key.clone())
            .or_insert_with(|| self.load(host, key.clone(), self.mailbox + turns.len()));
        for turn in turns {
            let owned = turn.live.session().clone();
            let sent = session.send(Command::Turn(Box::new(turn)), owned);
            if let Err(TrySendError::Full(envelope) | TrySendError::Closed(envelope)) = sent
                && let Command::Turn(turn) = envelope.command
            {
                // The turn is found again later. Callers that already follow it have to retry.
                let message = "the turn is waiting for room in its session's mailbox".to_owned();
                let full = RuntimeError::MailboxFull { message, retry_after_ms: RETRY_AFTER_MS };
                turn.end.feed().end(0, Err(full));
            }
        }
    }

    /// Ends all sessions of an agent. Resolves when their last turn has stopped.
    pub(crate) async fn end_agent(&self, agent: &str) {
        self.end(|key| key.agent == agent).await;
    }

    pub(crate) async fn end_all(&self) {
        self.end(|_| true).await;
    }

    /// Removes sessions from memory that are about to be given back to other hosts. Nobody uses them, so their actors are idle.
    pub(crate) fn unload(&self, sessions: &[SessionKey]) {
        let mut loaded = self.lock();
        for key in sessions {
            loaded.remove(key);
        }
    }

    /// Returns whether the turn of a session that is in memory only waits for people.
    pub(crate) fn is_suspended(&self, key: &SessionKey) -> bool {
        self.lock().get(key).is_some_and(|session| session.suspension.current().is_some())
    }

    #[cfg(test)]
    pub(crate) fn remembered_bytes(&self) -> usize {
        self.bytes.load(Ordering::Acquire)
    }

    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }

    /// Returns how many sessions are loaded, and how many may be.
    pub(crate) fn loaded(&self) -> (usize, usize) {
        (self.count(), self.max_loaded)
    }

    /// Returns how many bytes loaded sessions keep in memory, and how many they may.
    pub(crate) fn kept_bytes(&self) -> (usize, usize) {
        (self.bytes.load(Ordering::Acquire), self.max_bytes)
    }

    async fn end(&self, which: impl Fn(&SessionKey) -> bool) {
        let ended: Vec<Loaded> =
            self.lock().extract_if(|key, _| which(key)).map(|(_, session)| session).collect();
        // All actors are stopped before any of them is awaited, because one may be waiting for
        // another.
        let mailboxes: Vec<_> = ended.into_iter().map(|Loaded { mailbox, .. }| mailbox).collect();
        for mailbox in mailboxes {
            mailbox.closed().await;
        }
    }

    /// Records how many bytes the session of `key` keeps in memory. If all sessions together exceed
    /// the limit, the least recently used idle ones are retired; they are read from the store again
    /// when needed.
    fn remembers(&self, key: &SessionKey, bytes: usize) {
        let mut loaded = self.lock();
        let Some(session) = loaded.get_mut(key) else { return };
        session.remembered.set(bytes);
        if self.bytes.load(Ordering::Acquire) <= self.max_bytes {
            return;
        }
        // Evicts a little more than necessary, so that the next calls find room without a search.
        let enough = self.max_bytes - self.max_bytes / 16;
        for key in idle_longest(&loaded) {
            loaded.remove(&key);
            if self.bytes.load(Ordering::Acquire) <= enough {
                break;
            }
        }
    }

    /// Retires the actor of `key` with this number, unless a message has arrived.
    fn retire(&self, key: &SessionKey, number: u64, mailbox: &mpsc::Receiver<Envelope>) -> bool {
        let mut loaded = self.lock();
        if !mailbox.is_empty() {
            return false;
        }
        remove(&mut loaded, key, number);
        true
    }

    /// Removes the actor of `key` with this number after it terminated for any reason.
    fn gone(&self, key: &SessionKey, number: u64) {
        remove(&mut self.lock(), key, number);
    }

    fn load(self: &Arc<Self>, host: &Arc<TurnHost>, key: SessionKey, mailbox: usize) -> Loaded {
        let (mailbox, receiver) = mpsc::channel(mailbox);
        let (alive, gone) = watch::channel(());
        let sessions: Weak<Sessions> = Arc::downgrade(self);
        let (suspensions, suspension) = watch::channel(None);
        let number = self.started.fetch_add(1, Ordering::Relaxed) + 1;
        let registration = Registration { sessions, key, number };
        let actor = Actor::new(host.clone(), registration, gone, suspensions);
        tokio::spawn(actor.run(receiver, self.idle));
        let remembered = Remembered::new(self.bytes.clone());
        Loaded {
            number,
            mailbox,
            pending: Arc::default(),
            suspension: SuspensionWatch::new(suspension),
            remembered,
            used_at: Instant::now(),
            _alive: alive,
        }
    }

    /// Retires the least recently used idle sessions, several at once so that the next calls find
    /// room without a search.
    fn make_room(&self, loaded: &mut HashMap<SessionKey, Loaded>) -> Result<(), RuntimeError> {
        if loaded.len() < self.max_loaded {
            return Ok(());
        }
        let idle = idle_longest(loaded);
        if idle.is_empty() {
            return Err(RuntimeError::MailboxFull {
                message: format!("all {} sessions that the host keeps in memory are busy", loaded.len()),
                retry_after_ms: RETRY_AFTER_MS,
            });
        }
        for key in idle.into_iter().take(1 + self.max_loaded / 16) {
            loaded.remove(&key);
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionKey, Loaded>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registration {
    fn retires(&self, mailbox: &mpsc::Receiver<Envelope>) -> bool {
        self.sessions.upgrade().is_none_or(|sessions| sessions.retire(&self.key, self.number, mailbox))
    }

    fn remembers(&self, bytes: usize) {
        if let Some(sessions) = self.sessions.upgrade() {
            sessions.remembers(&self.key, bytes);
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(sessions) = self.sessions.upgrade() {
            sessions.gone(&self.key, self.number);
        }
    }
}
