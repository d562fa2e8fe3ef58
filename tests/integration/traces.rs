//! Traces as a collector receives them from a real `skep up`, and the log lines that belong to them.

use crate::{
    harness::{Host, client, model_path},
    ports::unused_address,
    scripted_upstream::{ScriptedUpstream, answered, refused},
};
use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{self, HeaderMap},
    routing::post,
};
use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::{AnyValue, KeyValue, any_value},
    trace::v1::{
        Span,
        span::{Event, SpanKind},
        status::StatusCode,
    },
};
use prost::Message;
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader, Lines},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread::JoinHandle,
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";
const REQUEST_ID: &str = "one-message";

/// The data that arrived at a collector.
#[derive(Clone, Default)]
struct Collector {
    requests: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
}

impl Collector {
    /// Starts the collector and returns its base URL.
    async fn start(&self) -> String {
        async fn take(State(collector): State<Collector>, headers: HeaderMap, body: Bytes) {
            assert_eq!(headers["content-type"], "application/x-protobuf");
            let request = ExportTraceServiceRequest::decode(body).expect("OTLP");
            collector.requests.lock().unwrap().push(request);
        }
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let routes = Router::new().route("/v1/traces", post(take)).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        url
    }

    fn spans(&self) -> Vec<Span> {
        let requests = self.requests.lock().unwrap();
        let resources = requests.iter().flat_map(|request| &request.resource_spans);
        resources.flat_map(|one| &one.scope_spans).flat_map(|one| one.spans.clone()).collect()
    }

    fn service_names(&self) -> Vec<Value> {
        let requests = self.requests.lock().unwrap();
        let resources = requests.iter().flat_map(|request| &request.resource_spans);
        resources.map(|one| attribute(&one.resource.as_ref().unwrap().attributes, "service.name")).collect()
    }
}

/// A `skep up` process with a JSON log.
struct Process {
    child: Child,
    host: Host,
    /// Keeps the pipe open, so that the process can still print.
    _stdout: Lines<BufReader<ChildStdout>>,
    log: JoinHandle<Vec<Value>>,
}

impl Process {
    fn start(endpoint: &str) -> Process {
        Process::start_with(endpoint, &[])
    }

    fn start_with(endpoint: &str, more: &[&str]) -> Process {
        let mut child = Command::new(env!("CARGO_BIN_EXE_skep"))
            .args(["up", "--ephemeral", "--listen", "127.0.0.1:0", "--otlp-endpoint", endpoint])
            .args(["--log-format", "json"])
            .args(["--log-level", "info,skep_gateway=debug,skep_runtime=debug,skep_engine=debug"])
            .arg("--model")
            .arg(model_path())
            .args(more)
            .env("OTEL_SERVICE_NAME", "shop")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let log = std::thread::spawn(move || {
            let lines = stderr.lines().map(|line| line.unwrap());
            lines.filter_map(|line| serde_json::from_str(&line).ok()).collect()
        });
        let mut stdout = BufReader::new(child.stdout.take().unwrap()).lines();
        let url = stdout
            .by_ref()
            .map(|line| line.unwrap())
            .find_map(|line| {
                line.split_whitespace().find(|word| word.starts_with("http://127.0.0.1")).map(str::to_owned)
            })
            .expect("`skep up` prints its URL");
        Process { child, host: Host::elsewhere(url), _stdout: stdout, log }
    }

