//! Accepts connections within bounds and closes those that keep the host waiting.
//!
//! A connection always waits for one thing: a request's head, its response, the next request, or the client to read.
//! Each of these except the response has a deadline. The number of connections is bounded in total and for each
//! client, so that one client cannot exhaust the connections of the others.

mod bounds;
mod connection;
mod pace;
mod paced_body;
mod paced_stream;
mod refusal;
#[cfg(test)]
mod tests;

use crate::{
    client_address::is_trusted,
    metrics::{CONNECTIONS, CONNECTIONS_ENDED, CONNECTIONS_REFUSED},
};
use axum::Router;
pub(crate) use bounds::Slot;
use bounds::{Bounds, Exceeded};
use connection::Connection;
use ipnet::IpNet;
use pace::Overdue;
use refusal::Refusals;
use std::{io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};

/// Bounds of connections.
#[derive(Clone, Debug)]
pub struct ConnectionOptions {
    /// Maximum number of open connections; further ones get 503 and are closed.
    pub max: usize,
    /// Maximum number of connections of one client address (for IPv6, a /64 network); further ones get 429.
    /// Connections of a trusted proxy do not count for its own address; each request that it forwards counts for the
    /// client that it names.
    pub max_per_address: usize,
    /// Timeout of a request's head, counted from its first byte or, for the first request, from the opening of the
    /// connection.
    pub header_timeout: Duration,
    /// Maximum time that a connection may stay open between requests.
    pub idle_timeout: Duration,
    /// Maximum time in which a client may read less than 64 KiB while a response waits to be sent.
    pub send_timeout: Duration,
}

impl Default for ConnectionOptions {
    fn default() -> Self {
        ConnectionOptions {
            max: 8_192,
            max_per_address: 1_024,
            header_timeout: Duration::from_secs(15),
            idle_timeout: Duration::from_secs(75),
            send_timeout: Duration::from_secs(30),
        }
    }
}

/// Size of the kernel's send buffer of a connection, above which the connection counts as blocked (Linux doubles it).
/// Together with the buffers of the client's system, this bounds the memory and the lag of a slow reader.
const SEND_BUFFER_BYTES: usize = 256 << 10;
/// Delay before accepting is retried when the process has no file handle left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Accepts connections until `stopping` is true, then lets running requests finish. Dropping the future closes all
/// connections.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    options: ConnectionOptions,
    trusted_proxies: Vec<IpNet>,
    mut stopping: watch::Receiver<bool>,
) {
    // Registers the counters, so that they are 0 and not absent before their first event.
    for bound in ["all", "address", "files"] {
        metrics::counter!(CONNECTIONS_REFUSED, "bound" => bound).increment(0);
    }
    for overdue in [Overdue::Head, Overdue::Idle, Overdue::Reader] {
        metrics::counter!(CONNECTIONS_ENDED, "reason" => overdue.reason()).increment(0);
    }
    let bounds = Arc::new(Bounds::new(options.max, options.max_per_address));
    let server = Arc::new(Server { router, options, trusted_proxies, bounds });
    let refusals = Refusals::default();
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(ended) = connections.join_next() => {
                report_panic(ended);
                continue;
            }
            // If the sender is gone, the server will never be asked to stop.
            Ok(_) = stopping.wait_for(|stopping| *stopping) => break,
        };
        match accepted {
            Ok((stream, peer)) => match server.admit(peer) {
                Ok(slot) => {
                    prepare(&stream, server.options.send_timeout);
                    let connection = Connection::new(server.clone(), peer, slot);
                    connections.spawn(connection.run(stream, stopping.clone()));
                }
                Err(exceeded) => refusals.refuse(stream, peer, exceeded),
            },
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                refusals.accepting_failed(&error);
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    while let Some(ended) = connections.join_next().await {
        report_panic(ended);
    }
}

/// The state that all connections share.
struct Server {
    router: Router,
    options: ConnectionOptions,
    trusted_proxies: Vec<IpNet>,
    bounds: Arc<Bounds>,
}

impl Server {
    fn admit(&self, peer: SocketAddr) -> Result<Slot, Exceeded> {
        let client = (!is_trusted(peer.ip(), &self.trusted_proxies)).then(|| peer.ip());
        self.bounds.admit_connection(client)
    }
}

fn prepare(stream: &TcpStream, send_timeout: Duration) {
    // Events are small and must not wait for the acknowledgement of the previous one.
    let set = stream.set_nodelay(true);
    let socket = socket2::SockRef::from(stream);
    let set = set.and_then(|()| socket.set_send_buffer_size(SEND_BUFFER_BYTES));
    // A client that vanished acknowledges nothing, and its connection must time out even if little data is in flight.
    #[cfg(target_os = "linux")]
    let set = set.and_then(|()| socket.set_tcp_user_timeout(Some(2 * send_timeout)));
    #[cfg(not(target_os = "linux"))]
    let _ = send_timeout;
    if let Err(error) = set {
        tracing::debug!(%error, "socket options cannot be set; the connection uses the system's defaults");
    }
}

/// Returns whether the error concerns only one connection, so that the next one can be accepted.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

fn report_panic(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection panicked");
    }
}

/// Counts a connection in the metrics while it is open.
struct Counted;

impl Counted {
    fn new() -> Self {
        metrics::gauge!(CONNECTIONS).increment(1.0);
        Counted
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        metrics::gauge!(CONNECTIONS).decrement(1.0);
    }
}
