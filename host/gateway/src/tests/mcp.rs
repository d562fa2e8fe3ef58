//! Tests `/mcp` with the official client over a socket, and with requests that no client sends.

use super::{
    access,
    fixture::{Server, TestResponse},
    turns,
};
use crate::{GatewayOptions, McpOptions, serve};
use axum::{
    body::Body,
    http::{Method, Request},
};
use rmcp::{
    ClientHandler, RoleClient,
    model::{
        CallToolRequestParams, ClientConfig, ProtocolVersion, ServerNotification, SubscribeRequestParams,
        SubscriptionFilter, UnsubscribeRequestParams,
    },
    service::{
        ClientLifecycleMode, ClientServiceExt, NotificationContext, RunningService, ServiceExt,
        SubscriptionEnd,
    },
    transport::{StreamableHttpClientTransport, streamable_http_client::StreamableHttpClientTransportConfig},
};
use serde_json::{Value, json};
use skep_runtime::{Manifest, Role};
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tokio::{
    net::TcpListener,
    sync::{Notify, oneshot},
    task::JoinHandle,
};
use tower::ServiceExt as _;

/// A client that records notifications of changes.
#[derive(Clone, Default)]
struct Listener(Arc<Notify>);

impl ClientHandler for Listener {
    fn get_info(&self) -> ClientConfig {
        ClientConfig::default()
    }

    async fn on_tool_list_changed(&self, _context: NotificationContext<RoleClient>) {
        self.0.notify_one();
    }
}

pub(super) struct Running {
    pub(super) server: Server,
    pub(super) url: String,
    pub(super) stop: oneshot::Sender<()>,
    pub(super) serving: JoinHandle<std::io::Result<()>>,
}

impl Running {
    pub(super) async fn start(options: GatewayOptions) -> Running {
        let server = turns::server().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/mcp", listener.local_addr().unwrap());
        let (stop, stopped) = oneshot::channel();
        let shutdown = async {
            let _ = stopped.await;
        };
        let serving = tokio::spawn(serve(listener, server.host.clone(), options, shutdown));
        Running { server, url, stop, serving }
    }

    pub(super) async fn deploy(&self, name: &str) {
        let manifest = Manifest::from_toml(&format!("name = \"{name}\"")).unwrap();
        self.server.host.deploy(manifest, turns::echo(), "tester").await.unwrap();
    }

    pub(super) fn transport(&self) -> StreamableHttpClientTransport<reqwest::Client> {
        let config = StreamableHttpClientTransportConfig::with_uri(self.url.clone());
        StreamableHttpClientTransport::with_client(http_client(), config)
    }

    async fn client(&self) -> (RunningService<RoleClient, Listener>, Arc<Notify>) {
        let listener = Listener::default();
        let changed = listener.0.clone();
        (listener.serve(self.transport()).await.unwrap(), changed)
    }
}

fn http_client() -> reqwest::Client {
    skep_outbound::tls::install_provider();
    reqwest::Client::new()
}

fn message(agent: &str, arguments: Value) -> CallToolRequestParams {
    let arguments = arguments.as_object().cloned().unwrap();
    CallToolRequestParams::new(agent.to_owned()).with_arguments(arguments)
}

#[tokio::test]
async fn messages_are_calls_and_share_the_session_of_the_connection() {
    let running = Running::start(GatewayOptions::default()).await;
    let (client, _) = running.client().await;
    let info = client.peer_info().unwrap();
    assert_eq!(info.server_info.as_ref().unwrap().name, "skep");
    assert!(info.instructions.as_ref().unwrap().contains("AGENT__TOOL"));
    let tools = client.list_all_tools().await.unwrap();
    assert_eq!(tools.iter().map(|tool| tool.name.as_ref()).collect::<Vec<_>>(), ["echo"]);
    assert_eq!(tools[0].input_schema["required"], json!(["text"]));

    let call = async |arguments| {
        let result = client.call_tool(message("echo", arguments)).await.unwrap();
        assert_eq!(result.is_error, Some(false), "{result:?}");
        let structured = result.structured_content.unwrap();
        let text = result.content[0].as_text().unwrap().text.clone();
        (text, structured["session"].as_str().unwrap().to_owned(), structured["turn"].as_u64().unwrap())
    };
    let (text, session, turn) = call(json!({"text": "hello"})).await;
    assert_eq!((text.as_str(), turn), ("hello", 1));
    assert_eq!(call(json!({"text": "again"})).await, ("again".into(), session.clone(), 2));
    assert_eq!(
        call(json!({"text": "there", "session": "mine", "data": {"a": 1}})).await,
        ("there".into(), "mine".into(), 1)
    );
    assert_eq!(running.server.host.session("echo", &session).await.unwrap().summary.turns, 2);
}

