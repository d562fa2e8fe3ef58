//! The owner of one loaded session: takes one command after the other.
//!
//! What it remembers of the session is what the store holds. When a commit fails it forgets, and reads again.

use super::{ActorPlace, Envelope, SessionKey, turn::TurnRequest};
use crate::{
    RuntimeError,
    agent_host::Services,
    capability::{
        CommittedConversations,
        log::now_ms,
        state::{State, state_bytes},
    },
    feed::Pause,
};
use skep_store::{Existing, Fork, SessionSnapshot, Store, StoreError};
use std::{sync::Arc, time::Duration};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot, watch};

/// What a session can be asked.
pub(crate) enum Command {
    Turn(Box<TurnRequest>),
    /// Forget everything. Whether there was anything.
    Delete(Answer<bool>),
    /// Forget everything, if the last turn was committed before this time. Whether it was.
    Expire {
        before_ms: u64,
        answer: Answer<bool>,
    },
    /// Begin as a copy of another session.
    Fork {
        from: String,
        answer: Answer<Fork>,
    },
    /// Begin as what was exported. Whether it did.
    Import {
        snapshot: Box<SessionSnapshot>,
        existing: Existing,
        answer: Answer<bool>,
    },
    #[cfg(test)]
    Panic,
}

/// Nobody may wait for it any more; what was asked is done all the same.
pub(crate) type Answer<T> = oneshot::Sender<Result<T, RuntimeError>>;

pub(super) struct Actor {
    pub(super) services: Arc<Services>,
    pub(super) key: SessionKey,
    /// Closed when nobody wants this actor any more.
    pub(super) gone: watch::Receiver<()>,
    /// While its turn waits for people.
    pub(super) pauses: watch::Sender<Option<Pause>>,
    pub(super) memory: Option<Memory>,
    /// While a turn that was taken up again is about to begin.
    pub(super) resuming: Option<OwnedSemaphorePermit>,
    place: ActorPlace,
}

/// The committed session.
#[derive(Default)]
pub(super) struct Memory {
    pub(super) turns: u64,
    pub(super) state: Arc<State>,
    pub(super) conversations: Arc<CommittedConversations>,
}

impl Memory {
    /// What its keys and values take.
    pub(super) fn state_bytes(&self) -> usize {
        state_bytes(&self.state)
    }
}

impl Command {
    /// Whether it may wait as long as people take: nobody holds a connection for it.
    pub(super) fn outlasts_a_pause(&self) -> bool {
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
        services: Arc<Services>,
        place: ActorPlace,
        gone: watch::Receiver<()>,
        pauses: watch::Sender<Option<Pause>>,
    ) -> Self {
        Actor { services, key: place.key.clone(), gone, pauses, memory: None, resuming: None, place }
    }

    /// Until the session is idle for long, or its handle is dropped.
    pub(super) async fn run(mut self, mut mailbox: mpsc::Receiver<Envelope>, idle: Duration) {
        loop {
            let mut gone = self.gone.clone();
            let envelope = tokio::select! {
                biased;
                _ = gone.changed() => return,
                envelope = tokio::time::timeout(idle, mailbox.recv()) => envelope,
            };
            match envelope {
                Ok(Some(Envelope { command, _pending })) => {
                    self.take(command).await;
                    if self.memory.is_none() && self.place.retires(&mailbox) {
                        return;
                    }
                }
                Ok(None) => return,
                Err(_idle) => {
                    if self.place.retires(&mailbox) {
                        return;
                    }
                }
            }
        }
    }

    async fn take(&mut self, command: Command) {
        match command {
            // In a box of its own, so that an actor is small while nothing happens.
            Command::Turn(request) => {
                Box::pin(self.turn(*request)).await;
                self.resuming = None;
                self.tell_size();
            }
            Command::Delete(answer) => {
                self.write(answer, async |store, SessionKey { agent, session }| {
                    store.delete_session(agent, session).await
                })
                .await;
            }
            Command::Expire { before_ms, answer } => {
                self.write(answer, async |store, SessionKey { agent, session }| {
                    store.expire_session(agent, session, before_ms).await
                })
                .await;
            }
            Command::Fork { from, answer } => {
                self.write(answer, async |store, SessionKey { agent, session }| {
                    store.fork_session(agent, &from, session, now_ms()).await
                })
                .await;
            }
            Command::Import { snapshot, existing, answer } => {
                self.write(answer, async |store, SessionKey { agent, .. }| {
                    store.import_session(agent, *snapshot, existing).await
                })
                .await;
            }
            #[cfg(test)]
            Command::Panic => panic!("a fault of the host, for a test"),
        }
    }

    /// Changes the stored session as a whole. What is remembered of it is not what it is any more.
    async fn write<T>(
        &mut self,
        answer: Answer<T>,
        write: impl AsyncFnOnce(&Store, &SessionKey) -> Result<T, StoreError>,
    ) {
        self.memory = None;
        let written = write(&self.services.store, &self.key).await;
        let _ = answer.send(written.map_err(RuntimeError::from));
    }

    fn tell_size(&self) {
        if let Some(memory) = &self.memory {
            self.place.remembers(memory.state_bytes() + memory.conversations.read_bytes());
        }
    }

    /// The session as it is committed.
    pub(super) async fn memory(&mut self) -> Result<&mut Memory, RuntimeError> {
        if self.memory.is_none() {
            self.memory = Some(self.read().await?);
        }
        Ok(self.memory.as_mut().expect("it was read above"))
    }

    async fn read(&self) -> Result<Memory, RuntimeError> {
        let SessionKey { agent, session } = &self.key;
        let Some(outline) = self.services.store.session_outline(agent, session).await? else {
            return Ok(Memory::default());
        };
        Ok(Memory {
            turns: outline.row.turns,
            state: Arc::new(outline.state.into_iter().collect()),
            conversations: Arc::new(CommittedConversations::outlined(outline.conversations)),
        })
    }
}
