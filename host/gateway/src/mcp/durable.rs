//! Tracks calls whose durable turns continue without their client, so that a cancellation notification reaches the
//! turn.

use rmcp::model::RequestId;
use skep_runtime::AgentHost;
use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The durable calls that one client is waiting for, and their turns.
#[derive(Default)]
pub(super) struct DurableCalls(Mutex<HashMap<RequestId, DurableTurn>>);

pub(super) struct DurableTurn {
    pub(super) agent: String,
    /// The host's id of the session.
    pub(super) session: String,
    pub(super) id: String,
}

impl DurableCalls {
    pub(super) fn begin(&self, call: &RequestId, turn: DurableTurn) {
        self.lock().insert(call.clone(), turn);
    }

    pub(super) fn end(&self, call: &RequestId) {
        self.lock().remove(call);
    }

    /// Cancels the turn of a call that the client has cancelled.
    pub(super) async fn cancel(&self, host: &AgentHost, call: &RequestId) {
        let Some(DurableTurn { agent, session, id }) = self.lock().remove(call) else { return };
        if let Err(error) = host.cancel_turn(&agent, &session, &id).await {
            tracing::debug!(agent, turn = id, "the turn of a cancelled call cannot be cancelled: {error}");
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RequestId, DurableTurn>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
