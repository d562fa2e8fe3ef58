//! The owner of one loaded session, which executes commands one after the other.
//!
//! The actor's in-memory copy of the session always equals what the store holds. When a commit
//! fails, the actor discards the copy and reads the session again.

use super::{Envelope, Registration, pauses::Pauses, turn::TurnRequest};
use crate::{
    RuntimeError,
    capability::{
        CommittedConversations,
        state::{State, state_bytes},
    },
    feed::Suspension,
    name::SessionKey,
    requests::Askers,
    session::TurnHost,
};
use skep_store::{Existing, Fork, SessionSnapshot, Store, StoreError};
use std::{sync::Arc, time::Duration};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot, watch};

/// A command to a session.
pub(crate) enum Command {
    Turn(Box<TurnRequest>),
    /// Deletes the session. Answers whether it existed.
    Delete(Responder<bool>),
    /// Deletes the session if its last turn was committed before this time. Answers whether it was
    /// deleted.
    Expire {
        before_ms: u64,
        responder: Responder<bool>,
    },
    /// Creates the session as a copy of another session.
    Fork {
        from: String,
        responder: Responder<Fork>,
    },
    /// Creates the session from an export. Answers whether it was created.
    Import {
        snapshot: Box<SessionSnapshot>,
        existing: Existing,
        responder: Responder<bool>,
    },
    #[cfg(test)]
    Panic,
}

/// Channel for a command's result. The command is executed even if nobody waits for the result
/// anymore.
pub(crate) type Responder<T> = oneshot::Sender<Result<T, RuntimeError>>;

pub(super) struct Actor {
    pub(super) host: Arc<TurnHost>,
    pub(super) key: SessionKey,
    /// Closed when nobody wants this actor anymore.
    pub(super) gone: watch::Receiver<()>,
    /// Set while the session's turn waits for people.
    pub(super) suspensions: watch::Sender<Option<Suspension>>,
    pub(super) memory: Option<Memory>,
    /// Set while a resumed turn is about to start.
    pub(super) resuming: Option<OwnedSemaphorePermit>,
    /// The times at which turns of the session were suspended.
    pub(super) pauses: Pauses,
    registration: Registration,
}

/// The committed session.
#[derive(Default)]
pub(super) struct Memory {
    pub(super) turns: u64,
    pub(super) state: Arc<State>,
    pub(super) conversations: Arc<CommittedConversations>,
}

impl Memory {
    /// Returns the size of the session's keys and values.
    pub(super) fn state_bytes(&self) -> usize {
        state_bytes(&self.state)
    }
}

impl Command {
    /// Returns whether the command may wait as long as people take, because no connection is held
    /// open for it.
    pub(super) fn outlasts_a_suspension(&self) -> bool {
        match self {
            Command::Turn(request) => !request.message.is_attached(),
            Command::Delete(_) | Command::Expire { .. } | Command::Fork { .. } | Command::Import { .. } => {
                false
            }
            #[cfg(test)]
            Command::Panic => false,
        }
    }
}

impl Actor {
    pub(super) fn new(
        host: Arc<TurnHost>,
        registration: Registration,
        gone: watch::Receiver<()>,
        suspensions: watch::Sender<Option<Suspension>>,
    ) -> Self {
        Actor {
            host,
            key: registration.key.clone(),
            gone,
            suspensions,
            memory: None,
            resuming: None,
            pauses: Pauses::default(),
            registration,
        }
    }

    /// Runs until the session has been idle for `idle`, or its handle is dropped.
    pub(super) async fn run(mut self, mut mailbox: mpsc::Receiver<Envelope>, idle: Duration) {
        loop {
            let mut gone = self.gone.clone();
            let envelope = tokio::select! {
                biased;
                _ = gone.changed() => return,
                envelope = tokio::time::timeout(idle, mailbox.recv()) => envelope,
            };
            match envelope {
                Ok(Some(Envelope { command, _owned, _pending })) => {
                    self.take(command).await;
                    if self.memory.is_none() && self.registration.retires(&mailbox) {
                        return;
                    }
                }
                Ok(None) => return,
                Err(_idle) => {
                    if self.registration.retires(&mailbox) {
                        return;
                    }
                }
            }
        }
    }

