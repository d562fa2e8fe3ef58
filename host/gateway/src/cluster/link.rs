//! The connections to the other hosts: each request is signed, and each answer is checked.
//!
//! A request goes only to the address of a host from the table of hosts, never to one that a client names.

use super::key::{self, ClusterKey, Nonce, Signed, SignedBody};
use crate::metrics::CLUSTER_REQUESTS;
use axum::{
    body::{Body, to_bytes},
    http::{
        HeaderMap, Method, Request, Response, StatusCode, Uri, Version,
        uri::{Authority, PathAndQuery, Scheme},
    },
};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use skep_runtime::Member;
use std::{
    error::Error,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time that an idle connection is kept: shorter than a host keeps one, so that a request rarely meets its end.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);
/// Silence after which the other machine is asked whether it still has the connection.
const PROBE_AFTER: Duration = Duration::from_secs(5);
const PROBE_INTERVAL: Duration = Duration::from_secs(2);
const PROBES: u32 = 3;
/// Number of idle connections to each host.
const MAX_IDLE: usize = 256;
/// Maximum size of an answer that is only read to be logged, and how much of it is logged.
const MAX_LOGGED_BYTES: usize = 64 << 10;
const LOGGED_CHARS: usize = 500;
/// Time within which such an answer must arrive.
const LOG_TIMEOUT: Duration = Duration::from_secs(2);

/// The client side of a host. It keeps connections open.
pub(super) struct Link {
    key: ClusterKey,
    client: Client<HttpConnector, Body>,
}

/// A request to another host.
pub(super) struct Outgoing {
    pub(super) method: Method,
    pub(super) path: PathAndQuery,
    pub(super) headers: HeaderMap,
    pub(super) body: Body,
    pub(super) signed_body: SignedBody,
    /// Whether the client needs a key at the other host, also if that requires none itself.
    pub(super) needs_key: bool,
}

/// Why there is no answer of the other host.
#[derive(Debug)]
pub(super) enum LinkError {
    /// The request did not reach the host, or the host did not accept it: nothing was done.
    Unreached(String),
    /// The connection broke, or the answer was not from that host: it is unknown what was done.
    Broken(String),
}

impl Link {
    pub(super) fn new(key: ClusterKey) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        connector.set_keepalive(Some(PROBE_AFTER));
        connector.set_keepalive_interval(Some(PROBE_INTERVAL));
        connector.set_keepalive_retries(Some(PROBES));
        #[cfg(target_os = "linux")]
        connector.set_tcp_user_timeout(Some(PROBE_AFTER + PROBES * PROBE_INTERVAL));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(MAX_IDLE)
            .build(connector);
        Link { key, client }
    }

    /// Sends a request, and returns the answer once its head is here. Dropping the answer ends the request.
    pub(super) async fn send(&self, to: &Member, outgoing: Outgoing) -> Result<Response<Body>, LinkError> {
        let sent = self.exchange(to, outgoing).await;
        let outcome = match &sent {
            Ok(_) => "answered",
            Err(LinkError::Unreached(_)) => "unreached",
            Err(LinkError::Broken(_)) => "broken",
        };
        metrics::counter!(CLUSTER_REQUESTS, "outcome" => outcome).increment(1);
        sent
    }

    async fn exchange(&self, to: &Member, outgoing: Outgoing) -> Result<Response<Body>, LinkError> {
        let Outgoing { method, path, mut headers, body, signed_body, needs_key } = outgoing;
        let authority = authority(&to.url).ok_or_else(|| {
            let Member { number, url } = to;
            LinkError::Unreached(format!("{url:?}, the address of host {number}, is not http://HOST:PORT"))
        })?;
        key::strip(&mut headers);
        let nonce = Nonce::new();
        let signed = Signed { nonce, receiver: to.number, time_ms: now_ms(), body: signed_body };
        self.key.sign(&method, path.as_str(), &mut headers, &signed);
        key::say_protocol(&mut headers);
        if needs_key {
            key::say_needs_key(&mut headers);
        }
        let uri = Uri::builder().scheme(Scheme::HTTP).authority(authority).path_and_query(path);
        let uri = uri.build().map_err(|error| LinkError::Unreached(error.to_string()))?;
        let mut request = Request::new(body);
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        *request.version_mut() = Version::HTTP_11;
        *request.headers_mut() = headers;
        let response = self.client.request(request).await.map_err(|error| {
            let message = format!("host {} at {}: {}", to.number, to.url, innermost(&error));
            if error.is_connect() { LinkError::Unreached(message) } else { LinkError::Broken(message) }
        })?;
        let (mut parts, body) = response.into_parts();
        let body = Body::new(body);
        if self.key.is_proven(nonce, parts.status, &mut parts.headers) {
            return Ok(Response::from_parts(parts, body));
        }
        let is_refusal = parts.status == StatusCode::UNAUTHORIZED;
        let said = said(body).await;
        tracing::warn!(
            host = to.number,
            url = to.url,
            status = parts.status.as_u16(),
            said,
            "an answer came without the proof that it is from a host of this cluster"
        );
        let message = format!(
            "host {} at {} answered {} without the proof of the cluster's key",
            to.number, to.url, parts.status
        );
        // A host that does not accept a signature reads nothing more of the request. Somebody who only pretends to
        // refuse it makes this host try the next one.
        Err(if is_refusal { LinkError::Unreached(message) } else { LinkError::Broken(message) })
    }
}

impl LinkError {
    pub(super) fn message(self) -> String {
        match self {
            LinkError::Unreached(message) | LinkError::Broken(message) => message,
        }
    }
}

/// Returns the host and the port of an address such as `http://10.0.0.2:8080`.
pub(super) fn authority(url: &str) -> Option<Authority> {
    let authority: Authority = url.strip_prefix("http://")?.trim_end_matches('/').parse().ok()?;
    (!authority.as_str().contains('@')).then_some(authority)
}

pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the beginning of an answer, for the log.
async fn said(body: Body) -> String {
    let read = tokio::time::timeout(LOG_TIMEOUT, to_bytes(body, MAX_LOGGED_BYTES)).await;
    let bytes = read.ok().and_then(Result::ok).unwrap_or_default();
    String::from_utf8_lossy(&bytes).chars().take(LOGGED_CHARS).collect()
}

fn innermost(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_address_of_a_host_is_one() {
        for (url, expected) in [
            ("http://10.0.0.2:8080", Some("10.0.0.2:8080")),
            ("http://[::1]:8080/", Some("[::1]:8080")),
            ("http://host.internal", Some("host.internal")),
            ("https://10.0.0.2:8080", None),
            ("http://10.0.0.2:8080/path", None),
            ("http://user@10.0.0.2:8080", None),
            ("10.0.0.2:8080", None),
            ("file:///etc/passwd", None),
            ("http://", None),
        ] {
            let found = authority(url);
            assert_eq!(found.as_ref().map(Authority::as_str), expected, "{url}");
        }
    }
}
