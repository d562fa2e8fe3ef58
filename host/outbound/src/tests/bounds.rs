//! Servers that send too much, respond too slowly, or violate HTTP.

use super::*;
use server::Then;

const LIMIT: usize = 100_000;

async fn answered(head: &'static str, then: Then, deadline: Duration) -> Result<Response, OutboundError> {
    let server = Server::at("127.0.0.1:0", move |_| head, then).await;
    let bounds = Bounds { response_bytes: LIMIT, deadline: Instant::now() + deadline, ..bounds() };
    client().send(get(&server.url("/")), &everywhere(), &bounds).await
}

const LONG: Duration = Duration::from_secs(20);

#[tokio::test]
async fn a_response_announced_over_the_limit_is_not_read() {
    let head = "HTTP/1.1 200 OK\r\ncontent-length: 100001\r\n\r\n";
    let error = answered(head, Then::Drip, LONG).await.expect_err("too large");
    assert_eq!(error, OutboundError::ResponseTooLarge { limit: LIMIT });
}

#[tokio::test]
async fn an_endless_response_is_read_up_to_the_limit() {
    for head in ["HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", "HTTP/1.0 200 OK\r\n\r\n"] {
        let error = answered(head, Then::Pour, LONG).await.expect_err("too large");
        assert_eq!(error, OutboundError::ResponseTooLarge { limit: LIMIT });
    }
}

#[tokio::test]
async fn endless_headers_are_an_error() {
    let error = answered("HTTP/1.1 200 OK\r\nx-a: ", Then::Pour, LONG).await.expect_err("no end");
    assert!(matches!(error, OutboundError::Exchange { .. }), "{error}");
    let head: &'static str =
        format!("HTTP/1.1 200 OK\r\nx-a: {}\r\ncontent-length: 0\r\n\r\n", "a".repeat(70_000)).leak();
    let error = answered(head, Then::Close, LONG).await.expect_err("too many bytes of headers");
    assert!(matches!(error, OutboundError::ResponseTooLarge { .. }), "{error}");
}

#[tokio::test]
async fn a_slow_response_fails_at_the_deadline() {
    for head in ["HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", "HTTP/1.1 200 OK\r\nx-a: "] {
        let error = answered(head, Then::Drip, Duration::from_millis(100)).await.expect_err("too slow");
        assert_eq!(error, OutboundError::DeadlineExceeded);
    }
}

#[tokio::test]
async fn a_passed_deadline_sends_no_request() {
    let server = Server::answering(|_| "").await;
    let bounds = Bounds { deadline: Instant::now() - Duration::from_secs(1), ..bounds() };
    // The first poll may still open the connection, but the client must not wait for it.
    let error = client().send(get(&server.url("/")), &everywhere(), &bounds).await.expect_err("too late");
    assert_eq!(error, OutboundError::DeadlineExceeded);
    assert!(server.requests().is_empty());
}

#[tokio::test]
async fn a_compressed_response_is_returned_unchanged() {
    // These 29 bytes of gzip decompress to a thousand zeros.
    const GZIP: [u8; 29] = [
        31, 139, 8, 0, 0, 0, 0, 0, 2, 3, 99, 96, 24, 5, 163, 96, 20, 12, 119, 0, 0, 128, 23, 11, 6, 232, 3,
        0, 0,
    ];
    let server = Server::answering(|_| {
        let head = "HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 29\r\n\r\n";
        [head.as_bytes(), &GZIP].concat()
    })
    .await;
    let response = fetch(&server.url("/")).await.expect("small");
    assert_eq!(response.body, GZIP);
    assert!(
        !server.requests()[0].to_lowercase().contains("accept-encoding"),
        "compression was not requested"
    );
}

#[tokio::test]
async fn a_request_over_its_limit_is_not_sent() {
    let server = Server::answering(|_| "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    let bounds = Bounds { request_bytes: 10, ..bounds() };
    let post = |bytes: usize| Request::new("POST", &server.url("/")).expect("valid").body(vec![b'x'; bytes]);
    client().send(post(10), &everywhere(), &bounds).await.expect("just fits");
    let error = client().send(post(11), &everywhere(), &bounds).await.expect_err("too large");
    assert_eq!(error, OutboundError::RequestTooLarge { bytes: 11, limit: 10 });
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn early_closes_and_other_protocols_are_errors() {
    for answer in ["", "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort", "SSH-2.0-OpenSSH_9.6\r\n"] {
        let error = answered(answer, Then::Close, LONG).await.expect_err(answer);
        assert!(matches!(error, OutboundError::Exchange { .. }), "{error}");
    }
    let error = fetch("http://127.0.0.1:1/").await.expect_err("nothing listens on this port");
    assert!(matches!(error, OutboundError::Connect { .. }), "{error}");
}
