//! The access log: one line for each request when its response has ended, at the target `skep::access`.
//!
//! A line has the route instead of the path, and no header, query or body, so it contains nothing that a client keeps
//! secret. Health checks and metrics requests are logged at the level `debug`, because they are frequent.

use crate::{caller::Requester, spent::Spent};
use axum::http::{Method, StatusCode};
use std::{net::IpAddr, time::Instant};

/// Routes that monitoring systems request.
const CHECKS: [&str; 3] = ["/healthz", "/readyz", "/metrics"];

/// An access-log line, written when it is dropped.
#[derive(Debug)]
pub(crate) struct AccessLine {
    pub(crate) request_id: String,
    pub(crate) requester: Option<Requester>,
    pub(crate) client: Option<IpAddr>,
    pub(crate) method: Method,
    /// The route as the router knows it. `None` is an agent's own route, or no route.
    pub(crate) route: Option<String>,
    pub(crate) began: Instant,
    /// `None` until the response starts, so it stays `None` if the client disconnects before.
    pub(crate) status: Option<StatusCode>,
    /// Whether the response was sent to its end.
    pub(crate) is_whole: bool,
    pub(crate) spent: Spent,
}

impl Drop for AccessLine {
    fn drop(&mut self) {
        let Self { request_id, requester, client, method, route, began, status, is_whole, spent } = self;
        let tenant = requester.as_ref().map(|requester| requester.tenant.as_str());
        let key = requester.as_ref().and_then(|requester| requester.key.as_deref());
        let client = client.map(tracing::field::display);
        let route = route.as_deref().unwrap_or("(other)");
        let status = status.map_or(0, |status| status.as_u16());
        // To a tenth of a millisecond.
        let ms = (began.elapsed().as_secs_f64() * 10_000.0).round() / 10.0;
        let tokens = spent.tokens();
        let (prompt_tokens, output_tokens) = (tokens.map(|tokens| tokens.0), tokens.map(|tokens| tokens.1));
        // The line has no parent, because the fields of the request's span would appear in it a second time.
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    target: "skep::access",
                    parent: None,
                    request_id,
                    tenant,
                    key,
                    client,
                    method = method.as_str(),
                    route,
                    status,
                    ms,
                    prompt_tokens,
                    output_tokens,
                    cut_off = (!*is_whole).then_some(true),
                    "request"
                )
            };
        }
        if CHECKS.contains(&route) { line!(debug) } else { line!(info) }
    }
}
