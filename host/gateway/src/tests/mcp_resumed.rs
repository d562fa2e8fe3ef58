//! Tests of streams of MCP sessions that clients continue after their connection was lost.

use super::{
    fixture::Server,
    mcp::{initialize, post},
    turns,
};
use axum::{body::Body, http::Request};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde_json::{Value, json};
use std::sync::Arc;

/// An event: its id, and its message if it has one.
type Event = (String, Option<Value>);

struct Client {
    server: Arc<Server>,
    session: String,
}

impl Client {
    async fn begin() -> Client {
        Client::begin_at(Arc::new(turns::server().await)).await
    }

    /// Begins another session at the same host.
    async fn beside(&self) -> Client {
        Client::begin_at(self.server.clone()).await
    }

    async fn begin_at(server: Arc<Server>) -> Client {
        let begun = server.send(post(&initialize(), &[])).await;
        let session = begun.headers["mcp-session-id"].to_str().unwrap().to_owned();
        let note = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        assert_eq!(server.send(post(&note, &[("mcp-session-id", &session)])).await.status, 202);
        Client { server, session }
    }

    /// Sends a request, and returns the events of its stream.
    async fn send(&self, id: u64, method: &str, params: Value) -> Vec<Event> {
        let request = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        let answer = self.server.send(post(&request, &[("mcp-session-id", &self.session)])).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        events(&answer.text)
    }

    async fn call(&self, id: u64, meta: Value) -> Vec<Event> {
        let params = json!({"name": "echo", "arguments": {"text": "hello"}, "_meta": meta});
        self.send(id, "tools/call", params).await
    }

    /// Continues a stream after an event, and returns its messages.
    async fn resume(&self, last_event_id: &str) -> Vec<Event> {
        let request = Request::get("/mcp")
            .header("host", "skep.example")
            .header("accept", "text/event-stream")
            .header("mcp-session-id", &self.session)
            .header("last-event-id", last_event_id);
        let answer = self.server.send(request.body(Body::empty()).unwrap()).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        events(&answer.text).into_iter().filter(|(_, message)| message.is_some()).collect()
    }
}

fn events(text: &str) -> Vec<Event> {
    let event = |text: &str| {
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        Some((field("id:")?.to_owned(), field("data:").and_then(|data| serde_json::from_str(data).ok())))
    };
    text.split("\n\n").filter_map(event).collect()
}

#[tokio::test]
async fn a_client_gets_the_result_of_a_call_that_ended_while_it_was_away_once() {
    let client = Client::begin().await;
    for (id, meta) in [(5, json!({})), (6, json!({"skep.dev/idempotency_key": "k"}))] {
        let seen = client.call(id, meta).await;
        let (answered, answer) = seen.last().unwrap().clone();
        let answer = answer.expect("the last event is the answer");
        assert_eq!((&answer["id"], &answer["result"]["isError"]), (&json!(id), &json!(false)), "{answer}");
        // The event before the answer names the turn of the call.
        let (named, message) = &seen[seen.len() - 2];
        assert!(message.is_none(), "{seen:?}");
        let again = client.resume(named).await;
        assert_eq!(again.len(), 1, "{again:?}");
        assert_eq!(again[0].1.as_ref(), Some(&answer));
        for last in [&answered, &again[0].0] {
            assert!(client.resume(last).await.is_empty(), "the client has seen the answer");
        }
    }
}

#[tokio::test]
async fn a_client_learns_that_an_answer_is_lost() {
    let client = Client::begin().await;
    let seen = client.send(8, "tools/list", json!({})).await;
    let (_, lost) = client.resume(&seen[0].0).await.remove(0);
    let lost = lost.unwrap();
    let error = &lost["error"];
    assert_eq!((&lost["id"], &error["code"]), (&json!(8), &json!(-32_050)), "{lost}");
    assert_eq!(error["data"]["skep.dev/code"], "answer_lost");
    // The call was refused, and nothing of it is stored.
    for (arguments, code) in [
        (json!({"text": 7}), "outcome_unknown"),
        (json!({"text": "a", "session": "rival/s"}), "invalid_name"),
    ] {
        let seen = client.send(9, "tools/call", json!({"name": "echo", "arguments": arguments})).await;
        let (_, answer) = client.resume(&seen[0].0).await.remove(0);
        let answer = answer.unwrap();
        assert_eq!(answer["result"]["_meta"]["skep.dev/code"], code, "{answer}");
    }
}

#[tokio::test]
async fn a_call_that_guesses_the_key_of_another_one_does_not_get_its_result() {
    let (client, meta) =
        (Client::begin().await, json!({"skep.dev/session": "s", "skep.dev/idempotency_key": "k"}));
    client.call(5, meta.clone()).await;
    let params = json!({"name": "echo", "arguments": {"text": "another"}, "_meta": meta});
    let seen = client.send(6, "tools/call", params).await;
    for (id, _) in seen.iter().filter(|(_, message)| message.is_none()) {
        let (_, answer) = client.resume(id).await.remove(0);
        let answer = answer.unwrap();
        assert_eq!(answer["result"]["_meta"]["skep.dev/code"], "outcome_unknown", "{answer}");
    }
}

#[tokio::test]
async fn a_ticket_that_somebody_made_up_or_took_from_another_session_opens_nothing() {
    let client = Client::begin().await;
    let other = client.beside().await;
    let seen = client.call(5, json!({"skep.dev/idempotency_key": "k"})).await;
    let called = json!({"n": "echo", "s": "s", "k": "k", "p": "k"});
    let made_up = URL_SAFE_NO_PAD.encode(json!({"i": 5, "c": called}).to_string());
    for foreign in [&seen[0].0, &format!("0/1~{made_up}"), &"0/1".to_owned(), &"0/1~-".to_owned()] {
        let (_, lost) = other.resume(foreign).await.remove(0);
        let lost = lost.unwrap();
        let code = &lost["error"]["data"]["skep.dev/code"];
        assert_eq!((lost.get("id"), code), (None, &json!("answer_lost")), "{foreign}: {lost}");
    }
}
