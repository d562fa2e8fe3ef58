//! Requests that are passed on to the owner of their session, and what happens when it cannot be reached.

use super::{
    super::{
        key::SignedBody,
        link::{Link, Outgoing},
        owners::Subject,
        receive,
    },
    HERE, Script, THERE, answered_by, ask, ended, gateway, here, key, member, serve,
};
use crate::{
    AccessOptions, GatewayOptions, routes_of,
    tests::{fixture::Server, turns::echo},
};
use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    http::{HeaderMap, Method, Request, StatusCode},
    middleware,
    response::{IntoResponse, Response},
};
use futures::{StreamExt, channel::mpsc};
use serde_json::json;
use skep_runtime::{Manifest, Member, NewApiKey, Role, Tenant};
use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};
use tower::ServiceExt;

const MESSAGES: &str = "/v1/agents/echo/sessions/s/messages";

pub(super) async fn with_echo() -> Server {
    let server = Server::start().await;
    server.host.deploy(Manifest::from_toml("name = \"echo\"").unwrap(), echo(), "tester").await.unwrap();
    server
}

pub(super) fn message(headers: &[(&'static str, &str)]) -> Request<Body> {
    let mut request = Request::post(MESSAGES);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Body::from(json!({ "text": "hello" }).to_string())).unwrap()
}

/// Returns the routes of another host that answers everything with this function.
fn answering<F, R>(server: &Server, answer: F) -> Router
where
    F: Fn(Request<Body>) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Response> + Send + 'static,
{
    let gateway = gateway(&server.host, GatewayOptions::default(), THERE, Script::new(vec![None]));
    let answer = move |request: Request<Body>| answer(request);
    Router::new().fallback(answer).layer(middleware::from_fn_with_state(gateway, receive))
}

#[tokio::test]
async fn a_request_is_answered_by_the_owner_of_its_session() {
    let (one, two) = (Server::start().await, with_echo().await);
    let there = gateway(&two.host, GatewayOptions::default(), THERE, Script::new(vec![None]));
    let (member, _stop) = serve(routes_of(there)).await;
    let owners = Script::new(vec![Some(member)]);
    let routes = here(&one.host, &owners);
    let answer = ask(&routes, message(&[("x-request-id", "mine")])).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!((&answer.json()["text"], &answer.json()["turn"]), (&json!("hello"), &json!(1)));
    assert_eq!((answered_by(&answer), answer.headers["x-request-id"].to_str().unwrap()), ("2", "mine"));
    assert!(!answer.headers.keys().any(|name| name.as_str().starts_with("x-skep-cluster-")));
    let path = "/v1/agents/echo/sessions/s/turns?limit=1";
    let read = ask(&routes, Request::get(path).body(Body::empty()).unwrap()).await;
    assert_eq!(read.json()["data"].as_array().map(Vec::len), Some(1), "{}", read.text);
    let session = Subject::Session { agent: "echo".to_owned(), session: "s".to_owned() };
    assert_eq!(owners.asked(), [session.clone(), session]);
    // Requests about more than one session are answered by the host that was asked.
    let agents = ask(&routes, Request::get("/v1/agents").body(Body::empty()).unwrap()).await;
    assert_eq!((answered_by(&agents), &agents.json()["data"]), ("1", &json!([])));
    let decision = Request::post("/v1/approvals/a-1").body(Body::from("{\"decision\":\"deny\"}")).unwrap();
    let decided = ask(&routes, decision).await;
    assert_eq!((decided.status.as_u16(), answered_by(&decided)), (404, "2"));
    assert_eq!(owners.asked().last(), Some(&Subject::Approval("a-1".to_owned())));
}

/// Returns a message of an MCP client, in a session or without one.
fn of_mcp(session: Option<&str>, message: &serde_json::Value) -> Request<Body> {
    let request = Request::post("/mcp")
        .header("host", "skep.example")
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream");
    let request = match session {
        Some(id) => request.header("mcp-session-id", id),
        None => request,
    };
    request.body(Body::from(message.to_string())).unwrap()
}

#[tokio::test]
async fn a_session_of_an_mcp_client_is_served_by_the_host_that_has_it() {
    let (one, two) = (Server::start().await, with_echo().await);
    let there = gateway(&two.host, GatewayOptions::default(), THERE, Script::new(vec![None]));
    let there = routes_of(there);
    let (member, _stop) = serve(there.clone()).await;
    let owners = Script::new(vec![Some(member)]);
    let routes = here(&one.host, &owners);
    let initialize = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }});
    let tools = json!({"jsonrpc": "2.0", "id": 2, "method": "tools/list"});
    let begin = async |routes: &Router| {
        let begun = ask(routes, of_mcp(None, &initialize)).await;
        assert_eq!(begun.status, 200, "{}", begun.text);
        begun.headers["mcp-session-id"].to_str().unwrap().to_owned()
    };
    let (own, other) = (begin(&routes).await, begin(&there).await);
    assert_eq!(answered_by(&ask(&routes, of_mcp(Some(&own), &tools)).await), "1");
    assert!(owners.asked().is_empty(), "a session of this host is nobody else's");
    let answer = ask(&routes, of_mcp(Some(&other), &tools)).await;
    assert_eq!((answer.status.as_u16(), answered_by(&answer)), (200, "2"), "{}", answer.text);
    assert!(answer.text.contains("\"echo\""), "{}", answer.text);
    assert_eq!(owners.asked(), [Subject::McpSession(other)]);
    let unknown = ask(&routes, of_mcp(Some("nobody"), &tools)).await;
    assert_eq!((unknown.status.as_u16(), answered_by(&unknown)), (404, "2"));
}

