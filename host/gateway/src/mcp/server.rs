//! Implements the server side of the protocol: identification, the list of tools, calls, and notifications of
//! changes.

use super::{
    call::{self, Client},
    catalog,
    durable::DurableCalls,
};
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, CancelledNotificationParam, CustomRequest, CustomResult,
        ErrorCode, Implementation, ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig,
        SubscriptionFilter,
    },
    service::{NotificationContext, RequestContext, SubscriptionContext},
};
use skep_runtime::AgentHost;
use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::{sync::watch, task::JoinSet};

const INSTRUCTIONS: &str = "Each agent is a tool of its own name that takes a message; the tools of an agent are called \
     AGENT__TOOL. An agent remembers its session: calls of one connection share one, unless they name another.";

/// Maximum length of a name that an error repeats.
const MAX_SHOWN: usize = 80;

/// The server as one client sees it.
pub(super) struct AgentServer {
    host: AgentHost,
    /// The agent session of calls that do not name one.
    session: String,
    approval_wait: Duration,
    durable: DurableCalls,
    closing: watch::Receiver<bool>,
    /// Sends notifications of changes to the client, and is aborted when this server is dropped.
    news: Mutex<JoinSet<()>>,
}

impl AgentServer {
    pub(super) fn new(host: AgentHost, closing: watch::Receiver<bool>, approval_wait: Duration) -> Self {
        let session = format!("mcp-{}", uuid::Uuid::now_v7().simple());
        let (durable, news) = (DurableCalls::default(), Mutex::default());
        AgentServer { host, session, approval_wait, durable, closing, news }
    }
}

impl ServerHandler for AgentServer {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder().enable_tools().enable_tool_list_changed().build();
        let implementation = Implementation::new("skep", env!("CARGO_PKG_VERSION")).with_title("Skep");
        ServerConfig::new(capabilities).with_server_info(implementation).with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let cursor = request.and_then(|request| request.cursor);
        Ok(catalog::page(&self.host, &call::caller(&context)?, cursor.as_deref()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let Self { host, session, approval_wait, durable, .. } = self;
        let client = Client { host, session, approval_wait: *approval_wait, durable };
        call::call(client, request, context).await.map(CallToolResponse::from)
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        let method: String = request.method.chars().take(MAX_SHOWN).collect();
        let message =
            format!("no method {method:?}; the methods are initialize, ping, tools/list and tools/call");
        Err(ErrorData::new(ErrorCode::METHOD_NOT_FOUND, message, None))
    }

    /// Cancels the turn of a durable call. Other calls have already been cancelled.
    async fn on_cancelled(
        &self,
        notification: CancelledNotificationParam,
        _context: NotificationContext<RoleServer>,
    ) {
        if let Some(id) = notification.request_id {
            self.durable.cancel(&self.host, &id).await;
        }
    }

    /// Starts notifications of changes, which clients of the revisions with sessions get without subscribing.
    async fn on_initialized(&self, context: NotificationContext<RoleServer>) {
        let mut changes = self.host.changes();
        let mut news = self.news.lock().unwrap_or_else(PoisonError::into_inner);
        if !news.is_empty() {
            return;
        }
        news.spawn(async move {
            while changes.changed().await.is_ok() {
                if context.peer.notify_tool_list_changed().await.is_err() {
                    return;
                }
            }
        });
    }

    /// Accepts the subscription to changes, which clients of the revision without sessions request.
    fn accepted_subscription_filter(&self, _requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        Some(SubscriptionFilter::builder().tools_list_changed().build())
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        let (mut changes, mut closing) = (self.host.changes(), self.closing.clone());
        loop {
            let goes_on = tokio::select! {
                () = context.cancelled() => false,
                _ = closing.changed() => false,
                changed = changes.changed() => changed.is_ok(),
            };
            if !goes_on || context.sink().notify_tool_list_changed().await.is_err() {
                return Ok(());
            }
        }
    }
}
