//! Sessions of MCP clients: any host answers, and a session continues when its host is killed or ends, with its streams.

use super::{
    gate::Gate,
    nodes::{Node, Site, answered_by, until},
};
use reqwest::{Method, Response};
use serde_json::{Value, json};

const REVISION: &str = "2025-06-18";

/// A client that may send each message to another host.
struct Client {
    session: String,
}

/// The messages that a host streams to the client.
struct Messages {
    response: Response,
    text: String,
    /// The id of the last event.
    last_id: String,
}

impl Client {
    /// Begins a session at a host, which may ask the client.
    async fn begin(node: &Node) -> Client {
        let about = json!({"protocolVersion": REVISION, "capabilities": {"elicitation": {}},
            "clientInfo": {"name": "test", "version": "1"}});
        let begun = sent(node, None, json!({"id": 0, "method": "initialize", "params": about})).await;
        assert_eq!(begun.status(), 200);
        let session = begun.headers()["mcp-session-id"].to_str().unwrap().to_owned();
        let answer = Messages::of(begun).answer(0).await;
        assert_eq!(answer["protocolVersion"], REVISION, "{answer}");
        Client { session }
    }

    async fn send(&self, node: &Node, message: Value) -> Response {
        sent(node, Some(&self.session), message).await
    }

    /// Sends a request until a host that lives has the session, and returns the host that answered.
    async fn ask(&self, node: &Node, message: &Value) -> (Messages, u64) {
        loop {
            let response = self.send(node, message.clone()).await;
            // The host of the session was killed a moment ago.
            if response.status() != 503 {
                assert_eq!(response.status(), 200);
                let host = answered_by(&response);
                return (Messages::of(response), host);
            }
        }
    }

    /// Returns the names of the tools, and the host that answered.
    async fn tools(&self, node: &Node) -> (Vec<String>, u64) {
        let (mut messages, host) = self.ask(node, &json!({"id": 1, "method": "tools/list"})).await;
        let answer = messages.answer(1).await;
        let tools = answer["tools"].as_array().unwrap_or_else(|| panic!("{answer}"));
        (tools.iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect(), host)
    }

    /// Agrees to a call that the client was asked about.
    async fn agree(&self, node: &Node, question: &Value) -> u64 {
        let content = json!({"action": "accept", "content": {"decision": "approve"}});
        let agreed = self.send(node, json!({"id": question["id"], "result": content})).await;
        assert_eq!(agreed.status(), 202);
        answered_by(&agreed)
    }

    /// Opens the session's own stream, or continues one after an event.
    async fn listen(&self, node: &Node, last_event_id: Option<&str>) -> Messages {
        loop {
            let request = node.request(Method::GET, "/mcp").header("accept", "text/event-stream");
            let request =
                request.header("mcp-session-id", &self.session).header("mcp-protocol-version", REVISION);
            let request = match last_event_id {
                Some(last) => request.header("last-event-id", last),
                None => request,
            };
            let response = request.send().await.unwrap();
            if response.status() != 503 {
                assert_eq!(response.status(), 200);
                return Messages::of(response);
            }
        }
    }

    async fn status(&self, node: &Node) -> u16 {
        self.send(node, json!({"id": 2, "method": "tools/list"})).await.status().as_u16()
    }
}

async fn sent(node: &Node, session: Option<&str>, mut message: Value) -> Response {
    message["jsonrpc"] = json!("2.0");
    let request = node.request(Method::POST, "/mcp").header("accept", "application/json, text/event-stream");
    let request = match session {
        Some(id) => request.header("mcp-session-id", id).header("mcp-protocol-version", REVISION),
        None => request,
    };
    request.json(&message).send().await.unwrap()
}

impl Messages {
    fn of(response: Response) -> Messages {
        Messages { response, text: String::new(), last_id: String::new() }
    }

    /// Returns the next message; `None` when the stream has ended.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(message) = self.event().await? {
                return Some(message);
            }
        }
    }

    /// Returns the message of the next event, if it has one.
    async fn event(&mut self) -> Option<Option<Value>> {
        loop {
            if let Some(end) = self.text.find("\n\n") {
                let event: String = self.text.drain(..end + 2).collect();
                let field =
                    |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
                if let Some(id) = field("id:") {
                    self.last_id = id.to_owned();
                }
                return Some(field("data:").and_then(|data| serde_json::from_str(data).ok()));
            }
            let part = self.response.chunk().await.ok().flatten()?;
            self.text.push_str(&String::from_utf8_lossy(&part));
        }
    }

    /// Returns the result of the request with this id.
    async fn answer(&mut self, id: u64) -> Value {
        loop {
            let mut message = self.next().await.expect("an answer");
            if message["id"] == id && message.get("method").is_none() {
                return message["result"].take();
            }
        }
    }

    /// Returns what the client is asked.
    async fn question(&mut self) -> Value {
        loop {
            let message = self.next().await.expect("a question");
            if message["method"] == "elicitation/create" {
                return message;
            }
        }
    }
}

