//! Passes the requests for a session on to the host that owns it, whole: the owner authenticates them, counts them and answers
//! them, and both bodies are streams.
//!
//! Invariant: a request is sent to a second host, or handled here after all, only if the first one has not got it, or if
//! the client says that it may be repeated. A request that another host has passed on is never passed on again.

use super::{
    ANSWERED_BY, Cluster, HOST_GONE, RETRY_MS, balance,
    inbound::PassedOn,
    key::{self, SignedBody},
    link::{LinkError, Outgoing},
    owners::Subject,
    prefill_host,
};
use crate::{
    ApiError, Gateway,
    access::{NeedsKey, requester},
    caller::RequestId,
    client_address::ClientAddress,
    mcp::Mcp,
    metrics::CLUSTER_FORWARD_TIME,
};
use axum::{
    body::{Body, Bytes, HttpBody, to_bytes},
    extract::{FromRequestParts, MatchedPath, RawPathParams, Request, State},
    http::{
        HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header, request::Parts, uri::PathAndQuery,
    },
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures::{StreamExt, stream};
use skep_runtime::{HostRole, Member, SessionPlace};
use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

/// Maximum size of a body that is kept, so that it can be sent a second time.
const MAX_KEPT_BYTES: u64 = 1 << 20;
/// Timeout of receiving such a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time that a request waits until another host has taken over the session of one that is gone.
const TAKE_OVER_TIMEOUT: Duration = Duration::from_secs(15);
/// Delay between two looks at who owns the session.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Headers that are about one connection (RFC 9110, section 7.6.1). Those that `connection` names are, too.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// A request that is to be passed on.
pub(super) struct Passing {
    parts: Parts,
    path: PathAndQuery,
    payload: Payload,
}

/// The end of passing a request on.
pub(super) enum Passed {
    Answered(Response),
    /// No other host has the session anymore. This is the request as it arrived.
    Here(Request),
}

enum Payload {
    /// A body that can be sent again.
    Kept(Bytes),
    /// `None` once it was sent.
    Streamed(Option<Body>),
}

/// Passes a request on if another host owns its session. It runs after the caller was identified, because the name of the
/// tenant is part of the session, and before anything is checked or counted.
pub(crate) async fn forward(State(gateway): State<Gateway>, request: Request, next: Next) -> Response {
    let Some(cluster) = gateway.cluster.clone() else { return next.run(request).await };
    let is_here = request.extensions().get::<PassedOn>().is_some();
    let path = request.uri().path();
    if let Some(balancer) =
        cluster.balancer.as_ref().filter(|_| !is_here && !balance::is_about_balancer(path))
    {
        return balance::relay(&cluster, &gateway.mcp, balancer, request).await;
    }
    if cluster.role == HostRole::Prefill && !prefill_host::is_about_host(path) {
        return prefill_host::refused().into_response();
    }
    let is_known = requester(request.extensions()).0.is_some();
    // The answer to a preflight request is the same everywhere.
    if is_here || !is_known || request.method() == Method::OPTIONS {
        return next.run(request).await;
    }
    let (subject, request) = subject_of(&gateway.mcp, request).await;
    let Some(subject) = subject else { return next.run(request).await };
    let is_stream_of_news = is_stream_of_news(&subject, &request);
    match cluster.owners.place(&subject).await {
        Ok(SessionPlace::There(owner)) => match pass(&cluster, &subject, owner, request).await {
            Passed::Answered(response) if is_stream_of_news => gateway.mcp.until_closed(response),
            Passed::Answered(response) => response,
            Passed::Here(request) => next.run(request).await,
        },
        Ok(SessionPlace::Here) => next.run(request).await,
        Err(error) => {
            // The handler meets the same error, or one that says more about the request.
            tracing::debug!(%error, "the owner of a session is not known");
            next.run(request).await
        }
    }
}

/// Returns what a request is about, if it is about a session.
pub(super) async fn subject_of(mcp: &Mcp, request: Request) -> (Option<Subject>, Request) {
    let route = request.extensions().get::<MatchedPath>().map(|route| route.as_str().to_owned());
    let is_session = match route.as_deref() {
        Some("/mcp" | "/mcp/{agent}") => {
            return (mcp.session_elsewhere(request.headers()).map(Subject::McpSession), request);
        }
        Some(route) if route.starts_with("/v1/agents/{agent}/sessions/{session}") => true,
        Some("/v1/approvals/{id}") => false,
        _ => return (None, request),
    };
    let (mut parts, body) = request.into_parts();
    let parameters = RawPathParams::from_request_parts(&mut parts, &()).await.ok();
    let value = |wanted: &str| {
        let mut parameters = parameters.as_ref()?.iter();
        parameters.find(|(name, _)| *name == wanted).map(|(_, value)| value.to_owned())
    };
    let subject = if is_session {
        value("agent").zip(value("session")).map(|(agent, session)| Subject::Session { agent, session })
    } else {
        value("id").map(Subject::Approval)
    };
    (subject, Request::from_parts(parts, body))
}

/// Returns whether a request opens the stream of an MCP session that has no end. When this host ends, it does not wait for that of
/// another host.
pub(super) fn is_stream_of_news(subject: &Subject, request: &Request) -> bool {
    matches!(subject, Subject::McpSession(_)) && request.method() == Method::GET
}

/// Passes a request on until a host has answered it, or no other host has the session anymore.
pub(super) async fn pass(
    cluster: &Arc<Cluster>,
    subject: &Subject,
    mut owner: Member,
    request: Request,
) -> Passed {
    let mut passing = match Passing::of(request).await {
        Ok(passing) => passing,
        Err(error) => return Passed::Answered(error.into_response()),
    };
    let began = Instant::now();
    loop {
        let error = match passing.send(cluster, &owner).await {
            Ok(response) => {
                record_time(began);
                return Passed::Answered(passed_back(cluster, owner.number, response));
            }
            Err(error) => error,
        };
        let is_unknown = matches!(error, LinkError::Broken(_));
        let may_repeat = passing.is_kept() && (!is_unknown || passing.is_repeatable());
        tracing::debug!(error = error.message(), may_repeat, "the owner of a session cannot be reached");
        if !may_repeat || began.elapsed() >= TAKE_OVER_TIMEOUT {
            return Passed::Answered(host_gone(&owner, is_unknown).into_response());
        }
        loop {
            tokio::time::sleep(LOOK_AGAIN).await;
            match cluster.owners.place(subject).await {
                Ok(SessionPlace::Here) => {
                    record_time(began);
                    return Passed::Here(passing.into_request());
                }
                Ok(SessionPlace::There(found)) => {
                    owner = found;
                    break;
                }
                Err(error) if began.elapsed() >= TAKE_OVER_TIMEOUT => {
                    return Passed::Answered(ApiError::from(error).into_response());
                }
                Err(_) => {}
            }
        }
    }
}

impl Passing {
    /// Takes a request, and receives its body if that is small.
    pub(super) async fn of(request: Request) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path_and_query().cloned();
        let path = path.ok_or_else(|| ApiError::internal("a request that names a session has no path"))?;
        let is_small = body.size_hint().upper().is_some_and(|bytes| bytes <= MAX_KEPT_BYTES);
        let payload = if is_small {
            let bytes = tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, MAX_KEPT_BYTES as usize)).await;
            let bytes = bytes.map_err(|_| {
                let message = format!("the body was not received within {} s", BODY_TIMEOUT.as_secs());
                ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
            })?;
            Payload::Kept(bytes.map_err(|error| {
                ApiError::new(StatusCode::BAD_REQUEST, "body_unreadable", error.to_string())
            })?)
        } else {
            Payload::Streamed(Some(body))
        };
        Ok(Passing { parts, path, payload })
    }

    /// Sends the request to a host, and waits for the head of its answer for as long as the host lives.
    pub(super) async fn send(&mut self, cluster: &Cluster, owner: &Member) -> Result<Response, LinkError> {
        let body = match &mut self.payload {
            Payload::Kept(bytes) => Body::from(bytes.clone()),
            Payload::Streamed(body) => body.take().unwrap_or_default(),
        };
        let outgoing = Outgoing {
            method: self.parts.method.clone(),
            path: self.path.clone(),
            headers: outgoing_headers(&self.parts),
            body,
            signed_body: SignedBody::Streamed,
            needs_key: self.parts.extensions.get::<NeedsKey>().is_some(),
        };
        tokio::select! {
            sent = cluster.link.send(owner, outgoing) => sent,
            () = cluster.until_gone(owner.number) => {
                Err(LinkError::Broken(format!("host {} is gone", owner.number)))
            }
        }
    }

    /// Returns the number of bytes of the body, as far as it is known.
    pub(super) fn body_bytes(&self) -> u64 {
        match &self.payload {
            Payload::Kept(bytes) => bytes.len() as u64,
            Payload::Streamed(body) => body.as_ref().map_or(0, |body| body.size_hint().lower()),
        }
    }

    pub(super) fn is_kept(&self) -> bool {
        matches!(self.payload, Payload::Kept(_))
    }

    /// Returns whether doing what the request asks twice is the same as doing it once. Only messages to sessions have idempotency
    /// keys; other routes ignore the header.
    pub(super) fn is_repeatable(&self) -> bool {
        let path = self.path.path();
        let is_message = self.parts.method == Method::POST
            && path.starts_with("/v1/agents/")
            && path.ends_with("/messages");
        matches!(self.parts.method, Method::GET | Method::HEAD)
            || is_message && self.parts.headers.contains_key("idempotency-key")
    }

    /// Returns the request as it arrived.
    fn into_request(self) -> Request {
        let body = match self.payload {
            Payload::Kept(bytes) => Body::from(bytes),
            Payload::Streamed(body) => body.unwrap_or_default(),
        };
        Request::from_parts(self.parts, body)
    }
}