#[tokio::test]
async fn failures_are_results_and_unknown_names_are_protocol_errors() {
    let running = Running::start(GatewayOptions::default()).await;
    let (client, _) = running.client().await;
    for (arguments, code, text) in [
        (json!({"txt": "x"}), "invalid_message", "unknown field `txt`"),
        (json!({"text": 7}), "invalid_message", "at `text`"),
        (json!({}), "invalid_message", "missing field `text`"),
        (json!({"text": "x", "session": "a/b"}), "invalid_name", "session id"),
        (json!({"text": "!"}), "agent_trapped", "trapped"),
    ] {
        let result = client.call_tool(message("echo", arguments.clone())).await.unwrap();
        assert_eq!(result.is_error, Some(true), "{arguments}");
        assert_eq!(result.meta.as_ref().unwrap().0["skep.dev/code"], code, "{arguments}");
        let said = &result.content[0].as_text().unwrap().text;
        assert!(said.contains(text), "{arguments}: {said}");
    }
    for (name, why) in
        [("nobody", "is not deployed"), ("echo__nothing", "does not let others call its tools")]
    {
        let error = client.call_tool(message(name, json!({}))).await.unwrap_err().to_string();
        assert!(error.contains("unknown tool") && error.contains(why), "{error}");
    }
}

#[tokio::test]
async fn a_client_is_notified_of_deployed_and_removed_agents() {
    let running = Running::start(GatewayOptions::default()).await;
    let (client, changed) = running.client().await;
    // The response shows that the server has read the client's initialization.
    client.list_all_tools().await.unwrap();
    running.deploy("other").await;
    changed.notified().await;
    assert_eq!(client.list_all_tools().await.unwrap().len(), 2);
    running.server.host.delete("other").await.unwrap();
    changed.notified().await;
    assert_eq!(client.list_all_tools().await.unwrap().len(), 1);
}

#[tokio::test]
async fn the_revision_without_sessions_is_supported() {
    let running = Running::start(GatewayOptions::default()).await;
    let lifecycle = ClientLifecycleMode::Discover { preferred_versions: vec![ProtocolVersion::V_2026_07_28] };
    let client = Listener::default().serve_with_lifecycle(running.transport(), lifecycle).await.unwrap();
    let mut session = BTreeSet::new();
    for _ in 0..2 {
        let result = client.call_tool(message("echo", json!({"text": "hello"}))).await.unwrap();
        let structured = result.structured_content.unwrap();
        assert_eq!((&structured["text"], &structured["turn"]), (&json!("hello"), &json!(1)));
        session.insert(structured["session"].to_string());
    }
    assert_eq!(session.len(), 2, "each call that names no session gets a new one");

    let filter = SubscriptionFilter::builder().tools_list_changed().build();
    let mut subscription = client.listen(filter).await.unwrap();
    running.deploy("other").await;
    let news = subscription.next().await.unwrap();
    assert!(matches!(news, Some(ServerNotification::ToolListChangedNotification(_))), "{news:?}");
    running.stop.send(()).unwrap();
    assert!(subscription.next().await.unwrap().is_none());
    assert!(matches!(subscription.end(), Some(SubscriptionEnd::Graceful(_))), "{:?}", subscription.end());
    running.serving.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_client_has_at_most_128_subscriptions() {
    let running = Running::start(GatewayOptions::default()).await;
    let (client, _) = running.client().await;
    // The revisions with sessions have no other subscriptions.
    #[expect(deprecated)]
    let subscribe = async |number: usize| {
        let uri = format!("skep://agents/echo/sessions/s{number}");
        client.subscribe(SubscribeRequestParams::new(uri)).await
    };
    for number in 0..128 {
        subscribe(number).await.unwrap();
    }
    let refused = subscribe(128).await.unwrap_err().to_string();
    assert!(refused.contains("128 resources"), "{refused}");
    subscribe(0).await.expect("subscribing again adds none");
    #[expect(deprecated)]
    client.unsubscribe(UnsubscribeRequestParams::new("skep://agents/echo/sessions/s7")).await.unwrap();
    subscribe(128).await.expect("there is room again");
}

#[tokio::test]
async fn tools_are_listed_in_pages() {
    let running = Running::start(GatewayOptions::default()).await;
    for number in 0..104 {
        running.deploy(&format!("agent-{number:03}")).await;
    }
    let (client, _) = running.client().await;
    let first = client.list_tools(None).await.unwrap();
    assert_eq!((first.tools.len(), first.next_cursor.as_deref()), (100, Some("agent-099")));
    let names: Vec<String> =
        client.list_all_tools().await.unwrap().iter().map(|tool| tool.name.to_string()).collect();
    assert_eq!(names.len(), 105);
    assert!(names.is_sorted() && names.last().is_some_and(|last| last == "echo"));
}

#[tokio::test]
async fn a_listening_client_does_not_delay_shutdown() {
    let running =
        Running::start(GatewayOptions { drain: Duration::from_secs(3600), ..GatewayOptions::default() })
            .await;
    let (client, _) = running.client().await;
    client.list_all_tools().await.unwrap();
    running.stop.send(()).unwrap();
    running.serving.await.unwrap().unwrap();
}

/// Builds a request as clients of the revisions with sessions send it.
pub(super) fn post(body: &Value, headers: &[(&str, &str)]) -> Request<Body> {
    raw(body.to_string(), headers)
}

fn raw(body: String, headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::post("/mcp").header("host", "skep.example");
    for (name, value) in
        [("content-type", "application/json"), ("accept", "application/json, text/event-stream")]
    {
        if !headers.iter().any(|(given, _)| *given == name) {
            request = request.header(name, value);
        }
    }
    for (name, value) in headers.iter().filter(|(_, value)| !value.is_empty()) {
        request = request.header(*name, *value);
    }
    request.body(Body::from(body)).unwrap()
}

pub(super) fn initialize() -> Value {
    json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }})
}

