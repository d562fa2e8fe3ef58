//! What a restored host holds back: work that was on its way when its backup was taken, and that may have been done after it.
//!
//! Sessions with a turn that is held take nothing new, so that the turn finds what it left when it is resumed.

use super::{AgentHost, Inner, OWN_KEY, Services};
use crate::{
    RuntimeError,
    access::plain_session,
    feed::Feed,
    session::{SessionKey, Settlement},
};
use skep_store::{Held, HeldTurn, Release};
use std::{
    collections::HashSet,
    sync::{PoisonError, RwLock},
};

/// Sessions with turns that are held.
#[derive(Default)]
pub(crate) struct HeldSessions(RwLock<HashSet<SessionKey>>);

impl HeldSessions {
    /// A session that waits for the operator takes nothing.
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
    /// At the start, before any turn goes on.
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
            "this host was restored from a backup; what was on its way then is held, because it may have been done since: \
             `skep held show` tells how much, `skep held resume` goes on with it, `skep held drop` gives it up"
        );
        Ok(())
    }
}

impl AgentHost {
    /// What is held since a restore; `None` if the host was not restored, or if it was decided about.
    pub async fn held(&self) -> Result<Option<Held>, RuntimeError> {
        Ok(self.inner.services.store.held().await?)
    }

    /// Goes on with everything that is held. Messages of webhooks say that they may have come before; a call that was cut off
    /// is told to its agent as interrupted.
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

    /// Gives up everything that is held: turns fail with `turn_dropped` and keep their keys, deliveries are dead letters,
    /// batches are cancelled, and of schedules those that repeat go on with their next time.
    pub async fn drop_held(&self) -> Result<Held, RuntimeError> {
        let (services, _one) = (&self.inner.services, self.inner.deploying.lock().await);
        let held = self.inner.held().await?;
        for turn in services.store.held_turns().await? {
            self.inner.drop_turn(turn).await;
        }
        for (principal, id) in services.store.held_batches().await? {
            if let Err(error) = self.inner.batches.cancel(self, &principal, &id).await {
                tracing::error!(batch = id, "the batch cannot be given up, and goes on: {error}");
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
        // A dead letter that is delivered again is another turn.
        let keeps_key = idempotency_key.is_some_and(|key| !key.starts_with(OWN_KEY));
        let error = RuntimeError::TurnDropped { turn: turn.id };
        Settlement::of_unbegun(turn.key, key, &error, keeps_key, live).write(&self.services).await;
    }
}

fn session_of(held: &HeldTurn) -> SessionKey {
    SessionKey { agent: held.turn.agent.clone(), session: held.turn.session.clone() }
}
