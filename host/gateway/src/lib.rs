//! The HTTP gateway: agents, their sessions and routes, OpenAI-compatible models, health and metrics.
//!
//! The JSON of the API is defined in `skep-api`, and this crate converts the types of the runtime to it. A handler
//! declares its route together with its description; [`openapi_document`] returns all descriptions. Every error has
//! OpenAI's shape and a stable code, and every body is bounded before it is read. A client that disconnects cancels its
//! request, because the response body owns the run; the exceptions are turns requested with an idempotency key or
//! `prefer: respond-async`, which continue without the client.
#![forbid(unsafe_code)]

mod access;
mod access_log;
mod anthropic;
mod batch;
mod body;
mod caller;
mod client_address;
mod cluster;
mod configuration;
mod console;
mod device_figures;
mod erased_handler;
mod error;
mod figures;
mod headers;
mod load_figures;
mod mcp;
mod metered;
mod metrics;
mod openai;
mod openapi;
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

use axum::{Router, body::Bytes, extract::DefaultBodyLimit, middleware};
use erased_handler::routes;
use figures::Figures;
use ipnet::IpNet;
use load_figures::LoadFigures;
use serde_json::Value;
use skep_engine::LiveSetting;
use skep_runtime::AgentHost;
use std::{
    collections::BTreeMap,
    future::Future,
    net::SocketAddr,
    pin::pin,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};
use tokio::sync::watch;
use tower_http::catch_panic::CatchPanicLayer;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};

pub use access::AccessOptions;
pub use cluster::{
    ClusterKey, ClusterOptions, ClusterPages, DrainRequests, HttpPeers, PageFigures, PageOptions, PageStage,
};
pub use configuration::{Configuration, ReloadError, reload as reload_configuration};
pub use console::ConsoleOptions;
pub use error::ApiError;
pub use mcp::McpOptions;
pub use metrics::start as start_metrics;
pub use rates::{RateLimiter, RateOptions, TenantRates};
pub use routes::keys::described as describe_key;
pub use routes::kv::ClusterCache;
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
    /// Timeout of receiving a file that is uploaded as a form.
    pub upload_timeout: Duration,
    /// Rate limits. Engines report the tokens of tenants to it if it is their token meter.
    pub rates: Arc<RateLimiter>,
    /// Maximum time that running requests may continue after the server starts to shut down.
    pub drain: Duration,
    /// Aliases of models, such as `@cf/meta/llama-3.1-8b-instruct`, on the routes of Workers AI.
    pub model_names: LiveSetting<BTreeMap<String, String>>,
    /// The configuration of the host, if it is one that can be shown and read again.
    pub configuration: Option<Arc<dyn Configuration>>,
    /// Bounds of `/mcp`.
    pub mcp: McpOptions,
    /// The console, which is served at `/ui`.
    pub console: ConsoleOptions,
    /// Links the span of a request to the caller's trace. With `None`, each request starts a trace.
    pub remote_parent: Option<RemoteParent>,
    /// The cluster that the host is in. The other hosts pass requests on to it, and it to them.
    pub cluster: Option<ClusterOptions>,
    /// The cache that the hosts share in their memory, to show its state.
    pub cluster_cache: Option<Arc<dyn ClusterCache>>,
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
            upload_timeout: Duration::from_secs(600),
            rates: Arc::default(),
            drain: Duration::from_secs(30),
            model_names: LiveSetting::default(),
            configuration: None,
            mcp: McpOptions::default(),
            console: ConsoleOptions::default(),
            remote_parent: None,
            cluster: None,
            cluster_cache: None,
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
    figures: Arc<Figures>,
    load: Arc<LoadFigures>,
    reads: Arc<access::LoggedReads>,
    cluster: Option<Arc<cluster::Cluster>>,
    /// The address that the server listens on. `None` if the routes are served by another program.
    address: Option<SocketAddr>,
    /// The text of the OpenAPI document, once somebody has asked for it.
    openapi: Arc<OnceLock<Bytes>>,
}

