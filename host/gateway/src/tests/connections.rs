//! Connections that keep the server waiting, over real sockets: they are closed, and others are not affected.

use super::{choices::Together, fixture::Server};
use crate::{ConnectionOptions, GatewayOptions, serve};
use serde_json::json;
use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{Barrier, oneshot},
    task::JoinHandle,
};

const HEALTH: &[u8] = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n";
/// A timeout longer than any step here takes, so that a test fails instead of hanging.
const PATIENCE: Duration = Duration::from_secs(180);

struct Running {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<std::io::Result<()>>,
    server: Server,
}

impl Running {
    async fn with(connections: ConnectionOptions) -> Self {
        Self::start(GatewayOptions { connections, ..GatewayOptions::default() }).await
    }

    async fn start(options: GatewayOptions) -> Self {
        let server = Server::start().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let shutdown = async {
            let _ = stopped.await;
        };
        let serving = tokio::spawn(serve(listener, server.host.clone(), options, shutdown));
        Running { address, stop, serving, server }
    }

    /// Connects from 127.0.0.`host`.
    async fn connect(&self, host: u8) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from((Ipv4Addr::new(127, 0, 0, host), 0))).unwrap();
        socket.connect(self.address).await.unwrap()
    }

    async fn metrics(&self) -> String {
        let mut stream = self.connect(1).await;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        read_to_end(&mut stream).await
    }
}

/// Sends a request and reads the response to the end of its body.
async fn ask(stream: &mut TcpStream, request: &[u8]) -> String {
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&answer);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
            if body.len() >= length.parse().unwrap() {
                return text.into_owned();
            }
        }
        let read = tokio::time::timeout(PATIENCE, stream.read_buf(&mut answer)).await.expect("an answer");
        assert_ne!(read.unwrap(), 0, "{}", String::from_utf8_lossy(&answer));
    }
}

/// Reads everything until the server closes the connection.
async fn read_to_end(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let end = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut bytes)).await;
    // Data in flight is lost when the connection is closed.
    let _ = end.expect("the server closes the connection");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the value of a counter with a single label.
fn counted(metrics: &str, name: &str, label: &str) -> u64 {
    let line =
        metrics.lines().find(|line| line.starts_with(name) && line.contains(&format!("=\"{label}\"}}")));
    line.and_then(|line| line.rsplit(' ').next()).map_or(0, |value| value.parse().unwrap())
}

fn short() -> ConnectionOptions {
    ConnectionOptions {
        header_timeout: Duration::from_secs(2),
        idle_timeout: Duration::from_secs(2),
        send_timeout: Duration::from_secs(2),
        ..ConnectionOptions::default()
    }
}

