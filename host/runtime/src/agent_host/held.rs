//! Work that a restored host holds back because it was in flight when the backup was taken and may
//! have completed afterwards.
//!
//! A session with a held turn accepts nothing new, so that the turn finds the session unchanged
//! when it is resumed.

use super::{AgentHost, Inner, Services};
use crate::invocation::OWN_KEY;
use crate::{
    RuntimeError,
    feed::Feed,
    name::{SessionKey, plain_session},
    session::Settlement,
};
use skep_store::{Held, HeldTurn, Release};
use std::{
    collections::HashSet,
    sync::{PoisonError, RwLock},
};

/// Sessions with held turns.
#[derive(Default)]
pub(crate) struct HeldSessions(RwLock<HashSet<SessionKey>>);

impl HeldSessions {
    /// Fails if the session has a held turn and therefore accepts nothing.
    pub(crate) fn check(&self, agent: &str, session: &str) -> Result<(), RuntimeError> {
        let held = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if held.is_empty()
            || !held.contains(&SessionKey { agent: agent.to_owned(), session: session.to_owned() })
        {
            return Ok(());
        }
        let session = plain_session(session).to_owned();
        Err(RuntimeError::HeldSinceRestore { agent: agent.to_owned(), session })
    }

    fn set(&self, sessions: HashSet<SessionKey>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = sessions;
    }
}

impl Services {
    /// Loads the held sessions at startup, before any turn is resumed.
    pub(super) async fn hold_sessions(&self) -> Result<(), RuntimeError> {
        let Some(held) = self.store.held().await? else { return Ok(()) };
        let turns = self.store.held_turns().await?;
        self.held.set(turns.into_iter().map(|held| session_of(&held)).collect());
        let Held { turns, deliveries, schedules, batches, .. } = held;
        tracing::warn!(
            turns,
            deliveries,
            schedules,
            batches,
            "this host was restored from a backup; work that was in flight then is held, because it may have completed \
             since: \
             `skep held show` shows how much, `skep held resume` continues it, `skep held drop` discards it"
        );
        Ok(())
    }
}

impl AgentHost {
    /// Returns the work that is held since a restore. `None` if the host was not restored, or if
    /// the operator has already resumed or dropped the work.
    pub async fn held(&self) -> Result<Option<Held>, RuntimeError> {
        Ok(self.inner.services.store.held().await?)
    }

    /// Resumes everything that is held. Webhook messages are marked as possible duplicates, and an
    /// interrupted call is reported to its agent as `interrupted`.
    pub async fn resume_held(&self) -> Result<Held, RuntimeError> {
        let (services, _one) = (&self.inner.services, self.inner.deploying.lock().await);
        let held = self.inner.held().await?;
        services.store.release(Release::Resume, services.clock.now_ms()).await?;
        services.store.release_work().await?;
        services.store.end_hold().await?;
        services.held.set(HashSet::new());
        self.inner.adopt_turns(None).await?;
        self.inner.batches.look();
        services.courier_bell.notify_one();
        Ok(held)
    }

    /// Drops everything that is held: turns fail with `turn_dropped` and keep their keys,
    /// deliveries become dead letters, batches are cancelled, and repeating schedules continue with
    /// their next time.
    pub async fn drop_held(&self) -> Result<Held, RuntimeError> {
        let (services, _one) = (&self.inner.services, self.inner.deploying.lock().await);
        let held = self.inner.held().await?;
        for turn in services.store.held_turns().await? {
            self.inner.drop_turn(turn).await;
        }
        for (principal, id) in services.store.held_batches().await? {
            if let Err(error) = self.inner.batches.cancel(self, &principal, &id).await {
                tracing::error!(batch = id, "cannot cancel the batch, so it continues: {error}");
            }
        }
        services.store.release(Release::Drop, services.clock.now_ms()).await?;
        services.store.release_work().await?;
        services.store.end_hold().await?;
        services.held.set(HashSet::new());
        services.courier_bell.notify_one();
        Ok(held)
    }
}

impl Inner {
    async fn held(&self) -> Result<Held, RuntimeError> {
        self.services.store.held().await?.ok_or(RuntimeError::NothingHeld)
    }

    async fn drop_turn(&self, held: HeldTurn) {
        let key = session_of(&held);
        let HeldTurn { turn, idempotency_key } = held;
        let Some(live) = self.services.live.enter(&Feed::new(turn.id.clone())) else { return };
        // A dead letter that is redelivered starts another turn.
        let keeps_key = idempotency_key.is_some_and(|key| !key.starts_with(OWN_KEY));
        let error = RuntimeError::TurnDropped { turn: turn.id };
        Settlement::of_unbegun(turn.key, key, &error, keeps_key, live).write(&self.services).await;
    }
}

fn session_of(held: &HeldTurn) -> SessionKey {
    SessionKey { agent: held.turn.agent.clone(), session: held.turn.session.clone() }
}
