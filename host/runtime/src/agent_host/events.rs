//! Publishes events from outside of turns, and lists all events with the state of their deliveries.

use super::AgentHost;
use crate::{Event, EventSummary, PublishedEvent, RuntimeError, event::encode_data};
use skep_store::{NewEvent, Published};

const MAX_PAGE: u32 = 1_000;

impl AgentHost {
    /// Makes an event of a client durable and delivers it at least once to the sessions and webhooks that
    /// subscribe to its topic. Events with the same source and id are treated as one for a day.
    pub async fn publish(&self, event: Event) -> Result<PublishedEvent, RuntimeError> {
        let host = self.host();
        event.check()?;
        let Event { id, source, topic, data, at_ms, principal } = event;
        let id = id.unwrap_or_else(|| uuid::Uuid::now_v7().simple().to_string());
        let encoded = encode_data(data.as_ref()).map_err(|message| RuntimeError::InvalidEvent { message })?;
        let deliveries = host.outbox.router.route(&principal, &id, &topic, data.as_ref());
        host.outbox.reserve(&principal, deliveries.len()).await?;
        let now_ms = host.clock.now_ms();
        let count = deliveries.len();
        let row = NewEvent {
            source,
            id: id.clone(),
            topic,
            data: encoded,
            principal,
            hops: 1,
            at_ms: at_ms.unwrap_or(now_ms),
            deliveries,
        };
        let is_known = host.store.publish(&row, now_ms).await? == Published::Known;
        if is_known {
            return Ok(PublishedEvent { id, is_known, deliveries: 0 });
        }
        metrics::counter!(crate::metric::EVENTS, "source" => "client").increment(1);
        host.outbox.ring();
        Ok(PublishedEvent { id, is_known, deliveries: count })
    }

    /// Returns the newest events, or those before the key `before`.
    pub async fn events(&self, before: Option<i64>, limit: u32) -> Result<Vec<EventSummary>, RuntimeError> {
        let rows = self.host().store.events(before, limit.min(MAX_PAGE)).await?;
        rows.into_iter().map(EventSummary::of).collect()
    }
}
