//! A single HTTP request of an agent, under its grants and within its limits. The code that journals the request decides
//! whether it may be repeated after a restart.

use crate::{capability::Turn, metric};
use skep_outbound::{Bounds, OutboundError, Request, Response};
use std::{
    fmt::Write,
    time::{Duration, Instant},
};
use tracing::{Instrument, Span, field::Empty, info_span};

/// Timeout of a request that sets none.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_REDIRECTS: usize = 5;
const MAX_REQUEST_BYTES: usize = 1 << 20;

/// The reason why a request has no response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    #[error(transparent)]
    Outbound(#[from] OutboundError),
    /// A limit of the turn; the text names the setting.
    #[error("{0}")]
    Limit(String),
    /// The host cannot open the secrets that the agent is granted.
    #[error("{0}")]
    Host(String),
}

impl Turn {
    /// Makes a request. Dropping the future, as the end of the turn does, cancels it.
    pub(crate) async fn fetch(
        &self,
        request: Request,
        timeout: Option<Duration>,
    ) -> Result<Response, FetchError> {
        let started = Instant::now();
        let span = span(&request);
        let result = self.fetch_in_span(request, timeout).instrument(span.clone()).await;
        let outcome = match &result {
            Ok(response) => {
                span.record("http.response.status_code", i64::from(response.status));
                // OpenTelemetry's rule for clients.
                if response.status >= 400 {
                    span.record("otel.status_code", "ERROR");
                }
                class(response.status)
            }
            Err(error) => {
                span.record("otel.status_code", "ERROR");
                error.code()
            }
        };
        if !matches!(outcome, "2xx" | "3xx") {
            span.record("error.type", outcome);
        }
        let agent = self.agent.manifest.name.to_string();
        metrics::counter!(metric::FETCHES, "agent" => agent.clone(), "outcome" => outcome).increment(1);
        metrics::histogram!(metric::FETCH_TIME, "agent" => agent).record(started.elapsed());
        result
    }

    async fn fetch_in_span(
        &self,
        request: Request,
        timeout: Option<Duration>,
    ) -> Result<Response, FetchError> {
        let reservation = self.fetches.begin(request.size()).map_err(FetchError::Limit)?;
        let bounds = Bounds {
            deadline: Instant::now() + timeout.unwrap_or(DEFAULT_TIMEOUT),
            request_bytes: MAX_REQUEST_BYTES,
            response_bytes: reservation.response_bytes,
            redirects: MAX_REDIRECTS,
        };
        let granted = self.tools.rules.granted_hosts.clone();
        let policy = self.egress.policy(&self.agent.manifest, granted, |name| self.placeholder(name)).await;
        let policy = policy.map_err(|error| FetchError::Host(error.to_string()))?;
        let response = self.egress.send(&self.affinity.tenant, request, &policy, &bounds).await?;
        reservation.settle(response.body.len());
        Ok(response)
    }

    /// Returns the placeholder for a secret in this turn. It is derived from the turn's seed, so a replayed turn gets the same
    /// one, and nobody outside of the turn can guess it.
    pub(crate) fn placeholder(&self, name: &str) -> String {
        let unguessable = self.journal.derive(&format!("secret {name}"));
        let mut placeholder = format!("secret.{name}.");
        for byte in &unguessable[..16] {
            let _ = write!(placeholder, "{byte:02x}");
        }
        placeholder
    }

    /// Counts a request that was made before a restart.
    pub(crate) fn fetched_before(&self, request_bytes: usize, response_bytes: usize) {
        // A request that did not fit was refused then, and is not counted now either.
        if let Ok(reservation) = self.fetches.begin(request_bytes) {
            reservation.settle(response_bytes);
        }
    }
}

impl FetchError {
    pub(crate) fn code(&self) -> &'static str {
        match self {
            Self::Outbound(error) => error.code(),
            Self::Limit(_) => "limit_exceeded",
            Self::Host(_) => "internal",
        }
    }
}

/// Returns a span named after OpenTelemetry's conventions for HTTP clients, without path and query, which may contain
/// private data.
fn span(request: &Request) -> Span {
    let (method, origin) = (request.method().as_str(), request.origin());
    info_span!(
        "fetch",
        otel.name = method,
        otel.kind = "client",
        otel.status_code = Empty,
        http.request.method = method,
        server.address = origin.host(),
        server.port = i64::from(origin.port()),
        url.scheme = request.url().scheme(),
        http.response.status_code = Empty,
        error.type = Empty,
    )
}

fn class(status: u16) -> &'static str {
    match status {
        ..=199 => "1xx",
        200..=299 => "2xx",
        300..=399 => "3xx",
        400..=499 => "4xx",
        500.. => "5xx",
    }
}
