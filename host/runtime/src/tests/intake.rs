//! Tests of message data on its way to the guest, and of the limits on waiting bytes.

use super::{
    fixture::{Host, invocation, until},
    guest::{Guest, echo, spinner},
};
use crate::{Invocation, Json, RuntimeError, RuntimeOptions, WaitingBytes};

const PATIENT: &str = "[limits]\ncpu_ms = 30000";

/// Replies with the data of its message.
fn data_echo() -> Guest {
    Guest {
        on_message: r#"
            (local.set $text (i32.load offset=12 (local.get $message)))
            (local.set $length (i32.load offset=16 (local.get $message)))"#,
        pages: 400,
        ..Guest::default()
    }
}

fn held(host: &Host) -> usize {
    host.agents.waiting_bytes()
}

#[tokio::test]
async fn data_reaches_the_guest_byte_for_byte() {
    let host = Host::start().await;
    host.deploy("echo", "", data_echo()).await.expect("valid");
    let text = "{\"b\" : [1,  2.50, 1e2],\n \"a\":\"\\u00e9\\/\", \"b\":null}";
    for detached in [false, true] {
        let data = Some(Json::from_text(text.to_owned()).expect("JSON"));
        let invocation = Invocation { data, detached, ..invocation("echo", "s", "") };
        let outcome = host.agents.invoke(invocation).await.expect("taken").outcome().await;
        assert_eq!(outcome.expect("the turn succeeds").text, text);
    }
}

#[tokio::test]
async fn data_of_many_values_costs_only_its_text() {
    let host = Host::start().await;
    host.deploy("echo", "", data_echo()).await.expect("valid");
    // The data would take thirty times as much memory as parsed values.
    let data = Json::from_text(format!("[{}0]", "0,".repeat(3 << 20))).expect("JSON");
    let bytes = data.get().len();
    let message = Invocation { data: Some(data.clone()), detached: true, ..invocation("echo", "s", "") };
    let copy = message.clone();
    assert!(std::ptr::eq(copy.data.as_ref().expect("data").get(), data.get()), "copies share the text");
    let outcome =
        host.agents.invoke(message).await.expect("taken").outcome().await.expect("the turn succeeds");
    assert_eq!((outcome.text.len(), outcome.text == data.get()), (bytes, true));
}

#[tokio::test]
async fn a_message_resent_with_different_whitespace_is_the_same() {
    let host = Host::start().await;
    host.deploy("echo", "", data_echo()).await.expect("valid");
    let send = async |text: &str| {
        let data = Some(Json::from_text(text.to_owned()).expect("JSON"));
        let idempotency_key = Some("k".to_owned());
        host.agents.invoke(Invocation { data, idempotency_key, ..invocation("echo", "s", "") }).await
    };
    let first = send("{\"a\":1}").await.expect("taken");
    let id = first.turn_id().to_owned();
    first.outcome().await.expect("the turn succeeds");
    let again = send("{ \"a\": 1 }").await.expect("the same");
    assert_eq!(again.turn_id(), id);
    assert_eq!(send("{\"a\":2}").await.expect_err("another").code(), "invalid_message");
}

#[tokio::test]
async fn waiting_messages_over_the_limit_are_refused_before_they_are_stored() {
    let waiting_bytes = WaitingBytes { session: 1_000, tenant: 1_500, host: 2_000 };
    let host = Host::with(RuntimeOptions { waiting_bytes, ..RuntimeOptions::default() }).await;
    host.deploy("spin", PATIENT, spinner()).await.expect("valid");
    let send = async |tenant: &str, session: &str| {
        let text = "s".repeat(600);
        let message = invocation("spin", session, &text);
        host.agents.invoke(Invocation { principal: tenant.into(), detached: true, ..message }).await
    };
    let refused = async |tenant: &str, session: &str| {
        let error = send(tenant, session).await.expect_err("there is no room");
        assert!(matches!(error, RuntimeError::IntakeFull { retry_after_ms: 1_000, .. }), "{error}");
        error.to_string()
    };
    let first = send("local", "a").await.expect("room");
    assert!(refused("local", "a").await.contains("in the session"));
    send("local", "b").await.expect("room in another session");
    assert!(refused("local", "c").await.contains("for the tenant"));
    send("acme", "acme/a").await.expect("room for another tenant");
    assert!(refused("acme", "acme/b").await.contains("on the host"));
    assert_eq!((host.open_turns().await, held(&host)), (3, 1_800), "refused messages leave nothing behind");
    // A cancelled message releases its memory.
    host.agents.cancel_turn("spin", "a", first.turn_id()).await.expect("the turn is running");
    assert_eq!(first.outcome().await.expect_err("cancelled").code(), "cancelled");
    assert_eq!(held(&host), 1_200);
    send("local", "a").await.expect("room again");
    // A message that exceeds a limit by itself must not be retried.
    let large = host.ask("spin", "z", &"x".repeat(1_001)).await.expect_err("never");
    assert_eq!(large.code(), "invalid_message");
    assert!(large.to_string().contains("`max_waiting_bytes_per_session`"), "{large}");
}

#[tokio::test]
async fn a_turn_releases_its_messages_memory_before_its_end_is_reported() {
    let host = Host::start().await;
    host.deploy("echo", "", echo()).await.expect("valid");
    let trap = Guest { on_message: "unreachable", ..Guest::default() };
    host.deploy("trap", "", trap).await.expect("valid");
    for detached in [false, true] {
        for agent in ["echo", "trap"] {
            let message = Invocation { detached, ..invocation(agent, "s", "hello") };
            let ended = host.agents.invoke(message).await.expect("taken").outcome().await;
            assert_eq!((ended.is_ok(), held(&host)), (agent == "echo", 0));
        }
    }
    // The client goes away before its turn has started.
    host.deploy("spin", PATIENT, spinner()).await.expect("valid");
    let running = host.invoke("spin", "s", "spin").await.expect("taken");
    let waiting = host.invoke("spin", "s", "waits").await.expect("taken");
    assert_eq!(held(&host), 9);
    drop(waiting);
    drop(running);
    until(async || (held(&host) == 0).then_some(())).await;
}

#[tokio::test]
async fn messages_left_by_the_last_process_count_too() {
    let host = Host::start().await;
    host.deploy("spin", PATIENT, spinner()).await.expect("valid");
    for session in ["a", "b"] {
        let message = invocation("spin", session, &"s".repeat(500));
        host.agents.invoke(Invocation { detached: true, ..message }).await.expect("taken");
    }
    let host = host.restart().await;
    let bytes = held(&host);
    assert!((1_000..2_000).contains(&bytes), "{bytes}");
}
