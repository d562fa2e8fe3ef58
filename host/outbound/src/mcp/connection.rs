//! One connection to a server, from the handshake until it breaks.

use super::{McpOptions, McpTransport, catalog, process::Process};
use crate::{ServedTool, tls::Tls};
use rmcp::{
    ClientHandler, Peer, RoleClient, ServiceExt,
    model::{ClientCapabilities, ClientConfig, Implementation},
    service::{ClientInitializeError, NotificationContext, RunningService},
    transport::{
        StreamableHttpClientTransport, async_rw::AsyncRwTransport,
        streamable_http_client::StreamableHttpClientTransportConfig,
    },
};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use tokio::sync::Mutex;

pub(super) struct Connection {
    service: RunningService<RoleClient, Listener>,
    /// What was listed, and after how many changes.
    listed: Mutex<Option<(u64, Arc<[ServedTool]>)>>,
    /// Killed with the connection.
    _process: Option<Process>,
}

/// The client's side: it offers the server nothing, and counts the changes of its tools.
#[derive(Default)]
struct Listener {
    changes: AtomicU64,
}

impl ClientHandler for Listener {
    fn get_info(&self) -> ClientConfig {
        ClientConfig::new(
            ClientCapabilities::default(),
            Implementation::new("skep", env!("CARGO_PKG_VERSION")),
        )
    }

    async fn on_tool_list_changed(&self, _context: NotificationContext<RoleClient>) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }
}

impl Connection {
    pub(super) async fn open(name: &str, options: &McpOptions) -> Result<Self, String> {
        let limit = options.bounds.connect;
        let opened = tokio::time::timeout(limit, Self::handshake(name, options)).await;
        opened.unwrap_or_else(|_elapsed| {
            Err(format!("it did not introduce itself within {} s", limit.as_secs()))
        })
    }

    async fn handshake(name: &str, options: &McpOptions) -> Result<Self, String> {
        let (service, process) = match &options.transport {
            McpTransport::Process { program, arguments, environment, folder } => {
                let (process, output, input) =
                    Process::start(name, program, arguments, environment, folder.as_deref())?;
                let transport = AsyncRwTransport::<RoleClient, _, _>::new_client(output, input)
                    .with_max_line_length(options.bounds.message_bytes);
                (Listener::default().serve(transport).await.map_err(explain)?, Some(process))
            }
            McpTransport::Http { url, headers } => {
                let config = StreamableHttpClientTransportConfig::with_uri(url.as_str())
                    .custom_headers(headers.clone())
                    .max_sse_event_size(options.bounds.message_bytes);
                let transport = StreamableHttpClientTransport::with_client(http_client(options)?, config);
                (Listener::default().serve(transport).await.map_err(explain)?, None)
            }
        };
        Ok(Connection { service, listed: Mutex::default(), _process: process })
    }

    pub(super) fn is_open(&self) -> bool {
        !self.service.is_transport_closed()
    }

    pub(super) fn peer(&self) -> &Peer<RoleClient> {
        self.service.peer()
    }

    /// As they are since the last change that the server told of.
    pub(super) async fn tools(&self, name: &str, options: &McpOptions) -> Result<Arc<[ServedTool]>, String> {
        let mut listed = self.listed.lock().await;
        let changes = self.service.service().changes.load(Ordering::Acquire);
        if let Some((at, tools)) = &*listed
            && *at == changes
        {
            return Ok(tools.clone());
        }
        let limit = options.bounds.connect;
        let tools = tokio::time::timeout(limit, catalog::list(name, self.peer(), options)).await;
        let tools = tools.unwrap_or_else(|_elapsed| Err(format!("not within {} s", limit.as_secs())))?;
        *listed = Some((changes, tools.clone()));
        Ok(tools)
    }
}

/// The operator named the address, so it is not looked at; a redirect would lead elsewhere.
fn http_client(options: &McpOptions) -> Result<reqwest::Client, String> {
    let client = reqwest::Client::builder()
        .tls_backend_preconfigured(Tls::of_the_machine().config)
        .user_agent(concat!("skep/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(options.bounds.connect)
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy();
    client.build().map_err(|error| error.to_string())
}

fn explain(error: ClientInitializeError) -> String {
    format!("it does not introduce itself: {error}")
}
