//! One connection: it handles its requests one after the other until it closes, is overdue, or the server stops.

use super::{
    Counted, Server,
    bounds::{Exceeded, Slot},
    pace::{Overdue, Pace},
    paced_body::PacedBody,
    paced_stream::PacedStream,
    refusal,
};
use crate::{
    client_address::{ClientAddress, is_trusted},
    metrics::CONNECTIONS_ENDED,
};
use axum::{
    body::Body,
    extract::ConnectInfo,
    http::{Request, Response},
    response::IntoResponse,
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use std::{convert::Infallible, future::Future, net::SocketAddr, pin::pin, sync::Arc, task::Poll};
use tokio::{net::TcpStream, sync::watch};
use tower_service::Service;

/// Size of the buffers for a request's head and for a response that the socket has not taken yet. A longer head gets
/// 431.
const BUFFER_BYTES: usize = 64 << 10;

pub(super) struct Connection {
    server: Arc<Server>,
    peer: SocketAddr,
    pace: Arc<Pace>,
    slot: Arc<Slot>,
    _counted: Counted,
}

/// The reason why a connection ended.
enum End {
    /// The client closed the connection, or a request ended it.
    Closed,
    Overdue(Overdue),
    /// The server stops, and no request is in flight.
    Stopped,
}

impl Connection {
    pub(super) fn new(server: Arc<Server>, peer: SocketAddr, slot: Slot) -> Self {
        let (pace, slot) = (Arc::new(Pace::new()), Arc::new(slot));
        Connection { server, peer, pace, slot, _counted: Counted::new() }
    }

    /// Drives the connection to its end. Dropping the future cancels the request in flight and everything that its
    /// response body owns.
    pub(super) async fn run(self, stream: TcpStream, stopping: watch::Receiver<bool>) {
        if let End::Overdue(overdue) = self.drive(stream, stopping).await {
            metrics::counter!(CONNECTIONS_ENDED, "reason" => overdue.reason()).increment(1);
            tracing::debug!(peer = %self.peer, reason = overdue.reason(), "a connection was closed");
        }
    }

    async fn drive(&self, stream: TcpStream, mut stopping: watch::Receiver<bool>) -> End {
        let stream = TokioIo::new(PacedStream::new(stream, self.pace.clone()));
        let service = service_fn(|request| self.answer(request));
        let mut builder = http1::Builder::new();
        builder.header_read_timeout(None).max_buf_size(BUFFER_BYTES);
        let mut connection = pin!(builder.serve_connection(stream, service));
        let mut timer = pin!(tokio::time::sleep_until(tokio::time::Instant::now()));
        let mut stop = pin!(async move {
            if stopping.wait_for(|stopping| *stopping).await.is_err() {
                std::future::pending::<()>().await;
            }
        });
        let mut stops = false;
        std::future::poll_fn(|context| {
            if !stops && stop.as_mut().poll(context).is_ready() {
                stops = true;
                connection.as_mut().graceful_shutdown();
            }
            // The connection is polled first, because that may change the pace.
            if connection.as_mut().poll(context).is_ready() {
                return Poll::Ready(End::Closed);
            }
            if stops && self.pace.is_quiet() {
                return Poll::Ready(End::Stopped);
            }
            let Some((deadline, overdue)) = self.pace.deadline(&self.server.options) else {
                return Poll::Pending;
            };
            if timer.deadline() != deadline {
                timer.as_mut().reset(deadline);
            }
            timer.as_mut().poll(context).map(|()| End::Overdue(overdue))
        })
        .await
    }

    async fn answer(&self, request: Request<Incoming>) -> Result<Response<PacedBody>, Infallible> {
        self.pace.request_began();
        let (slot, response) = match self.slot_for(&request) {
            Ok(slot) => (slot, self.route(request).await),
            Err(exceeded) => (None, refusal::of(exceeded).into_response()),
        };
        Ok(response.map(|body| PacedBody::new(body, self.pace.clone(), slot)))
    }

    async fn route(&self, request: Request<Incoming>) -> Response<Body> {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(ConnectInfo(self.peer));
        // A request may outlive its connection, for example in a session of MCP.
        request.extensions_mut().insert(Arc::downgrade(&self.slot));
        let Ok(response) = self.server.router.clone().call(request).await;
        response
    }

    /// Reserves a slot for the client that a trusted proxy forwards the request for.
    fn slot_for(&self, request: &Request<Incoming>) -> Result<Option<Slot>, Exceeded> {
        let proxies = &self.server.trusted_proxies;
        if !is_trusted(self.peer.ip(), proxies) {
            return Ok(None);
        }
        let ClientAddress(client) = ClientAddress::of(self.peer.ip(), request.headers(), proxies);
        if is_trusted(client, proxies) {
            // The proxy itself is the client, for example for its health checks.
            return Ok(None);
        }
        self.server.bounds.admit_request(client).map(Some)
    }
}
