//! Room for events on their way. What would wait beyond it is refused, to whoever causes it.

use super::EventRouter;
use crate::{RuntimeError, metric};
use skep_store::{NewEvent, Store};
use tokio::sync::Mutex;

/// Deliveries that may wait, over all targets.
const MAX_WAITING: usize = 100_000;
/// What a caller is told to wait.
const RETRY_AFTER_MS: u32 = 5_000;

pub(crate) struct Outbox {
    pub(crate) router: EventRouter,
    store: Store,
    /// At least so many more may be written. Deliveries that are over make it more, which the next count finds.
    room: Mutex<usize>,
    max_waiting: usize,
}

impl Outbox {
    pub(crate) fn new(store: Store) -> Self {
        Outbox { router: EventRouter::default(), store, room: Mutex::new(0), max_waiting: MAX_WAITING }
    }

    /// Takes room for so many deliveries, which are written next.
    pub(crate) async fn reserve(&self, deliveries: usize) -> Result<(), RuntimeError> {
        if deliveries == 0 {
            return Ok(());
        }
        let mut room = self.room.lock().await;
        if *room < deliveries {
            let limit = u32::try_from(self.max_waiting).unwrap_or(u32::MAX);
            let waiting = self.store.count_deliveries(limit).await?;
            *room = self.max_waiting - waiting as usize;
        }
        match room.checked_sub(deliveries) {
            Some(left) => {
                *room = left;
                Ok(())
            }
            None => Err(RuntimeError::OutboxFull { limit: self.max_waiting, retry_after_ms: RETRY_AFTER_MS }),
        }
    }

    /// The event that tells of a turn's end, if there is room for it. A turn must not fail because nobody takes events.
    pub(crate) async fn with_room(&self, event: Option<NewEvent>) -> Option<NewEvent> {
        let event = event?;
        match self.reserve(event.deliveries.len()).await {
            Ok(()) => {
                metrics::counter!(metric::EVENTS, "source" => "host").increment(1);
                Some(event)
            }
            Err(error) => {
                tracing::error!(topic = event.topic, "the end of a turn is not told: {error}");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_store::{AgentRow, NewDelivery, Target};

    #[tokio::test]
    async fn a_full_outbox_refuses_until_deliveries_are_over() {
        let store = Store::in_memory().await.expect("a database in memory");
        let agent = AgentRow {
            name: "a".into(),
            manifest: String::new(),
            digest: "d".into(),
            deployed_at_ms: 1,
            deployed_by: "ann".into(),
        };
        store.put_agent(&agent, b"component", &[]).await.expect("stored");
        let outbox = Outbox { max_waiting: 2, ..Outbox::new(store.clone()) };
        let target = Target::Session { agent: "a".into(), session: "s".into() };
        let event = NewEvent {
            source: "shop".into(),
            id: "1".into(),
            topic: "t".into(),
            data: None,
            principal: "p".into(),
            hops: 0,
            at_ms: 1,
            deliveries: vec![NewDelivery { target, undeliverable: None }; 2],
        };
        outbox.reserve(2).await.expect("there is room for two");
        store.publish(&event, 1).await.expect("written");
        let refused = outbox.reserve(1).await.expect_err("it is full");
        assert!(matches!(refused, RuntimeError::OutboxFull { limit: 2, .. }), "{refused}");
        outbox.reserve(0).await.expect("nothing needs no room");
        store.delete_session("a", "s").await.expect("deleted");
        outbox.reserve(2).await.expect("there is room again");
    }
}
