//! Turns that a restored host holds back.

use super::Dispatch;
use crate::{
    RuntimeError, cluster::Owned, feed::Feed, invocation::OWN_KEY, name::SessionKey, session::Settlement,
};
use skep_store::{Held, HeldTurn};

impl Dispatch {
    /// Loads the held sessions at startup, before any turn is resumed.
    pub(crate) async fn hold_sessions(&self) -> Result<(), RuntimeError> {
        let Some(held) = self.host.store.held().await? else { return Ok(()) };
        let turns = self.host.store.held_turns().await?;
        self.admission.held.set(turns.into_iter().map(|held| session_of(&held)).collect());
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

    /// Reads the held sessions again, after another host released some.
    pub(crate) async fn reload_held(&self) -> Result<(), RuntimeError> {
        let turns = match self.host.store.held().await? {
            Some(_) => self.host.store.held_turns().await?,
            None => Vec::new(),
        };
        self.admission.held.set(turns.iter().map(session_of).collect());
        Ok(())
    }

    /// Fails a held turn with `turn_dropped`.
    pub(crate) async fn drop_turn(&self, held: HeldTurn) {
        let key = session_of(&held);
        let HeldTurn { turn, idempotency_key } = held;
        // Whoever owns the session runs none of its held turns.
        let owned = Owned::default();
        let Some(live) = self.host.live.enter(&Feed::new(turn.id.clone()), owned) else { return };
        // A dead letter that is redelivered starts another turn.
        let keeps_key = idempotency_key.is_some_and(|key| !key.starts_with(OWN_KEY));
        let error = RuntimeError::TurnDropped { turn: turn.id };
        Settlement::for_unstarted_turn(&self.host, turn.key, key, &error, keeps_key, live)
            .write(&self.host)
            .await;
    }
}

fn session_of(held: &HeldTurn) -> SessionKey {
    SessionKey { agent: held.turn.agent.clone(), session: held.turn.session.clone() }
}