    async fn take(&mut self, command: Command) {
        match command {
            // Boxed separately, so that an idle actor is small.
            Command::Turn(request) => {
                Box::pin(self.turn(*request)).await;
                self.resuming = None;
                self.tell_size();
            }
            Command::Delete(responder) => {
                self.remove(responder, async |store, SessionKey { agent, session }| {
                    store.delete_session(agent, session).await
                })
                .await;
            }
            Command::Expire { before_ms, responder } => {
                self.remove(responder, async |store, SessionKey { agent, session }| {
                    store.expire_session(agent, session, before_ms).await
                })
                .await;
            }
            Command::Fork { from, responder } => {
                let at_ms = self.host.clock.now_ms();
                self.write(responder, async |store, SessionKey { agent, session }| {
                    store.fork_session(agent, &from, session, at_ms).await
                })
                .await;
            }
            Command::Import { snapshot, existing, responder } => {
                self.forget_requests().await;
                self.write(responder, async |store, SessionKey { agent, .. }| {
                    store.import_session(agent, *snapshot, existing).await
                })
                .await;
            }
            #[cfg(test)]
            Command::Panic => panic!("simulated host fault"),
        }
    }

    /// Removes the stored session, with its pages on disk and what the log of requests holds of it.
    /// `remove` answers whether it removed the row.
    async fn remove(
        &mut self,
        responder: Responder<bool>,
        remove: impl AsyncFnOnce(&Store, &SessionKey) -> Result<bool, StoreError>,
    ) {
        self.forget_requests().await;
        self.erase_pages().await;
        let host = self.host.clone();
        self.write(responder, async |store, key| {
            let removed = remove(store, key).await?;
            if removed {
                // The session could be pinned until now.
                host.reach.disk.forget_pin(&key.agent, &key.session).await;
            }
            Ok(removed)
        })
        .await;
    }

    /// Changes the stored session as a whole. The in-memory copy becomes invalid.
    async fn write<T>(
        &mut self,
        responder: Responder<T>,
        write: impl AsyncFnOnce(&Store, &SessionKey) -> Result<T, StoreError>,
    ) {
        self.memory = None;
        let written = write(&self.host.store, &self.key).await;
        let _ = responder.send(written.map_err(RuntimeError::from));
    }

    /// Stores what the log of requests still holds of the session, so that it is removed with the session.
    async fn forget_requests(&self) {
        let SessionKey { agent, session } = self.key.clone();
        self.host.reach.requests.forget(Askers::Session { agent, session }).await;
    }

    /// Erases the KV pages on disk that only this session has.
    async fn erase_pages(&self) {
        let SessionKey { agent, session } = &self.key;
        self.host.reach.disk.erase_session(agent, session).await;
    }

    fn tell_size(&self) {
        if let Some(memory) = &self.memory {
            self.registration.remembers(memory.state_bytes() + memory.conversations.read_bytes());
        }
    }

    /// Returns whether nobody wants this session anymore, because the host shuts down or the agent
    /// was deleted.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.has_changed().is_err()
    }

    /// Returns the session as committed, reading it if necessary.
    pub(super) async fn memory(&mut self) -> Result<&mut Memory, RuntimeError> {
        if self.memory.is_none() {
            self.memory = Some(self.read().await?);
        }
        Ok(self.memory.as_mut().expect("the session was read above"))
    }

    async fn read(&self) -> Result<Memory, RuntimeError> {
        let SessionKey { agent, session } = &self.key;
        let Some(outline) = self.host.store.session_outline(agent, session).await? else {
            return Ok(Memory::default());
        };
        Ok(Memory {
            turns: outline.row.turns,
            state: Arc::new(outline.state.into_iter().collect()),
            conversations: Arc::new(CommittedConversations::outlined(outline.conversations)),
        })
    }
}
