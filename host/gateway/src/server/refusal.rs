//! What a client is told for which there is no place, and what the log says of it, which is not much: whoever floods the
//! host must not flood its log.

use super::bounds::Exceeded;
use crate::{ApiError, metrics::CONNECTIONS_REFUSED};
use axum::http::StatusCode;
use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{io::AsyncReadExt, net::TcpStream, sync::Semaphore};

/// Between two lines of the log.
const QUIET: Duration = Duration::from_secs(10);
const RETRY_AFTER_MS: u32 = 1_000;
/// Refused connections that stay open until their clients have read why. Past these they are just closed.
const MAX_LINGERING: usize = 64;
const LINGER: Duration = Duration::from_secs(1);
/// Of a request that nobody answers.
const MAX_UNREAD_BYTES: usize = 64 << 10;

/// The refusals of one server.
pub(super) struct Refusals {
    lingering: Arc<Semaphore>,
    refused: AtomicU64,
    told_at: Mutex<Option<Instant>>,
}

impl Default for Refusals {
    fn default() -> Self {
        let lingering = Arc::new(Semaphore::new(MAX_LINGERING));
        Refusals { lingering, refused: AtomicU64::new(0), told_at: Mutex::default() }
    }
}

/// The error that says so.
pub(super) fn of(exceeded: Exceeded) -> ApiError {
    let error = match exceeded {
        Exceeded::All => ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "too_many_connections",
            "this host has as many connections as it may have; try again in a moment; the operator sets the bound as \
             max_connections under [http] in skep.toml",
        ),
        Exceeded::Address => ApiError::new(
            StatusCode::TOO_MANY_REQUESTS,
            "too_many_connections",
            "your address has as many connections as it may have; close some, or use them again; the operator sets the \
             bound as max_connections_per_address under [http] in skep.toml",
        ),
    };
    ApiError { retry_after_ms: Some(RETRY_AFTER_MS), ..error }
}

impl Refusals {
    /// Tells why, and closes the connection.
    pub(super) fn refuse(&self, stream: TcpStream, peer: SocketAddr, exceeded: Exceeded) {
        let bound = match exceeded {
            Exceeded::All => "all",
            Exceeded::Address => "address",
        };
        metrics::counter!(CONNECTIONS_REFUSED, "bound" => bound).increment(1);
        self.refused.fetch_add(1, Ordering::Relaxed);
        if self.may_tell() {
            let refused = self.refused.swap(0, Ordering::Relaxed);
            tracing::warn!(
                %peer, bound, refused,
                "connections are refused: the bound of [http] max_connections or max_connections_per_address is reached"
            );
        }
        // The socket's buffer is empty, so this takes all of it or the connection is gone.
        let _ = stream.try_write(&answer(exceeded));
        if let Ok(permit) = self.lingering.clone().try_acquire_owned() {
            tokio::spawn(async move {
                let _ = tokio::time::timeout(LINGER, linger(stream)).await;
                drop(permit);
            });
        }
    }

    /// The process has no file handles left, most likely.
    pub(super) fn accepting_failed(&self, error: &io::Error) {
        metrics::counter!(CONNECTIONS_REFUSED, "bound" => "files").increment(1);
        if self.may_tell() {
            tracing::error!(
                %error,
                "no connection can be accepted; if the process has too many open files, raise its limit (ulimit -n) or lower \
                 max_connections under [http] in skep.toml"
            );
        }
    }

    fn may_tell(&self) -> bool {
        let mut told_at = self.told_at.lock().unwrap_or_else(PoisonError::into_inner);
        let may = told_at.is_none_or(|at| at.elapsed() >= QUIET);
        if may {
            *told_at = Some(Instant::now());
        }
        may
    }
}

/// Closing a connection with something unread resets it, and the client would not see the answer.
async fn linger(mut stream: TcpStream) {
    use tokio::io::AsyncWriteExt;
    let _ = stream.shutdown().await;
    let mut unread = [0; 4 << 10];
    let mut read_bytes = 0;
    while read_bytes < MAX_UNREAD_BYTES {
        match stream.read(&mut unread).await {
            Ok(0) | Err(_) => return,
            Ok(bytes) => read_bytes += bytes,
        }
    }
}

/// The bytes of the whole answer.
fn answer(exceeded: Exceeded) -> Vec<u8> {
    let error = of(exceeded);
    let body = error.body().to_string();
    let reason = error.status.canonical_reason().unwrap_or_default();
    let head = format!(
        "HTTP/1.1 {} {reason}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nretry-after: {}\r\n\
         connection: close\r\n\r\n",
        error.status.as_u16(),
        body.len(),
        RETRY_AFTER_MS.div_ceil(1_000),
    );
    [head.into_bytes(), body.into_bytes()].concat()
}
