//! Stored responses; see `batch::response`.

use super::AgentHost;
use crate::{
    BatchAnswer, BatchPhase, LiveAnswer, NewBatch, NewResponse, RuntimeError, StoredResponse,
    batch::response::{self, MAX_CHAIN, ResponseEnd, ResponsePhase},
    dispatch::{Asks, Dispatch},
    text::excerpt,
};
use skep_store::{ResponseRow, ResponseState, ResponseTurn};
use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};
use tokio::task::JoinSet;

/// Maximum size of the responses that one request continues.
const MAX_CHAIN_BYTES: u64 = 64 << 20;
/// Delay before a turn is followed again that is open and could not be followed.
const FOLLOW_PAUSE: Duration = Duration::from_secs(1);

/// The responses whose turns this host follows.
#[derive(Default)]
pub(super) struct Following {
    tasks: Mutex<JoinSet<()>>,
    ids: Arc<Mutex<HashSet<String>>>,
}

impl Following {
    /// Waits in the background for the end of the turn of a response, unless a task already does.
    fn follow(&self, dispatch: Arc<Dispatch>, id: String, turn: ResponseTurn) {
        if !locked(&self.ids).insert(id.clone()) {
            return;
        }
        let ids = self.ids.clone();
        let mut tasks = locked(&self.tasks);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move {
            follow(dispatch, id.clone(), turn).await;
            locked(&ids).remove(&id);
        });
    }

    /// Follows all open responses that this host does not follow yet, because the host that followed them is gone.
    pub(super) async fn take_over(&self, dispatch: &Arc<Dispatch>) -> Result<(), RuntimeError> {
        for row in dispatch.host.store.open_responses_of_turns().await? {
            if let Some(turn) = row.turn {
                self.follow(dispatch.clone(), row.id, turn);
            }
        }
        Ok(())
    }
}

fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AgentHost {
    /// Stores a response with its answer, or one whose turn has begun and is followed to its end.
    pub async fn keep_response(
        &self,
        new: NewResponse,
        answer: Option<&BatchAnswer>,
    ) -> Result<(), RuntimeError> {
        let id = new.id.clone();
        let followed = new.turn.clone().filter(|_| answer.is_none());
        response::put(self.inner.batches.context(), new, answer).await?;
        if let Some(turn) = followed {
            self.inner.following.follow(self.inner.dispatch.clone(), id, turn);
        }
        Ok(())
    }

    /// Fails if there is no room now for a response whose answer is not known yet, so that it need not be begun.
    pub async fn check_response_room(&self, new: &NewResponse) -> Result<(), RuntimeError> {
        response::check_room(self.inner.batches.context(), new).await
    }

    /// Stores a response that a model produces in the background, and queues its request, which is the only item of
    /// the batch. Both are durable when this returns.
    pub async fn queue_response(&self, new: NewResponse, batch: NewBatch) -> Result<(), RuntimeError> {
        let (id, principal) = (new.id.clone(), new.principal.clone());
        self.keep_response(new, None).await?;
        let queued = self.inner.batches.queue_as(id.clone(), batch).await;
        if queued.is_err()
            && let Err(error) = self.host().store.delete_response(&principal, &id).await
        {
            tracing::warn!(id, "cannot remove a response that could not be queued: {error}");
        }
        queued.map(drop)
    }

    /// Returns a response of this tenant.
    pub async fn response(&self, principal: &str, id: &str) -> Result<StoredResponse, RuntimeError> {
        let row = self.host().store.response(principal, id).await?;
        let row = row.ok_or_else(|| RuntimeError::ResponseNotFound { id: excerpt(id) })?;
        self.stored(principal, row).await
    }

    /// Returns a response of this tenant after the responses that it continues. All of them have ended.
    pub async fn response_chain(
        &self,
        principal: &str,
        id: &str,
    ) -> Result<Vec<StoredResponse>, RuntimeError> {
        let store = &self.host().store;
        let size = store.response_chain_size(principal, id, MAX_CHAIN + 1).await?;
        if size.responses > MAX_CHAIN || size.bytes > MAX_CHAIN_BYTES {
            return Err(RuntimeError::ResponseChainTooLong {
                most: MAX_CHAIN,
                most_mb: MAX_CHAIN_BYTES >> 20,
            });
        }
        let rows = store.response_chain(principal, id, MAX_CHAIN).await?;
        let gone = match rows.first() {
            None => Some(id),
            Some(first) => first.previous.as_deref(),
        };
        if let Some(gone) = gone {
            return Err(RuntimeError::ResponseNotFound { id: excerpt(gone) });
        }
        let mut chain = Vec::with_capacity(rows.len());
        for row in rows {
            chain.push(self.stored(principal, row).await?);
        }
        Ok(chain)
    }

    /// Deletes a response of this tenant. One that is being produced is cancelled first.
    pub async fn delete_response(&self, principal: &str, id: &str) -> Result<(), RuntimeError> {
        self.cancel_response(principal, id).await?;
        match self.host().store.delete_response(principal, id).await? {
            true => Ok(()),
            false => Err(RuntimeError::ResponseNotFound { id: excerpt(id) }),
        }
    }

    /// Cancels a response of this tenant. One that has ended is left unchanged.
    pub async fn cancel_response(&self, principal: &str, id: &str) -> Result<(), RuntimeError> {
        let found = self.response(principal, id).await?;
        if let ResponsePhase::Ended { .. } = found.phase {
            return Ok(());
        }
        match found.turn {
            Some(ResponseTurn { agent, session, turn }) => {
                self.inner.dispatch.cancel_turn(&agent, &session, &turn, Asks::Others).await?;
                let (store, at_ms) = (&self.host().store, self.host().clock.now_ms());
                store.end_response(id, ResponseState::Cancelled, at_ms).await?;
            }
            None => self.inner.batches.cancel(principal, id).await?,
        }
        Ok(())
    }

    /// Returns the answer that a model is producing for a response.
    pub fn live_response(&self, id: &str) -> Arc<LiveAnswer> {
        self.inner.batches.live(id)
    }

    async fn stored(&self, principal: &str, row: ResponseRow) -> Result<StoredResponse, RuntimeError> {
        let open = match (&row.state, &row.turn) {
            (ResponseState::Open, None) => match self.inner.batches.status(principal, &row.id).await {
                Ok(status) if status.phase == BatchPhase::Queued => ResponsePhase::Queued,
                Ok(_) => ResponsePhase::Running,
                // The process ended between the two writes that queue a response.
                Err(RuntimeError::BatchNotFound { .. }) => {
                    let message = "the host stopped before the request was queued; send it again".to_owned();
                    let end = ResponseEnd::Failed { code: "internal", message };
                    ResponsePhase::Ended { at_ms: row.created_at_ms, end }
                }
                Err(error) => return Err(error),
            },
            _ => ResponsePhase::Running,
        };
        response::stored(row, open)
    }
}

/// Follows the turns of responses whose host stopped before they ended.
pub(super) async fn follow_open(dispatch: Weak<Dispatch>, following: Arc<Following>) {
    let Some(dispatch) = dispatch.upgrade() else { return };
    if let Err(error) = following.take_over(&dispatch).await {
        tracing::error!("cannot look for open responses: {error}");
    }
}

/// Waits for the end of a turn, and stores it as the end of the response.
async fn follow(dispatch: Arc<Dispatch>, id: String, turn: ResponseTurn) {
    let ResponseTurn { agent, session, turn } = turn;
    let ended = loop {
        let ended = async {
            let run = dispatch.follow(&agent, &session, &turn).await?;
            Ok::<_, RuntimeError>(BatchAnswer::of_turn(String::new(), run.outcome().await?))
        };
        let error = match ended.await {
            Ok(answer) => break Ok(answer),
            Err(RuntimeError::ShuttingDown) => return,
            Err(error) => error,
        };
        if !dispatch.is_open(&agent, &session, &turn).await {
            break Err(error);
        }
        // It waits for its agent, continues on another host, or cannot be read now.
        if dispatch.host.shutdown.admit().is_err() {
            return;
        }
        tokio::time::sleep(FOLLOW_PAUSE).await;
    };
    let state = response::state_of(ended);
    let host = &dispatch.host;
    let write = || host.store.end_response(&id, state.clone(), host.clock.now_ms());
    host.shutdown.stored("the end of a response", write).await;
}
