//! Tests of requests by guests to a server run by the test: grants, limits and restarts.

use super::{
    fixture::{Host, invocation},
    guest::Guest,
};
use crate::{Invocation, RuntimeOptions, TurnPhase};
use skep_outbound::{AddressPolicy, Origins};
use std::{net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinHandle,
};

/// Requests the URL in the message, once per turn: with POST after a "+", with PUT after a "=",
/// otherwise with GET. Replies with the body or the error.
///
/// 512: the methods, and errors without a text. 600: the result.
pub(super) fn fetcher() -> Guest {
    Guest {
        module: r#"
            (import "skep:agent/http@0.1.1" "fetch" (func $fetch
                (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32)))
            (data (i32.const 512) "GETPOSTPUTtimeoutinterrupted")"#,
        on_message: FETCH_ONCE,
        ..Guest::default()
    }
}

const FETCH_ONCE: &str = r#"
    (local.set $a (i32.const 512)) (local.set $b (i32.const 3))
    (if (i32.eq (i32.load8_u (local.get $text)) (i32.const 43))
        (then (local.set $a (i32.const 515)) (local.set $b (i32.const 4))))
    (if (i32.eq (i32.load8_u (local.get $text)) (i32.const 61))
        (then (local.set $a (i32.const 519)) (local.set $b (i32.const 3))))
    (if (i32.ne (local.get $a) (i32.const 512))
        (then (local.set $text (i32.add (local.get $text) (i32.const 1)))
              (local.set $length (i32.sub (local.get $length) (i32.const 1)))))
    (call $fetch (local.get $a) (local.get $b) (local.get $text) (local.get $length)
        (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)
        (i32.const 600))
    (if (i32.load8_u (i32.const 600))
        (then
            (local.set $text (i32.load (i32.const 608))) (local.set $length (i32.load (i32.const 612)))
            (if (i32.eq (i32.load8_u (i32.const 604)) (i32.const 3))
                (then (local.set $text (i32.const 522)) (local.set $length (i32.const 7))))
            (if (i32.eq (i32.load8_u (i32.const 604)) (i32.const 6))
                (then (local.set $text (i32.const 529)) (local.set $length (i32.const 11)))))
        (else (local.set $text (i32.load (i32.const 624))) (local.set $length (i32.load (i32.const 628)))))"#;

/// A request on a connection that waits for its answer.
pub(super) struct ReceivedRequest {
    pub(super) head: String,
    pub(super) body: String,
    stream: TcpStream,
}

/// A server that hands every request to the test, which may answer it.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    pub(super) asked: mpsc::Receiver<ReceivedRequest>,
    task: JoinHandle<()>,
}

impl Server {
    pub(super) async fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("the listener is bound");
        let (sender, asked) = mpsc::channel(16);
        let task = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let sender = sender.clone();
                tokio::spawn(async move {
                    let mut bytes = Vec::new();
                    let (head, body) = loop {
                        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
                            return;
                        }
                        if let Some(whole) = whole(&bytes) {
                            break whole;
                        }
                    };
                    // The receiver is gone only when the test is over.
                    let _ = sender.send(ReceivedRequest { head, body, stream }).await;
                });
            }
        });
        Server { address, asked, task }
    }

    /// Answers every request with this text.
    pub(super) fn answering(mut self, text: &'static str) -> SocketAddr {
        let address = self.address;
        tokio::spawn(async move {
            while let Some(asked) = self.asked.recv().await {
                asked.answer(text).await;
            }
        });
        address
    }

    pub(super) async fn next(&mut self) -> ReceivedRequest {
        self.asked.recv().await.expect("the server runs")
    }
}

