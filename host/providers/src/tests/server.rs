//! A server that does what a test scripts, byte for byte.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::JoinSet,
};

/// A server that ends when it is dropped, with all its connections.
pub(super) struct Server {
    pub url: String,
    pub requests: Arc<Mutex<Vec<Request>>>,
    _running: JoinSet<()>,
}

/// One request as it arrived.
#[derive(Debug, Clone)]
pub(super) struct Request {
    /// The request line and the headers.
    pub head: String,
    pub body: Value,
}

/// One response: what is written, in this order.
pub(super) type Reply = Vec<Part>;

pub(super) enum Part {
    Bytes(Vec<u8>),
    /// Writes single bytes with a pause after each.
    Drip(Vec<u8>, Duration),
    /// Writes nothing more until the client goes, and then notifies.
    Stall(Arc<Notify>),
    /// Waits for the test.
    Wait(Arc<Notify>),
}

impl Server {
    /// Starts a server. `script` gets the number of each request, from 0, and the request.
    pub(super) async fn start(script: impl Fn(usize, &Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}/v1", listener.local_addr().expect("bound"));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (script, seen) = (Arc::new(script), requests.clone());
        let mut running = JoinSet::new();
        running.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let Ok((connection, _)) = listener.accept().await else { return };
                let (script, seen) = (script.clone(), seen.clone());
                connections.spawn(async move {
                    let _ = serve(connection, |request| {
                        let number = {
                            let mut seen = seen.lock().expect("not poisoned");
                            seen.push(request.clone());
                            seen.len() - 1
                        };
                        script(number, request)
                    })
                    .await;
                });
            }
        });
        Server { url, requests, _running: running }
    }

    /// Starts a server that gives the same response to every request.
    pub(super) async fn always(reply: impl Fn() -> Reply + Send + Sync + 'static) -> Self {
        Self::start(move |_, _| reply()).await
    }

    pub(super) fn count(&self) -> usize {
        self.requests.lock().expect("not poisoned").len()
    }

    pub(super) fn request(&self, number: usize) -> Request {
        self.requests.lock().expect("not poisoned")[number].clone()
    }
}

async fn serve(mut connection: TcpStream, script: impl FnOnce(&Request) -> Reply) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    let head_end = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
        if connection.read_buf(&mut bytes).await? == 0 {
            return Ok(());
        }
    };
    let head = String::from_utf8_lossy(&bytes[..head_end]).to_ascii_lowercase();
    let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split('\r').next()?.parse().ok());
    let end = head_end + length.unwrap_or(0);
    while bytes.len() < end {
        connection.read_buf(&mut bytes).await?;
    }
    let body = serde_json::from_slice(&bytes[head_end..end]).unwrap_or_default();
    let head = String::from_utf8_lossy(&bytes[..head_end]).into_owned();
    for part in script(&Request { head, body }) {
        match part {
            Part::Bytes(bytes) => connection.write_all(&bytes).await?,
            Part::Drip(bytes, pause) => {
                for byte in bytes {
                    connection.write_all(&[byte]).await?;
                    tokio::time::sleep(pause).await;
                }
            }
            Part::Stall(gone) => {
                while connection.read(&mut [0; 64]).await.is_ok_and(|read| read > 0) {}
                gone.notify_one();
            }
            Part::Wait(notify) => notify.notified().await,
        }
    }
    Ok(())
}

/// Returns a response with a status and a body. `headers` is text with a line break after each.
pub(super) fn status(status: u16, headers: &str, body: &str) -> Reply {
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nconnection: close\r\n{headers}\r\n");
    vec![Part::Bytes(format!("{head}{body}").into_bytes())]
}

/// Returns the head of a stream that ends with its connection.
pub(super) fn stream_head() -> Part {
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n";
    Part::Bytes(head.as_bytes().to_vec())
}

/// Returns the head of a stream in chunks, whose end without a last chunk is an error.
pub(super) fn chunked_head() -> Part {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    Part::Bytes(head.as_bytes().to_vec())
}

/// Returns one chunk of such a stream.
pub(super) fn chunked(bytes: &[u8]) -> Part {
    let mut part = format!("{:x}\r\n", bytes.len()).into_bytes();
    part.extend_from_slice(bytes);
    part.extend_from_slice(b"\r\n");
    Part::Bytes(part)
}

pub(super) fn event(data: &Value) -> Part {
    Part::Bytes(format!("data: {data}\n\n").into_bytes())
}

/// Returns a stream of events that ends with `[DONE]`.
pub(super) fn stream(events: &[Value]) -> Reply {
    let done = Part::Bytes(b"data: [DONE]\n\n".to_vec());
    [stream_head()].into_iter().chain(events.iter().map(event)).chain([done]).collect()
}