#[tokio::test]
async fn the_owner_is_looked_for_by_the_tenants_session_and_only_for_a_known_caller() {
    let one = Server::start().await;
    let access = AccessOptions { keys_required: true, ..AccessOptions::default() };
    let seen = Arc::new(Mutex::new(Vec::new()));
    let paths = seen.clone();
    let there = answering(&one, move |request| {
        paths.lock().unwrap().push(request.uri().to_string());
        async { StatusCode::NO_CONTENT.into_response() }
    });
    let (member, _stop) = serve(there).await;
    let owners = Script::new(vec![Some(member)]);
    let options = GatewayOptions { access, ..GatewayOptions::default() };
    let routes = routes_of(gateway(&one.host, options, HERE, owners.clone()));
    assert_eq!(ask(&routes, message(&[])).await.status, 401);
    assert!(owners.asked().is_empty(), "a caller without a key learns nothing");
    let new = NewApiKey {
        tenant: Tenant::new("acme").unwrap(),
        role: Role::Invoke,
        agents: None,
        name: String::new(),
        expires_in: None,
        requests_per_minute: None,
        bodies: false,
    };
    let key = format!("Bearer {}", one.host.keys().create(new).await.unwrap().1);
    assert_eq!(ask(&routes, message(&[("authorization", key.as_str())])).await.status, 204);
    let session = Subject::Session { agent: "echo".to_owned(), session: "acme/s".to_owned() };
    assert_eq!(owners.asked(), [session]);
    assert_eq!(*seen.lock().unwrap(), ["/v1/agents/echo/sessions/acme%2Fs/messages"]);
}

