//! The MCP client against real servers that behave well and badly.

use super::server::Server;
use crate::{
    McpBounds, McpForms, McpOptions, McpServer, McpTransport, ServedTool, ToolHints, ToolServer,
    ToolServerError,
};
use serde_json::{Value, json};
use std::{path::Path, sync::Arc, time::Duration};

/// Returns options that start the fixture in the mode `how`.
fn options(how: &str) -> McpOptions {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/mcp/server.py");
    let transport = McpTransport::Process {
        program: "python3".to_owned(),
        arguments: vec![script.to_str().expect("a plain path").to_owned(), how.to_owned()],
        environment: [("GREETING".to_owned(), "hello".to_owned())].into(),
        folder: None,
    };
    McpOptions { transport, tools: None, forms: McpForms::default(), bounds: McpBounds::default() }
}

fn bounded(how: &str, bounds: McpBounds) -> McpServer {
    McpServer::new("fixture", McpOptions { bounds, ..options(how) })
}

fn server(how: &str) -> McpServer {
    McpServer::new("fixture", options(how))
}

async fn names(server: &McpServer) -> Vec<String> {
    server.tools().await.expect("it lists them").iter().map(|tool| tool.name.clone()).collect()
}

async fn call(server: &McpServer, tool: &str) -> Result<Value, ToolServerError> {
    server.call(tool, json!({})).await
}

async fn failed(server: &McpServer, tool: &str) -> String {
    match call(server, tool).await {
        Err(ToolServerError::Failed(message)) => message,
        other => panic!("{tool}: {other:?}"),
    }
}

async fn unavailable(server: &McpServer, tool: &str) -> String {
    match call(server, tool).await {
        Err(ToolServerError::Unavailable(message)) => message,
        other => panic!("{tool}: {other:?}"),
    }
}

async fn interrupted(server: &McpServer, tool: &str) -> String {
    match call(server, tool).await {
        Err(ToolServerError::Interrupted(message)) => message,
        other => panic!("{tool}: {other:?}"),
    }
}

#[tokio::test]
async fn tools_are_listed_and_called() {
    let server = server("good");
    let tools = server.tools().await.expect("it lists them");
    let ServedTool { output_schema, hints, .. } = &tools[0];
    assert_eq!(
        (tools[0].name.as_str(), &output_schema.as_ref().expect("it has a schema")["required"]),
        ("add", &json!(["sum"]))
    );
    assert_eq!(*hints, ToolHints { read_only: true, ..ToolHints::default() });
    assert_eq!(tools[1].hints, ToolHints { destructive: true, open_world: true, ..ToolHints::default() });
    assert_eq!(server.call("add", json!({"a": 2, "b": 3})).await, Ok(json!({"sum": 5})));
    // The server inherits nothing from this process's environment.
    assert_eq!(call(&server, "environment").await, Ok(json!("GREETING")));
    let picture = call(&server, "picture").await.expect("a result of content blocks");
    assert_eq!((&picture[0]["type"], &picture[0]["mimeType"]), (&json!("image"), &json!("image/png")));
}

#[tokio::test]
async fn the_error_message_of_a_tool_is_passed_on() {
    let server = server("good");
    assert_eq!(failed(&server, "refuse").await, "not today");
    assert!(failed(&server, "unstructured").await.contains("returned none"));
    assert!(unavailable(&server, "nothing").await.contains("offers no tool"));
    let huge = failed(&server, "huge").await;
    assert!(huge.contains("has 1000002 bytes; the limit is 786432"), "{huge}");
}

#[tokio::test]
async fn a_crash_fails_the_calls_in_flight_and_restarts_the_server() {
    let server = Arc::new(server("good"));
    names(&server).await;
    let waiting = tokio::spawn({
        let server = server.clone();
        async move { call(&server, "hang").await }
    });
    let died = interrupted(&server, "die").await;
    assert!(died.contains("was interrupted"), "{died}");
    // The server may have ended before this call was written.
    let waited = waiting.await.expect("no panic");
    assert!(
        matches!(waited, Err(ToolServerError::Interrupted(_) | ToolServerError::Unavailable(_))),
        "{waited:?}"
    );
    assert_eq!(server.call("add", json!({"a": 1, "b": 1})).await, Ok(json!({"sum": 2})));
}

