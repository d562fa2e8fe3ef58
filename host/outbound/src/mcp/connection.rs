//! One connection to an MCP server, from the handshake until it breaks.

use super::{McpForms, McpOptions, McpTransport, catalog, forms, http::HttpClient, process::Process};
use crate::ServedTool;
use rmcp::{
    ClientHandler, ErrorData, Peer, RoleClient, ServiceExt,
    model::{
        ClientCapabilities, ClientConfig, ElicitRequestParams, ElicitResult, ElicitationAction,
        Implementation, ProtocolVersion,
    },
    service::{ClientInitializeError, NotificationContext, RequestContext, RunningService},
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
    /// The cached tools, and the number of changes that had been announced when they were listed.
    listed: Mutex<Option<(u64, Arc<[ServedTool]>)>>,
    /// The server process, killed when the connection is dropped.
    _process: Option<Process>,
}

/// The client side of the protocol. It offers the server to fill in forms, if the operator allows that, and counts the
/// announced changes of its tools.
struct Listener {
    changes: AtomicU64,
    forms: McpForms,
}

impl ClientHandler for Listener {
    fn get_info(&self) -> ClientConfig {
        let capabilities = match self.forms {
            McpForms::Refused => ClientCapabilities::default(),
            McpForms::Defaults => ClientCapabilities::builder().enable_elicitation().build(),
        };
        // Newer revisions have no handshake, and a server need not know them to answer one.
        ClientConfig::new(capabilities, Implementation::new("skep", env!("CARGO_PKG_VERSION")))
            .with_protocol_version(ProtocolVersion::LATEST_WITH_INITIALIZE)
    }

    async fn create_elicitation(
        &self,
        request: ElicitRequestParams,
        _context: RequestContext<RoleClient>,
    ) -> Result<ElicitResult, ErrorData> {
        Ok(match self.forms {
            McpForms::Refused => ElicitResult::new(ElicitationAction::Decline),
            McpForms::Defaults => forms::filled_in(&request),
        })
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
            Err(format!("it did not complete the handshake within {} s", limit.as_secs()))
        })
    }

    async fn handshake(name: &str, options: &McpOptions) -> Result<Self, String> {
        let listener = Listener { changes: AtomicU64::new(0), forms: options.forms };
        let (service, process) = match &options.transport {
            McpTransport::Process { program, arguments, environment, folder } => {
                let (process, output, input) =
                    Process::start(name, program, arguments, environment, folder.as_deref())?;
                let transport = AsyncRwTransport::<RoleClient, _, _>::new_client(output, input)
                    .with_max_line_length(options.bounds.message_bytes);
                (listener.serve(transport).await.map_err(explain)?, Some(process))
            }
            McpTransport::Http { url, headers } => {
                let config = StreamableHttpClientTransportConfig::with_uri(url.as_str())
                    .custom_headers(headers.clone())
                    .max_sse_event_size(options.bounds.message_bytes);
                let transport = StreamableHttpClientTransport::with_client(HttpClient::new(options)?, config);
                (listener.serve(transport).await.map_err(explain)?, None)
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

    /// Returns the tools as of the last change that the server announced.
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
        let tools =
            tools.unwrap_or_else(|_elapsed| Err(format!("no complete list within {} s", limit.as_secs())))?;
        *listed = Some((changes, tools.clone()));
        Ok(tools)
    }
}

fn explain(error: ClientInitializeError) -> String {
    format!("the handshake failed: {error}")
}
