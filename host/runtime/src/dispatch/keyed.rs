//! Turns that are found by their idempotency key.

use super::Dispatch;
use crate::{
    RunHandle, RuntimeError,
    feed::{Feed, Hold},
    name::plain_session,
    session::decode_outcome,
    text::excerpt,
};
use std::sync::Arc;

impl Dispatch {
    /// Follows the turn of a session that has this idempotency key, as [`crate::AgentHost::follow_keyed`] describes.
    pub(crate) async fn follow_keyed(
        self: &Arc<Self>,
        agent: &str,
        session: &str,
        key: &str,
    ) -> Result<RunHandle, RuntimeError> {
        self.host.deployments.find_known(agent).await?;
        let store = &self.host.store;
        if let Some(row) = store.turn_with_idempotency_key(agent, session, key).await? {
            return self.follow(agent, session, &row.id).await;
        }
        let feed = Feed::new(uuid::Uuid::now_v7().simple().to_string());
        self.kept_outcome(&feed, agent, session, key).await?.ok_or_else(|| {
            let (agent, session) = (agent.to_owned(), excerpt(plain_session(session)));
            RuntimeError::TurnNotFound { agent, session, turn: excerpt(key) }
        })
    }

    /// Ends a feed with the outcome that is stored under an idempotency key, and follows it. The outcome is kept longer than its
    /// turn.
    pub(super) async fn kept_outcome(
        &self,
        feed: &Arc<Feed>,
        agent: &str,
        session: &str,
        key: &str,
    ) -> Result<Option<RunHandle>, RuntimeError> {
        let Some(outcome) = self.host.store.outcome(agent, session, key).await? else { return Ok(None) };
        feed.end(0, Ok(decode_outcome(&outcome)?));
        Ok(Some(feed.follow(Hold::Watches)))
    }
}