/// Returns the head and the body once everything has arrived.
fn whole(bytes: &[u8]) -> Option<(String, String)> {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    (body.len() >= length.unwrap_or(0)).then(|| (head.to_owned(), body.to_owned()))
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ReceivedRequest {
    pub(super) async fn answer(mut self, text: &str) {
        let length = text.len();
        let answer =
            format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{text}");
        // The client may have gone away.
        let _ = self.stream.write_all(answer.as_bytes()).await;
    }

    /// Answers with these lines in the head, and a body in chunks of a few bytes.
    pub(super) async fn answer_in_chunks(mut self, head: &str, body: &[u8]) {
        let head =
            format!("HTTP/1.1 200 OK\r\nconnection: close\r\n{head}transfer-encoding: chunked\r\n\r\n");
        let _ = self.stream.write_all(head.as_bytes()).await;
        for chunk in body.chunks(5) {
            let chunk = [format!("{:x}\r\n", chunk.len()).as_bytes(), chunk, b"\r\n"].concat();
            let _ = self.stream.write_all(&chunk).await;
        }
        let _ = self.stream.write_all(b"0\r\n\r\n").await;
    }
}

/// Returns options of an operator who grants these hosts and lets agents connect to this machine.
pub(super) fn granting(hosts: &[&str]) -> RuntimeOptions {
    let hosts = hosts.iter().map(|host| host.parse().expect("an origin")).collect::<Vec<_>>();
    let mut options =
        RuntimeOptions { granted_hosts: Origins::try_from(hosts).expect("few"), ..Default::default() };
    options.outbound.addresses =
        AddressPolicy { allow_private: vec!["127.0.0.0/8".parse().expect("a range")] };
    options
}

async fn host_with(options: RuntimeOptions, manifest: &str) -> Host {
    let host = Host::with(options).await;
    host.deploy("web", manifest, fetcher()).await.expect("valid");
    host
}

pub(super) const EVERYWHERE: &str = "[grants]\nhosts = [\"*\"]";

#[tokio::test]
async fn a_request_is_sent_only_where_developer_and_operator_both_allow_it() {
    let address = Server::start().await.answering("pong");
    let (origin, url) = (format!("http://{address}"), format!("http://{address}/ping"));
    let asked = |hosts: &str| format!("[grants]\nhosts = [{hosts}]");
    for (operator, manifest, expected) in [
        (vec![origin.as_str()], asked(&format!("{origin:?}")), "pong"),
        (vec!["*"], asked("\"https://api.example.com\""), "to hosts under [grants] in agent.toml"),
        (vec![], asked("\"*\""), "to hosts under [grants] in skep.toml"),
        (vec![], String::new(), "in agent.toml, and to hosts under [grants] in skep.toml"),
    ] {
        let host = host_with(granting(&operator), &manifest).await;
        let answer = host.answer("web", "s", &url).await;
        assert!(answer.ends_with(expected), "{operator:?} {manifest}: {answer}");
    }
}

#[tokio::test]
async fn non_public_addresses_are_denied_unless_the_operator_allows_them() {
    let server = Server::start().await;
    let options = RuntimeOptions { outbound: Default::default(), ..granting(&["*"]) };
    let host = host_with(options, EVERYWHERE).await;
    for url in [
        &format!("http://{}/", server.address),
        &format!("http://localhost:{}/", server.address.port()),
        "http://169.254.169.254/latest/meta-data/",
        "http://[::ffff:10.0.0.1]/",
    ] {
        let answer = host.answer("web", "s", url).await;
        assert!(answer.contains("allow_private = [") && answer.contains("skep.toml"), "{url}: {answer}");
    }
    assert!(server.asked.is_empty());
}

#[tokio::test]
async fn requests_and_their_bytes_are_limited_per_turn() {
    let address = Server::start().await.answering("pong");
    let url = format!("http://{address}/");
    for (limits, expected) in [
        ("fetches = 0", "`fetches` under [limits] in agent.toml"),
        ("fetch_kb = 0", "`fetch_kb` under [limits] in agent.toml"),
        ("fetches = 1\nfetch_kb = 1", "pong"),
    ] {
        let host = host_with(granting(&["*"]), &format!("{EVERYWHERE}\n[limits]\n{limits}")).await;
        let answer = host.answer("web", "s", &url).await;
        assert!(answer.contains(expected), "{limits}: {answer}");
    }
    let operator =
        RuntimeOptions { ceilings: crate::Limits { fetches: 0, ..Default::default() }, ..granting(&["*"]) };
    let host = host_with(operator, EVERYWHERE).await;
    assert!(host.answer("web", "s", &url).await.contains("made 0 requests"));
}

#[tokio::test]
async fn a_response_over_the_rest_of_fetch_kb_is_an_error_for_the_guest() {
    let address = Server::start().await.answering(Box::leak("x".repeat(2_000).into_boxed_str()));
    let host = host_with(granting(&["*"]), &format!("{EVERYWHERE}\n[limits]\nfetch_kb = 1")).await;
    let answer = host.answer("web", "s", &format!("http://{address}/")).await;
    assert!(answer.starts_with("the response is larger than the"), "{answer}");
}

#[tokio::test]
async fn a_turn_that_ends_aborts_its_request() {
    let mut server = Server::start().await;
    let host = host_with(granting(&["*"]), &format!("{EVERYWHERE}\n[limits]\nturn_ms = 2000")).await;
    let error =
        host.ask("web", "s", &format!("http://{}/", server.address)).await.expect_err("nobody answers");
    assert_eq!(error.code(), "deadline_exceeded");
    let mut asked = server.next().await;
    assert_eq!(asked.stream.read(&mut [0; 8]).await.unwrap_or(0), 0, "the connection was closed");
}

fn detached(text: &str) -> Invocation {
    Invocation { detached: true, ..invocation("web", "s", text) }
}

/// Interrupts a turn while the server has not answered. Returns the reply of the resumed turn, and
/// how often the server was called.
async fn after_a_restart(prefix: &str) -> (String, usize) {
    let mut server = Server::start().await;
    let host = host_with(granting(&["*"]), EVERYWHERE).await;
    let text = format!("{prefix}http://{}/order", server.address);
    let handle = host.agents.invoke(detached(&text)).await.expect("taken");
    let id = handle.turn_id().to_owned();
    let first = server.next().await;
    let host = host.restart_with(granting(&["*"])).await;
    drop(first);
    let following = host.agents.follow("web", "s", &id).await.expect("kept");
    let outcome = following.outcome();
    tokio::pin!(outcome);
    let mut times = 1;
    loop {
        tokio::select! {
            outcome = &mut outcome => return (outcome.expect("the turn succeeds").text, times),
            asked = server.next() => {
                times += 1;
                asked.answer("done").await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeatable_request_is_repeated_after_a_restart() {
    assert_eq!(after_a_restart("").await, ("done".to_owned(), 2));
    assert_eq!(after_a_restart("=").await, ("done".to_owned(), 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_post_interrupted_by_a_restart_is_not_repeated_but_reported() {
    assert_eq!(after_a_restart("+").await, ("interrupted".to_owned(), 1));
}

/// Makes its request, then a second one.
fn fetch_twice() -> Guest {
    let twice: &'static str = Box::leak(
        format!(
            "{FETCH_ONCE}
             (local.set $text (i32.load (local.get $message)))
             (local.set $length (i32.load offset=4 (local.get $message)))
             {FETCH_ONCE}"
        )
        .into_boxed_str(),
    );
    Guest { on_message: twice, ..fetcher() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_journaled_response_is_not_requested_again() {
    let mut server = Server::start().await;
    let host = Host::with(granting(&["*"])).await;
    host.deploy("web", EVERYWHERE, fetch_twice()).await.expect("valid");
    let text = format!("+http://{}/order", server.address);
    let id = host.agents.invoke(detached(&text)).await.expect("taken").turn_id().to_owned();
    server.next().await.answer("first").await;
    // The second request is sent only after the first response is stored.
    let second = server.next().await;
    assert!(second.head.starts_with("POST /order HTTP/1.1\r\n"), "{}", second.head);
    let host = host.restart_with(granting(&["*"])).await;
    let outcome = host.agents.follow("web", "s", &id).await.expect("kept").outcome().await;
    assert_eq!(
        outcome.expect("the turn succeeds").text,
        "interrupted",
        "only the second request was interrupted"
    );
    assert!(server.asked.is_empty(), "no third request was made");
    let phase = host.agents.turn("web", "s", &id).await.expect("kept").phase;
    assert!(matches!(phase, TurnPhase::Done { .. }), "{phase:?}");
    drop(second);
}

#[tokio::test]
async fn a_request_has_a_timeout_of_its_own() {
    let mut server = Server::start().await;
    let host = Host::with(granting(&["*"])).await;
    // The last field of the request is a timeout of one second, which is enough even for a busy
    // machine to send it.
    let timed: &'static str = Box::leak(
        FETCH_ONCE
            .replace("(i32.const 0)\n        (i32.const 600))", "(i32.const 1000)\n        (i32.const 600))")
            .replacen("(i32.const 0) (i32.const 1000)", "(i32.const 1) (i32.const 1000)", 1)
            .into_boxed_str(),
    );
    host.deploy("web", EVERYWHERE, Guest { on_message: timed, ..fetcher() }).await.expect("valid");
    let url = format!("http://{}/", server.address);
    let answer = tokio::time::timeout(Duration::from_secs(20), host.answer("web", "s", &url)).await;
    assert_eq!(answer.expect("long before the turn's own deadline"), "timeout");
    server.next().await;
}
