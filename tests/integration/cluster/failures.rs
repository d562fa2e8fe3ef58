//! A host is killed in the middle of a turn, and another one hangs for longer than its lease: both turns end elsewhere, once,
//! and the host that comes back changes nothing.

use super::{
    deploy,
    gate::Gate,
    nodes::{Node, PATIENCE, Site, answered_by, until},
};
use crate::durability::Seen;
use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Begins a turn of the guest `gate` at its owner, and waits until it is in the middle of its work. Returns its path.
async fn begun(owner: &Node, session: &str, gate: &Gate) -> String {
    let (turn, accepted_by) = owner.begin(session, &gate.url).await;
    assert_eq!(accepted_by, owner.number);
    gate.has(1).await;
    turn
}

/// Follows a turn through one host after the other, each after the last event that was seen, until it has ended.
async fn follow(nodes: &[&Node], turn: &str) -> Seen {
    let (mut seen, events, end) = (Seen::default(), watch::Sender::new(0), Instant::now() + PATIENCE);
    for node in nodes.iter().cycle() {
        assert!(Instant::now() < end, "{turn} did not end; the last event is {:?}", seen.last_id);
        let request = node.request(Method::GET, &format!("{turn}/events"));
        let request = match seen.last_id {
            Some(last) => request.header("last-event-id", last),
            None => request,
        };
        match request.send().await {
            Ok(response) if response.status() == 200 => seen.read(response, &events).await,
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
        if seen.done.is_some() {
            break;
        }
    }
    seen
}

/// Checks that a turn was done once, at another host than this one, and that its clients saw it whole.
async fn is_done_once(nodes: &[&Node], session: &str, turn: &str, seen: Seen, gone: u64) {
    let done = seen.done.expect("the turn has ended");
    assert_eq!((&done["data"], &done["turn"]), (&json!(1), &json!(1)), "{done}");
    assert_eq!(done["text"], seen.said, "what was streamed is the answer");
    assert!(!seen.said.is_empty());
    for node in nodes.iter().copied() {
        let (_, session, owner) = node.get(&format!("/v1/agents/{session}")).await;
        assert_eq!(session["turns"], 1, "{session}");
        assert_ne!(owner, gone);
        let again = follow(&[node], turn).await;
        assert_eq!(
            (again.said, &again.done.expect("it has ended")["text"]),
            (seen.said.clone(), &done["text"])
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_ends_at_another_host_when_its_own_is_killed_or_hangs() {
    let Some(site) = Site::start(false).await else { return };
    let nodes = site.nodes().await;
    deploy(&nodes).await;
    let [a, b, c] = nodes;

    // Both clients have seen the beginning when the host is killed, one of them at the host itself.
    let gate = Gate::start().await;
    let turn = begun(&a, "gate/sessions/killed", &gate).await;
    let first = a.request(Method::GET, &format!("{turn}/events")).send().await.unwrap();
    let (killed, mut seen) = (a.number, Seen::default());
    let (through, reading) = ([&b, &c], watch::Sender::new(0));
    let ((), followed, ()) = tokio::join!(seen.read(first, &reading), follow(&through, &turn), async {
        // The events of the first generation have come.
        let has_begun = reading.subscribe().wait_for(|events| *events >= 2).await.is_ok();
        assert!(has_begun);
        a.kill();
        gate.has(2).await;
        gate.open();
    });
    assert!(seen.done.is_none() && seen.last_id.is_some());
    is_done_once(&through, "gate/sessions/killed", &turn, followed, killed).await;
    // The client of the host that is gone continues where its stream broke off.
    let rest =
        b.request(Method::GET, &format!("{turn}/events")).header("last-event-id", seen.last_id.unwrap());
    seen.read(rest.send().await.unwrap(), &reading).await;
    assert_eq!(seen.done.expect("the turn has ended")["text"], seen.said);
    assert_eq!(gate.arrived(), 2);

    // A message with the same key is the same turn, whichever hosts get it, even at the same time.
    let keyed = async |node: &Node| {
        let request = node.request(Method::POST, "/v1/agents/state/sessions/keyed/messages");
        let request = request.header("idempotency-key", "k").json(&json!({"text": "increment n"}));
        request.send().await.unwrap().json::<Value>().await.unwrap()
    };
    let (one, two) = tokio::join!(keyed(&b), keyed(&c));
    assert_eq!((&one["text"], &one["turn_id"]), (&json!("1"), &two["turn_id"]), "{one} {two}");

    // The owner hangs, and its connections stay open.
    let d = site.node().await;
    d.knows(&["gate"]).await;
    let gate = Gate::start().await;
    let turn = begun(&d, "gate/sessions/hung", &gate).await;
    let hung = d.number;
    d.signal("-STOP");
    let (followed, ()) = tokio::join!(follow(&through, &turn), async {
        gate.has(2).await;
        gate.open();
    });
    is_done_once(&through, "gate/sessions/hung", &turn, followed, hung).await;
    let stored = async || {
        let export = b.ok(Method::GET, "/v1/agents/gate/sessions/hung/export", Value::Null).await;
        (export["turns"].clone(), export["state"].clone(), export["conversations"].clone())
    };
    let before = stored().await;

    // It continues in the middle of its turn, and learns that it was replaced.
    d.signal("-CONT");
    let (status, log) = d.exited().await;
    assert_eq!(status, Some(1), "{log}");
    assert!(log.contains("another host") && log.contains("hint:"), "{log}");
    assert_eq!(stored().await, before);
    assert_eq!(b.say("gate/sessions/hung", &gate.url).await.0["data"], 2);
    let listed = c.ok(Method::GET, "/v1/cluster", Value::Null).await;
    let hosts = listed["hosts"].as_array().unwrap().iter();
    let numbers: Vec<u64> = hosts.map(|host| host["number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, [b.number.min(c.number), b.number.max(c.number)], "{listed}");

    // The survivor of all takes everything over.
    let owner = b.say("state/sessions/last", "increment n").await.1;
    assert_eq!(owner, b.number);
    b.kill();
    until(async || {
        let path = "/v1/agents/state/sessions/last/messages";
        let sent = c
            .request(Method::POST, path)
            .header("idempotency-key", "last")
            .json(&json!({"text": "increment n"}));
        let Ok(answer) = sent.send().await else { return false };
        answered_by(&answer) == c.number && answer.json::<Value>().await.unwrap()["text"] == "2"
    })
    .await;
}
