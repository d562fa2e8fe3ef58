//! Agents as tools of an MCP server, with the official client over HTTP.

use crate::harness::{Host, client as http_client, shared};
use rmcp::{
    ClientHandler, RoleClient, ServiceExt,
    model::{
        CallToolRequest, CallToolRequestParams, CallToolResult, ClientRequest, ProgressNotificationParam,
    },
    service::{NotificationContext, PeerRequestOptions, RunningService},
    transport::{StreamableHttpClientTransport, streamable_http_client::StreamableHttpClientTransportConfig},
};
use serde_json::{Value, json};
use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// Records progress notifications.
#[derive(Clone, Default)]
pub(crate) struct Listener {
    told: Arc<Mutex<Vec<(f64, String)>>>,
    was_told: Arc<Notify>,
}

impl ClientHandler for Listener {
    async fn on_progress(
        &self,
        progress: ProgressNotificationParam,
        _context: NotificationContext<RoleClient>,
    ) {
        let message = progress.message.unwrap_or_default();
        self.told.lock().unwrap().push((progress.progress, message));
        self.was_told.notify_one();
    }
}

pub(crate) type Client = RunningService<RoleClient, Listener>;

/// Connects a client to the host's server. Returns the client and its progress notifications.
pub(crate) async fn connect(host: &Host) -> (Client, Listener) {
    let listener = Listener::default();
    let config = StreamableHttpClientTransportConfig::with_uri(host.at("/mcp"));
    let transport = StreamableHttpClientTransport::with_client(http_client(), config);
    (listener.clone().serve(transport).await.expect("the host supports MCP"), listener)
}

async fn deploy(guest: &str, name: &str, extra: &str) -> &'static Host {
    let (status, answer) = shared().deploy_guest(guest, name, extra).await;
    assert_eq!(status, 201, "{answer}");
    shared()
}

fn params(name: &str, arguments: Value) -> CallToolRequestParams {
    CallToolRequestParams::new(name.to_owned()).with_arguments(arguments.as_object().cloned().unwrap())
}

pub(crate) async fn call(client: &Client, name: &str, arguments: Value) -> CallToolResult {
    client.call_tool(params(name, arguments)).await.expect("the tool exists")
}

fn text(result: &CallToolResult) -> &str {
    &result.content[0].as_text().expect("a text").text
}

