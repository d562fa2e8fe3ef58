//! Tests clients that read an endless stream over real sockets.

use super::{ConnectionOptions, serve};
use axum::{
    Router,
    body::{Body, Bytes},
    routing::get,
};
use futures::stream;
use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{oneshot, watch},
};

const EVENT: &[u8] = &[b'x'; 1_000];

/// A server with one route, whose response never ends.
struct Endless {
    address: SocketAddr,
    /// Bytes taken from the response so far.
    produced_bytes: Arc<AtomicUsize>,
    /// Resolves when the response is dropped.
    dropped: oneshot::Receiver<()>,
    _stopping: watch::Sender<bool>,
}

impl Endless {
    async fn start(send_timeout: Duration) -> Self {
        let produced_bytes = Arc::new(AtomicUsize::new(0));
        let (drops, dropped) = oneshot::channel();
        let (counter, guard) = (produced_bytes.clone(), Arc::new(Mutex::new(Some(Guard(Some(drops))))));
        let endless = move || {
            let (counter, guard) = (counter.clone(), guard.lock().unwrap().take());
            let events = stream::repeat_with(move || {
                let _owned = &guard;
                counter.fetch_add(EVENT.len(), Ordering::Relaxed);
                Ok::<_, Infallible>(Bytes::from_static(EVENT))
            });
            async move { Body::from_stream(events) }
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stopping, stops) = watch::channel(false);
        let options = ConnectionOptions { send_timeout, ..ConnectionOptions::default() };
        let router = Router::new().route("/", get(endless));
        tokio::spawn(serve(listener, router, options, Vec::new(), stops));
        Endless { address, produced_bytes, dropped, _stopping: stopping }
    }

    /// Requests the stream over a socket with a small receive buffer.
    async fn ask(&self) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(16 << 10).unwrap();
        let mut stream = socket.connect(self.address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        stream
    }
}

/// Sends a message when it is dropped.
struct Guard(Option<oneshot::Sender<()>>);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.take().map(|sender| sender.send(()));
    }
}

#[tokio::test]
async fn a_client_that_stops_reading_is_disconnected_and_little_is_buffered() {
    let mut server = Endless::start(Duration::from_millis(300)).await;
    let stream = server.ask().await;
    let ended = tokio::time::timeout(Duration::from_secs(20), &mut server.dropped).await;
    ended.expect("a client that reads nothing is disconnected").expect("the stream is dropped");
    let produced = server.produced_bytes.load(Ordering::Relaxed);
    assert!(produced < 2 << 20, "{produced} bytes were produced for a client that read nothing");
    drop(stream);
}

#[tokio::test]
async fn a_client_that_reads_too_slowly_is_disconnected() {
    let mut server = Endless::start(Duration::from_millis(300)).await;
    let mut stream = server.ask().await;
    let mut byte = [0; 1];
    loop {
        tokio::select! {
            ended = &mut server.dropped => break ended.expect("the stream is dropped"),
            read = stream.read_exact(&mut byte) => {
                read.expect("the connection is open");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
    let produced = server.produced_bytes.load(Ordering::Relaxed);
    assert!(produced < 2 << 20, "{produced} bytes were produced for a client that read a few");
}

#[tokio::test]
async fn a_client_that_keeps_reading_stays_connected() {
    let mut server = Endless::start(Duration::from_secs(2)).await;
    let mut stream = server.ask().await;
    let mut piece = vec![0; 256 << 10];
    // Together these pauses are longer than a client may read nothing, and each of them is much shorter.
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_millis(700)).await;
        stream.read_exact(&mut piece).await.expect("the stream continues");
    }
    assert!(server.dropped.try_recv().is_err(), "the stream is still open");
    drop(stream);
    server.dropped.await.expect("a client that disconnects cancels its stream");
}