impl Gateway {
    fn new(host: AgentHost, options: GatewayOptions) -> Self {
        // The hosts of a cluster continue the streams of each other's MCP sessions.
        let tickets = options.cluster.as_ref().map(|cluster| cluster.key.derived(mcp::TICKETS));
        let mcp = mcp::Mcp::new(host.clone(), &options.mcp, options.max_body_bytes, tickets);
        let mcp = Arc::new(mcp);
        let cluster = options.cluster.clone();
        let cluster = cluster.map(|options| cluster::Cluster::new(options, Arc::new(host.clone())));
        Gateway {
            host,
            options: Arc::new(options),
            cluster: cluster.map(Arc::new),
            draining: Arc::default(),
            mcp,
            started: Instant::now(),
            figures: Arc::default(),
            load: Arc::default(),
            reads: Arc::default(),
            address: None,
            openapi: Arc::default(),
        }
    }
}

/// Returns the routes as a router, for embedding and for tests.
pub fn router(host: AgentHost, options: GatewayOptions) -> Router {
    routes_of(Gateway::new(host, options))
}

/// Returns the OpenAPI document of all routes.
pub fn openapi_document() -> Value {
    let routes = routes(&GatewayOptions::default());
    openapi::document(routes.into_openapi())
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
    beside.spawn(gateway.figures.clone().run(host.clone()));
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
        // The sender is dropped only when nothing is served anymore.
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
    for engine in host.models().engines() {
        engine.drain(Duration::ZERO).await;
    }
    // Aborted requests finish with an error, which needs a moment to be sent.
    let _ = tokio::time::timeout(LAST_WORDS, server).await;
    Ok(())
}

/// Maximum time for errors to reach the clients of aborted requests.
const LAST_WORDS: Duration = Duration::from_secs(1);

fn routes_of(gateway: Gateway) -> Router {
    metrics::start();
    let body_limit = gateway.options.max_body_bytes;
    let (routes, _) = routes(&gateway.options).split_for_parts();
    let routes = routes
        .merge(console::pages(&gateway.options.console))
        .fallback(routes::triggers::run)
        .method_not_allowed_fallback(routes::health::method_not_allowed)
        .layer(DefaultBodyLimit::max(body_limit))
        .layer(middleware::from_fn_with_state(gateway.clone(), access::authorize))
        .layer(middleware::map_response(error::in_shape))
        .layer(CatchPanicLayer::custom(error::panicked))
        .layer(middleware::from_fn_with_state(gateway.clone(), access::guard))
        .layer(middleware::from_fn_with_state(gateway.clone(), cluster::forward))
        .layer(middleware::from_fn_with_state(gateway.clone(), trace::request))
        .with_state(gateway.clone());
    // This layer wraps the whole router, because it must run before a request is matched to its route.
    Router::new()
        .fallback_service(routes)
        .layer(middleware::from_fn_with_state(gateway.clone(), access::identify))
        .layer(middleware::from_fn_with_state(gateway, cluster::receive))
        .layer(middleware::from_fn(anthropic::error::in_shape))
}