/// Returns a call that pays once, however often it is sent.
fn pay(id: u64, key: &str) -> Value {
    let meta = json!({"skep.dev/idempotency_key": key, "skep.dev/session": key});
    let params = json!({"name": "bank__pay", "arguments": {"cents": 7}, "_meta": meta});
    json!({"id": id, "method": "tools/call", "params": params})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_of_an_mcp_client_is_used_through_any_host_and_outlives_its_own() {
    let Some(site) = Site::start(false).await else { return };
    let [a, b, c] = site.nodes().await;
    a.deploy("toolcall", "bank", "").await;
    for node in [&b, &c] {
        node.knows(&["bank"]).await;
    }
    let client = Client::begin(&a).await;
    let ready = client.send(&b, json!({"method": "notifications/initialized"})).await;
    assert_eq!((ready.status().as_u16(), answered_by(&ready)), (202, a.number));
    let (tools, host) = client.tools(&b).await;
    assert!(tools.contains(&"bank__pay".to_owned()), "{tools:?}");
    assert_eq!(host, a.number, "the host that has the session answers");
    let stranger = Client { session: "nobody".to_owned() };
    assert_eq!(stranger.status(&b).await, 404);

    // A question is answered through a third host.
    let (mut messages, _) = client.ask(&b, &pay(3, "first")).await;
    let question = messages.question().await;
    assert_eq!(client.agree(&c, &question).await, a.number);
    assert_eq!(messages.answer(3).await["structuredContent"], json!({"result": 7}));

    // The host is killed while a question waits. The approval stays, the client is asked again, and what it agrees to is done once.
    let (mut messages, _) = client.ask(&b, &pay(4, "second")).await;
    let lost = messages.question().await;
    a.kill();
    while messages.next().await.is_some() {}
    let (mut messages, host) = client.ask(&b, &pay(5, "second")).await;
    assert_eq!(host, b.number, "the session continues at the host that was asked");
    let question = messages.question().await;
    // The answer to what the last host has asked decides nothing.
    assert_eq!(client.agree(&c, &lost).await, b.number);
    assert_eq!(b.get("/v1/approvals").await.1["data"].as_array().map(Vec::len), Some(1));
    assert_eq!(client.agree(&c, &question).await, b.number);
    assert_eq!(messages.answer(5).await["structuredContent"], json!({"result": 7}));
    let paid = b.ok(Method::GET, "/v1/agents/bank/sessions/second", Value::Null).await;
    assert_eq!(paid["turns"], 1, "{paid}");
    assert_eq!(b.get("/v1/approvals").await.1["data"], json!([]));
    assert_eq!(client.tools(&c).await.1, b.number);

    // A session that its client has ended is not continued by anybody.
    let end = c.request(Method::DELETE, "/mcp").header("mcp-session-id", &client.session);
    assert_eq!(end.send().await.unwrap().status(), 202);
    for node in [&b, &c] {
        assert_eq!(client.status(node).await, 404);
    }

    // A host that ends in order leaves its sessions to the others.
    let client = Client::begin(&c).await;
    c.signal("-TERM");
    let (status, log) = c.exited().await;
    assert_eq!(status, Some(0), "{log}");
    until(async || client.status(&b).await == 200).await;
    assert_eq!(client.tools(&b).await.1, b.number);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_streams_of_an_mcp_client_continue_at_another_host_when_their_own_is_killed() {
    let Some(site) = Site::start(false).await else { return };
    let [a, b, c] = site.nodes().await;
    a.deploy("gate", "gate", "[grants]\nhosts = [\"*\"]").await;
    for node in [&b, &c] {
        node.knows(&["gate"]).await;
    }
    let client = Client::begin(&a).await;
    assert_eq!(client.send(&b, json!({"method": "notifications/initialized"})).await.status(), 202);
    let mut news = client.listen(&b, None).await;
    assert_eq!(news.event().await, Some(None), "the first event only has an id");
    let (mut listed, _) = client.ask(&b, &json!({"id": 6, "method": "tools/list"})).await;
    assert_eq!(listed.event().await, Some(None));
    let list_began = listed.last_id.clone();
    listed.answer(6).await;

    // A call without a key is in the middle of its turn when its host is killed.
    let gate = Gate::start().await;
    let arguments = json!({"text": gate.url, "session": "held"});
    let call = json!({"name": "gate", "arguments": arguments});
    let (mut calling, host) = client.ask(&b, &json!({"id": 7, "method": "tools/call", "params": call})).await;
    assert_eq!(host, a.number);
    assert_eq!(calling.event().await, Some(None));
    let began = calling.last_id.clone();
    gate.has(1).await;
    while calling.last_id == began {
        assert_eq!(calling.event().await, Some(None), "an event tells the turn of the call");
    }
    a.kill();
    while calling.next().await.is_some() {}
    let mut resumed = client.listen(&b, Some(&calling.last_id)).await;
    gate.has(2).await;
    gate.open();
    let answer = resumed.answer(7).await;
    assert_eq!(answer["isError"], false, "{answer}");
    assert_eq!(
        (&answer["structuredContent"]["session"], &answer["structuredContent"]["turn"]),
        (&json!("held"), &json!(1))
    );
    assert_eq!(resumed.next().await, None, "the stream ends with the answer");
    let held = c.ok(Method::GET, "/v1/agents/gate/sessions/held", Value::Null).await;
    assert_eq!((&held["turns"], gate.arrived()), (&json!(1), 2), "{held}");

    // A client that has not seen the answer gets it again from any host, and one that has gets nothing.
    assert_eq!(client.listen(&c, Some(&calling.last_id)).await.answer(7).await, answer);
    assert_eq!(client.listen(&c, Some(&resumed.last_id)).await.next().await, None);
    assert_eq!(client.listen(&c, Some(&listed.last_id)).await.next().await, None);
    // Other answers are lost, and the client gets an error that says so.
    let lost = client.listen(&c, Some(&list_began)).await.next().await.unwrap();
    assert_eq!(
        (&lost["id"], &lost["error"]["data"]["skep.dev/code"]),
        (&json!(6), &json!("answer_lost")),
        "{lost}"
    );
    // The session's own stream says what may have changed meanwhile.
    while news.event().await.is_some() {}
    let mut news = client.listen(&c, Some(&news.last_id)).await;
    for list in ["tools", "prompts", "resources"] {
        let changed = news.next().await.unwrap();
        assert_eq!(changed["method"], format!("notifications/{list}/list_changed"));
    }
}
