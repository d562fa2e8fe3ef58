//! Tests of events, from their publisher to the sessions that handle them.

use super::{
    fixture::{Host, Setup, until},
    guest::{Guest, echo},
    store_faults::every_third_time,
    tools::{caller, finder, granting},
    waker::waker,
};
use crate::{Clock, Event, EventSummary, RuntimeOptions};
use serde_json::{Value, json};
use skep_store::Moment;
use std::time::Duration;

const TRIGGER: &str = "[grants]\nevents = [\"order.*\", \"ping.*\"]\n[[trigger.event]]\ntopic = \"*.*\"\n";

async fn start(session: &str) -> (Host, Clock) {
    let clock = Clock::at(1_800_000_000_000);
    let host = Host::with(Setup::at(&clock, RuntimeOptions::default())).await;
    host.deploy("w", &format!("{TRIGGER}session = \"{session}\""), waker()).await.expect("deploys");
    (host, clock)
}

fn event(id: &str, topic: &str, data: Value) -> Event {
    Event {
        id: Some(id.into()),
        source: "shop".into(),
        topic: topic.into(),
        data: Some(data.into()),
        at_ms: None,
        principal: "local".into(),
    }
}

async fn taken(host: &Host, session: &str, count: usize) {
    until(async || (host.answer("w", session, "E").await.len() == count).then_some(())).await;
}

/// Returns the newest event once all its deliveries have finished.
async fn over(host: &Host) -> EventSummary {
    until(async || {
        let newest = host.agents.events(None, 1).await.expect("listed").into_iter().next();
        newest.filter(|event| event.pending == 0)
    })
    .await
}

