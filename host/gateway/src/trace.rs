//! One span and one line for each request, and its id on the answer.

use crate::metrics::{ANSWER_TIME, REQUESTS};
use axum::{
    extract::{MatchedPath, Request},
    http::HeaderValue,
    middleware::Next,
    response::Response,
};
use std::time::Instant;
use tracing::Instrument;

const REQUEST_ID: &str = "x-request-id";
const MAX_ID_BYTES: usize = 128;

/// Keeps the id that the client sent, or mints one.
pub(crate) async fn request(request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).filter(|id| id.len() <= MAX_ID_BYTES).cloned();
    let id = given.unwrap_or_else(|| {
        HeaderValue::from_str(&uuid::Uuid::now_v7().simple().to_string()).expect("hex digits make a header")
    });
    // The route, not the path: ids in paths would make every line unique.
    let route = request.extensions().get::<MatchedPath>().map_or("(other)", MatchedPath::as_str).to_owned();
    let method = request.method().clone();
    let span =
        tracing::info_span!("request", id = id.to_str().unwrap_or("?"), %method, route = route.as_str());
    let began = Instant::now();
    let mut response = next.run(request).instrument(span.clone()).await;
    span.in_scope(|| {
        let status = response.status().as_u16();
        tracing::debug!(status, elapsed_us = began.elapsed().as_micros() as u64, "answered");
    });
    let labels = [("route", route), ("status", response.status().as_u16().to_string())];
    metrics::counter!(REQUESTS, &labels).increment(1);
    metrics::histogram!(ANSWER_TIME, &labels).record(began.elapsed().as_secs_f64());
    response.headers_mut().insert(REQUEST_ID, id);
    response
}
