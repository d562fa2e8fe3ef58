//! Implements the server side of the protocol: identification, tools, prompts, resources, completion, log levels, and
//! notifications of changes.

// Subscriptions and log levels belong to the revisions with sessions, and are deprecated in the one without.
#![allow(deprecated)]

use super::{
    SESSION_ID,
    approval::AskedApprovals,
    call::{self, Client},
    catalog, completion,
    durable::DurableCalls,
    link::LeastLevel,
    prompts,
    records::Records,
    resources,
    scope::Scope,
    subscriptions::Subscriptions,
};
use axum::http::request::Parts;
use ring::digest;
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, CancelledNotificationParam, CompleteRequestParams,
        CompleteResult, CustomRequest, CustomResult, ErrorCode, Extensions, GetPromptRequestParams,
        GetPromptResponse, Implementation, InitializeRequestParams, InitializeResult, ListPromptsResult,
        ListResourceTemplatesResult, ListResourcesResult, ListToolsResult, PaginatedRequestParams,
        ReadResourceRequestParams, ReadResourceResponse, ServerCapabilities, ServerConfig,
        SetLevelRequestParams, SubscribeRequestParams, SubscriptionFilter, UnsubscribeRequestParams,
    },
    service::{NotificationContext, RequestContext, SubscriptionContext},
    transport::streamable_http_server::SessionRestoreMarker,
};
use skep_runtime::{AgentHost, excerpt};
use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};
use tokio::{sync::watch, task::JoinSet};

const INSTRUCTIONS: &str = "Each agent is a tool of its own name that takes a message; the tools of an agent are called \
     AGENT__TOOL. An agent remembers its session: calls of one connection share one, unless they name another. At \
     /mcp/AGENT, the tools of one agent have their own names.";

/// The methods that this server knows. The protocol crate takes a request whose parameters do not fit its method for one
/// with a method of somebody else.
const METHODS: [&str; 15] = [
    "completion/complete",
    "initialize",
    "logging/setLevel",
    "ping",
    "prompts/get",
    "prompts/list",
    "resources/list",
    "resources/read",
    "resources/subscribe",
    "resources/templates/list",
    "resources/unsubscribe",
    "server/discover",
    "subscriptions/listen",
    "tools/call",
    "tools/list",
];

/// The server as one client sees it.
pub(super) struct AgentServer {
    host: AgentHost,
    /// The agent session of calls that do not name one, once there was a call.
    session: OnceLock<String>,
    records: Arc<Records>,
    approval_wait: Duration,
    durable: DurableCalls,
    least_level: LeastLevel,
    asked: AskedApprovals,
    subscriptions: Subscriptions,
    closing: watch::Receiver<bool>,
    /// Sends notifications of changes to the client, and is aborted when this server is dropped.
    news: Mutex<JoinSet<()>>,
}

impl AgentServer {
    pub(super) fn new(
        host: AgentHost,
        records: Arc<Records>,
        closing: watch::Receiver<bool>,
        approval_wait: Duration,
    ) -> Self {
        let (session, durable, news) = (OnceLock::new(), DurableCalls::default(), Mutex::default());
        let (least_level, asked) = (LeastLevel::default(), AskedApprovals::default());
        let subscriptions = Subscriptions::default();
        AgentServer {
            host,
            session,
            records,
            approval_wait,
            durable,
            least_level,
            asked,
            subscriptions,
            closing,
            news,
        }
    }

    /// Returns the client that has sent a request with these extensions.
    fn client<'a>(&'a self, extensions: &Extensions) -> Client<'a> {
        let Self { host, session, approval_wait, durable, least_level, asked, .. } = self;
        let session = session.get_or_init(|| agent_session(session_id(extensions)));
        Client { host, session, approval_wait: *approval_wait, durable, least_level, asked }
    }

    /// Restores what the client has set in a session that continues here.
    fn restore(&self, id: &str, context: &RequestContext<RoleServer>) {
        let (Some(kept), Ok(scope)) = (self.records.kept(id), Scope::of(context)) else { return };
        if let Some(level) = kept.level {
            self.least_level.set(level);
        }
        for uri in kept.subscriptions {
            // A resource that is gone does not change anymore.
            let Ok(named) = resources::named(&self.host, &scope, &uri) else { continue };
            let tenant = scope.caller.tenant.clone();
            if let Err(why) = self.subscriptions.add(&self.host, &context.peer, uri, named, tenant) {
                tracing::debug!(why, "a subscription does not continue");
            }
        }
    }
}

/// Returns the id of the session that a request was sent in. Requests of the revision without sessions have none.
fn session_id(extensions: &Extensions) -> Option<&str> {
    extensions.get::<Parts>()?.headers.get(SESSION_ID)?.to_str().ok()
}

