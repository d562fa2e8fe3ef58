//! Implements the server side of the protocol: identification, tools, prompts, resources, completion, log levels, and
//! notifications of changes.

// Subscriptions and log levels belong to the revisions with sessions, and are deprecated in the one without.
#![allow(deprecated)]

use super::{
    call::{self, Client},
    catalog, completion,
    durable::DurableCalls,
    link::LeastLevel,
    prompts, resources,
    scope::Scope,
    subscriptions::Subscriptions,
};
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, CancelledNotificationParam, CompleteRequestParams,
        CompleteResult, CustomRequest, CustomResult, ErrorCode, GetPromptRequestParams, GetPromptResponse,
        Implementation, ListPromptsResult, ListResourceTemplatesResult, ListResourcesResult, ListToolsResult,
        PaginatedRequestParams, ReadResourceRequestParams, ReadResourceResponse, ServerCapabilities,
        ServerConfig, SetLevelRequestParams, SubscribeRequestParams, SubscriptionFilter,
        UnsubscribeRequestParams,
    },
    service::{NotificationContext, RequestContext, SubscriptionContext},
};
use skep_runtime::{AgentHost, excerpt};
use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::{sync::watch, task::JoinSet};

const INSTRUCTIONS: &str = "Each agent is a tool of its own name that takes a message; the tools of an agent are called \
     AGENT__TOOL. An agent remembers its session: calls of one connection share one, unless they name another. At \
     /mcp/AGENT, the tools of one agent have their own names.";

/// The server as one client sees it.
pub(super) struct AgentServer {
    host: AgentHost,
    /// The agent session of calls that do not name one.
    session: String,
    approval_wait: Duration,
    durable: DurableCalls,
    least_level: LeastLevel,
    subscriptions: Subscriptions,
    closing: watch::Receiver<bool>,
    /// Sends notifications of changes to the client, and is aborted when this server is dropped.
    news: Mutex<JoinSet<()>>,
}

impl AgentServer {
    pub(super) fn new(host: AgentHost, closing: watch::Receiver<bool>, approval_wait: Duration) -> Self {
        let session = format!("mcp-{}", uuid::Uuid::now_v7().simple());
        let (durable, news) = (DurableCalls::default(), Mutex::default());
        let (least_level, subscriptions) = (LeastLevel::default(), Subscriptions::default());
        AgentServer { host, session, approval_wait, durable, least_level, subscriptions, closing, news }
    }

    fn client(&self) -> Client<'_> {
        let Self { host, session, approval_wait, durable, least_level, .. } = self;
        Client { host, session, approval_wait: *approval_wait, durable, least_level }
    }
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
        call::call(self.client(), request, context).await.map(CallToolResponse::from)
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
        prompts::get(self.client(), &scope, request, &context).await.map(GetPromptResponse::from)
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
        resources::read(self.client(), &scope, &request.uri, &context).await.map(ReadResourceResponse::from)
    }

    async fn subscribe(
        &self,
        request: SubscribeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let scope = Scope::of(&context)?;
        let named = resources::named(&self.host, &scope, &request.uri)?;
        let tenant = scope.caller.tenant.clone();
        let added = self.subscriptions.add(&self.host, &context.peer, request.uri, named, tenant);
        added.map_err(|why| ErrorData::invalid_params(why, None))
    }

    async fn unsubscribe(
        &self,
        request: UnsubscribeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.subscriptions.remove(&request.uri);
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
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.least_level.set(request.level);
        Ok(())
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        let method = excerpt(&request.method);
        let message = format!(
            "no method {method:?}; the methods are initialize, ping, logging/setLevel, completion/complete, and those of \
             tools, prompts and resources"
        );
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
