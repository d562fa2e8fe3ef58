//! Tests of the client against real servers on this machine.

mod addresses;
mod bounds;
mod mcp;
mod redirects;
mod secrets;
mod server;

use crate::{AddressPolicy, Bounds, Client, Options, Origins, OutboundError, Policy, Request, Response};
use server::Server;
use std::time::{Duration, Instant};

fn origins(patterns: &[&str]) -> Origins {
    let patterns = patterns.iter().map(|pattern| pattern.parse().expect(pattern)).collect::<Vec<_>>();
    patterns.try_into().expect("few")
}

fn allowing(ranges: &[&str]) -> AddressPolicy {
    AddressPolicy { allow_private: ranges.iter().map(|range| range.parse().expect(range)).collect() }
}

fn everywhere() -> Policy {
    Policy::default().and(origins(&["*"]), "the test")
}

/// Returns a client that may connect to this machine.
fn client() -> Client {
    Client::new(Options { addresses: allowing(&["127.0.0.0/8"]), ..Options::default() })
}

fn get(url: &str) -> Request {
    Request::new("GET", url).expect(url)
}

fn bounds() -> Bounds {
    Bounds { deadline: Instant::now() + Duration::from_secs(20), ..Bounds::default() }
}

async fn fetch(url: &str) -> Result<Response, OutboundError> {
    client().send(get(url), &everywhere(), &bounds()).await
}

#[tokio::test]
async fn sends_a_request_and_returns_its_response() {
    let server = Server::answering(|_| "HTTP/1.1 201 Created\r\nx-a: 1\r\ncontent-length: 2\r\n\r\nok").await;
    let request = Request::new("POST", &server.url("/v1/things?x=%20"))
        .and_then(|request| request.header("X-Key", "k"))
        .expect("valid")
        .body(b"{}".to_vec());
    let response = client().send(request, &everywhere(), &bounds()).await.expect("answered");
    assert_eq!((response.status, response.body.as_slice()), (201, b"ok".as_slice()));
    assert_eq!(response.headers["x-a"], "1");
    let seen = server.requests().pop().expect("one");
    assert!(seen.starts_with("POST /v1/things?x=%20 HTTP/1.1\r\n"), "{seen}");
    assert!(seen.contains("\r\nx-key: k\r\n") && seen.contains("\r\nuser-agent: skep/"), "{seen}");
    assert!(seen.ends_with("\r\n\r\n{}"), "{seen}");
}

#[tokio::test]
async fn an_origin_that_is_not_granted_is_not_connected_to() {
    let server = Server::answering(|_| "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    let policy =
        Policy::default().and(origins(&["https://api.example.com"]), "hosts under [grants] in agent.toml");
    let error = client().send(get(&server.url("/")), &policy, &bounds()).await.expect_err("not granted");
    assert_eq!(error.code(), "not_granted");
    assert!(error.to_string().ends_with("to hosts under [grants] in agent.toml"), "{error}");
    assert_eq!(server.connections(), 0);
}

#[tokio::test]
async fn cookies_are_not_kept_between_requests() {
    let server =
        Server::answering(|_| "HTTP/1.1 200 OK\r\nset-cookie: who=me\r\ncontent-length: 0\r\n\r\n").await;
    let client = client();
    for _ in 0..2 {
        client.send(get(&server.url("/")), &everywhere(), &bounds()).await.expect("answered");
    }
    assert!(server.requests().iter().all(|request| !request.to_lowercase().contains("cookie")));
}