/// Returns the table of routes. Each handler declares its path and its method beside its description.
fn routes(options: &GatewayOptions) -> OpenApiRouter<Gateway> {
    use routes::{
        agents, ai_batches, ai_run, anthropic_messages, approvals, batches, caller, chat_completions,
        clusters, completions, config, engine, events, files, health, held, keys, kv, limits, listings, logs,
        mcp_servers, messages, model_changes, models, openapi_document, requests, responses, schedules,
        schemas, secrets, session_exports, session_pages, sessions, status, stored_responses, tenants,
        timelines, tokenize, turns, usage, versions, webhooks,
    };
    let deploy_limit = DefaultBodyLimit::max(options.max_component_bytes.saturating_add(1 << 20));
    let file_limit = DefaultBodyLimit::max(files::MAX_FILE_BYTES + (64 << 10));
    let import_limit = DefaultBodyLimit::max(session_exports::MAX_BYTES);
    OpenApiRouter::new()
        .routes(routes!(agents::list))
        .routes(routes!(agents::deploy).layer(deploy_limit))
        .routes(routes!(agents::show, agents::delete))
        .routes(routes!(versions::list))
        .routes(routes!(versions::rollback))
        .routes(routes!(sessions::list))
        .routes(routes!(sessions::show, sessions::delete))
        .routes(routes!(session_exports::import).layer(import_limit))
        .routes(routes!(session_exports::export))
        .routes(routes!(sessions::fork))
        .routes(routes!(session_pages::warm))
        .routes(routes!(session_pages::pin, session_pages::unpin))
        .routes(routes!(sessions::messages, messages::send))
        .routes(routes!(turns::show, turns::cancel))
        .routes(routes!(turns::events))
        .routes(routes!(timelines::show))
        .routes(routes!(listings::recent))
        .routes(routes!(listings::turns))
        .routes(routes!(listings::state))
        .routes(routes!(approvals::list))
        .routes(routes!(approvals::decide))
        .routes(routes!(logs::agent_logs))
        .routes(routes!(logs::all_logs))
        .routes(routes!(schedules::list))
        .routes(routes!(schedules::cancel))
        .routes(routes!(schedules::run))
        .routes(routes!(events::list, events::publish))
        .routes(routes!(webhooks::list, webhooks::add))
        .routes(routes!(webhooks::remove))
        .routes(routes!(webhooks::test))
        .routes(routes!(webhooks::dead_letters))
        .routes(routes!(webhooks::redeliver))
        .routes(routes!(models::list, model_changes::change))
        .routes(routes!(models::show))
        .routes(routes!(chat_completions::create))
        .routes(routes!(completions::create))
        .routes(routes!(anthropic_messages::create))
        .routes(routes!(anthropic_messages::count_tokens))
        .routes(routes!(responses::create))
        .routes(routes!(stored_responses::show, stored_responses::delete))
        .routes(routes!(stored_responses::cancel))
        .routes(routes!(stored_responses::input_items))
        .routes(routes!(schemas::check))
        .routes(routes!(tokenize::tokenize))
        .routes(routes!(tokenize::detokenize))
        .routes(routes!(ai_run::run))
        .routes(routes!(ai_run::run_of_account))
        .routes(routes!(ai_batches::show, ai_batches::cancel))
        .routes(routes!(files::list))
        .routes(routes!(files::upload).layer(file_limit))
        .routes(routes!(files::show, files::delete))
        .routes(routes!(files::content))
        .routes(routes!(batches::list, batches::create))
        .routes(routes!(batches::show))
        .routes(routes!(batches::cancel))
        .routes(routes!(mcp_servers::list))
        .routes(routes!(mcp::send, mcp::listen, mcp::end))
        .routes(routes!(mcp::send_to_agent, mcp::listen_to_agent, mcp::end_of_agent))
        .routes(routes!(secrets::list))
        .routes(routes!(secrets::set, secrets::delete))
        .routes(routes!(keys::list, keys::create))
        .routes(routes!(keys::revoke))
        .routes(routes!(tenants::list))
        .routes(routes!(tenants::delete))
        .routes(routes!(caller::show))
        .routes(routes!(console::sign_in::sign_in, console::sign_in::sign_out))
        .routes(routes!(usage::report))
        .routes(routes!(limits::show))
        .routes(routes!(requests::list))
        .routes(routes!(requests::show))
        .routes(routes!(held::show, held::decide))
        .routes(routes!(kv::show, kv::purge))
        .routes(routes!(config::show))
        .routes(routes!(config::reload))
        .routes(routes!(status::show))
        .routes(routes!(clusters::show))
        .routes(routes!(clusters::drain))
        .routes(routes!(engine::figures))
        .routes(routes!(engine::load))
        .routes(routes!(engine::pages))
        .routes(routes!(health::healthz))
        .routes(routes!(health::readyz))
        .routes(routes!(health::metrics))
        .routes(routes!(openapi_document::show))
}
