//! Refuses connections over the bounds: the error that the client gets, and few log lines, so that a flood of
//! connections does not flood the log.

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

/// Minimum time between two log lines.
const QUIET: Duration = Duration::from_secs(10);
const RETRY_AFTER_MS: u32 = 1_000;
/// Maximum number of refused connections that stay open until their clients have read the error. Further ones are
/// closed immediately.
const MAX_LINGERING: usize = 64;
const LINGER: Duration = Duration::from_secs(1);
/// Maximum number of bytes read from a refused client.
const MAX_UNREAD_BYTES: usize = 64 << 10;

/// The refusals of one server.
pub(super) struct Refusals {
    lingering: Arc<Semaphore>,
    refused: AtomicU64,
    logged_at: Mutex<Option<Instant>>,
}

impl Default for Refusals {
    fn default() -> Self {
        let lingering = Arc::new(Semaphore::new(MAX_LINGERING));
        Refusals { lingering, refused: AtomicU64::new(0), logged_at: Mutex::default() }
    }
}

/// Returns the error for an exceeded bound.
pub(super) fn of(exceeded: Exceeded) -> ApiError {
    let error = match exceeded {
        Exceeded::All => ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "too_many_connections",
            "this host has reached its maximum number of connections; try again in a moment; the operator sets the \
             limit with max_connections under [http] in skep.toml",
        ),
        Exceeded::Address => ApiError::new(
            StatusCode::TOO_MANY_REQUESTS,
            "too_many_connections",
            "your address has reached its maximum number of connections; close or reuse some; the operator sets the \
             limit with max_connections_per_address under [http] in skep.toml",
        ),
    };
    ApiError { retry_after_ms: Some(RETRY_AFTER_MS), ..error }
}

impl Refusals {
    /// Sends the error and closes the connection.
    pub(super) fn refuse(&self, stream: TcpStream, peer: SocketAddr, exceeded: Exceeded) {
        let bound = match exceeded {
            Exceeded::All => "all",
            Exceeded::Address => "address",
        };
        metrics::counter!(CONNECTIONS_REFUSED, "bound" => bound).increment(1);
        self.refused.fetch_add(1, Ordering::Relaxed);
        if self.may_log() {
            let refused = self.refused.swap(0, Ordering::Relaxed);
            tracing::warn!(
                %peer, bound, refused,
                "connections are refused: the limit max_connections or max_connections_per_address under [http] is reached"
            );
        }
        // The socket's buffer is empty, so it either takes the whole response or the connection is gone.
        let _ = stream.try_write(&answer(exceeded));
        if let Ok(permit) = self.lingering.clone().try_acquire_owned() {
            tokio::spawn(async move {
                let _ = tokio::time::timeout(LINGER, linger(stream)).await;
                drop(permit);
            });
        }
    }

    /// Records that accepting failed, most likely because the process has no file handles left.
    pub(super) fn accepting_failed(&self, error: &io::Error) {
        metrics::counter!(CONNECTIONS_REFUSED, "bound" => "files").increment(1);
        if self.may_log() {
            tracing::error!(
                %error,
                "no connection can be accepted; if the process has too many open files, raise its limit (ulimit -n) or lower \
                 max_connections under [http] in skep.toml"
            );
        }
    }

    fn may_log(&self) -> bool {
        let mut logged_at = self.logged_at.lock().unwrap_or_else(PoisonError::into_inner);
        let may = logged_at.is_none_or(|at| at.elapsed() >= QUIET);
        if may {
            *logged_at = Some(Instant::now());
        }
        may
    }
}

/// Reads what the client still sends, because closing a connection with unread data resets it and the client would
/// not see the response.
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

/// Returns the bytes of the whole HTTP response.
fn answer(exceeded: Exceeded) -> Vec<u8> {
    let error = of(exceeded);
    let body = serde_json::to_string(&error.body()).expect("strings always serialize");
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
