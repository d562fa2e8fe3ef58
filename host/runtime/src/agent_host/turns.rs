//! Turns as callers see them.

use super::AgentHost;
use crate::{Invocation, RunHandle, RuntimeError, TurnClient, TurnDetail, dispatch::Asks};
use std::sync::Weak;

impl AgentHost {
    /// Puts a message into the mailbox of its session. The returned handle delivers the events of
    /// its turn.
    ///
    /// A turn that is detached or has an idempotency key is durable when this returns, and
    /// continues if the handle is dropped. Any other turn becomes durable when it starts, and is
    /// cancelled when its handle is dropped; its handle ends with an error if the turn ahead of it
    /// waits for a person.
    pub async fn invoke(&self, invocation: Invocation) -> Result<RunHandle, RuntimeError> {
        self.inner.dispatch.invoke(invocation).await
    }

    /// Does the same as [`AgentHost::invoke`], for a client to which the turn may send notifications and questions as long
    /// as it exists, unless the turn runs on another host of the cluster.
    pub async fn invoke_for(
        &self,
        invocation: Invocation,
        client: Weak<dyn TurnClient>,
    ) -> Result<RunHandle, RuntimeError> {
        self.inner.dispatch.invoke_for(invocation, client).await
    }

    /// Follows the events of an open or ended turn from the first one. Dropping the handle does not
    /// affect the turn.
    pub async fn follow(&self, agent: &str, session: &str, turn: &str) -> Result<RunHandle, RuntimeError> {
        self.inner.dispatch.follow(agent, session, turn).await
    }

    /// Follows the turn of a session that has this idempotency key, as [`AgentHost::follow`] does. Fails with
    /// [`RuntimeError::TurnNotFound`] if neither a turn nor the outcome of one is stored under the key.
    pub async fn follow_keyed(
        &self,
        agent: &str,
        session: &str,
        key: &str,
    ) -> Result<RunHandle, RuntimeError> {
        self.inner.dispatch.follow_keyed(agent, session, key).await
    }

    /// Returns the state of a turn.
    pub async fn turn(&self, agent: &str, session: &str, turn: &str) -> Result<TurnDetail, RuntimeError> {
        self.inner.dispatch.turn(agent, session, turn).await
    }

    /// Cancels a turn that is waiting or running. A turn that has ended is left unchanged.
    pub async fn cancel_turn(&self, agent: &str, session: &str, turn: &str) -> Result<(), RuntimeError> {
        self.inner.dispatch.cancel_turn(agent, session, turn, Asks::Others).await
    }
}
