//! Tests of the outbox: events are stored once, each target gets one delivery at a time, and dead deliveries
//! stay until they are redelivered.

use crate::{
    deliveries::due_statement,
    events::DEAD_KEPT_MS,
    sql::{AssertSqlSafe, Dialect, query},
    *,
};
use std::collections::{BTreeMap, BTreeSet};

async fn with_agent() -> Store {
    let store = Store::for_tests().await.unwrap();
    put_agent(&store, "a").await;
    put_webhook(&store, "w").await;
    store
}

async fn put_agent(store: &Store, name: &str) {
    let agent = AgentRow {
        name: name.into(),
        manifest: String::new(),
        digest: "d".into(),
        deployed_at_ms: 1,
        deployed_by: "ann".into(),
    };
    store.put_agent(&agent, b"component", &[]).await.unwrap();
}

async fn put_webhook(store: &Store, id: &str) {
    let webhook = WebhookRow {
        id: id.into(),
        url: "https://example.com".into(),
        topics: "*".into(),
        sealed_secret: "s".into(),
        configured: false,
        created_at_ms: 1,
        disabled: None,
        last_try: None,
    };
    store.put_webhook(&webhook).await.unwrap();
}

fn to(session: &str) -> NewDelivery {
    to_session("a", session)
}

fn to_session(agent: &str, session: &str) -> NewDelivery {
    NewDelivery {
        target: Target::Session { agent: agent.into(), session: session.into() },
        undeliverable: None,
    }
}

fn webhook() -> NewDelivery {
    to_webhook("w")
}

fn to_webhook(id: &str) -> NewDelivery {
    NewDelivery { target: Target::Webhook(id.into()), undeliverable: None }
}

fn event(id: &str, deliveries: Vec<NewDelivery>) -> NewEvent {
    NewEvent {
        source: "shop".into(),
        id: id.into(),
        topic: "order.paid".into(),
        data: Some(b"{}".to_vec()),
        principal: "p".into(),
        hops: 0,
        at_ms: 5,
        deliveries,
    }
}

async fn deliveries(store: &Store) -> usize {
    store.count_deliveries().await.unwrap().into_iter().map(|(_, count)| count).sum()
}

async fn due(store: &Store, now_ms: u64) -> Vec<Delivery> {
    store.due_deliveries(now_ms, 10).await.unwrap()
}

#[tokio::test]
async fn a_long_queue_of_one_tenant_does_not_hide_deliveries_of_others() {
    let store = with_agent().await;
    for number in 0..20 {
        let session = number.to_string();
        store.publish(&event(&session, vec![to(&session)]), number).await.unwrap();
    }
    let other = NewEvent { principal: "q".into(), ..event("other", vec![to("other")]) };
    store.publish(&other, 100).await.unwrap();
    let first = store.due_deliveries(1_000, 3).await.unwrap();
    let tenants: Vec<&str> = first.iter().map(|delivery| delivery.principal.as_str()).collect();
    assert_eq!(tenants, ["p", "q", "p"]);
}

