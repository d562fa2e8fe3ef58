//! The first layer of a host in a cluster: it recognizes the requests of other hosts, and removes from all other requests
//! the headers that only hosts may send.

use super::{
    ANSWERED_BY, Cluster,
    key::{self, Signed, SignedBody, WINDOW},
    link::now_ms,
    nonces::Refused,
    routes,
};
use crate::{ApiError, Gateway, access::NeedsKey, client_address::ClientAddress, server::Slot};
use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, StatusCode},
    middleware::Next,
    response::{IntoResponse, Response},
};
use skep_runtime::{CLUSTER_PROTOCOL, speak_with};
use std::{
    net::IpAddr,
    sync::Weak,
    time::{Duration, Instant},
};

/// The code of the error that the versions of two hosts are too far apart.
const VERSIONS_APART: &str = "cluster_versions_apart";

/// Marks a request that another host passed on. It is answered here, whoever owns the session.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassedOn;

/// Checks the signature of a request, answers what only hosts ask, and passes everything else on to the routes.
pub(crate) async fn receive(State(gateway): State<Gateway>, mut request: Request, next: Next) -> Response {
    let Some(cluster) = gateway.cluster.clone() else { return next.run(request).await };
    let checked = cluster.check(&request);
    let (protocol, needs_key) = (key::protocol(request.headers()), key::needs_key(request.headers()));
    key::strip(request.headers_mut());
    request.headers_mut().remove(ANSWERED_BY);
    let is_internal = routes::is_internal(request.method(), request.uri().path());
    let mut response = match checked {
        Err(refusal) => refusal.into_response(),
        Ok(None) if is_internal => key_required().into_response(),
        Ok(None) => next.run(request).await,
        Ok(Some(signed)) => {
            // The connection is one of a host, whose requests are for many clients.
            if let Some(slot) = request.extensions().get::<Weak<Slot>>().and_then(Weak::upgrade) {
                slot.leave_address();
            }
            let mut response = if !speak_with(CLUSTER_PROTOCOL, protocol) {
                let refusal = versions_apart(protocol);
                if is_internal { routes::refusal(refusal) } else { refusal.into_response() }
            } else if is_internal {
                routes::answer(&gateway, &cluster, &signed, request).await
            } else {
                if let Some(client) = client(request.headers()) {
                    request.extensions_mut().insert(ClientAddress(client));
                }
                request.extensions_mut().insert(PassedOn);
                if needs_key {
                    request.extensions_mut().insert(NeedsKey);
                }
                next.run(request).await
            };
            let status = response.status();
            cluster.key.prove(signed.nonce, status, response.headers_mut());
            response
        }
    };
    if !response.headers().contains_key(ANSWERED_BY) {
        response.headers_mut().insert(ANSWERED_BY, HeaderValue::from(cluster.number));
    }
    response
}

impl Cluster {
    /// Returns what a host has signed. Fails if the request has a signature that does not count, so that it is never taken for
    /// the request of a client.
    fn check(&self, request: &Request) -> Result<Option<Signed>, ApiError> {
        let verified = self.key.verify(request.method(), request.uri(), request.headers());
        let Some(signed) = verified.map_err(|fault| refused(fault.message()))? else { return Ok(None) };
        let apart = Duration::from_millis(now_ms().abs_diff(signed.time_ms));
        if apart > WINDOW {
            let (apart_s, most_s) = (apart.as_secs(), WINDOW.as_secs());
            return Err(refused(format!(
                "the clocks of the two hosts are {apart_s} s apart, and at most {most_s} s are allowed; synchronize them"
            )));
        }
        if signed.receiver != self.number {
            return Err(refused(format!(
                "the request is for host {}, and host {} answers here now",
                signed.receiver, self.number
            )));
        }
        let is_internal = routes::is_internal(request.method(), request.uri().path());
        if is_internal == (signed.body == SignedBody::Streamed) {
            return Err(refused("the body of the request is signed in the wrong way"));
        }
        self.nonces.take(signed.nonce, Instant::now()).map_err(|why| {
            refused(match why {
                Refused::Repeated => "the request was sent before",
                Refused::Full => "the other hosts send too many requests",
            })
        })?;
        Ok(Some(signed))
    }
}

/// Returns the client that a host has named.
fn client(headers: &HeaderMap) -> Option<IpAddr> {
    headers.get(key::CLIENT)?.to_str().ok()?.parse().ok()
}

fn refused(why: impl Into<String>) -> ApiError {
    let why = why.into();
    tracing::debug!(why, "a request that says that it is from another host is refused");
    ApiError::new(StatusCode::UNAUTHORIZED, "cluster_signature_refused", why)
}

/// Returns the error for a host whose version is too far from that of this one. The host that asks learns that it is from a host of
/// its cluster.
fn versions_apart(protocol: i64) -> ApiError {
    let message = format!(
        "the host that passed this request on speaks version {protocol} of the protocol between hosts, and this one version \
         {CLUSTER_PROTOCOL}; hosts work together if these are at most one apart, so upgrade the cluster one version after the other"
    );
    tracing::warn!(
        protocol,
        "a host of the cluster is refused, because its version is too far from that of this one"
    );
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, VERSIONS_APART, message)
}

fn key_required() -> ApiError {
    let message = "only the hosts of this cluster may use this route; they sign their requests";
    ApiError::new(StatusCode::UNAUTHORIZED, "cluster_key_required", message)
}