#[tokio::test]
async fn invalid_requests_are_refused_in_the_common_error_shape() {
    let origins = vec!["https://app.example".into()];
    let options = GatewayOptions { max_body_bytes: 4096, origins, ..GatewayOptions::default() };
    let server = Server::with(options).await;
    let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"});
    let large = raw(" ".repeat(5000), &[]);
    for (what, request, status) in [
        ("large", large, 413),
        ("one form only", post(&initialize(), &[("accept", "application/json")]), 406),
        ("no form", post(&initialize(), &[("accept", "")]), 406),
        ("another type", post(&initialize(), &[("content-type", "text/plain")]), 415),
        ("foreign page", post(&initialize(), &[("origin", "https://evil.example")]), 403),
        ("rebound page", post(&initialize(), &[("origin", "http://skep.example")]), 403),
        ("another port", post(&initialize(), &[("origin", "https://app.example:444")]), 403),
        ("no page", post(&initialize(), &[("origin", "null")]), 403),
        ("not begun", post(&list, &[]), 400),
        ("unknown session", post(&list, &[("mcp-session-id", "nobody")]), 404),
        ("unknown revision", post(&list, &[("mcp-protocol-version", "1999-01-01")]), 400),
        ("no method", Request::put("/mcp").header("host", "x").body(Body::empty()).unwrap(), 405),
        ("not JSON", raw("{".into(), &[]), 400),
        ("no call", raw("[1]".into(), &[]), 400),
    ] {
        let answer: TestResponse = server.send(request).await;
        assert_eq!(answer.status, status, "{what}: {}", answer.text);
        answer.error();
    }
    let unknown = server.send(post(&list, &[("mcp-session-id", "nobody")])).await.error();
    assert_eq!(unknown["code"], "session_not_found", "{unknown}");
    let begun = server.send(post(&initialize(), &[("origin", "https://app.example")])).await;
    assert_eq!(begun.status, 200, "{}", begun.text);
    let session = [("mcp-session-id", begun.headers["mcp-session-id"].to_str().unwrap())];
    let note = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    assert_eq!(server.send(post(&note, &session)).await.status, 202);
    let unknown = json!({"jsonrpc": "2.0", "id": 2, "method": "tools/forget"});
    let answer = server.send(post(&unknown, &session)).await.text;
    assert!(answer.contains("-32601") && answer.contains("no method"), "{answer}");
    for method in ["completion/complete", "resources/templates/list", "server/discover", "tools/list"] {
        assert!(answer.contains(method), "{method}: {answer}");
    }
    for (method, params) in [
        ("tools/call", json!({"arguments": {}})),
        ("tools/call", json!({"name": "echo", "arguments": "none"})),
        ("prompts/get", json!({"name": 7})),
        ("logging/setLevel", json!({"level": "loud"})),
        ("resources/read", json!({})),
    ] {
        let call = json!({"jsonrpc": "2.0", "id": 3, "method": method, "params": params});
        let answer = server.send(post(&call, &session)).await.text;
        assert!(answer.contains("-32602") && answer.contains(method), "{params}: {answer}");
    }
}

