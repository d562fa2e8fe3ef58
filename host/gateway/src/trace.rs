//! Creates one span and one access-log line for each request, and sets the request's id on the response.
//!
//! Both cover the response body: they end with its last byte, or when the client disconnects.

use crate::{
    Gateway,
    access::requester,
    access_log::AccessLine,
    caller::RequestId,
    client_address::ClientAddress,
    metrics::{ANSWER_TIME, REQUESTS},
};
use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{MatchedPath, Request, State},
    http::{HeaderMap, HeaderValue},
    middleware::Next,
    response::Response,
};
use http_body::{Frame, SizeHint};
use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};
use tracing::{Instrument, Span, field::Empty};

const REQUEST_ID: &str = "x-request-id";
const MAX_ID_BYTES: usize = 128;

/// Finds the caller's span in a request's headers and makes it the parent of a given span. The exporter of traces
/// supplies this function, because the form of a trace context is not defined here.
#[derive(Clone)]
pub struct RemoteParent(Arc<Adopt>);

type Adopt = dyn Fn(&HeaderMap, &Span) + Send + Sync;

impl RemoteParent {
    /// Wraps a function that sets the parent of a span from a request's headers.
    pub fn new(adopt: impl Fn(&HeaderMap, &Span) + Send + Sync + 'static) -> Self {
        RemoteParent(Arc::new(adopt))
    }
}

impl fmt::Debug for RemoteParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RemoteParent")
    }
}

/// Uses the request id that the client sent, or generates one.
pub(crate) async fn request(State(gateway): State<Gateway>, mut request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).filter(|id| id.len() <= MAX_ID_BYTES).cloned();
    let id = given.unwrap_or_else(|| {
        HeaderValue::from_str(&uuid::Uuid::now_v7().simple().to_string())
            .expect("hex digits are a valid header value")
    });
    // The span has the route and not the path, because ids in paths would make every name unique.
    let route = request.extensions().get::<MatchedPath>().map(|route| route.as_str().to_owned());
    let method = request.method().clone();
    let span = tracing::info_span!(
        "request",
        otel.name = Empty,
        otel.kind = "server",
        otel.status_code = Empty,
        request_id = id.to_str().unwrap_or("?"),
        http.request.method = method.as_str(),
        http.route = route.as_deref(),
        http.response.status_code = Empty,
        error.type = Empty,
    );
    match &route {
        Some(route) => span.record("otel.name", tracing::field::display(format_args!("{method} {route}"))),
        None => span.record("otel.name", method.as_str()),
    };
    if let Some(RemoteParent(adopt)) = &gateway.options.remote_parent {
        adopt(request.headers(), &span);
    }
    let began = Instant::now();
    let (requester, spent) = requester(request.extensions());
    let mut line = AccessLine {
        request_id: id.to_str().unwrap_or("?").to_owned(),
        requester,
        client: request.extensions().get::<ClientAddress>().map(|client| client.0),
        method,
        route: route.clone(),
        began,
        status: None,
        is_whole: false,
        spent,
    };
    request.extensions_mut().insert(RequestId(line.request_id.clone()));
    let mut response = next.run(request).instrument(span.clone()).await;
    let status = response.status();
    span.record("http.response.status_code", i64::from(status.as_u16()));
    if status.is_server_error() {
        span.record("error.type", status.as_str());
        span.record("otel.status_code", "ERROR");
    }
    line.status = Some(status);
    let labels =
        [("route", route.unwrap_or_else(|| "(other)".to_owned())), ("status", status.as_u16().to_string())];
    metrics::counter!(REQUESTS, &labels).increment(1);
    metrics::histogram!(ANSWER_TIME, &labels).record(began.elapsed().as_secs_f64());
    response.headers_mut().insert(REQUEST_ID, id);
    line.is_whole = response.body().is_end_stream();
    response.map(|body| Body::new(SpannedBody { body: Some(body), span, line }))
}

/// A response body that runs inside the request's span.
struct SpannedBody {
    /// `None` only while dropping, so that the values the body owns are dropped inside the span, too.
    body: Option<Body>,
    span: Span,
    line: AccessLine,
}

impl HttpBody for SpannedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Self { body, span, line } = &mut *self;
        let _inside = span.enter();
        let Some(body) = body else { return Poll::Ready(None) };
        let frame = Pin::new(&mut *body).poll_frame(context);
        // A body that reports its end is not polled again.
        line.is_whole = matches!(frame, Poll::Ready(None)) || body.is_end_stream();
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, Body::size_hint)
    }
}

impl Drop for SpannedBody {
    fn drop(&mut self) {
        let _inside = self.span.enter();
        self.body = None;
    }
}
