//! Sends one bounded request and follows its redirects.

use crate::{
    AddressPolicy, Origin, OutboundError, Policy, Request, Resolve, Response, SystemResolver,
    bounded_body::{self, innermost},
    connections::Connections,
    policy::Carried,
    redirect,
};
use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Semaphore;

/// Maximum total size of a response's headers. The parser itself reads a few hundred kilobytes before it fails.
const MAX_RESPONSE_HEADER_BYTES: usize = 64 << 10;

/// Sends requests. Clones share their connections.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    connections: Connections,
    running: Semaphore,
}

/// Options that the operator sets for all requests.
#[derive(Clone)]
pub struct Options {
    pub addresses: AddressPolicy,
    pub resolve: Arc<dyn Resolve>,
    /// Maximum number of requests in flight at once. Others wait, until their deadline.
    pub max_running: usize,
}

/// Bounds of one request, including all its redirects.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub deadline: Instant,
    /// Maximum size of the request body.
    pub request_bytes: usize,
    /// Maximum size of the response body.
    pub response_bytes: usize,
    /// Maximum number of redirects. With 0, a redirect is returned as the response.
    pub redirects: usize,
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options { addresses, max_running, .. } = self;
        f.debug_struct("Options")
            .field("addresses", addresses)
            .field("max_running", max_running)
            .finish_non_exhaustive()
    }
}

impl Default for Options {
    fn default() -> Self {
        Options { addresses: AddressPolicy::default(), resolve: Arc::new(SystemResolver), max_running: 256 }
    }
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds {
            deadline: Instant::now() + Duration::from_secs(30),
            request_bytes: 1 << 20,
            response_bytes: 4 << 20,
            redirects: 5,
        }
    }
}

impl Client {
    /// Creates a client. Its clones share its connections and its bound on running requests.
    pub fn new(options: Options) -> Self {
        let connections = Connections::new(options.resolve, options.addresses);
        Client { inner: Arc::new(Inner { connections, running: Semaphore::new(options.max_running.max(1)) }) }
    }

    /// Sends a request if `policy` allows its origin, and follows redirects to origins that `policy` allows.
    pub async fn send(
        &self,
        request: Request,
        policy: &Policy,
        bounds: &Bounds,
    ) -> Result<Response, OutboundError> {
        policy.check(request.origin())?;
        if request.body.len() > bounds.request_bytes {
            let (bytes, limit) = (request.body.len(), bounds.request_bytes);
            return Err(OutboundError::RequestTooLarge { bytes, limit });
        }
        let sent = tokio::time::timeout_at(bounds.deadline.into(), self.exchange(request, policy, bounds));
        sent.await.unwrap_or(Err(OutboundError::DeadlineExceeded))
    }

    /// Returns a client for a library that speaks its own protocol over HTTP. The client follows no redirects
    /// and connects to this origin's port only, at allowed addresses. Use it for this origin only.
    pub fn connection(&self, origin: &Origin) -> Result<reqwest::Client, OutboundError> {
        self.inner.connections.to(origin)
    }

    /// Checks that all of this origin's addresses are allowed, without connecting to one.
    pub(crate) async fn check_addresses(&self, origin: &Origin) -> Result<(), OutboundError> {
        self.inner.connections.check_addresses(origin).await
    }

    async fn exchange(
        &self,
        mut request: Request,
        policy: &Policy,
        bounds: &Bounds,
    ) -> Result<Response, OutboundError> {
        let _permit = self.inner.running.acquire().await.expect("the semaphore is never closed");
        let secrets = policy.secrets();
        // The secrets of all hops: a server may pass on to the next one the value that it received.
        let mut carried = Carried::default();
        let mut redirects = 0;
        loop {
            let filled = secrets.fill(&request, bounds.request_bytes, &mut carried)?;
            let mut response = self.send_once(&filled).await?;
            // Redaction comes first, so that nothing derived from a response, an error included, holds a
            // secret.
            carried.redact_headers(response.headers_mut());
            carried.check(&request.origin, response.status(), response.headers())?;
            let next = match bounds.redirects {
                0 => None,
                _ => redirect::follow(&request, response.status(), response.headers())?,
            };
            let Some(mut next) = next else { return read(response, request, &carried, bounds).await };
            redirects += 1;
            if redirects > bounds.redirects {
                return Err(OutboundError::TooManyRedirects { limit: bounds.redirects });
            }
            policy.check(next.origin())?;
            if next.origin() != request.origin() {
                secrets.leave_behind(&mut next.headers);
            }
            request = next;
        }
    }

    async fn send_once(&self, request: &Request) -> Result<reqwest::Response, OutboundError> {
        let client = self.inner.connections.to(&request.origin)?;
        let mut outgoing = reqwest::Request::new(request.method.clone(), request.url.clone());
        *outgoing.headers_mut() = request.headers.clone();
        if !request.body.is_empty() {
            *outgoing.body_mut() = Some(request.body.clone().into());
        }
        client.execute(outgoing).await.map_err(|error| explain(&error, &request.origin))
    }
}

async fn read(
    response: reqwest::Response,
    request: Request,
    carried: &Carried,
    bounds: &Bounds,
) -> Result<Response, OutboundError> {
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let header_bytes = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum::<usize>();
    if header_bytes > MAX_RESPONSE_HEADER_BYTES {
        return Err(OutboundError::ResponseTooLarge { limit: MAX_RESPONSE_HEADER_BYTES });
    }
    let body = bounded_body::read(response, &request.origin, bounds.response_bytes).await?;
    let body = carried.redact_body(body, bounds.response_bytes)?;
    Ok(Response { status, url: request.url, headers, body })
}

/// Converts an error of `reqwest`. A refusal by this crate's resolver arrives wrapped inside it and is
/// unwrapped.
fn explain(error: &reqwest::Error, origin: &Origin) -> OutboundError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(refusal) = error.downcast_ref::<OutboundError>() {
            return refusal.clone();
        }
        cause = error.source();
    }
    let (origin, problem) = (origin.clone(), innermost(error));
    match error.is_connect() {
        true => OutboundError::Connect { origin, problem },
        false => OutboundError::Exchange { origin, problem },
    }
}
