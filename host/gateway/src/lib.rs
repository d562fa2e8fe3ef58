//! The HTTP gateway: agents, their sessions and routes, OpenAI-compatible models, health and metrics.
//!
//! This crate alone defines the JSON shapes of the API. Every error has OpenAI's shape and a stable code, and every
//! body is bounded before it is read. A client that disconnects cancels its request, because the response body owns
//! the run; the exceptions are turns requested with an idempotency key or `prefer: respond-async`, which continue
//! without the client.
#![forbid(unsafe_code)]

mod access;
mod access_log;
mod body;
mod caller;
mod client_address;
mod error;
mod headers;
mod mcp;
mod metered;
mod metrics;
mod openai;
mod process_figures;
mod rates;
mod routes;
mod server;
mod spent;
mod sse;
mod store_figures;
#[cfg(test)]
mod tests;
mod trace;
mod workers_ai;

use axum::{
    Router,
    extract::DefaultBodyLimit,
    middleware,
    routing::{delete, get, post, put},
};
use ipnet::IpNet;
use skep_runtime::AgentHost;
use std::{
    collections::BTreeMap,
    future::Future,
    net::SocketAddr,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::watch;
use tower_http::catch_panic::CatchPanicLayer;

pub use access::AccessOptions;
pub use error::ApiError;
pub use mcp::McpOptions;
pub use rates::{RateLimiter, RateOptions, TenantRates};
pub use server::ConnectionOptions;
pub use trace::RemoteParent;

/// Options of the gateway.
#[derive(Clone, Debug)]
pub struct GatewayOptions {
    /// Maximum size of a JSON or text body.
    pub max_body_bytes: usize,
    /// Maximum size of a component to deploy.
    pub max_component_bytes: usize,
    /// Whether requests need a key.
    pub access: AccessOptions,
    /// Origins of web pages that may use this host, such as `https://app.example.com`. Requests of all other pages
    /// are refused, because a page can make a browser send requests to a host that only the browser can reach.
    /// Programs send no `Origin`.
    pub origins: Vec<String>,
    /// Bounds of connections.
    pub connections: ConnectionOptions,
    /// Proxies whose `X-Forwarded-For` header is trusted to name the client, for limits by address and for logs.
    pub trusted_proxies: Vec<IpNet>,
    /// Rate limits. Engines report the tokens of tenants to it if it is their token meter.
    pub rates: Arc<RateLimiter>,
    /// Maximum time that running requests may continue after the server starts to shut down.
    pub drain: Duration,
    /// Aliases of models, such as `@cf/meta/llama-3.1-8b-instruct`, on the routes of Workers AI.
    pub model_names: BTreeMap<String, String>,
    /// Bounds of `/mcp`.
    pub mcp: McpOptions,
    /// Links the span of a request to the caller's trace. With `None`, each request starts a trace.
    pub remote_parent: Option<RemoteParent>,
}

impl Default for GatewayOptions {
    fn default() -> Self {
        GatewayOptions {
            max_body_bytes: 16 << 20,
            max_component_bytes: 64 << 20,
            access: AccessOptions::default(),
            origins: Vec::new(),
            connections: ConnectionOptions::default(),
            trusted_proxies: Vec::new(),
            rates: Arc::default(),
            drain: Duration::from_secs(30),
            model_names: BTreeMap::new(),
            mcp: McpOptions::default(),
            remote_parent: None,
        }
    }
}

/// The state that every route shares.
#[derive(Clone)]
struct Gateway {
    host: AgentHost,
    options: Arc<GatewayOptions>,
    /// Becomes true when the server starts to shut down, which terminates endless streams.
    draining: Arc<watch::Sender<bool>>,
    mcp: Arc<mcp::Mcp>,
    started: Instant,
    /// The address that the server listens on. `None` if the routes are served by another program.
    address: Option<SocketAddr>,
}

impl Gateway {
    fn new(host: AgentHost, options: GatewayOptions) -> Self {
        let mcp = Arc::new(mcp::Mcp::new(host.clone(), &options.mcp, options.max_body_bytes));
        let started = Instant::now();
        Gateway { host, options: Arc::new(options), draining: Arc::default(), mcp, started, address: None }
    }
}

/// Returns the routes as a router, for embedding and for tests.
pub fn router(host: AgentHost, options: GatewayOptions) -> Router {
    routes_of(Gateway::new(host, options))
}

/// Serves until `shutdown` resolves, then lets running requests finish for at most `options.drain`.
pub async fn serve(
    listener: tokio::net::TcpListener,
    host: AgentHost,
    options: GatewayOptions,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let drain = options.drain;
    let (connections, trusted_proxies) = (options.connections.clone(), options.trusted_proxies.clone());
    let mut beside = tokio::task::JoinSet::new();
    beside.spawn(metrics::upkeep());
    let gateway = Gateway { address: listener.local_addr().ok(), ..Gateway::new(host.clone(), options) };
    let (draining, mcp) = (gateway.draining.clone(), gateway.mcp.clone());
    let mut began = draining.subscribe();
    let router = routes_of(gateway);
    let mut server =
        pin!(server::serve(listener, router, connections, trusted_proxies, draining.subscribe()));
    beside.spawn(async move {
        shutdown.await;
        draining.send_replace(true);
        mcp.close();
    });
    let overtime = async {
        // The sender is dropped only when nothing is served any more.
        if began.wait_for(|draining| *draining).await.is_err() {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(drain).await;
    };
    tokio::select! {
        () = &mut server => return Ok(()),
        () = overtime => {}
    }
    tracing::warn!(
        drain_s = drain.as_secs(),
        "requests were still running when the drain timeout expired; they are aborted"
    );
    host.drain(Duration::ZERO).await;
    for engine in host.models().iter() {
        engine.drain(Duration::ZERO).await;
    }
    // Aborted requests finish with an error, which needs a moment to be sent.
    let _ = tokio::time::timeout(LAST_WORDS, server).await;
    Ok(())
}

/// Maximum time for errors to reach the clients of aborted requests.
const LAST_WORDS: Duration = Duration::from_secs(1);

fn routes_of(gateway: Gateway) -> Router {
    metrics::recorder();
    let body_limit = gateway.options.max_body_bytes;
    let deploy_limit = gateway.options.max_component_bytes.saturating_add(1 << 20);
    let routes = Router::new()
        .route("/v1/agents", get(routes::agents::list))
        .route("/v1/agents", post(routes::agents::deploy).layer(DefaultBodyLimit::max(deploy_limit)))
        .route("/v1/agents/{agent}", get(routes::agents::show).delete(routes::agents::delete))
        .route("/v1/agents/{agent}/versions", get(routes::versions::list))
        .route("/v1/agents/{agent}/rollback", post(routes::versions::rollback))
        .route("/v1/agents/{agent}/logs", get(routes::logs::agent_logs))
        .route("/v1/logs", get(routes::logs::all_logs))
        .route("/v1/agents/{agent}/sessions", get(routes::sessions::list))
        .route(
            "/v1/agents/{agent}/sessions/{session}",
            get(routes::sessions::show).delete(routes::sessions::delete).merge(
                put(routes::session_exports::import)
                    .layer(DefaultBodyLimit::max(routes::session_exports::MAX_BYTES)),
            ),
        )
        .route(
            "/v1/agents/{agent}/sessions/{session}/messages",
            get(routes::sessions::messages).post(routes::messages::send),
        )
        .route("/v1/agents/{agent}/sessions/{session}/fork", post(routes::sessions::fork))
        .route("/v1/agents/{agent}/sessions/{session}/export", get(routes::session_exports::export))
        .route(
            "/v1/agents/{agent}/sessions/{session}/turns/{turn}",
            get(routes::turns::show).delete(routes::turns::cancel),
        )
        .route("/v1/agents/{agent}/sessions/{session}/turns/{turn}/events", get(routes::turns::events))
        .route("/v1/approvals", get(routes::approvals::list))
        .route("/v1/approvals/{id}", post(routes::approvals::decide))
        .route("/v1/agents/{agent}/schedules/{id}", delete(routes::schedules::cancel))
        .route("/v1/agents/{agent}/schedules/{id}/run", post(routes::schedules::run))
        .route("/v1/schedules", get(routes::schedules::list))
        .route("/v1/events", get(routes::events::list).post(routes::events::publish))
        .route("/v1/webhooks", get(routes::webhooks::list).post(routes::webhooks::add))
        .route("/v1/webhooks/{webhook}", delete(routes::webhooks::remove))
        .route("/v1/webhooks/{webhook}/test", post(routes::webhooks::test))
        .route("/v1/webhooks/dead-letters", get(routes::webhooks::dead_letters))
        .route("/v1/webhooks/dead-letters/{id}/redeliver", post(routes::webhooks::redeliver))
        .route("/v1/status", get(routes::status::show))
        .route("/v1/held", get(routes::held::show).post(routes::held::decide))
        .route("/v1/chat/completions", post(routes::chat_completions::create))
        .route("/v1/completions", post(routes::completions::create))
        .route("/ai/run/{*model}", post(routes::ai_run::run))
        .route("/client/v4/accounts/{account}/ai/run/{*model}", post(routes::ai_run::run))
        .route("/ai/batches/{id}", get(routes::ai_batches::show).delete(routes::ai_batches::cancel))
        .route("/v1/secrets", get(routes::secrets::list))
        .route("/v1/secrets/{name}", put(routes::secrets::set).delete(routes::secrets::delete))
        .route("/v1/keys", get(routes::keys::list).post(routes::keys::create))
        .route("/v1/keys/{key}", delete(routes::keys::revoke))
        .route("/v1/models", get(routes::models::list))
        .route("/v1/models/{model}", get(routes::models::show))
        .route("/v1/mcp", get(routes::mcp_servers::list))
        .route("/mcp", get(mcp::serve).post(mcp::serve).delete(mcp::serve))
        .route("/healthz", get(routes::health::healthz))
        .route("/readyz", get(routes::health::readyz))
        .route("/metrics", get(routes::health::metrics))
        .fallback(routes::triggers::run)
        .method_not_allowed_fallback(routes::health::method_not_allowed)
        .layer(DefaultBodyLimit::max(body_limit))
        .layer(middleware::from_fn_with_state(gateway.clone(), access::authorize))
        .layer(middleware::map_response(error::in_shape))
        .layer(CatchPanicLayer::custom(error::panicked))
        .layer(middleware::from_fn_with_state(gateway.clone(), access::guard))
        .layer(middleware::from_fn_with_state(gateway.clone(), trace::request))
        .with_state(gateway.clone());
    // This layer wraps the whole router, because it must run before a request is matched to its route.
    Router::new().fallback_service(routes).layer(middleware::from_fn_with_state(gateway, access::identify))
}