#[tokio::test]
async fn the_least_recently_used_session_is_removed_to_make_room() {
    let mcp = McpOptions { max_sessions: 2, ..McpOptions::default() };
    let server = Server::with(GatewayOptions { mcp, ..GatewayOptions::default() }).await;
    let begin = async || {
        let begun = server.send(post(&initialize(), &[])).await;
        begun.headers["mcp-session-id"].to_str().unwrap().to_owned()
    };
    let note = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    let use_it = async |session: &str| server.send(post(&note, &[("mcp-session-id", session)])).await.status;
    let (first, second) = (begin().await, begin().await);
    assert_eq!(use_it(&first).await, 202);
    let third = begin().await;
    let statuses = [use_it(&first).await, use_it(&second).await, use_it(&third).await];
    assert_eq!(statuses.map(|status| status.as_u16()), [202, 404, 202]);
}

#[tokio::test]
async fn a_session_exists_only_for_the_caller_that_started_it() {
    let server = access::guarded().await;
    let key = async |tenant| access::key(&server, tenant, Role::Invoke, None).await;
    let (first, colleague, stranger) = (key("acme").await, key("acme").await, key("rival").await);
    let send = async |method: Method, key: &str, session: Option<&str>, body: Value| {
        let request =
            Request::builder().method(method).uri("/mcp").header("authorization", format!("Bearer {key}"));
        let mut request = request
            .header("host", "skep.example")
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream");
        if let Some(session) = session {
            request = request.header("mcp-session-id", session);
        }
        let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
        server.router.clone().oneshot(request.body(body).unwrap()).await.unwrap()
    };
    let begun = send(Method::POST, &first, None, initialize()).await;
    assert_eq!(begun.status(), 200);
    let id = begun.headers()["mcp-session-id"].to_str().unwrap().to_owned();
    let initialized = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    assert_eq!(send(Method::POST, &first, Some(&id), initialized.clone()).await.status(), 202);
    let list = json!({"jsonrpc": "2.0", "id": 2, "method": "tools/list"});
    for other in [&colleague, &stranger] {
        for (method, body) in [
            (Method::POST, list.clone()),
            (Method::POST, initialized.clone()),
            (Method::GET, Value::Null),
            (Method::DELETE, Value::Null),
        ] {
            let refused = send(method.clone(), other, Some(&id), body).await;
            assert_eq!(refused.status(), 404, "{method}");
            let body = axum::body::to_bytes(refused.into_body(), 1 << 20).await.unwrap();
            let body: Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(body["error"]["code"], "session_not_found", "{method}");
        }
    }
    assert_eq!(
        send(Method::POST, &first, Some(&id), list.clone()).await.status(),
        200,
        "the session still exists"
    );
    assert!(send(Method::DELETE, &first, Some(&id), Value::Null).await.status().is_success());
    assert_eq!(send(Method::POST, &first, Some(&id), list).await.status(), 404);
}

#[tokio::test]
async fn names_in_the_meta_of_a_call_are_validated() {
    let running = Running::start(GatewayOptions::default()).await;
    let (client, _) = running.client().await;
    for (name, value, code) in [
        ("skep.dev/idempotency_key", json!("\u{1}event 1"), "invalid_message"),
        ("skep.dev/idempotency_key", json!("a\nb"), "invalid_message"),
        ("skep.dev/idempotency_key", json!(""), "invalid_message"),
        ("skep.dev/idempotency_key", json!("k".repeat(129)), "invalid_message"),
        ("skep.dev/idempotency_key", json!(7), "invalid_message"),
        ("skep.dev/session", json!("\u{1}s"), "invalid_name"),
        ("skep.dev/session", json!("rival/s"), "invalid_name"),
        ("skep.dev/session", json!(["s"]), "invalid_message"),
    ] {
        let mut call = message("echo", json!({"text": "x"}));
        call.meta = Some(serde_json::from_value(json!({ name: value })).unwrap());
        let result = client.call_tool(call).await.unwrap();
        assert_eq!(result.is_error, Some(true), "{name} {value}");
        assert_eq!(result.meta.as_ref().unwrap().0["skep.dev/code"], code, "{name} {value}");
    }
    assert_eq!(running.server.store.open_turns().await.unwrap().len(), 0);
}