#[tokio::test]
async fn an_event_is_delivered_once_to_the_session_that_it_names() {
    let (host, _clock) = start("{data.order_id}").await;
    let paid = event("1", "order.paid", json!({"order_id": "o-7"}));
    let published = host.agents.publish(paid.clone()).await.expect("taken");
    assert_eq!((published.deliveries, published.is_known), (1, false));
    taken(&host, "o-7", 1).await;
    assert!(host.agents.publish(paid).await.expect("taken").is_known);
    over(&host).await;
    taken(&host, "o-7", 1).await;
    let lost = host.agents.publish(event("2", "order.paid", json!({}))).await.expect("taken");
    assert_eq!(lost.deliveries, 1);
    assert_eq!(over(&host).await.dead, 1, "no session can receive the event");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_event_is_handled_once_despite_database_faults() {
    const SESSIONS: [&str; 4] = ["o-1", "o-2", "o-3", "o-4"];
    for at in [Moment::Begin, Moment::Write, Moment::Commit, Moment::Committed] {
        let (host, clock) = start("{data.order_id}").await;
        host.store().faults().choose(every_third_time(at));
        for session in SESSIONS {
            // The publisher sees the fault and publishes again.
            let paid = event(session, "order.paid", json!({ "order_id": session }));
            until(async || host.agents.publish(paid.clone()).await.ok()).await;
        }
        until(async || {
            // Postponed deliveries become due.
            clock.advance(1_000);
            tokio::time::sleep(Duration::from_millis(5)).await;
            let events = host.agents.events(None, 10).await.expect("listed");
            (events.len() == 4 && events.iter().all(|event| event.pending == 0)).then_some(())
        })
        .await;
        host.store().faults().end();
        for session in SESSIONS {
            assert_eq!(host.answer("w", session, "E").await.len(), 1, "{at:?}: {session}");
        }
        assert!(host.agents.dead_letters(None, 10).await.expect("listed").is_empty());
    }
}

#[tokio::test]
async fn a_failing_event_is_retried_and_then_becomes_a_dead_letter() {
    let (host, clock) = start("s").await;
    host.agents.publish(event("1", "trap.x", json!(null))).await.expect("taken");
    let dead = until(async || {
        // Everything that waits becomes due, and what is running is not disturbed.
        clock.advance(1_000_000);
        let newest = host.agents.events(None, 1).await.expect("listed").remove(0);
        (newest.dead == 1).then_some(newest)
    })
    .await;
    assert_eq!(dead.pending, 0);
    host.agents.publish(event("2", "order.paid", json!(null))).await.expect("taken");
    taken(&host, "s", 1).await;
}

#[tokio::test]
async fn emitted_events_are_delivered_after_the_commit_and_only_if_granted() {
    let (host, _clock) = start("{data.order_id}").await;
    host.answer("w", "who-tells", "e").await;
    taken(&host, "s", 1).await;
    let payload = over(&host).await;
    assert_eq!((payload.source.as_str(), payload.topic.as_str()), ("agent:w", "order.paid"));
    host.ask("w", "who-tells", "d").await.expect_err("the topic is not granted");
    assert_eq!(host.agents.events(None, 10).await.expect("listed").len(), 1);
}

#[tokio::test]
async fn an_event_loop_ends_at_the_hop_limit() {
    let (host, _clock) = start("s").await;
    host.answer("w", "s", "p").await;
    taken(&host, "s", 8).await;
    over(&host).await;
    assert_eq!(host.agents.events(None, 100).await.expect("listed").len(), 8);
}

/// Returns a guest whose tool `find` emits `ping.x`, if it may.
fn ringer() -> Guest {
    let emit = r#"(import "skep:agent/events@0.1.1" "emit" (func $emit (param i32 i32 i32 i32 i32 i32)))"#;
    let ring = r#"(call $emit (i32.const 3000) (i32.const 6) (i32.const 0) (i32.const 0) (i32.const 0)
        (i32.const 3100))"#;
    let guest = finder(emit, ring, 0);
    Guest { module: format!(r#"{} (data (i32.const 3000) "ping.x")"#, guest.module).leak(), ..guest }
}

/// Handles every event by calling the ringer's tool.
fn answerer() -> Guest {
    let guest = caller();
    let on_event = r#"
        (data (i32.const 3000) "agent:ringer/find")
        (func (export "skep:agent/event-handler@0.1.1#on-event")
            (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i64 i64 i64 i32) (result i32)
            (call $call (i32.const 3000) (i32.const 17) (i32.const 512) (i32.const 8)
                (i32.const 0) (i32.const 0) (i32.const 600))
            (i32.store8 (i32.const 200) (i32.const 0))
            (i32.const 200))"#;
    let module = format!("{} {on_event}", guest.module).leak();
    Guest { world: "export skep:agent/event-handler@0.1.1;", module, ..guest }
}

#[tokio::test]
async fn an_event_loop_through_tool_calls_ends_at_the_hop_limit() {
    let host = Host::with(granting(&["agent:*/*"])).await;
    host.deploy("ringer", "[grants]\nevents = [\"ping.*\"]", ringer()).await.expect("deploys");
    let manifest =
        "[grants]\ntools = [\"agent:ringer/find\"]\n[[trigger.event]]\ntopic = \"ping.x\"\nsession = \"s\"";
    host.deploy("answerer", manifest, answerer()).await.expect("deploys");
    host.answer("answerer", "s", "agent:ringer/find").await;
    // The event caused by a delivery is stored before that delivery finishes.
    over(&host).await;
    assert_eq!(host.agents.events(None, 100).await.expect("listed").len(), 8);
}

#[tokio::test]
async fn the_end_of_a_turn_is_published_to_subscribers() {
    let (host, _clock) = start("s").await;
    let manifest = "[[trigger.event]]\ntopic = \"skep.turn.*\"\nsession = \"watch\"";
    host.deploy("watcher", manifest, waker()).await.expect("deploys");
    host.answer("w", "s", "n").await;
    host.ask("w", "s", "t").await.expect_err("the guest traps");
    let watched = async |text| host.answer("watcher", "watch", text).await.len();
    // The watcher's own turns end too, so the number keeps growing.
    until(async || (watched("E").await >= 2).then_some(())).await;
    let payload = host.agents.events(None, 100).await.expect("listed");
    let of = |topic: &str| {
        payload
            .iter()
            .rfind(|event| event.topic == topic)
            .and_then(|event| event.data.as_ref())
            .expect("the event is published")
            .value()
    };
    let (done, failed) = (of("skep.turn.done"), of("skep.turn.failed"));
    assert_eq!((&done["agent"], &done["session"], &done["turn"]), (&json!("w"), &json!("s"), &json!(1)));
    assert_eq!(failed["error"]["code"], "agent_trapped");
    assert!(
        payload
            .iter()
            .all(|event| event.data.as_ref().expect("data").value()["turn_id"] == event.id.as_str()),
        "each end is published once, under the id of its turn"
    );
}

#[tokio::test]
async fn invalid_events_are_refused() {
    let (host, _clock) = start("s").await;
    for (refused, why) in [
        (event("1", "no topic", json!(null)), "is not a valid topic"),
        (event("1", "skep.turn.done", json!(null)), "reserved for the host"),
        (event("", "order.paid", json!(null)), "1 to 128"),
        (event("1", "order.paid", json!("x".repeat(300_000))), "are allowed"),
        (Event { source: "agent:w".into(), ..event("1", "order.paid", json!(null)) }, "reserved for agents"),
    ] {
        let error = host.agents.publish(refused).await.expect_err(why);
        assert!(error.code() == "invalid_event" && error.to_string().contains(why), "{error}");
    }
    let manifest = "[[trigger.event]]\ntopic = \"a.*\"\nsession = \"s\"";
    let refused =
        host.deploy("e", manifest, echo()).await.expect_err("the component exports no handler").to_string();
    assert!(refused.contains("[[trigger.event]]") && refused.contains("event-handler"), "{refused}");
}