    /// Stops the process like a supervisor would, and returns its log.
    async fn stop(mut self) -> (ExitStatus, Vec<Value>) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let status = tokio::task::spawn_blocking(move || self.child.wait().unwrap()).await.unwrap();
        (status, self.log.join().unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_one_trace_from_the_caller_to_the_model() {
    let collector = Collector::default();
    let server = Process::start(&collector.start().await);
    assert_eq!(server.host.deploy_guest("generate", "talker", "").await.0, 201);
    let message = client()
        .post(server.host.at("/v1/agents/talker/sessions/desk/messages"))
        .header("traceparent", format!("00-{TRACE}-{CALLER}-01"))
        .header("x-request-id", REQUEST_ID)
        .json(&json!({"text": "Hello", "data": {"max_tokens": 5, "temperature": 0.7, "seed": 11}}));
    let answer = message.send().await.unwrap();
    assert_eq!(answer.headers()["x-request-id"], REQUEST_ID);
    let answer: Value = answer.json().await.unwrap();
    let (status, log) = server.stop().await;
    assert!(status.success());

    let spans = collector.spans();
    let of_trace: Vec<&Span> = spans.iter().filter(|span| hex(&span.trace_id) == TRACE).collect();
    assert_eq!(of_trace.len(), 3, "{of_trace:#?}");
    let named = |name: &str| *of_trace.iter().find(|span| span.name == name).expect(name);
    let request = named("POST /v1/agents/{agent}/sessions/{session}/messages");
    let turn = named("invoke_agent talker");
    let generation = named("chat smollm2-135m");
    assert_eq!(hex(&request.parent_span_id), CALLER);
    assert_eq!(turn.parent_span_id, request.span_id);
    assert_eq!(generation.parent_span_id, turn.span_id);
    assert_eq!((request.kind(), turn.kind()), (SpanKind::Server, SpanKind::Internal));
    assert!(request.start_time_unix_nano <= generation.start_time_unix_nano);
    assert!(generation.end_time_unix_nano <= turn.end_time_unix_nano);
    assert_eq!(collector.service_names().first(), Some(&json!("shop")));

    expect(
        request,
        json!({
            "request_id": REQUEST_ID,
            "http.request.method": "POST",
            "http.route": "/v1/agents/{agent}/sessions/{session}/messages",
            "http.response.status_code": 200,
        }),
    );
    expect(
        turn,
        json!({
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": "skep",
            "gen_ai.agent.name": "talker",
            "gen_ai.conversation.id": "desk",
            "skep.turn.id": answer["turn_id"],
            "skep.turn.number": 1,
        }),
    );
    let mut measured = attributes(generation);
    for duration in ["skep.queue_us", "skep.first_token_us"] {
        let value = measured.remove(duration).unwrap_or_else(|| panic!("no {duration}"));
        assert!(value.as_i64().is_some_and(|us| us >= 0), "{duration}: {value}");
    }
    let usage = &answer["usage"];
    assert_eq!(
        Value::Object(measured),
        json!({
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "skep",
            "gen_ai.agent.name": "talker",
            "gen_ai.conversation.id": "desk",
            "gen_ai.request.model": "smollm2-135m",
            "gen_ai.request.max_tokens": 5,
            "gen_ai.request.temperature": 0.7,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.request.seed": 11,
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        })
    );
    one_request_id_links_the_lines(&log);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_of_another_agents_tool_is_below_the_turn_whose_model_made_it() {
    let collector = Collector::default();
    let config = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    let grants = "[grants]\ntools = [\"agent:orders/*\"]\n";
    std::fs::write(config.path(), grants).unwrap();
    let more = ["--config", config.path().to_str().unwrap()];
    let server = Process::start_with(&collector.start().await, &more);
    assert_eq!(server.host.deploy_guest("toolcall", "orders", "").await.0, 201);
    assert_eq!(server.host.deploy_guest("relay", "desk", grants).await.0, 201);
    let path = "/v1/agents/desk/sessions/ada/messages";
    server.host.ok(path, json!({"text": "model agent:orders/add Add 2 and 3."})).await;
    assert!(server.stop().await.0.success());

    let spans = collector.spans();
    let named =
        |name: &str| spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no {name}"));
    let request = spans
        .iter()
        .find(|span| span.name == "POST /v1/agents/{agent}/sessions/{session}/messages")
        .expect("the request");
    let (turn, call, called) =
        (named("invoke_agent desk"), named("execute_tool agent:orders/add"), named("invoke_agent orders"));
    assert_eq!(turn.parent_span_id, request.span_id);
    assert_eq!(call.parent_span_id, turn.span_id);
    assert_eq!(called.parent_span_id, call.span_id);
    let generations: Vec<&Span> = spans.iter().filter(|span| span.name == "chat smollm2-135m").collect();
    assert_eq!(generations.len(), 2, "the call and the answer");
    assert!(generations.iter().all(|generation| generation.parent_span_id == turn.span_id));
    assert!(generations.iter().any(|generation| generation.end_time_unix_nano <= call.start_time_unix_nano));
    assert!(spans.iter().all(|span| span.trace_id == request.trace_id || span.kind() == SpanKind::Server));
    expect(call, json!({"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "agent:orders/add"}));
    assert_eq!(attribute(&called.attributes, "gen_ai.conversation.id"), json!("desk~ada"));
}

/// Checks that the spans of each line lead to the request, and that the access log has its id.
fn one_request_id_links_the_lines(log: &[Value]) {
    let access = |line: &&Value| line["target"] == "skep::access" && line["request_id"] == REQUEST_ID;
    let access = log.iter().find(access).unwrap_or_else(|| panic!("no line of the access log in {log:#?}"));
    assert_eq!((&access["status"], &access["method"]), (&json!(200), &json!("POST")), "{access}");
    for (message, depth) in [("the turn ended", 2), ("the generation ended", 3)] {
        let of_request =
            |line: &&Value| line["message"] == message && line["spans"][0]["request_id"] == REQUEST_ID;
        let line = log.iter().find(of_request).unwrap_or_else(|| panic!("no line {message:?} in {log:#?}"));
        assert_eq!(line["spans"].as_array().map(Vec::len), Some(depth), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_are_separate_traces_that_last_as_long_as_their_streams() {
    let collector = Collector::default();
    let server = Process::start(&collector.start().await);
    // Schemas are compiled on a different thread than the request's.
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "yes", "schema": {"type": "boolean"}}});
    let messages = json!([{"role": "user", "content": "Is water wet?"}]);
    let chat = json!({"messages": messages, "response_format": format, "stream": true});
    let events = server.host.events("/v1/chat/completions", chat).await;
    assert_eq!(events.last().map(|(_, data)| data.as_str()), Some("[DONE]"));
    let endless = json!({"prompt": "One", "max_tokens": 2000, "ignore_eos": true, "stream": true});
    let mut left = client().post(server.host.at("/v1/completions")).json(&endless).send().await.unwrap();
    left.chunk().await.unwrap().expect("the stream has started");
    drop(left);
    let refused = json!({"prompt": "One", "max_tokens": 1_000_000});
    assert_eq!(server.host.post("/v1/completions", refused).await.0, 400);
    let (status, _) = server.stop().await;
    assert!(status.success());

    let spans = collector.spans();
    let requests: Vec<&Span> = spans.iter().filter(|span| span.kind() == SpanKind::Server).collect();
    assert!(requests.iter().all(|span| span.parent_span_id.is_empty()), "{requests:#?}");
    let below = |request: &Span| {
        let mut below = spans.iter().filter(|span| span.parent_span_id == request.span_id);
        below.next().expect("a generation").clone()
    };
    let streamed = requests.iter().find(|span| span.name == "POST /v1/chat/completions").expect("streamed");
    let generation = below(streamed);
    assert_eq!(generation.trace_id, streamed.trace_id);
    assert!(
        generation.end_time_unix_nano <= streamed.end_time_unix_nano,
        "the generation ended before the request span"
    );
    assert_eq!(attribute(&generation.attributes, "gen_ai.response.finish_reasons"), json!(["stop"]));
    assert_eq!(attribute(&generation.attributes, "gen_ai.agent.name"), Value::Null);
    let completions = requests.iter().filter(|span| span.name == "POST /v1/completions");
    let mut failures: Vec<(Value, Value, bool)> = completions
        .map(|request| {
            let generation = below(request);
            let is_error = generation.status.as_ref().map(|status| status.code()) == Some(StatusCode::Error);
            let status = attribute(&request.attributes, "http.response.status_code");
            (status, attribute(&generation.attributes, "error.type"), is_error)
        })
        .collect();
    failures.sort_by_key(|(status, ..)| status.as_i64());
    let expected = [(json!(200), json!("cancelled"), true), (json!(400), json!("context_overflow"), true)];
    assert_eq!(failures, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fallback_of_a_route_is_an_event_of_the_request_and_attempts_are_counted() {
    let collector = Collector::default();
    let endpoint = collector.start().await;
    let bad = ScriptedUpstream::start(|_| refused(http::StatusCode::INTERNAL_SERVER_ERROR, "broken")).await;
    let good = ScriptedUpstream::start(|_| answered(&[json!({"content": "Hello."})])).await;
    let upstream = |name: &str, url: &str| {
        format!(
            "[[upstream]]\nname = \"{name}\"\nkind = \"openai\"\nurl = \"{url}\"\nattempts = 2\n[[upstream.models]]\nname = \"m\"\n"
        )
    };
    let route = "[[route]]\nname = \"smart\"\n[[route.models]]\nmodel = \"bad/m\"\n[[route.models]]\nmodel = \"good/m\"\n";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("skep.toml");
    let settings = format!("{}{}{route}", upstream("bad", &bad.url), upstream("good", &good.url));
    std::fs::write(&file, settings).unwrap();
    let server = Process::start_with(&endpoint, &["--config", file.to_str().unwrap()]);
    let messages = json!([{"role": "user", "content": "Hi."}]);
    server.host.ok("/v1/chat/completions", json!({"model": "smart", "messages": messages})).await;
    let (status, _) = server.stop().await;
    assert!(status.success());

    let spans = collector.spans();
    let named = |name: &str| {
        spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("{name}: {spans:#?}"))
    };
    let request = named("POST /v1/chat/completions");
    let is_fallback = |event: &&Event| event.name.contains("falls back");
    let fallback = request.events.iter().find(is_fallback).unwrap_or_else(|| panic!("{request:#?}"));
    assert_eq!(
        (attribute(&fallback.attributes, "route"), attribute(&fallback.attributes, "model")),
        (json!("smart"), json!("bad/m"))
    );
    for (name, attempts, error) in
        [("chat bad/m", 2, json!("upstream_unavailable")), ("chat good/m", 1, Value::Null)]
    {
        let answer = named(name);
        assert_eq!(answer.parent_span_id, request.span_id, "{name}");
        assert_eq!(attribute(&answer.attributes, "skep.attempts"), json!(attempts), "{name}");
        assert_eq!(attribute(&answer.attributes, "error.type"), error, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_collector_causes_only_a_warning() {
    let closed = unused_address();
    let server = Process::start(&format!("http://{closed}"));
    server.host.ok("/v1/completions", json!({"prompt": "One", "max_tokens": 2})).await;
    let (status, log) = server.stop().await;
    assert!(status.success());
    let is_warning =
        |line: &&Value| line["level"] == "WARN" && line["message"].to_string().contains("traces are lost");
    assert_eq!(log.iter().filter(is_warning).count(), 1, "{log:#?}");
}

#[test]
fn an_invalid_endpoint_is_refused_with_the_fix() {
    let output = Command::new(env!("CARGO_BIN_EXE_skep"))
        .args(["up", "--ephemeral", "--otlp-endpoint", "localhost:4318"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("--otlp-endpoint") && error.contains("http://127.0.0.1:4318"), "{error}");
}

fn expect(span: &Span, attributes: Value) {
    assert_eq!(Value::Object(self::attributes(span)), attributes, "{}", span.name);
}

fn attributes(span: &Span) -> serde_json::Map<String, Value> {
    let named = |one: &KeyValue| (one.key.clone(), attribute(&span.attributes, &one.key));
    span.attributes.iter().map(named).collect()
}

/// Returns the value of an attribute, or `null` if it does not exist.
fn attribute(attributes: &[KeyValue], key: &str) -> Value {
    let found = attributes.iter().find(|attribute| attribute.key == key);
    found.map_or(Value::Null, |attribute| plain(attribute.value.as_ref()))
}

fn plain(value: Option<&AnyValue>) -> Value {
    match value.and_then(|value| value.value.as_ref()) {
        Some(any_value::Value::StringValue(text)) => json!(text),
        Some(any_value::Value::IntValue(number)) => json!(number),
        Some(any_value::Value::DoubleValue(number)) => json!(number),
        Some(any_value::Value::ArrayValue(array)) => {
            array.values.iter().map(|one| plain(Some(one))).collect()
        }
        other => panic!("unexpected attribute value: {other:?}"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
