//! A proxy for TCP connections that are cut and frozen, as those of a network with faults are: all at once, or one in the
//! middle of what it carries. It also counts how often a client waits for its server.

mod server;

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub use server::{at, server_of};

const BUFFER_BYTES: usize = 16 << 10;

/// A proxy on a port of this machine. Dropping it closes the port.
pub struct Proxy {
    pub address: SocketAddr,
    lines: Arc<Lines>,
    accepting: JoinHandle<()>,
}

/// Everything that the connections share.
struct Lines {
    /// The address to which new connections go: HOST:PORT.
    target: Mutex<String>,
    /// Number of times that all connections were cut.
    cuts: watch::Sender<u64>,
    is_frozen: watch::Sender<bool>,
    /// Number of bytes until the connection is cut that carries the last of them.
    fuse: Mutex<Option<usize>>,
    round_trips: AtomicU64,
}

impl Proxy {
    /// Starts a proxy that passes connections on to this address.
    pub async fn start(target: String) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("cannot listen on this machine")?;
        let address = listener.local_addr()?;
        let lines = Arc::new(Lines {
            target: Mutex::new(target),
            cuts: watch::Sender::new(0),
            is_frozen: watch::Sender::new(false),
            fuse: Mutex::default(),
            round_trips: AtomicU64::new(0),
        });
        let shared = Arc::clone(&lines);
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let lines = Arc::clone(&shared);
                tokio::spawn(async move { lines.pass(client).await });
            }
        });
        Ok(Self { address, lines, accepting })
    }

    /// Passes new connections on to another address.
    pub fn aim(&self, target: String) {
        *self.lines.target.lock().unwrap_or_else(PoisonError::into_inner) = target;
    }

    /// Cuts all connections at once.
    pub fn cut(&self) {
        self.lines.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Cuts one connection as soon as all of them together have carried this many more bytes.
    pub fn cut_after(&self, bytes: usize) {
        *self.lines.fuse.lock().unwrap_or_else(PoisonError::into_inner) = Some(bytes);
    }

    /// Returns how often a client has sent something after an answer, or as the first: the number of times that it waited for an
    /// answer. Everything that it sends before is one question.
    pub fn round_trips(&self) -> u64 {
        self.lines.round_trips.load(Ordering::Acquire)
    }

    /// Holds back everything that is sent through the proxy until it is thawed. All connections stay open.
    pub fn freeze(&self) {
        self.lines.is_frozen.send_replace(true);
    }

    /// Lets everything pass again.
    pub fn thaw(&self) {
        self.lines.is_frozen.send_replace(false);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

impl Lines {
    async fn pass(&self, client: TcpStream) {
        let mut cuts = self.cuts.subscribe();
        let is_asking = AtomicBool::new(false);
        let asks = || {
            if !is_asking.swap(true, Ordering::AcqRel) {
                self.round_trips.fetch_add(1, Ordering::AcqRel);
            }
        };
        let answers = || is_asking.store(false, Ordering::Release);
        let passing = async {
            self.until_thawed().await;
            let target = self.target.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let server = TcpStream::connect(target).await?;
            // Small messages must not wait for each other.
            client.set_nodelay(true)?;
            server.set_nodelay(true)?;
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            tokio::try_join!(
                self.copy(from_client, to_server, asks),
                self.copy(from_server, to_client, answers)
            )
        };
        // Both ends are closed in either case.
        tokio::select! {
            _ = passing => {}
            _ = cuts.changed() => {}
        }
    }

    /// Copies one direction to its end, and calls `carries` for each part.
    async fn copy(
        &self,
        mut from: OwnedReadHalf,
        mut to: OwnedWriteHalf,
        carries: impl Fn(),
    ) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let read = from.read(&mut buffer).await?;
            self.until_thawed().await;
            if read == 0 {
                return to.shutdown().await;
            }
            carries();
            match self.burn(read) {
                None => to.write_all(&buffer[..read]).await?,
                Some(left) => {
                    to.write_all(&buffer[..left]).await?;
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
            }
        }
    }

    async fn until_thawed(&self) {
        // The sender is part of `self`.
        let _ = self.is_frozen.subscribe().wait_for(|is_frozen| !*is_frozen).await;
    }

    /// Counts bytes. If the connection has to be cut within them, returns how many it still carries.
    fn burn(&self, bytes: usize) -> Option<usize> {
        let mut fuse = self.fuse.lock().unwrap_or_else(PoisonError::into_inner);
        let left = (*fuse)?;
        if left > bytes {
            *fuse = Some(left - bytes);
            return None;
        }
        *fuse = None;
        Some(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::timeout;

    /// Starts a server that sends back what it gets, and a proxy in front of it.
    async fn echo() -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let target = listener.local_addr().expect("it listens").to_string();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut from, mut to) = stream.split();
                    let _ = tokio::io::copy(&mut from, &mut to).await;
                    let _ = to.shutdown().await;
                });
            }
        });
        Proxy::start(target).await.expect("a free port")
    }

    async fn said(proxy: &Proxy, text: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(proxy.address).await.expect("it listens");
        stream.write_all(text).await.expect("it is open");
        stream
    }

    /// Reads everything until the connection is closed or reset.
    async fn heard(mut stream: TcpStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        let _ = timeout(Duration::from_secs(30), stream.read_to_end(&mut bytes)).await.expect("it is closed");
        bytes
    }

    #[tokio::test]
    async fn both_directions_are_passed_on_and_closed_one_after_the_other() {
        let proxy = echo().await;
        let mut stream = said(&proxy, b"hello").await;
        stream.shutdown().await.expect("it is open");
        assert_eq!(heard(stream).await, b"hello");
    }

    #[tokio::test]
    async fn all_connections_are_cut_at_once_and_new_ones_pass() {
        let proxy = echo().await;
        let mut streams = [said(&proxy, b"one").await, said(&proxy, b"two").await];
        for stream in &mut streams {
            stream.read_exact(&mut [0; 3]).await.expect("it passes");
        }
        proxy.cut();
        for stream in streams {
            assert_eq!(heard(stream).await, b"");
        }
        said(&proxy, b"one").await.read_exact(&mut [0; 3]).await.expect("a new one passes");
    }

    #[tokio::test]
    async fn one_connection_is_cut_in_the_middle_of_what_it_carries() {
        let proxy = echo().await;
        proxy.cut_after(7);
        assert_eq!(heard(said(&proxy, b"hello").await).await, b"he");
        said(&proxy, b"hello").await.read_exact(&mut [0; 5]).await.expect("only one was cut");
    }

    #[tokio::test]
    async fn each_question_that_waits_for_an_answer_is_a_round_trip() {
        let proxy = echo().await;
        let mut stream = said(&proxy, b"one").await;
        stream.read_exact(&mut [0; 3]).await.expect("it passes");
        assert_eq!(proxy.round_trips(), 1);
        for _ in 0..3 {
            stream.write_all(b"more").await.expect("it is open");
            stream.read_exact(&mut [0; 4]).await.expect("it passes");
        }
        assert_eq!(proxy.round_trips(), 4);
    }

    #[tokio::test]
    async fn nothing_passes_while_it_is_frozen_and_nothing_is_lost() {
        let proxy = echo().await;
        let mut stream = said(&proxy, b"one").await;
        stream.read_exact(&mut [0; 3]).await.expect("it passes");
        proxy.freeze();
        stream.write_all(b"two").await.expect("it is open");
        let mut bytes = [0; 3];
        let waiting = timeout(Duration::from_millis(200), stream.read_exact(&mut bytes)).await;
        assert!(waiting.is_err(), "it is held back");
        proxy.thaw();
        stream.read_exact(&mut bytes).await.expect("it passes again");
        assert_eq!(&bytes, b"two");
    }
}