#[tokio::test]
async fn a_tool_that_does_not_answer_times_out_and_is_cancelled() {
    let limit = Duration::from_millis(300);
    let server = bounded("good", McpBounds { call: limit, ..McpBounds::default() });
    for tool in ["hang", "flood"] {
        assert_eq!(call(&server, tool).await, Err(ToolServerError::TimedOut(limit)), "{tool}");
    }
    let patient = bounded("good", McpBounds::default());
    let patient = Arc::new(patient);
    names(&patient).await;
    let hanging = tokio::spawn({
        let server = patient.clone();
        async move { call(&server, "hang").await }
    });
    // The answer shows that the server has read the previous call.
    call(&patient, "environment").await.expect("it answers");
    hanging.abort();
    while call(&patient, "cancelled").await == Ok(json!("[]")) {}
}

#[tokio::test]
async fn a_changed_tool_list_is_read_again() {
    let server = server("good");
    assert!(!names(&server).await.contains(&"new".to_owned()));
    call(&server, "grow").await.expect("it grows");
    while !names(&server).await.contains(&"new".to_owned()) {
        // The notification is still on its way; a round trip gives it time to arrive.
        call(&server, "environment").await.expect("it answers");
    }
}

#[tokio::test]
async fn the_tool_list_is_bounded_filtered_and_validated() {
    assert_eq!(names(&bounded("many", McpBounds { tools: 150, ..McpBounds::default() })).await.len(), 150);
    assert_eq!(names(&server("odd")).await, ["fine", "last"]);
    let wanted = McpOptions { tools: Some(vec!["tool-4999".into()]), ..options("many") };
    let wanted = McpServer::new("fixture", wanted);
    assert_eq!(names(&wanted).await, ["tool-4999"]);
    assert!(unavailable(&wanted, "tool-1").await.contains("offers no tool"));
}

#[tokio::test]
async fn a_server_that_fails_to_start_is_retried_after_a_delay() {
    let mut options = options("good");
    options.transport = McpTransport::Process {
        program: "/nowhere/at-all".to_owned(),
        arguments: Vec::new(),
        environment: [].into(),
        folder: None,
    };
    let server = McpServer::new("files", options);
    let first = unavailable(&server, "add").await;
    assert!(first.contains("cannot be started") && first.contains("[mcp.files]"), "{first}");
    // A busy machine may let the delay pass before the second call; that call tries again, and the next one may not.
    let mut messages = Vec::new();
    while !messages.last().is_some_and(|last: &String| last.contains("the next attempt is in")) {
        assert!(messages.len() < 10, "{messages:?}");
        messages.push(unavailable(&server, "add").await);
    }

    let silent = bounded("silent", McpBounds { connect: Duration::from_millis(200), ..McpBounds::default() });
    assert!(unavailable(&silent, "add").await.contains("did not complete the handshake"));
}

#[tokio::test]
async fn invalid_output_does_not_break_the_connection() {
    let noisy = server("noisy");
    assert_eq!(noisy.call("add", json!({"a": 1, "b": 2})).await, Ok(json!({"sum": 3})));
    let limit = Duration::from_secs(2);
    let server = bounded("good", McpBounds { call: limit, ..McpBounds::default() });
    assert_eq!(call(&server, "nonsense").await, Err(ToolServerError::TimedOut(limit)));
    assert_eq!(server.call("add", json!({"a": 1, "b": 2})).await, Ok(json!({"sum": 3})));
}

/// Answers as a server with one tool, and breaks the connection when the tool is called.
fn breaking_at_a_call(request: &str) -> String {
    let (_, body) = request.split_once("\r\n\r\n").expect("a whole request");
    let message: Value = serde_json::from_str(body).unwrap_or_default();
    let result = match message["method"].as_str() {
        Some("initialize") => json!({
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "fixture", "version": "1"},
        }),
        Some("tools/list") => json!({"tools": [{"name": "add", "inputSchema": {"type": "object"}}]}),
        Some("tools/call") => return String::new(),
        _ => return "HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".to_owned(),
    };
    let answer = json!({"jsonrpc": "2.0", "id": message["id"], "result": result}).to_string();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: ";
    format!("{head}{}\r\n\r\n{answer}", answer.len())
}

#[tokio::test]
async fn errors_of_a_server_over_http_do_not_name_its_url() {
    let at = |url: &str| {
        let transport = McpTransport::Http { url: url.parse().expect("a URL"), headers: [].into() };
        McpServer::new("remote", McpOptions { transport, ..options("good") })
    };
    let away = unavailable(&at("http://127.0.0.1:1/s3cret?key=s3cret"), "add").await;
    let breaking = Server::answering(breaking_at_a_call).await;
    let broken = interrupted(&at(&breaking.url("/s3cret?key=s3cret")), "add").await;
    for error in [away, broken] {
        assert!(error.contains("\"remote\"") && error.contains("error sending request"), "{error}");
        assert!(!error.contains("s3cret") && !error.contains("127.0.0.1"), "{error}");
    }
}