/// Returns the name of the agent session of a client's calls. It follows from the id of the client's session, so it is the same at
/// each host, and does not tell the id.
pub(super) fn agent_session(client: Option<&str>) -> String {
    let Some(id) = client else { return format!("mcp-{}", uuid::Uuid::now_v7().simple()) };
    let digest = digest::digest(&digest::SHA256, id.as_bytes());
    let (half, _) = digest.as_ref().split_first_chunk::<16>().expect("SHA-256 has 32 bytes");
    format!("mcp-{:032x}", u128::from_be_bytes(*half))
}

impl ServerHandler for AgentServer {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_logging()
            .enable_completions()
            .enable_prompts()
            .enable_prompts_list_changed()
            .enable_resources()
            .enable_resources_list_changed()
            .enable_resources_subscribe()
            .enable_tools()
            .enable_tool_list_changed()
            .build();
        let implementation = Implementation::new("skep", env!("CARGO_PKG_VERSION")).with_title("Skep");
        ServerConfig::new(capabilities).with_server_info(implementation).with_instructions(INSTRUCTIONS)
    }

    async fn initialize(
        &self,
        request: InitializeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<InitializeResult, ErrorData> {
        if let Some(marker) = context.extensions.get::<SessionRestoreMarker>() {
            self.restore(&marker.id, &context);
        }
        context.peer.set_peer_info(request.clone());
        self.negotiate_initialize(&request)
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let cursor = request.and_then(|request| request.cursor);
        Ok(catalog::page(&self.host, &Scope::of(&context)?, cursor.as_deref()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        call::call(self.client(&context.extensions), request, context).await.map(CallToolResponse::from)
    }

    async fn list_prompts(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        let cursor = request.and_then(|request| request.cursor);
        Ok(prompts::page(&self.host, &Scope::of(&context)?, cursor.as_deref()))
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        let scope = Scope::of(&context)?;
        let client = self.client(&context.extensions);
        prompts::get(client, &scope, request, &context).await.map(GetPromptResponse::from)
    }

    async fn list_resources(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let cursor = request.and_then(|request| request.cursor);
        resources::page(&self.host, &Scope::of(&context)?, cursor.as_deref()).await
    }

    async fn list_resource_templates(
        &self,
        _request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(resources::templates(&self.host, &Scope::of(&context)?))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let scope = Scope::of(&context)?;
        let client = self.client(&context.extensions);
        resources::read(client, &scope, &request.uri, &context).await.map(ReadResourceResponse::from)
    }

    async fn subscribe(
        &self,
        request: SubscribeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let scope = Scope::of(&context)?;
        let named = resources::named(&self.host, &scope, &request.uri)?;
        let tenant = scope.caller.tenant.clone();
        let uri = request.uri.clone();
        let added = self.subscriptions.add(&self.host, &context.peer, request.uri, named, tenant);
        added.map_err(|why| ErrorData::invalid_params(why, None))?;
        if let Some(id) = session_id(&context.extensions) {
            self.records.change(id, |kept| _ = kept.subscriptions.insert(uri)).await;
        }
        Ok(())
    }

    async fn unsubscribe(
        &self,
        request: UnsubscribeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.subscriptions.remove(&request.uri);
        if let Some(id) = session_id(&context.extensions) {
            self.records.change(id, |kept| _ = kept.subscriptions.remove(&request.uri)).await;
        }
        Ok(())
    }

    async fn complete(
        &self,
        request: CompleteRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        Ok(CompleteResult::new(completion::complete(&self.host, &Scope::of(&context)?, &request)))
    }

    async fn set_level(
        &self,
        request: SetLevelRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.least_level.set(request.level);
        if let Some(id) = session_id(&context.extensions) {
            self.records.change(id, |kept| kept.level = Some(request.level)).await;
        }
        Ok(())
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        let method = excerpt(&request.method);
        if METHODS.contains(&request.method.as_str()) {
            let message =
                format!("the parameters of {method:?} do not have the form that the protocol defines");
            return Err(ErrorData::invalid_params(message, None));
        }
        let message = format!("no method {method:?}; the methods are {}", METHODS.join(", "));
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
                let peer = &context.peer;
                let notified = async {
                    peer.notify_tool_list_changed().await?;
                    peer.notify_prompt_list_changed().await?;
                    peer.notify_resource_list_changed().await
                };
                if notified.await.is_err() {
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
            let keeps_listening = tokio::select! {
                () = context.cancelled() => false,
                _ = closing.changed() => false,
                changed = changes.changed() => changed.is_ok(),
            };
            if !keeps_listening || context.sink().notify_tool_list_changed().await.is_err() {
                return Ok(());
            }
        }
    }
}
