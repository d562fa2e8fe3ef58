//! Turns that are found by their idempotency key.

use super::Dispatch;
use crate::{
    Invocation, RunHandle, RuntimeError,
    feed::{Feed, Hold},
    name::plain_session,
    session::{Input, decode_outcome},
    text::excerpt,
};
use skep_store::KeptOutcome;
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
        let Some(kept) = store.outcome(agent, session, key).await? else {
            let (agent, session) = (agent.to_owned(), excerpt(plain_session(session)));
            return Err(RuntimeError::TurnNotFound { agent, session, turn: excerpt(key) });
        };
        ended(&Feed::new(uuid::Uuid::now_v7().simple().to_string()), &kept)
    }
}

/// Answers a message with the outcome that is kept under its idempotency key, also after its turn was removed. Fails if the
/// outcome is that of a different message.
pub(super) fn kept_answer(
    feed: &Arc<Feed>,
    invocation: &Invocation,
    kept: &KeptOutcome,
) -> Result<RunHandle, RuntimeError> {
    // Outcomes that were stored by early versions, and those of the host's own keys, have no digest.
    match &kept.message_digest {
        Some(digest) if !Input::may_have_digest(invocation, digest) => Err(used_otherwise()),
        _ => ended(feed, kept),
    }
}

/// Returns the error of a message whose idempotency key belongs to a different one.
pub(super) fn used_otherwise() -> RuntimeError {
    let message = "the idempotency key was already used with a different message; use a new one".to_owned();
    RuntimeError::InvalidMessage { message }
}

/// Ends a feed with a kept outcome, and follows it.
fn ended(feed: &Arc<Feed>, kept: &KeptOutcome) -> Result<RunHandle, RuntimeError> {
    feed.end(0, Ok(decode_outcome(&kept.body)?));
    Ok(feed.follow(Hold::Watches))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Outcome, tests::fixture::invocation};

    #[test]
    fn a_kept_outcome_with_a_digest_answers_only_the_message_of_its_key() {
        let outcome =
            Outcome { text: "hi".into(), data: None, turn: 1, usage: Default::default(), elapsed_us: 1 };
        let body = serde_json::to_vec(&outcome).expect("JSON");
        let (sent, other) = (invocation("a", "s", "one"), invocation("a", "s", "other"));
        let answer = |message: &Invocation, message_digest: Option<Vec<u8>>| {
            kept_answer(&Feed::new("t".into()), message, &KeptOutcome { body: body.clone(), message_digest })
        };
        let digest = Some(Input::digest(&sent));
        answer(&sent, digest.clone()).expect("the same message");
        assert_eq!(answer(&other, digest).expect_err("another message").code(), "invalid_message");
        answer(&other, None).expect("outcomes of early versions have no digest");
    }
}
