//! Connections: accepting them within bounds, and ending those that keep the host waiting.
//!
//! Every connection is always waiting for one thing (a request's head, its answer, the next request, or the client's
//! reading), and each of these but the answer has a deadline. How many connections there may be is bounded in all and for
//! each client, so that one client cannot take the places of the others.

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
use bounds::{Bounds, Exceeded, Place};
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
    /// Connections at the same time; more get 503 and are closed.
    pub max: usize,
    /// The same of one client address (an IPv6 client is its /64 network); more get 429. Those of a trusted proxy are not
    /// counted as its own: each request that it forwards counts for the client that it names.
    pub max_per_address: usize,
    /// From the first byte of a request, or the opening of a connection, to the end of the request's head.
    pub header_timeout: Duration,
    /// How long a connection may stay open between requests.
    pub idle_timeout: Duration,
    /// How long a client may read next to nothing (less than 64 KiB) while an answer waits to be sent.
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

/// What the kernel keeps of an answer for one connection before the connection counts as blocked (Linux doubles it). With
/// what a client's own system keeps, this bounds the memory and the lag of a slow reader.
const SEND_BUFFER_BYTES: usize = 256 << 10;
/// Between two tries to accept when the process has no file handle left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Accepts connections until `stopping` is true, then lets requests under way finish. Dropping it ends all connections.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    options: ConnectionOptions,
    trusted_proxies: Vec<IpNet>,
    mut stopping: watch::Receiver<bool>,
) {
    // So that what never happened is 0 and not absent.
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
            // A sender that is gone will never say that it stops.
            Ok(_) = stopping.wait_for(|stopping| *stopping) => break,
        };
        match accepted {
            Ok((stream, peer)) => match server.admit(peer) {
                Ok(place) => {
                    prepare(&stream, server.options.send_timeout);
                    let connection = Connection::new(server.clone(), peer, place);
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

/// What all connections share.
struct Server {
    router: Router,
    options: ConnectionOptions,
    trusted_proxies: Vec<IpNet>,
    bounds: Arc<Bounds>,
}

impl Server {
    fn admit(&self, peer: SocketAddr) -> Result<Place, Exceeded> {
        let client = (!is_trusted(peer.ip(), &self.trusted_proxies)).then(|| peer.ip());
        self.bounds.admit_connection(client)
    }
}

fn prepare(stream: &TcpStream, send_timeout: Duration) {
    // Events are small and must not wait for the client's acknowledgement of the last one.
    let set = stream.set_nodelay(true);
    let socket = socket2::SockRef::from(stream);
    let set = set.and_then(|()| socket.set_send_buffer_size(SEND_BUFFER_BYTES));
    // A client that vanished acknowledges nothing, and little may be on its way to it.
    #[cfg(target_os = "linux")]
    let set = set.and_then(|()| socket.set_tcp_user_timeout(Some(2 * send_timeout)));
    #[cfg(not(target_os = "linux"))]
    let _ = send_timeout;
    if let Err(error) = set {
        tracing::debug!(%error, "a connection keeps the system's settings");
    }
}

/// Whether the next connection can be accepted all the same.
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

/// Counts one connection while it is open.
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
