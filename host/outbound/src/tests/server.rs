//! An HTTP server that answers every request with bytes chosen by the test and records the requests.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

pub(super) struct Server {
    address: SocketAddr,
    seen: Arc<Seen>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Seen {
    connections: AtomicUsize,
    requests: Mutex<Vec<String>>,
}

/// The behavior of a server after it has sent its answer.
#[derive(Clone, Copy)]
pub(super) enum Then {
    Close,
    /// Sends a byte every few milliseconds, forever.
    Drip,
    /// Sends bytes as fast as the client reads them.
    Pour,
}

impl Server {
    pub(super) async fn answering<A: AsRef<[u8]>>(
        answer: impl Fn(&str) -> A + Send + Sync + 'static,
    ) -> Self {
        Self::at("127.0.0.1:0", answer, Then::Close).await
    }

    pub(super) async fn at<A: AsRef<[u8]>>(
        address: &str,
        answer: impl Fn(&str) -> A + Send + Sync + 'static,
        then: Then,
    ) -> Self {
        let listener = TcpListener::bind(address).await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let seen = Arc::new(Seen::default());
        let answer = Arc::new(move |request: &str| answer(request).as_ref().to_vec());
        let shared = seen.clone();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                shared.connections.fetch_add(1, Ordering::Relaxed);
                let (answer, shared) = (answer.clone(), shared.clone());
                tokio::spawn(serve(stream, shared, move |request: &str| answer(request), then));
            }
        });
        Server { address, seen, task }
    }

    pub(super) fn port(&self) -> u16 {
        self.address.port()
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(super) fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::Relaxed)
    }

    /// Returns the requests so far, each with its head and body.
    pub(super) fn requests(&self) -> Vec<String> {
        self.seen.requests.lock().expect("no test panics while it holds the lock").clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves one request on a connection.
async fn serve(mut stream: TcpStream, seen: Arc<Seen>, answer: impl Fn(&str) -> Vec<u8>, then: Then) {
    let mut bytes = Vec::new();
    while !is_whole(&bytes) {
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return;
        }
    }
    let request = String::from_utf8_lossy(&bytes).into_owned();
    let answer = answer(&request);
    seen.requests.lock().expect("no test panics while it holds the lock").push(request);
    // The client may have disconnected, which some tests provoke.
    let _ = stream.write_all(&answer).await;
    match then {
        Then::Close => {}
        Then::Drip => {
            while stream.write_all(b"x").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        Then::Pour => while stream.write_all(&[b'x'; 65_536]).await.is_ok() {},
    }
}

fn is_whole(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    body.len() >= length.unwrap_or(0)
}