#[tokio::test]
async fn an_event_is_accepted_once_per_source_and_id() {
    let store = with_agent().await;
    assert_eq!(store.publish(&event("1", vec![to("s")]), 10).await.unwrap(), Published::New);
    assert_eq!(store.publish(&event("1", vec![to("s")]), 11).await.unwrap(), Published::Known);
    let other = NewEvent { source: "warehouse".into(), ..event("1", vec![]) };
    assert_eq!(store.publish(&other, 12).await.unwrap(), Published::New);
    let events = store.events(None, 10).await.unwrap();
    let seen: Vec<_> = events.iter().map(|event| (event.source.as_str(), event.pending)).collect();
    assert_eq!(seen, [("warehouse", 0), ("shop", 1)]);
    assert_eq!(store.events(Some(events[0].key), 10).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_target_gets_one_event_at_a_time_in_order() {
    let store = with_agent().await;
    for id in ["1", "2"] {
        store.publish(&event(id, vec![to("s"), to("t"), webhook()]), 10).await.unwrap();
    }
    assert!(due(&store, 9).await.is_empty());
    let first = due(&store, 10).await;
    assert_eq!(first.len(), 3);
    assert!(first.iter().all(|delivery| delivery.event_id == "1"));
    assert!(store.begin_delivery(first[0].key, 1, 10).await.unwrap());
    assert!(!store.begin_delivery(first[0].key, 1, 10).await.unwrap());
    assert_eq!(due(&store, 10).await.len(), 2, "the target is busy");
    store.retry_delivery(first[0].key, 1, 50, "no luck").await.unwrap();
    let next: Vec<_> = due(&store, 10).await.into_iter().map(|delivery| delivery.event_id).collect();
    assert_eq!(
        next.iter().filter(|id| *id == "2").count(),
        1,
        "other targets do not wait for one that failed"
    );
    assert_eq!(store.next_delivery_ms(10).await.unwrap(), Some(50));
    assert_eq!(deliveries(&store).await, 6);
    for (attempt, now_ms) in [(1, 60), (2, 49)] {
        let begun = store.begin_delivery(first[0].key, attempt, now_ms).await.unwrap();
        assert!(!begun, "it was read before the attempt that failed");
    }
    assert!(store.begin_delivery(first[0].key, 2, 50).await.unwrap());
}

/// Returns the event that is due next for each target.
async fn due_by_target(store: &Store, now_ms: u64) -> BTreeMap<String, String> {
    let named = |delivery: Delivery| match delivery.target {
        Target::Session { agent, session } => (format!("{agent} {session}"), delivery.event_id),
        Target::Webhook(id) => (id, delivery.event_id),
    };
    let found = due(store, now_ms).await;
    let count = found.len();
    let by_target: BTreeMap<_, _> = found.into_iter().map(named).collect();
    assert_eq!(by_target.len(), count, "a target has one delivery at a time");
    by_target
}

#[tokio::test]
async fn every_session_and_webhook_gets_its_own_events_in_the_order_of_their_times() {
    let store = with_agent().await;
    put_agent(&store, "b").await;
    put_webhook(&store, "v").await;
    for id in ["1", "2", "3"] {
        let sessions = [("b", "s"), ("a", "t"), ("a", "s/1"), ("a", "s")];
        let sessions = sessions.map(|(agent, session)| to_session(agent, session));
        let targets = sessions.into_iter().chain([to_webhook("w"), to_webhook("v")]).collect();
        store.publish(&event(id, targets), 10).await.unwrap();
    }
    let expected = |events: &[(&str, &str)]| -> BTreeMap<String, String> {
        events.iter().map(|(target, event)| ((*target).to_owned(), (*event).to_owned())).collect()
    };
    let all = [("a s", "1"), ("a s/1", "1"), ("a t", "1"), ("b s", "1"), ("v", "1"), ("w", "1")];
    assert_eq!(due_by_target(&store, 10).await, expected(&all));

    let started = async |target: Target, now_ms: u64| {
        let delivery =
            due(&store, now_ms).await.into_iter().find(|delivery| delivery.target == target).unwrap();
        assert!(store.begin_delivery(delivery.key, delivery.attempt + 1, now_ms).await.unwrap());
        delivery.key
    };
    started(to("t").target, 10).await;
    let failed = started(to("s").target, 10).await;
    store.retry_delivery(failed, 1, 50, "no luck").await.unwrap();
    let dead = started(to_webhook("w").target, 10).await;
    store.dead_letter_delivery(dead, "HTTP 500").await.unwrap();
    let next = [("a s", "2"), ("a s/1", "1"), ("b s", "1"), ("v", "1"), ("w", "2")];
    assert_eq!(
        due_by_target(&store, 60).await,
        expected(&next),
        "one that failed goes behind those that wait"
    );

    let failed = started(to("s").target, 60).await;
    store.retry_delivery(failed, 1, 70, "no luck").await.unwrap();
    let failed = started(to("s").target, 60).await;
    store.retry_delivery(failed, 1, 70, "no luck").await.unwrap();
    assert_eq!(due_by_target(&store, 60).await["a s"], "1");
    started(to("s").target, 60).await;
    assert!(!due_by_target(&store, 80).await.contains_key("a s"), "the target is busy");
}

#[tokio::test]
async fn a_look_for_due_deliveries_reads_one_row_of_each_target() {
    let store = with_agent().await;
    if store.readers.dialect() == Dialect::Postgres {
        return;
    }
    for has_statistics in [false, true] {
        if has_statistics {
            for number in 0..300 {
                let targets = vec![to(&(number % 30).to_string()), webhook()];
                store.publish(&event(&number.to_string(), targets), 10).await.unwrap();
            }
            query("ANALYZE").execute(&store.readers).await.unwrap();
        }
        let explain = AssertSqlSafe(format!("EXPLAIN QUERY PLAN {}", due_statement()));
        let steps = query(explain).bind(10_i64).bind(10_i64).fetch_all(&store.readers).await.unwrap();
        let steps: Vec<String> = steps.iter().map(|row| row.get(3)).collect();
        let scanned = steps.iter().filter_map(|step| step.strip_prefix("SCAN ")?.split(' ').next());
        let scanned: BTreeSet<&str> = scanned.filter(|table| !table.starts_with('(')).collect();
        assert_eq!(Vec::from_iter(scanned), ["due", "walked", "webhooks"], "{steps:#?}");
        let mut searched: Vec<&str> =
            steps.iter().filter_map(|step| Some(step.split_once("INDEX deliveries_by_target ")?.1)).collect();
        searched.sort_unstable();
        let firsts =
            ["(agent=? AND session=? AND webhook=?)", "(agent=? AND session>?)", "(agent>?)", "(agent>?)"];
        assert_eq!(searched, firsts, "{steps:#?}");
    }
}

#[tokio::test]
async fn the_commit_of_a_turn_settles_its_delivery_and_publishes_its_events() {
    let store = with_agent().await;
    store.publish(&event("1", vec![to("s")]), 10).await.unwrap();
    let delivery = due(&store, 10).await.remove(0);
    store.begin_delivery(delivery.key, 1, 10).await.unwrap();
    assert_eq!(store.begun_deliveries().await.unwrap()[0].key, delivery.key);
    let commit = TurnCommit {
        agent: "a".into(),
        session: "s".into(),
        turn: 1,
        at_ms: 20,
        trigger: Some(TurnTrigger::Event(delivery.key)),
        events: vec![event("2", vec![to("gone"), webhook()])],
        ..Default::default()
    };
    store.commit_turn(commit).await.unwrap();
    assert!(store.begun_deliveries().await.unwrap().is_empty());
    assert_eq!(due(&store, 20).await.len(), 2);
}

#[tokio::test]
async fn dead_deliveries_are_listed_and_redelivered_unless_undeliverable() {
    let store = with_agent().await;
    let never = NewDelivery { undeliverable: Some("no order_id".into()), ..to("") };
    store.publish(&event("1", vec![webhook(), never]), 10).await.unwrap();
    let delivery = due(&store, 10).await.remove(0);
    store.begin_delivery(delivery.key, 1, 10).await.unwrap();
    store.dead_letter_delivery(delivery.key, "HTTP 500").await.unwrap();
    let dead = store.dead_deliveries(None, 10).await.unwrap();
    let errors: Vec<_> = dead.iter().map(|delivery| delivery.error.as_deref().unwrap()).collect();
    assert_eq!(errors, ["no order_id", "HTTP 500"]);
    assert!(!store.redeliver(dead[0].key, 30).await.unwrap());
    assert!(store.redeliver(delivery.key, 30).await.unwrap());
    assert_eq!(due(&store, 30).await[0].attempt, 0);
}

#[tokio::test]
async fn deliveries_are_removed_with_their_session_agent_or_webhook() {
    let store = with_agent().await;
    store.publish(&event("1", vec![to("s"), to("t"), webhook()]), 10).await.unwrap();
    store.delete_session("a", "s").await.unwrap();
    assert_eq!(deliveries(&store).await, 2);
    store.delete_agent("a").await.unwrap();
    assert_eq!(deliveries(&store).await, 1);
    assert!(store.delete_webhook("w").await.unwrap());
    assert_eq!(deliveries(&store).await, 0);
    store.publish(&event("2", vec![to("s"), webhook()]), 10).await.unwrap();
    assert_eq!(deliveries(&store).await, 0, "all targets are gone");
}

#[tokio::test]
async fn old_events_are_removed_unless_they_are_in_flight() {
    let store = with_agent().await;
    store.publish(&event("open", vec![to("s")]), 1).await.unwrap();
    for number in 0..200 {
        let now_ms = if number < 100 { 2 } else { 2 * EVENT_IDS_KEPT_MS };
        store.publish(&event(&number.to_string(), vec![]), now_ms).await.unwrap();
    }
    let before = |kept_ms: u64| (2 * EVENT_IDS_KEPT_MS).saturating_sub(kept_ms);
    assert_eq!(store.forget_events(before).await.unwrap(), 100);
    let left = store.events(None, 1_000).await.unwrap();
    assert_eq!(left.len(), 101);
    assert_eq!(left.last().unwrap().id, "open");
}

#[tokio::test]
async fn dead_letters_are_kept_longer_than_delivered_events_but_not_forever() {
    let store = with_agent().await;
    let unroutable = NewDelivery { undeliverable: Some("no order_id".into()), ..to("") };
    store.publish(&event("dead", vec![unroutable]), 1).await.unwrap();
    let left = async |now_ms: u64| {
        store.forget_events(|kept_ms| now_ms.saturating_sub(kept_ms)).await.unwrap();
        store.dead_deliveries(None, 10).await.unwrap().len()
    };
    assert_eq!(left(2 * EVENT_IDS_KEPT_MS).await, 1);
    assert_eq!(left(2 * DEAD_KEPT_MS).await, 0);
}

#[tokio::test]
async fn old_events_are_removed_even_behind_many_dead_letters() {
    let store = with_agent().await;
    let unroutable = || NewDelivery { undeliverable: Some("no order_id".into()), ..to("") };
    for number in 0..600 {
        store.publish(&event(&format!("dead{number}"), vec![unroutable()]), 1).await.unwrap();
    }
    for number in 0..300 {
        store.publish(&event(&format!("old{number}"), vec![]), 1).await.unwrap();
    }
    let before = |kept_ms: u64| (2 * EVENT_IDS_KEPT_MS).saturating_sub(kept_ms);
    assert_eq!(store.forget_events(before).await.unwrap(), 300);
    assert_eq!(store.forget_events(before).await.unwrap(), 0);
    assert_eq!(store.dead_deliveries(None, 1_000).await.unwrap().len(), 600);
}

#[tokio::test]
async fn old_events_are_removed_even_behind_events_with_a_time_in_the_future() {
    let store = with_agent().await;
    for number in 0..600 {
        store.publish(&event(&format!("later{number}"), vec![]), 100 * EVENT_IDS_KEPT_MS).await.unwrap();
    }
    for number in 0..300 {
        store.publish(&event(&format!("old{number}"), vec![]), 1).await.unwrap();
    }
    let before = |kept_ms: u64| (2 * EVENT_IDS_KEPT_MS).saturating_sub(kept_ms);
    assert_eq!(store.forget_events(before).await.unwrap(), 300);
}

#[tokio::test]
async fn a_webhook_keeps_its_last_attempt_and_counts_events_in_flight() {
    let store = with_agent().await;
    assert!(store.webhook_queues().await.unwrap().is_empty());
    store.publish(&event("1", vec![webhook(), to("s")]), 10).await.unwrap();
    store.publish(&event("2", vec![webhook()]), 20).await.unwrap();
    let queue = store.webhook_queues().await.unwrap().remove(0);
    assert_eq!((queue.webhook.as_str(), queue.waiting, queue.next_try_at_ms), ("w", 2, 10));
    let last = WebhookTry { at_ms: 30, status: Some(503), error: Some("it is busy".into()) };
    store.note_webhook_try("w", &last).await.unwrap();
    store.note_webhook_try("gone", &last).await.unwrap();
    let row = store.webhooks().await.unwrap().remove(0);
    assert_eq!(row.last_try, Some(last));
    store.put_webhook(&WebhookRow { last_try: None, ..row.clone() }).await.unwrap();
    assert_eq!(
        store.webhooks().await.unwrap(),
        [row],
        "a restart with the same configuration keeps the last attempt"
    );
}
