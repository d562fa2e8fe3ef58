//! Bounds the deliveries that are waiting. Work that would exceed the limit is refused, and if
//! there are several tenants, each has a share of it.

use super::EventRouter;
use crate::{
    RuntimeError, metric,
    tenancy::{Shares, Tenancy},
};
use skep_store::{NewEvent, Store};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, Notify};

/// Maximum number of waiting deliveries over all targets.
pub(crate) const MAX_WAITING_DELIVERIES: usize = 100_000;
/// Retry delay reported to a caller that finds the outbox full.
const RETRY_AFTER_MS: u32 = 5_000;
/// Minimum time between two counts for refused callers, because counting many deliveries takes
/// long.
const COUNT_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) struct Outbox {
    pub(crate) router: EventRouter,
    store: Store,
    waiting: Mutex<Waiting>,
    max_waiting: usize,
    count_interval: Duration,
    tenancy: Tenancy,
    /// Rung when something may be due earlier than expected.
    bell: Notify,
}

/// An upper bound of the waiting deliveries. The next count notices those that have finished
/// meanwhile.
#[derive(Default)]
struct Waiting {
    shares: Shares,
    counted_at: Option<Instant>,
}

impl Outbox {
    pub(crate) fn new(store: Store, tenancy: Tenancy) -> Self {
        let (router, waiting, bell) = (EventRouter::default(), Mutex::default(), Notify::new());
        let (max_waiting, count_interval) = (MAX_WAITING_DELIVERIES, COUNT_INTERVAL);
        Outbox { router, store, waiting, max_waiting, count_interval, tenancy, bell }
    }

    /// Wakes the courier, because a row may be due.
    pub(crate) fn ring(&self) {
        self.bell.notify_one();
    }

    /// Resolves when a row may be due.
    pub(crate) async fn rung(&self) {
        self.bell.notified().await;
    }

    /// Reserves room for this many deliveries of a tenant's event, which the caller writes next.
    pub(crate) async fn reserve(&self, tenant: &str, deliveries: usize) -> Result<(), RuntimeError> {
        if deliveries == 0 {
            return Ok(());
        }
        let mut waiting = self.waiting.lock().await;
        let may_take = |waiting: &Waiting| {
            waiting.counted_at.is_some()
                && waiting.shares.may_take(tenant, deliveries, self.max_waiting, self.tenancy.has_several())
        };
        if !may_take(&waiting) && waiting.counted_at.is_none_or(|at| at.elapsed() >= self.count_interval) {
            let counted = self.store.count_deliveries().await?;
            *waiting = Waiting { shares: counted.into_iter().collect(), counted_at: Some(Instant::now()) };
        }
        if may_take(&waiting) {
            waiting.shares.take(tenant, deliveries);
            return Ok(());
        }
        let limit = waiting.shares.all();
        let whose = if limit < self.max_waiting { " (the rest is reserved for other tenants)" } else { "" };
        Err(RuntimeError::OutboxFull { whose, limit, retry_after_ms: RETRY_AFTER_MS })
    }

    /// Returns the event that announces a turn's end, if there is room for it. A full outbox must
    /// not make a turn fail.
    pub(crate) async fn with_room(&self, event: Option<NewEvent>) -> Option<NewEvent> {
        let event = event?;
        match self.reserve(&event.principal, event.deliveries.len()).await {
            Ok(()) => {
                metrics::counter!(metric::EVENTS, "source" => "host").increment(1);
                Some(event)
            }
            Err(error) => {
                tracing::error!(topic = event.topic, "cannot publish the end of a turn: {error}");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_store::{AgentRow, NewDelivery, Target};

    async fn outbox(max_waiting: usize) -> Outbox {
        let store = Store::for_tests().await.expect("a database in memory");
        let agent = AgentRow {
            name: "a".into(),
            manifest: String::new(),
            digest: "d".into(),
            deployed_at_ms: 1,
            deployed_by: "ann".into(),
        };
        store.put_agent(&agent, b"component", &[]).await.expect("stored");
        Outbox { max_waiting, count_interval: Duration::ZERO, ..Outbox::new(store, Tenancy::default()) }
    }

    async fn publish(outbox: &Outbox, id: &str, principal: &str, deliveries: usize) {
        let target = Target::Session { agent: "a".into(), session: "s".into() };
        let event = NewEvent {
            source: "shop".into(),
            id: id.into(),
            topic: "t".into(),
            data: None,
            principal: principal.into(),
            hops: 0,
            at_ms: 1,
            deliveries: vec![NewDelivery { target, undeliverable: None }; deliveries],
        };
        outbox.store.publish(&event, 1).await.expect("written");
    }

    #[tokio::test]
    async fn a_full_outbox_refuses_until_deliveries_finish() {
        let outbox = outbox(2).await;
        outbox.reserve("p", 2).await.expect("there is room for two");
        publish(&outbox, "1", "p", 2).await;
        let refused = outbox.reserve("p", 1).await.expect_err("it is full");
        assert!(matches!(refused, RuntimeError::OutboxFull { limit: 2, .. }), "{refused}");
        outbox.reserve("p", 0).await.expect("zero deliveries need no room");
        outbox.store.delete_session("a", "s").await.expect("deleted");
        outbox.reserve("p", 2).await.expect("there is room again");
    }

    #[tokio::test]
    async fn a_tenant_with_many_deliveries_leaves_room_for_others() {
        let outbox = outbox(100).await;
        outbox.tenancy.set_several(true);
        publish(&outbox, "1", "greedy", 75).await;
        let refused = outbox.reserve("greedy", 1).await.expect_err("its share is used up");
        assert!(refused.to_string().contains("other tenants"), "{refused}");
        outbox.reserve("other", 10).await.expect("there is room for others");
        publish(&outbox, "2", "other", 10).await;
        outbox.reserve("other", 16).await.expect_err("the remaining room is too small");
    }
}
