//! Servers and requests that try to send a secret to the wrong place.

use super::*;
use crate::{Secret, Secrets};

const PLACEHOLDER: &str = "secret.KEY.0123456789abcdef";
const VALUE: &str = "s3cret/value";

/// Returns a policy that grants everything and a secret that is allowed only for `server`.
fn policy(server: &Server) -> Policy {
    let allowed = Policy::default().and(origins(&[&server.url("")]), "hosts of KEY");
    let secret =
        Secret { name: "KEY".into(), placeholder: PLACEHOLDER.into(), value: Some(VALUE.into()), allowed };
    everywhere().with_secrets(Secrets::new(vec![secret]))
}

fn with_key(url: &str) -> Request {
    get(url).header("X-Key", PLACEHOLDER).expect("valid")
}

fn redirect(status: u16, location: &str) -> String {
    format!(
        "HTTP/1.1 {status} Moved\r\nlocation: {location}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    )
}

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn the_server_sees_the_value_and_the_caller_only_the_placeholder() {
    let server = Server::answering(|request| {
        let seen =
            request.lines().find_map(|line| line.strip_prefix("x-key: ")).unwrap_or_default().to_owned();
        format!("HTTP/1.1 200 OK\r\nx-echo: {seen}\r\ncontent-length: {}\r\n\r\n{seen}", seen.len())
    })
    .await;
    let response =
        client().send(with_key(&server.url("/")), &policy(&server), &bounds()).await.expect("answered");
    assert!(server.requests()[0].contains(&format!("x-key: {VALUE}\r\n")));
    assert_eq!(response.body, PLACEHOLDER.as_bytes());
    assert_eq!(response.headers["x-echo"], PLACEHOLDER);
}

#[tokio::test]
async fn no_request_with_the_secret_is_sent_to_another_server() {
    let (server, other) = (Server::answering(|_| OK).await, Server::answering(|_| OK).await);
    let body = get(&other.url("/")).body(PLACEHOLDER.into());
    for request in [with_key(&other.url("/")), get(&other.url(&format!("/?k={PLACEHOLDER}"))), body] {
        let error = client().send(request, &policy(&server), &bounds()).await.expect_err("not for this one");
        assert_eq!(error.code(), "secret_not_granted");
    }
    let path = get(&server.url(&format!("/{PLACEHOLDER}")));
    let error = client().send(path, &policy(&server), &bounds()).await.expect_err("a path");
    assert_eq!(error.code(), "secret_misplaced");
    assert_eq!((server.connections(), other.connections()), (0, 0));
}

#[tokio::test]
async fn a_redirect_to_another_origin_drops_headers_with_a_secret() {
    let other = Server::answering(|_| OK).await;
    let target = other.url("/there");
    let server = Server::answering(move |_| redirect(302, &target)).await;
    client().send(with_key(&server.url("/")), &policy(&server), &bounds()).await.expect("followed");
    let there = other.requests().pop().expect("it was followed");
    assert!(!there.contains("x-key") && !there.contains(VALUE) && !there.contains(PLACEHOLDER), "{there}");
}

#[tokio::test]
async fn a_redirect_that_would_repeat_a_secret_elsewhere_is_refused() {
    let other = Server::answering(|_| OK).await;
    // One redirect repeats the body; the others write the value that the server received into the URL.
    for (status, path) in [(307, "/"), (302, "/?leak=s3cret/value"), (302, "/?leak=s3cret%2Fvalue")] {
        let target = other.url(path);
        let server = Server::answering(move |_| redirect(status, &target)).await;
        let request = Request::new("POST", &server.url("/")).expect("valid").body(PLACEHOLDER.into());
        let error =
            client().send(request, &policy(&server), &bounds()).await.expect_err("not for the other one");
        assert_eq!(error.code(), "secret_not_granted", "{error}");
        assert!(!error.to_string().contains("s3cret"), "{error}");
    }
    assert_eq!(other.connections(), 0);
}

#[tokio::test]
async fn a_redirect_within_the_origin_keeps_the_secret() {
    let server = Server::answering(|request| match request.starts_with("GET /a ") {
        true => redirect(302, "/b"),
        false => OK.to_owned(),
    })
    .await;
    client().send(with_key(&server.url("/a")), &policy(&server), &bounds()).await.expect("followed");
    assert!(server.requests().iter().all(|request| request.contains(&format!("x-key: {VALUE}\r\n"))));
}