#[tokio::test]
async fn tools_of_an_agent_are_called_as_turns_and_their_results_are_structured() {
    let host = deploy("toolcall", "mcp-tools", "").await;
    let (client, _) = connect(host).await;
    let tools = client.list_all_tools().await.unwrap();
    let named =
        |name: &str| tools.iter().find(|tool| tool.name == name).unwrap_or_else(|| panic!("no {name}"));
    assert_eq!(named("mcp-tools").description.as_deref(), Some("Calls the tool that the message names."));
    let add = named("mcp-tools__add");
    assert_eq!(add.input_schema["properties"]["a"]["maximum"], 99);
    assert_eq!(add.output_schema.as_ref().unwrap()["required"], json!(["sum"]));
    let annotations = |name: &str| {
        let told = named(name).annotations.as_ref().unwrap();
        [told.read_only_hint, told.destructive_hint, told.idempotent_hint, told.open_world_hint]
            .map(Option::unwrap)
    };
    assert_eq!(annotations("mcp-tools__add"), [false, false, true, false]);
    assert_eq!(annotations("mcp-tools__lie"), [true, false, false, false]);
    assert_eq!(annotations("mcp-tools__pay"), [false, true, false, true]);
    assert_eq!(named("mcp-tools__pay").meta.as_ref().unwrap().0["skep.dev/needs_approval"], true);
    assert!(add.meta.is_none());

    let sum = call(&client, "mcp-tools__add", json!({"a": 2, "b": 3})).await;
    assert_eq!((sum.is_error, &sum.structured_content), (Some(false), &Some(json!({"sum": 5}))));
    assert_eq!(text(&sum), r#"{"sum":5}"#);
    let session = sum.meta.as_ref().unwrap().0["skep.dev/session"].as_str().unwrap();
    let (_, detail) = host.get(&format!("/v1/agents/mcp-tools/sessions/{session}")).await;
    assert_eq!((&detail["turns"], &detail["state_keys"]), (&json!(1), &json!(["sum"])), "{detail}");
}

#[tokio::test]
async fn a_failing_tool_reports_its_error_and_changes_nothing() {
    let host = deploy("toolcall", "mcp-wrong", "").await;
    let (client, _) = connect(host).await;
    for (tool, arguments, code, said) in [
        ("add", json!({"a": 2, "b": 100}), "invalid_message", "at \"/b\""),
        ("add", json!({"a": 2}), "invalid_message", "\"b\" is a required property"),
        ("refuse", json!({"colours": "red"}), "tool_failed", "no red"),
        (
            "lie",
            json!({"colour": "red"}),
            "agent_failed",
            "the result of tool \"lie\" is not valid: at \"/digit\"",
        ),
        ("boom", json!({}), "agent_trapped", "trapped"),
    ] {
        let result = call(&client, &format!("mcp-wrong__{tool}"), arguments).await;
        assert_eq!(result.is_error, Some(true), "{tool}: {result:?}");
        assert_eq!(result.meta.as_ref().unwrap().0["skep.dev/code"], code, "{tool}: {result:?}");
        assert!(text(&result).contains(said), "{tool}: {}", text(&result));
    }
    let unknown = client.call_tool(params("mcp-wrong__divide", json!({}))).await.unwrap_err();
    assert!(unknown.to_string().contains("it has: add, lie, refuse, boom"), "{unknown}");
    let sum = call(&client, "mcp-wrong__add", json!({"a": 1, "b": 1})).await;
    assert_eq!(sum.meta.unwrap().0["skep.dev/turn"], 1);
}

#[tokio::test]
async fn generated_text_is_reported_as_progress() {
    let host = deploy("generate", "mcp-progress", "").await;
    let (client, listener) = connect(host).await;
    let data = json!({"regex": "([a-z]{1,8} ){20}end", "temperature": 0.0, "max_tokens": 200});
    let result = call(&client, "mcp-progress", json!({"text": "Say something.", "data": data})).await;
    assert_eq!(result.is_error, Some(false), "{result:?}");
    let joined = || listener.told.lock().unwrap().iter().map(|(_, text)| text.as_str()).collect::<String>();
    // The client may handle its last notifications after the result.
    let end = Instant::now() + Duration::from_secs(20);
    while joined() != text(&result) && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(joined(), text(&result));
    let told = listener.told.lock().unwrap().clone();
    assert!(told.len() > 1 && told.is_sorted_by(|(one, _), (next, _)| one < next), "{told:?}");
}

#[tokio::test]
async fn cancelling_a_call_cancels_its_turn() {
    let host = deploy("generate", "mcp-cancel", "").await;
    let (client, listener) = connect(host).await;
    let data = json!({"regex": "[a-z ]{6000}", "temperature": 0.0, "max_tokens": 4000});
    let long = CallToolRequest::new(params("mcp-cancel", json!({"text": "Count.", "data": data})));
    let options = PeerRequestOptions::no_options();
    let running =
        client.send_cancellable_request(ClientRequest::CallToolRequest(long), options).await.unwrap();
    listener.was_told.notified().await;
    running.cancel(Some("enough".into())).await.unwrap();
    // The session runs one turn at a time, and a cancelled turn does not count.
    let next = call(&client, "mcp-cancel", json!({"text": "usage"})).await;
    assert_eq!(next.structured_content.unwrap()["turn"], 1);
}

/// Returns a metadata value of a result of `pay`.
fn told(result: &CallToolResult, key: &str) -> Value {
    result.meta.as_ref().and_then(|meta| meta.0.get(key)).cloned().unwrap_or_default()
}

async fn decide(host: &Host, id: &Value, decision: &str) {
    host.ok(&format!("/v1/approvals/{}", id.as_str().unwrap()), json!({ "decision": decision })).await;
}

#[tokio::test]
async fn a_call_that_needs_approval_waits_for_it_and_returns_its_result() {
    let host = deploy("toolcall", "mcp-pay", "").await;
    let (client, listener) = connect(host).await;
    let deciding = async {
        listener.was_told.notified().await;
        let said = listener.told.lock().unwrap()[0].1.clone();
        assert!(said.starts_with("pay is waiting for approval "), "{said}");
        decide(host, &json!(said.split_whitespace().last().unwrap()), "approve").await;
    };
    let (paid, ()) = tokio::join!(call(&client, "mcp-pay__pay", json!({"cents": 7})), deciding);
    assert_eq!(
        (paid.is_error, &paid.structured_content),
        (Some(false), &Some(json!({"result": 7}))),
        "{paid:?}"
    );
}

#[tokio::test]
async fn an_undecided_call_is_reported_and_found_again_by_its_key() {
    let mut options = Host::options(None);
    options.gateway.mcp.approval_wait = Duration::ZERO;
    let host = Host::start_with(options);
    assert_eq!(host.deploy_guest("toolcall", "payer", "").await.0, 201);
    let (client, _) = connect(&host).await;
    let waits = call(&client, "payer__pay", json!({"cents": 7})).await;
    assert_eq!((waits.is_error, told(&waits, "skep.dev/code")), (Some(true), json!("approval_required")));
    let approval = told(&waits, "skep.dev/approval");
    assert!(approval["tool"] == "pay" && approval["expires_at_ms"].is_u64(), "{approval}");
    assert!(text(&waits).contains(&format!("skep approval approve {}", approval["id"].as_str().unwrap())));

    // The tool has not run yet, and the same call is the same turn, even on another connection.
    let (key, session) = (told(&waits, "skep.dev/idempotency_key"), told(&waits, "skep.dev/session"));
    let again = async || {
        let (client, _) = connect(&host).await;
        let meta = json!({"skep.dev/idempotency_key": key, "skep.dev/session": session});
        let mut params = params("payer__pay", json!({"cents": 7}));
        params.meta = Some(serde_json::from_value(meta).unwrap());
        client.call_tool(params).await.unwrap()
    };
    assert_eq!(told(&again().await, "skep.dev/approval"), approval);
    let path = format!("/v1/agents/payer/sessions/{}", session.as_str().unwrap());
    assert_eq!(host.get(&path).await.0, 404, "no turn has finished");
    let turn = format!("{path}/turns/{}", told(&waits, "skep.dev/turn_id").as_str().unwrap());
    assert_eq!(host.get(&turn).await.1["state"], "running");

    decide(&host, &approval["id"], "approve").await;
    let followed = host.get(&format!("{turn}/events")).await.1;
    assert!(followed.as_str().unwrap().contains("event: done"), "{followed}");
    assert_eq!(again().await.structured_content, Some(json!({"result": 7})));
    let (_, detail) = host.get(&path).await;
    assert_eq!((&detail["turns"], &detail["state_keys"]), (&json!(1), &json!(["paid"])), "once: {detail}");
}

#[tokio::test]
async fn a_denied_or_cancelled_call_runs_nothing() {
    let host = deploy("toolcall", "mcp-refuse", "").await;
    let (client, listener) = connect(host).await;
    let asked = async || {
        listener.was_told.notified().await;
        let said = listener.told.lock().unwrap().last().unwrap().1.clone();
        json!(said.split_whitespace().last().unwrap())
    };
    let deciding = async { decide(host, &asked().await, "deny").await };
    let (refused, ()) = tokio::join!(call(&client, "mcp-refuse__pay", json!({"cents": 7})), deciding);
    assert_eq!((refused.is_error, told(&refused, "skep.dev/code")), (Some(true), json!("call_refused")));
    assert_eq!(text(&refused), "a person refused this call");

    let pay = CallToolRequest::new(params("mcp-refuse__pay", json!({"cents": 7})));
    let options = PeerRequestOptions::no_options();
    let running =
        client.send_cancellable_request(ClientRequest::CallToolRequest(pay), options).await.unwrap();
    let id = asked().await;
    running.cancel(Some("enough".into())).await.unwrap();
    // The cancellation is in flight, and until it arrives the session waits for approval. The turn after it
    // is the first one of the session that counts.
    let next = loop {
        let next = call(&client, "mcp-refuse__add", json!({"a": 1, "b": 1})).await;
        if told(&next, "skep.dev/code") != json!("waiting_for_approval") {
            break next;
        }
    };
    assert_eq!(told(&next, "skep.dev/turn"), json!(1), "{next:?}");
    let (status, late) =
        host.post(&format!("/v1/approvals/{}", id.as_str().unwrap()), json!({"decision": "approve"})).await;
    assert!(status == 409 && late["error"]["message"].as_str().unwrap().contains("has ended"), "{late}");
}