#[tokio::test]
async fn both_bodies_are_streams_and_a_client_that_leaves_ends_the_request() {
    let one = Server::start().await;
    let (chunks, answer) = mpsc::unbounded::<Result<Bytes, Infallible>>();
    let answer = Arc::new(Mutex::new(Some(answer)));
    let (arrived, mut heads) = tokio::sync::mpsc::unbounded_channel();
    let there = answering(&one, move |request: Request<Body>| {
        arrived.send(()).unwrap();
        let answer = answer.lock().unwrap().take();
        async move {
            let bytes = to_bytes(request.into_body(), usize::MAX).await.unwrap();
            assert_eq!(bytes.len(), (3 << 20) + 1, "a body that is too large to be kept");
            Response::new(Body::from_stream(answer.unwrap()))
        }
    });
    let (member, _stop) = serve(there).await;
    let routes = here(&one.host, &Script::new(vec![Some(member)]));
    let (parts, sent) = mpsc::unbounded::<Result<Bytes, Infallible>>();
    let request = Request::post(MESSAGES).body(Body::from_stream(sent)).unwrap();
    let asking = tokio::spawn(routes.oneshot(request));
    parts.unbounded_send(Ok(Bytes::from(vec![b'x'; 3 << 20]))).unwrap();
    heads.recv().await.expect("the request is passed on before its body has ended");
    parts.unbounded_send(Ok(Bytes::from_static(b"y"))).unwrap();
    drop(parts);
    let mut body = asking.await.unwrap().unwrap().into_body().into_data_stream();
    for chunk in ["one", "two"] {
        chunks.unbounded_send(Ok(Bytes::from(chunk))).unwrap();
        let received = body.next().await.unwrap().unwrap();
        assert_eq!(received, chunk, "each part arrives before the next one is made");
    }
    drop(body);
    // The other host notices at a write, and drops the body with its receiver.
    while chunks.unbounded_send(Ok(Bytes::from_static(b"more"))).is_ok() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn headers_that_only_hosts_send_are_removed_from_a_clients_request() {
    let one = Server::start().await;
    let seen = Arc::new(Mutex::new(HeaderMap::new()));
    let headers = seen.clone();
    let there = answering(&one, move |request| {
        *headers.lock().unwrap() = request.headers().clone();
        async { StatusCode::NO_CONTENT.into_response() }
    });
    let forged = [
        ("x-skep-cluster-nonce", "1"),
        ("x-skep-cluster-new", "1"),
        ("x-skep-host", "9"),
        ("x-mine", "1"),
        ("host", "skep.example"),
    ];
    assert_eq!(ask(&there, message(&forged)).await.status, 204, "straight from a client");
    let names = |headers: &HeaderMap| headers.keys().filter(|name| name.as_str().starts_with("x-")).count();
    assert_eq!(names(&seen.lock().unwrap()), 1, "{:?}", seen.lock().unwrap());
    let (member, _stop) = serve(there).await;
    let routes = here(&one.host, &Script::new(vec![Some(member)]));
    assert_eq!(ask(&routes, message(&forged)).await.status, 204);
    let seen = seen.lock().unwrap();
    assert_eq!(seen["x-mine"], "1");
    assert_eq!(seen["host"], "skep.example");
    assert!(!seen.keys().any(|name| name.as_str().starts_with("x-skep-")), "{seen:?}");
}

#[tokio::test]
async fn a_request_that_was_passed_on_is_answered_here() {
    let one = with_echo().await;
    let owners = Script::new(vec![Some(ended().await)]);
    let routes = here(&one.host, &owners);
    let (member, _stop) = serve(routes).await;
    let outgoing = Outgoing {
        method: Method::POST,
        path: MESSAGES.parse().unwrap(),
        headers: HeaderMap::new(),
        body: Body::from(json!({ "text": "hello" }).to_string()),
        signed_body: SignedBody::Streamed,
        needs_key: false,
    };
    let to = Member { number: HERE, ..member };
    let answer = Link::new(key()).send(&to, outgoing).await;
    let answer = answer.unwrap_or_else(|error| panic!("{}", error.message()));
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.headers()["x-skep-host"], "1");
    assert!(owners.asked().is_empty(), "nobody looks for an owner again");
}

