//! Delivery of an event to a session, as one of its turns.

use super::{
    count,
    permits::Permit,
    turn::{self, TURN_BACKOFF, Verdict},
};
use crate::{
    EventOrigin, Invocation, Origin, RuntimeError, courier::Context, dispatch::Dispatch, invocation::OWN_KEY,
};
use skep_engine::Priority;
use skep_store::{Delivery, Target};
use std::sync::{Arc, Weak};

/// Maximum number of attempts to deliver an event.
const MAX_ATTEMPTS: u32 = 6;

pub(super) struct SessionDelivery {
    pub(super) context: Arc<Context>,
    pub(super) dispatch: Weak<Dispatch>,
    pub(super) row: Delivery,
}

impl SessionDelivery {
    pub(super) async fn deliver(self, permit: Permit) {
        let Target::Session { agent, session } = &self.row.target else { return };
        let verdict = match self.invocation(agent, session) {
            Ok(invocation) => turn::take(&self.dispatch, invocation, permit).await,
            Err(error) => Verdict::Failed(error),
        };
        self.note(agent, session, verdict).await;
    }

    fn invocation(&self, agent: &str, session: &str) -> Result<Invocation, RuntimeError> {
        let Delivery { key, attempt, event_id, topic, data, principal, hops, at_ms, .. } = &self.row;
        let data = data.as_deref().map(serde_json::from_slice).transpose();
        let data = data.map_err(|error| RuntimeError::Internal {
            message: format!("the data of event {event_id} is unreadable: {error}"),
        })?;
        Ok(Invocation {
            principal: principal.clone(),
            key: None,
            agent: agent.to_owned(),
            session: session.to_owned(),
            text: String::new(),
            data,
            origin: Origin::Event(EventOrigin {
                id: event_id.clone(),
                topic: topic.clone(),
                at_ms: *at_ms,
                attempt: *attempt,
                hops: *hops,
                delivery: key.0,
            }),
            priority: Priority::Interactive,
            deadline: None,
            // No client can send a key with a control character.
            idempotency_key: Some(format!("{OWN_KEY}event {}", key.0)),
            detached: true,
        })
    }

    async fn note(&self, agent: &str, session: &str, verdict: Verdict) {
        let (store, row) = (&self.context.store, &self.row);
        let now_ms = self.context.clock.now_ms();
        match verdict {
            Verdict::HostEnds => {}
            // The row was removed by the commit; a row left by an earlier attempt is removed now.
            Verdict::Done => {
                count("event", "ok");
                self.context
                    .shutdown
                    .stored("the delivery of an event", || store.finish_delivery(row.key))
                    .await;
            }
            Verdict::NotNow { error, wait_ms } => {
                let (attempt, wake_ms, error) = (row.attempt - 1, now_ms + wait_ms, error.to_string());
                let reschedule = || store.retry_delivery(row.key, attempt, wake_ms, &error);
                self.context.shutdown.stored("the next attempt to deliver an event", reschedule).await;
            }
            Verdict::Failed(error) if row.attempt < MAX_ATTEMPTS => {
                count("event", "retried");
                let wake_ms = now_ms + TURN_BACKOFF.delay_ms(row.attempt);
                let error = error.to_string();
                let reschedule = || store.retry_delivery(row.key, row.attempt, wake_ms, &error);
                self.context.shutdown.stored("the next attempt to deliver an event", reschedule).await;
            }
            Verdict::Failed(error) => {
                count("event", "failed");
                let (topic, event) = (&row.topic, &row.event_id);
                tracing::warn!(agent, session, topic, event, "an event could not be delivered: {error}");
                let error = error.to_string();
                let dead_letter = || store.dead_letter_delivery(row.key, &error);
                self.context.shutdown.stored("the failure of an event's delivery", dead_letter).await;
            }
        }
    }
}