#[tokio::test]
async fn a_head_that_is_sent_byte_by_byte_times_out() {
    let running = Running::with(short()).await;
    for begins_with_a_request in [false, true] {
        let mut stream = running.connect(1).await;
        if begins_with_a_request {
            assert!(ask(&mut stream, HEALTH).await.starts_with("HTTP/1.1 200"));
        }
        let (mut reading, mut writing) = stream.into_split();
        let drip = tokio::spawn(async move {
            for byte in b"GET /healthz HTTP/1.1\r\nx-slow: ".iter().chain(std::iter::repeat(&b'x')) {
                if writing.write_all(&[*byte]).await.is_err() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let mut rest = Vec::new();
        let end = tokio::time::timeout(PATIENCE, reading.read_to_end(&mut rest)).await;
        let _ = end.expect("the connection is closed");
        assert!(rest.is_empty());
        drip.await.unwrap();
    }
}

#[tokio::test]
async fn idle_connections_are_closed_before_and_after_requests() {
    let running = Running::with(short()).await;
    let mut silent = running.connect(1).await;
    let mut idle = running.connect(1).await;
    for _ in 0..3 {
        assert!(ask(&mut idle, HEALTH).await.starts_with("HTTP/1.1 200"), "it is kept open between requests");
    }
    assert_eq!(read_to_end(&mut silent).await, "");
    assert_eq!(read_to_end(&mut idle).await, "");
    let metrics = running.metrics().await;
    for reason in ["slow_head", "idle"] {
        assert!(counted(&metrics, "skep_http_connections_ended_total", reason) > 0, "{reason}: {metrics}");
    }
}

#[tokio::test]
async fn a_response_may_take_longer_than_any_timeout() {
    let most = Duration::from_millis(500);
    let running = Running::with(ConnectionOptions {
        header_timeout: most,
        idle_timeout: most,
        send_timeout: most,
        ..ConnectionOptions::default()
    })
    .await;
    let barrier = Arc::new(Barrier::new(2));
    let _ = running.server.host.models().clone().with(Together::model(&barrier));
    let request = post_chat(&json!({"model": "far/model", "messages": [{"role": "user", "content": "x"}]}));
    let mut stream = running.connect(1).await;
    let holding = async {
        tokio::time::sleep(2 * most).await;
        tokio::time::timeout(PATIENCE, barrier.wait()).await.expect("the model is asked");
    };
    let (answer, ()) = tokio::join!(ask(&mut stream, &request), holding);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn connections_are_bounded_in_total_and_by_address() {
    let running =
        Running::with(ConnectionOptions { max: 3, max_per_address: 2, ..ConnectionOptions::default() }).await;
    let mut first = running.connect(1).await;
    let mut second = running.connect(1).await;
    assert!(ask(&mut first, HEALTH).await.starts_with("HTTP/1.1 200"));
    assert!(ask(&mut second, HEALTH).await.starts_with("HTTP/1.1 200"));
    let mut surplus = running.connect(1).await;
    surplus.write_all(HEALTH).await.unwrap();
    let refusal = read_to_end(&mut surplus).await;
    assert!(
        refusal.starts_with("HTTP/1.1 429 ") && refusal.contains("max_connections_per_address"),
        "{refusal}"
    );
    // Another client has a separate limit.
    let mut other = running.connect(2).await;
    assert!(ask(&mut other, HEALTH).await.starts_with("HTTP/1.1 200"));
    let mut surplus = running.connect(3).await;
    surplus.write_all(HEALTH).await.unwrap();
    let refusal = read_to_end(&mut surplus).await;
    assert!(refusal.starts_with("HTTP/1.1 503 ") && refusal.contains("\r\nretry-after: 1\r\n"), "{refusal}");
    let (_, body) = refusal.split_once("\r\n\r\n").unwrap();
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    assert_eq!(body["error"]["code"], "too_many_connections");
    // A closed connection frees its slot.
    drop(first);
    let metrics = loop {
        let mut stream = running.connect(3).await;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        let answer = read_to_end(&mut stream).await;
        if answer.starts_with("HTTP/1.1 200") {
            break answer;
        }
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    };
    for bound in ["all", "address"] {
        assert!(counted(&metrics, "skep_http_connections_refused_total", bound) > 0, "{bound}: {metrics}");
    }
}

#[tokio::test]
async fn a_client_that_stops_reading_its_stream_is_disconnected() {
    // While this client has the only connection, no other one is accepted.
    let running = Running::with(ConnectionOptions { max: 1, ..short() }).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(8 << 10).unwrap();
    let mut stream = socket.connect(running.address).await.unwrap();
    // Log-probabilities make the response several megabytes large.
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 3_000, "n": 2, "ignore_eos": true,
                      "stream": true, "logprobs": true, "top_logprobs": 20});
    stream.write_all(&post_chat(&body)).await.unwrap();
    let began = Instant::now();
    let metrics = loop {
        let answer = running.metrics().await;
        if answer.starts_with("HTTP/1.1 200") {
            break answer;
        }
        assert!(began.elapsed() < PATIENCE, "the slow reader is still connected: {answer}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert!(counted(&metrics, "skep_http_connections_ended_total", "slow_reader") > 0, "{metrics}");
    let read = read_to_end(&mut stream).await;
    assert!(read.starts_with("HTTP/1.1 200") && !read.contains("[DONE]"), "{} bytes", read.len());
}

#[tokio::test]
async fn connections_without_a_request_do_not_delay_shutdown() {
    // Only the shutdown itself ends these connections while the test waits.
    let long = 2 * PATIENCE;
    let connections =
        ConnectionOptions { header_timeout: long, idle_timeout: long, ..ConnectionOptions::default() };
    let options = GatewayOptions { connections, drain: long, ..GatewayOptions::default() };
    let running = Running::start(options).await;
    let mut idle = running.connect(1).await;
    assert!(ask(&mut idle, HEALTH).await.starts_with("HTTP/1.1 200"));
    let mut silent = running.connect(1).await;
    running.stop.send(()).unwrap();
    let served = tokio::time::timeout(PATIENCE, running.serving).await;
    served.expect("shutdown does not wait").unwrap().unwrap();
    assert_eq!(read_to_end(&mut idle).await, "");
    assert_eq!(read_to_end(&mut silent).await, "");
}

#[tokio::test]
async fn a_trusted_proxy_is_not_limited_but_its_clients_are() {
    let running = Running::start(GatewayOptions {
        connections: ConnectionOptions { max_per_address: 1, ..ConnectionOptions::default() },
        trusted_proxies: vec![IpAddr::from([127, 0, 0, 9]).into()],
        ..GatewayOptions::default()
    })
    .await;
    let forwarded = |client: &str, body: &[u8]| {
        let text = String::from_utf8_lossy(body).replacen(
            "host: x",
            &format!("host: x\r\nx-forwarded-for: {client}"),
            1,
        );
        text.into_bytes()
    };
    // A stream of the first client is in flight.
    let mut streaming = running.connect(9).await;
    streaming.write_all(&forwarded("198.51.100.1", &chat(3_500, true))).await.unwrap();
    let mut began = Vec::new();
    while !String::from_utf8_lossy(&began).contains("data: ") {
        assert_ne!(streaming.read_buf(&mut began).await.unwrap(), 0);
    }
    let mut proxy = running.connect(9).await;
    let refused = ask(&mut proxy, &forwarded("198.51.100.1", HEALTH)).await;
    assert!(refused.starts_with("HTTP/1.1 429 ") && refused.contains("too_many_connections"), "{refused}");
    for client in ["198.51.100.2", "6.6.6.6, 198.51.100.3", "not an address"] {
        let answer = ask(&mut proxy, &forwarded(client, HEALTH)).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{client}: {answer}");
    }
    drop(streaming);
    let began = Instant::now();
    while !ask(&mut proxy, &forwarded("198.51.100.1", HEALTH)).await.starts_with("HTTP/1.1 200") {
        assert!(began.elapsed() < PATIENCE, "the slot was not freed");
    }
    // The header of an untrusted client is ignored.
    let _held = running.connect(1).await;
    let mut liar = running.connect(1).await;
    liar.write_all(&forwarded("198.51.100.7", HEALTH)).await.unwrap();
    assert!(read_to_end(&mut liar).await.starts_with("HTTP/1.1 429 "));
}

/// Uses the default options.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_idle_and_two_hundred_slow_connections_do_not_affect_others() {
    raise_open_files();
    let running = Running::with(ConnectionOptions::default()).await;
    let alone = latencies(&running).await;
    let mut idle = Vec::new();
    for connection in 0..2_000_u32 {
        // One address may not have all of them.
        let mut stream = running.connect(2 + (connection % 2) as u8).await;
        assert!(ask(&mut stream, HEALTH).await.starts_with("HTTP/1.1 200"), "connection {connection}");
        idle.push(stream);
    }
    let mut slow = Vec::new();
    for _ in 0..200 {
        let mut stream = running.connect(4).await;
        slow.push(tokio::spawn(async move {
            for byte in
                b"POST /v1/chat/completions HTTP/1.1\r\nx-slow: ".iter().chain(std::iter::repeat(&b'x'))
            {
                if stream.write_all(&[*byte]).await.is_err() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }));
    }
    let beside = latencies(&running).await;
    println!("p50 and p99 alone {alone:?}, beside 2,000 idle and 200 slow connections {beside:?}");
    // The median, because a busy machine may delay a few requests on its own.
    assert!(beside[0] < Duration::from_secs(1), "{beside:?} instead of {alone:?}");
    for (connection, stream) in idle.iter_mut().enumerate() {
        let answer = ask(stream, HEALTH).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "idle connection {connection}: {answer}");
    }
    slow.iter().for_each(JoinHandle::abort);
}

/// Returns the median and the 99th percentile of requests on new connections, each with a short chat.
async fn latencies(running: &Running) -> [Duration; 2] {
    let mut times = Vec::new();
    for _ in 0..100 {
        let began = Instant::now();
        let mut stream = running.connect(1).await;
        assert!(ask(&mut stream, HEALTH).await.starts_with("HTTP/1.1 200"));
        let answer = ask(&mut stream, &chat(1, false)).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        times.push(began.elapsed());
    }
    times.sort();
    [times[49], times[98]]
}

fn chat(max_tokens: u32, streams: bool) -> Vec<u8> {
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": max_tokens, "ignore_eos": true,
                      "stream": streams});
    post_chat(&body)
}

fn post_chat(body: &serde_json::Value) -> Vec<u8> {
    let body = body.to_string();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n";
    format!("{head}content-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// Raises the open-file limit, because both ends of each connection are in this process.
fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
    let limit = getrlimit(Resource::Nofile).current;
    assert!(
        limit.is_none_or(|limit| limit >= 6_000),
        "this test needs 6,000 open files, and the limit is {limit:?}"
    );
}