#[tokio::test]
async fn a_request_waits_until_the_session_of_a_host_that_ended_is_taken_over() {
    let one = with_echo().await;
    // It was never sent, so it does not matter whether the request may be repeated.
    let owners = Script::new(vec![Some(ended().await), Some(ended().await), None]);
    let answer = ask(&here(&one.host, &owners), message(&[])).await;
    assert_eq!((answer.status.as_u16(), answered_by(&answer)), (200, "1"), "{}", answer.text);
    assert_eq!(answer.json()["text"], "hello");
    assert_eq!(owners.asked().len(), 3);
}

/// Starts a host that reads a request, answers with these bytes, and closes the connection.
async fn rude(answer: &'static [u8]) -> Member {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let member = member(&listener);
    tokio::spawn(async move {
        loop {
            let Ok((mut stream, _)) = listener.accept().await else { return };
            let mut read = Vec::new();
            while !read.ends_with(b"}") {
                if stream.read_buf(&mut read).await.unwrap_or_default() == 0 {
                    break;
                }
            }
            let _ = stream.write_all(answer).await;
        }
    });
    member
}

#[tokio::test]
async fn a_request_whose_answer_is_lost_is_repeated_only_with_an_idempotency_key() {
    let one = with_echo().await;
    let broken = rude(b"").await;
    let owners = Script::new(vec![Some(broken.clone()), None]);
    let lost = ask(&here(&one.host, &owners), message(&[])).await;
    assert_eq!((lost.status.as_u16(), &lost.error()["code"]), (503, &json!("host_gone")));
    assert_eq!(lost.headers["retry-after"], "2");
    assert!(lost.error()["message"].as_str().unwrap().contains("idempotency key"), "{}", lost.text);
    assert_eq!(owners.asked().len(), 1);
    let owners = Script::new(vec![Some(broken), None]);
    let repeated = ask(&here(&one.host, &owners), message(&[("idempotency-key", "k")])).await;
    assert_eq!(repeated.status, 200, "{}", repeated.text);
}

#[tokio::test]
async fn an_answer_of_a_stranger_is_not_passed_back() {
    let one = Server::start().await;
    let head = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nx-skep-cluster-proof: AAAA\r\n\r\nsecret";
    let owners = Script::new(vec![Some(rude(head).await)]);
    let answer = ask(&here(&one.host, &owners), message(&[])).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (503, &json!("host_gone")));
    assert!(!answer.text.contains("secret"), "{}", answer.text);
}

#[tokio::test]
async fn a_host_that_hangs_is_waited_for_only_while_it_is_alive() {
    let one = with_echo().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let owners = Script::new(vec![Some(member(&listener)), None]);
    let routes = here(&one.host, &owners);
    let asking = tokio::spawn(async move { ask(&routes, message(&[("idempotency-key", "k")])).await });
    let (hanging, _) = listener.accept().await.unwrap();
    owners.live.lock().unwrap().remove(&THERE);
    let answer = asking.await.unwrap();
    assert_eq!((answer.status.as_u16(), answered_by(&answer)), (200, "1"), "{}", answer.text);
    drop(hanging);
}

#[tokio::test]
async fn an_answer_of_a_host_that_hangs_breaks_off_when_it_is_gone() {
    let one = Server::start().await;
    let (chunks, answer) = mpsc::unbounded::<Result<Bytes, Infallible>>();
    let answer = Arc::new(Mutex::new(Some(answer)));
    let there = answering(&one, move |_| {
        let answer = answer.lock().unwrap().take();
        async move { Response::new(Body::from_stream(answer.unwrap())) }
    });
    let (member, _stop) = serve(there).await;
    let owners = Script::new(vec![Some(member)]);
    let response = here(&one.host, &owners).oneshot(message(&[])).await.unwrap();
    let mut body = response.into_body().into_data_stream();
    chunks.unbounded_send(Ok(Bytes::from_static(b"one"))).unwrap();
    assert_eq!(body.next().await.unwrap().unwrap(), "one");
    owners.live.lock().unwrap().remove(&THERE);
    assert!(body.next().await.unwrap().is_err(), "the client learns that the answer is not whole");
    assert!(body.next().await.is_none());
    drop(chunks);
}
