//! HTTP requests in the harness, covering the behavior that authors rely on.

use serde::{Deserialize, Serialize};
use serde_json::json;
use skep_sdk::testing::{Harness, ScriptedWeb};
use skep_sdk::{AgentError, Context, HttpError, Message, Reply, agent};
use std::time::Duration;

#[derive(Deserialize)]
struct Order {
    status: String,
}

#[derive(Serialize)]
struct Note<'a> {
    text: &'a str,
}

/// Looks orders up and writes notes.
#[agent]
async fn clerk(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let orders = "https://api.example.com/orders";
    match message.text.split_once(' ') {
        Some(("note", text)) => {
            let request = cx
                .http()
                .post(orders)
                .idempotency_key("note-1")
                .bearer(cx.secret("KEY")?)
                .json(&Note { text });
            let response = request.timeout(Duration::from_secs(2)).send().await?;
            Ok(Reply::text(format!(
                "{} {}",
                response.status,
                response.header("Content-Type").unwrap_or("none")
            )))
        }
        _ => {
            let response = cx.http().get(orders).query("id", &message.text).query("a&b", 1).send().await?;
            let order: Order = response.error_for_status()?.json()?;
            Ok(Reply::text(order.status))
        }
    }
}

#[test]
fn a_request_contains_everything_set_on_the_builder() {
    let web = ScriptedWeb::new().text("POST", "https://api.example.com/orders", 201, "noted");
    let mut harness = Harness::new(clerk).web(web);
    assert_eq!(harness.send("note hello").expect("answered").reply.text, "201 text/plain");
    let request = harness.requests().pop().expect("one");
    let header = |name: &str| {
        let found = request.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    };
    assert_eq!(request.body.as_deref(), Some(br#"{"text":"hello"}"#.as_slice()));
    assert_eq!(header("content-type"), Some("application/json"));
    assert_eq!(
        (header("authorization"), header("idempotency-key")),
        (Some("Bearer secret.KEY.test"), Some("note-1"))
    );
    assert_eq!(request.timeout_ms, Some(2_000));
}

#[test]
fn a_query_is_escaped_and_responses_arrive_in_order() {
    let url = "https://api.example.com/orders?id=7%2F%C3%A4&a%26b=1";
    let web = ScriptedWeb::new()
        .json("GET", url, 200, &json!({"status": "packed"}))
        .json("GET", url, 200, &json!({"status": "shipped"}))
        .json("GET", url, 404, &json!({}))
        .json("GET", url, 200, &json!({"other": 1}))
        .fail("GET", url, HttpError::Timeout);
    let mut harness = Harness::new(clerk).web(web);
    for status in ["packed", "shipped"] {
        assert_eq!(harness.send("7/ä").expect("answered").reply.text, status);
    }
    let mut error = || match harness.send("7/ä").expect_err("the response is an error") {
        AgentError::Http(error) => error,
        other => panic!("{other}"),
    };
    assert_eq!(error(), HttpError::Status { status: 404, url: url.into() });
    assert!(matches!(error(), HttpError::Failed(why) if why.contains("missing field `status`")));
    assert_eq!(error(), HttpError::Timeout);
}

#[test]
#[should_panic(expected = "the agent requests GET https://api.example.com/orders?id=1&a%26b=1")]
fn a_request_without_a_scripted_response_panics() {
    let _ = Harness::new(clerk).send("1");
}

#[test]
fn a_query_replaces_the_fragment_of_an_address() {
    /// Reads the address that it gets.
    #[agent]
    async fn reader(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
        let response = cx.http().get(message.text).query("id", 7).query("page", 2).send().await?;
        Ok(Reply::text(response.text()?))
    }

    for (address, requested) in [
        ("https://example.com/orders#top", "https://example.com/orders?id=7&page=2"),
        ("https://example.com/orders?a=1#top?x", "https://example.com/orders?a=1&id=7&page=2"),
        ("https://example.com/orders#top?x", "https://example.com/orders?id=7&page=2"),
    ] {
        let web = ScriptedWeb::new().text("GET", requested, 200, "found");
        let reply = Harness::new(reader).web(web).send(address).expect("answered").reply;
        assert_eq!(reply.text, "found", "{address}");
    }
}
