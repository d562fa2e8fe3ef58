//! One span and one line of the access log for each request, and its id on the answer.
//!
//! Both last as long as the answer's body does: until its last byte, or until the client goes away.

use crate::{
    Gateway,
    access::requester,
    access_log::AccessLine,
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

/// Finds the span of the caller in a request's headers and makes it the parent of the given one. What a trace context
/// looks like is the business of whoever exports traces.
#[derive(Clone)]
pub struct RemoteParent(Arc<Adopt>);

/// The id of a request, among its extensions.
#[derive(Clone, Debug)]
pub(crate) struct RequestId(pub(crate) String);

type Adopt = dyn Fn(&HeaderMap, &Span) + Send + Sync;

impl RemoteParent {
    pub fn new(adopt: impl Fn(&HeaderMap, &Span) + Send + Sync + 'static) -> Self {
        RemoteParent(Arc::new(adopt))
    }
}

impl fmt::Debug for RemoteParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RemoteParent")
    }
}

/// Keeps the id that the client sent, or mints one.
pub(crate) async fn request(State(gateway): State<Gateway>, mut request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).filter(|id| id.len() <= MAX_ID_BYTES).cloned();
    let id = given.unwrap_or_else(|| {
        HeaderValue::from_str(&uuid::Uuid::now_v7().simple().to_string()).expect("hex digits make a header")
    });
    // The route, not the path: ids in paths would make every line unique.
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

/// An answer's body, which runs inside of the request's span.
struct SpannedBody {
    /// `None` only while dropping, so that what the body owns ends inside of the span too.
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
        // A body that says that it has ended is not asked again.
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