/// Returns the headers of a request for the owner of its session. The name of the host stays as the client wrote it, because
/// the owner compares it with the origin of web pages.
fn outgoing_headers(parts: &Parts) -> HeaderMap {
    let mut headers = parts.headers.clone();
    remove_hop_by_hop(&mut headers);
    // The answer to it was given on this connection.
    headers.remove(header::EXPECT);
    headers.remove(key::CLIENT);
    if let Some(ClientAddress(client)) = parts.extensions.get::<ClientAddress>() {
        let client = HeaderValue::try_from(client.to_string()).expect("an address is a valid header value");
        headers.insert(key::CLIENT, client);
    }
    if let Some(RequestId(id)) = parts.extensions.get::<RequestId>()
        && let Ok(id) = HeaderValue::from_str(id)
    {
        headers.insert("x-request-id", id);
    }
    headers
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.into_iter().chain(HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Returns the answer of the owner as this host's.
pub(super) fn passed_back(cluster: &Arc<Cluster>, owner: i64, response: Response) -> Response {
    let (mut parts, body) = response.into_parts();
    remove_hop_by_hop(&mut parts.headers);
    key::strip(&mut parts.headers);
    parts.headers.insert(ANSWERED_BY, HeaderValue::from(owner));
    if body.is_end_stream() {
        return Response::from_parts(parts, body);
    }
    // A host that hangs keeps its connections open. Its clients learn that it is gone when the database says so.
    let cluster = cluster.clone();
    let gone = Box::pin(async move { cluster.until_gone(owner).await });
    let body = stream::unfold(Some((body.into_data_stream(), gone)), |open| async move {
        let (mut body, mut gone) = open?;
        let part = tokio::select! {
            part = body.next() => part?.map_err(io::Error::other),
            () = &mut gone => Err(io::Error::other("the host that answers is gone")),
        };
        let open = part.is_ok().then_some((body, gone));
        Some((part, open))
    });
    Response::from_parts(parts, Body::from_stream(body))
}

fn record_time(began: Instant) {
    metrics::histogram!(CLUSTER_FORWARD_TIME).record(began.elapsed().as_secs_f64());
}

/// Returns the error for a request whose owner cannot be reached.
fn host_gone(owner: &Member, is_unknown: bool) -> ApiError {
    let message = if is_unknown {
        format!(
            "the connection to host {}, which owns the session, broke before it answered, so it is not known what was done; \
             a request with an idempotency key may be sent again safely",
            owner.number
        )
    } else {
        format!(
            "host {}, which owns the session, cannot be reached, and no other host has taken over yet; try again in a moment",
            owner.number
        )
    };
    let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, HOST_GONE, message);
    ApiError { retry_after_ms: Some(RETRY_MS), ..error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_one_connection_are_not_passed_on() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "keep-alive, X-Mine"),
            ("connection", "x-other"),
            ("keep-alive", "timeout=5"),
            ("x-mine", "1"),
            ("x-other", "2"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "websocket"),
            ("content-length", "3"),
            ("authorization", "Bearer k"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        remove_hop_by_hop(&mut headers);
        let mut left: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["authorization", "content-length"]);
    }

    #[test]
    fn a_client_cannot_choose_the_address_that_is_passed_on() {
        let request = Request::get("/v1/agents/a/sessions/s")
            .header("x-forwarded-for", "203.0.113.9")
            .header("host", "example.com")
            .extension(ClientAddress("192.0.2.1".parse().unwrap()))
            .extension(RequestId("id-1".to_owned()));
        let (parts, _) = request.body(Body::empty()).unwrap().into_parts();
        let headers = outgoing_headers(&parts);
        assert_eq!(headers["x-forwarded-for"], "192.0.2.1");
        assert_eq!(headers["host"], "example.com");
        assert_eq!(headers["x-request-id"], "id-1");
        let request = Request::get("/").header("x-forwarded-for", "203.0.113.9").body(Body::empty());
        assert!(outgoing_headers(&request.unwrap().into_parts().0).is_empty());
    }

    #[tokio::test]
    async fn only_a_body_that_was_kept_can_be_sent_again() {
        let of = |method: Method, body: Body| {
            let request = Request::builder().method(method).uri("/v1/agents/a/sessions/s").body(body);
            Passing::of(request.unwrap())
        };
        let kept = of(Method::POST, Body::from("text")).await.unwrap();
        assert!(kept.is_kept() && !kept.is_repeatable());
        let body = to_bytes(kept.into_request().into_body(), 9).await.unwrap();
        assert_eq!(&body[..], b"text");
        assert!(of(Method::GET, Body::empty()).await.unwrap().is_repeatable());
        for (path, expected) in [("/messages", true), ("/messages?detach=true", true), ("/fork", false)] {
            let request =
                Request::post(format!("/v1/agents/a/sessions/s{path}")).header("idempotency-key", "k");
            let kept = Passing::of(request.body(Body::empty()).unwrap()).await.unwrap();
            assert_eq!(kept.is_repeatable(), expected, "{path}");
        }
        let without_session = Request::post("/v1/messages").header("idempotency-key", "k");
        let without_session = Passing::of(without_session.body(Body::empty()).unwrap()).await.unwrap();
        assert!(!without_session.is_repeatable(), "this route ignores the key");
        let large = of(Method::PUT, Body::from(vec![b'x'; MAX_KEPT_BYTES as usize + 1])).await.unwrap();
        assert!(!large.is_kept());
        let endless = stream::iter([Ok::<_, io::Error>(Bytes::from_static(b"x"))]);
        assert!(!of(Method::POST, Body::from_stream(endless)).await.unwrap().is_kept());
    }
}
