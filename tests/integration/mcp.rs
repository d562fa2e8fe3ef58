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
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// Keeps what it is told of progress.
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

/// A client of the host's server, and what it is told.
pub(crate) async fn connect(host: &Host) -> (Client, Listener) {
    let listener = Listener::default();
    let config = StreamableHttpClientTransportConfig::with_uri(host.at("/mcp"));
    let transport = StreamableHttpClientTransport::with_client(http_client(), config);
    (listener.clone().serve(transport).await.expect("the host speaks MCP"), listener)
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
    client.call_tool(params(name, arguments)).await.expect("the tool is known")
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
    assert_eq!(named("mcp-tools").description.as_deref(), Some("Calls the tool that it is told to."));
    let add = named("mcp-tools__add");
    assert_eq!(add.input_schema["properties"]["a"]["maximum"], 99);
    assert_eq!(add.output_schema.as_ref().unwrap()["required"], json!(["sum"]));

    let sum = call(&client, "mcp-tools__add", json!({"a": 2, "b": 3})).await;
    assert_eq!((sum.is_error, &sum.structured_content), (Some(false), &Some(json!({"sum": 5}))));
    assert_eq!(text(&sum), r#"{"sum":5}"#);
    let session = sum.meta.as_ref().unwrap().0["skep.dev/session"].as_str().unwrap();
    let (_, detail) = host.get(&format!("/v1/agents/mcp-tools/sessions/{session}")).await;
    assert_eq!((&detail["turns"], &detail["state_keys"]), (&json!(1), &json!(["sum"])), "{detail}");
}

#[tokio::test]
async fn a_tool_that_goes_wrong_says_so_and_changes_nothing() {
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
    assert!(unknown.to_string().contains("it has add, lie, refuse, boom"), "{unknown}");
    let sum = call(&client, "mcp-wrong__add", json!({"a": 1, "b": 1})).await;
    assert_eq!(sum.meta.unwrap().0["skep.dev/turn"], 1);
}

#[tokio::test]
async fn what_is_generated_is_told_while_it_is() {
    let host = deploy("generate", "mcp-progress", "").await;
    let (client, listener) = connect(host).await;
    let data = json!({"regex": "([a-z]+ ){20}end", "temperature": 0.0, "max_tokens": 200});
    let result = call(&client, "mcp-progress", json!({"text": "Say something.", "data": data})).await;
    assert_eq!(result.is_error, Some(false), "{result:?}");
    let told = listener.told.lock().unwrap().clone();
    assert_eq!(told.iter().map(|(_, text)| text.as_str()).collect::<String>(), text(&result));
    assert!(told.len() > 1 && told.is_sorted_by(|(one, _), (next, _)| one < next), "{told:?}");
}

#[tokio::test]
async fn a_call_that_is_cancelled_cancels_its_turn() {
    let host = deploy("generate", "mcp-cancel", "").await;
    let (client, listener) = connect(host).await;
    let data = json!({"regex": "[a-z ]{6000}", "temperature": 0.0, "max_tokens": 4000});
    let long = CallToolRequest::new(params("mcp-cancel", json!({"text": "Count.", "data": data})));
    let options = PeerRequestOptions::no_options();
    let running =
        client.send_cancellable_request(ClientRequest::CallToolRequest(long), options).await.unwrap();
    listener.was_told.notified().await;
    running.cancel(Some("enough".into())).await.unwrap();
    // The session takes one turn at a time, and a turn that was cancelled has not been.
    let next = call(&client, "mcp-cancel", json!({"text": "usage"})).await;
    assert_eq!(next.structured_content.unwrap()["turn"], 1);
}
