//! A call of a tool, which is a turn of the agent.
//!
//! An unknown name is a protocol error. All other errors are results that the client's model can read: invalid
//! arguments, a failed turn, a busy host.
//!
//! A call that needs an approval is a durable turn. Its client waits for the decision for a limited time; then it is
//! informed which approval is pending and which key the same call can use to get the result.

use super::{
    RequestSpan,
    answer::{self, CallOutcome, Follower, Form, KEY, RetryKey, SESSION},
    approval::{Approver, AskedApprovals},
    catalog::{self, Target},
    content,
    durable::{DurableCalls, DurableTurn},
    link::{self, ClientChannel, LeastLevel, Link},
    scope::Scope,
    tickets::CallTicket,
};
use crate::{caller::Caller, metrics::MCP_CALLS};
use axum::http::request::Parts;
use rmcp::{
    ErrorData, RoleServer,
    model::{CallToolRequestParams, CallToolResult, JsonObject},
    service::RequestContext,
};
use serde::Deserialize;
use serde_json::Value;
use skep_engine::Priority;
use skep_runtime::{
    AgentHost, Invocation, Json, Origin, RunHandle, RuntimeError, ToolDefinition, ToolOrigin, TurnClient,
    plain_session,
};
use std::{
    fmt::Display,
    sync::{Arc, Weak},
    time::Duration,
};
use tracing::{Instrument, Span, field::Empty};

/// The client of a call, and its options.
pub(super) struct Client<'a> {
    pub(super) host: &'a AgentHost,
    /// The session of calls that do not name one.
    pub(super) session: &'a str,
    pub(super) approval_wait: Duration,
    pub(super) durable: &'a DurableCalls,
    pub(super) least_level: &'a LeastLevel,
    pub(super) asked: &'a AskedApprovals,
}

/// Properties of the called tool.
pub(super) struct Shape {
    pub(super) form: Form,
    pub(super) needs_approval: bool,
}

/// The arguments of a message to an agent.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageArguments {
    text: String,
    data: Option<Json>,
    session: Option<String>,
}

pub(super) async fn call(
    client: Client<'_>,
    request: CallToolRequestParams,
    context: RequestContext<RoleServer>,
) -> Result<CallToolResult, ErrorData> {
    let scope = Scope::of(&context)?;
    let name = request.name.clone();
    let target = scope.target(&name);
    let shape = match scope.includes(target.agent) {
        true => shape(client.host, &target).map_err(|error| unknown(&name, &error))?,
        false => return Err(unknown(&name, &"this key is not for this agent")),
    };
    let kind = if target.tool.is_some() { "tool" } else { "message" };
    let span = span(&format!("tools/call {name}"), "tools/call", &name, &context);
    let work = make(&client, &scope.caller, &target, &shape, request.arguments, &context);
    let ended = counted(work, kind, &span, &context).await;
    Ok(ended.unwrap_or_else(|error| answer::refusal(&error)))
}

/// Runs a tool that makes a prompt or a resource, which is what `kind` says, and returns the tool's result.
pub(super) async fn result_of(
    client: &Client<'_>,
    scope: &Scope,
    agent: &str,
    tool: &ToolDefinition,
    arguments: JsonObject,
    context: &RequestContext<RoleServer>,
    kind: &'static str,
) -> Result<Value, ErrorData> {
    let target = Target { agent, tool: Some(&tool.name) };
    let method = if kind == "prompt" { "prompts/get" } else { "resources/read" };
    let span = span(&format!("{method} {agent}"), method, &tool.name, context);
    let work = async {
        let invocation = invocation(&scope.caller, &target, client.session, Some(arguments))?;
        let turn = Turn::start(client, &target, invocation, context).await?;
        match turn.follow(client, &scope.caller, context, Some(client.approval_wait)).await? {
            CallOutcome::Outcome(outcome) => {
                scope.caller.spent().add(&outcome.usage);
                Ok(outcome.data.map(|data| data.value()).unwrap_or_default())
            }
            // No client could follow the turn afterwards, so it is cancelled, and the question withdrawn.
            CallOutcome::PendingApproval { .. } => Err(RuntimeError::InvalidMessage {
                message: format!("the tool {:?} calls something that a person must approve first", tool.name),
            }),
        }
    };
    counted(work, kind, &span, context).await.map_err(|error| failed(&error))
}

/// Converts an error of a turn into one of the protocol, for what has no result that can say it.
pub(super) fn failed(error: &RuntimeError) -> ErrorData {
    let data = serde_json::json!({ answer::CODE: error.code() });
    match error {
        RuntimeError::InvalidMessage { .. } => ErrorData::invalid_params(error.to_string(), Some(data)),
        error => ErrorData::internal_error(error.to_string(), Some(data)),
    }
}

/// Does the work of a request until the client cancels it, and counts how it ended.
async fn counted<T>(
    work: impl Future<Output = Result<T, RuntimeError>>,
    kind: &'static str,
    span: &Span,
    context: &RequestContext<RoleServer>,
) -> Result<T, RuntimeError> {
    let ended = tokio::select! {
        ended = work.instrument(span.clone()) => ended,
        // Dropping the work cancels the turn, unless the turn is durable.
        () = context.ct.cancelled() => Err(RuntimeError::Cancelled),
    };
    let outcome = ended.as_ref().map_or_else(RuntimeError::code, |_| "ok");
    metrics::counter!(MCP_CALLS, "kind" => kind, "outcome" => outcome).increment(1);
    if outcome != "ok" {
        span.record("error.type", outcome);
    }
    ended
}

/// A turn that was accepted, and its connection to the client.
struct Turn {
    run: RunHandle,
    link: Arc<Link>,
    line: ClientChannel,
}

impl Turn {
    async fn start(
        client: &Client<'_>,
        target: &Target<'_>,
        invocation: Invocation,
        context: &RequestContext<RoleServer>,
    ) -> Result<Self, RuntimeError> {
        let token = context.meta.get_progress_token();
        let (link, line) = link::open(&context.peer, token, client.least_level.clone(), target.agent);
        let weak = Arc::downgrade(&link);
        let waiting: Weak<dyn TurnClient> = weak;
        let run = client.host.invoke_for(invocation, waiting).await?;
        Ok(Turn { run, link, line })
    }

    async fn follow(
        self,
        client: &Client<'_>,
        caller: &Caller,
        context: &RequestContext<RoleServer>,
        patience: Option<Duration>,
    ) -> Result<CallOutcome, RuntimeError> {
        let Turn { run, link, line } = self;
        let decides = caller.is_admin() && link.can_elicit();
        let Client { host, asked, .. } = *client;
        let approver = decides.then_some(Approver { host, caller, peer: &context.peer, asked });
        let follower = Follower { patience, approver, link: Some(&link) };
        line.carry(answer::follow(run, follower)).await
    }
}

async fn make(
    client: &Client<'_>,
    caller: &Caller,
    target: &Target<'_>,
    shape: &Shape,
    arguments: Option<JsonObject>,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResult, RuntimeError> {
    let meta = |key| named(&context.meta.0.0, key);
    let mut invocation = invocation(caller, target, meta(SESSION)?.unwrap_or(client.session), arguments)?;
    let ticket = context.extensions.get::<CallTicket>();
    let minted = || match ticket {
        Some(ticket) => ticket.spare_key.clone(),
        None => uuid::Uuid::now_v7().simple().to_string(),
    };
    let key = meta(KEY)?.map(str::to_owned).or_else(|| shape.needs_approval.then(minted));
    invocation.idempotency_key = key.clone();
    let place = invocation.session.clone();
    let session = plain_session(&place).to_owned();
    let turn = Turn::start(client, target, invocation, context).await?;
    if let Some(ticket) = ticket {
        ticket.tell_turn(turn.run.turn_id());
    }
    let again = key.map(|key| RetryKey { key, turn_id: turn.run.turn_id().to_owned() });
    let answered = match &again {
        None => turn.follow(client, caller, context, None).await?,
        Some(RetryKey { turn_id, .. }) => {
            let known = DurableTurn { agent: target.agent.to_owned(), session: place, id: turn_id.clone() };
            client.durable.begin(&context.id, known);
            let answered = turn.follow(client, caller, context, Some(client.approval_wait)).await;
            client.durable.end(&context.id);
            answered?
        }
    };
    match (answered, again) {
        (CallOutcome::Outcome(outcome), _) => {
            caller.spent().add(&outcome.usage);
            answer::result(outcome, session, shape.form)
        }
        (CallOutcome::PendingApproval { approval, question }, again) => {
            if let Some(question) = question {
                question.keep();
            }
            let again = again.expect("only durable turns, which have a key, limit how long the client waits");
            Ok(answer::not_yet(&approval, target, &session, &again))
        }
    }
}

/// Returns a string from a call's `_meta`. Other types are an error, because they would be ignored silently.
fn named<'a>(meta: &'a JsonObject, key: &str) -> Result<Option<&'a str>, RuntimeError> {
    match meta.get(key) {
        None => Ok(None),
        Some(Value::String(name)) => Ok(Some(name)),
        Some(_) => {
            Err(RuntimeError::InvalidMessage { message: format!("{key:?} in `_meta` must be a string") })
        }
    }
}

pub(super) fn shape(host: &AgentHost, target: &Target<'_>) -> Result<Shape, RuntimeError> {
    match target.tool {
        None => host.agent(target.agent).map(|_| Shape { form: Form::Reply, needs_approval: false }),
        Some(tool) => host
            .tool(target.agent, tool)
            .map(|tool| Shape { form: form(&tool), needs_approval: tool.needs_approval }),
    }
}

fn form(tool: &ToolDefinition) -> Form {
    if content::has_parts(tool) {
        Form::Parts
    } else if catalog::is_object(tool.output_schema.as_ref()) {
        Form::Object
    } else {
        Form::Value
    }
}

pub(super) fn unknown(name: &str, error: &dyn Display) -> ErrorData {
    let name: String = name.chars().take(160).collect();
    ErrorData::invalid_params(
        format!("unknown tool {name:?}: {error}; tools/list lists the available tools"),
        None,
    )
}

fn span(title: &str, method: &str, tool: &str, context: &RequestContext<RoleServer>) -> Span {
    let request = context.extensions.get::<Parts>().and_then(|parts| parts.extensions.get::<RequestSpan>());
    let parent = request.map_or_else(Span::current, |RequestSpan(span)| span.clone());
    tracing::info_span!(
        parent: &parent,
        "mcp_call",
        otel.name = title,
        mcp.method.name = method,
        gen_ai.operation.name = "execute_tool",
        gen_ai.tool.name = tool,
        error.type = Empty,
    )
}

fn invocation(
    caller: &Caller,
    target: &Target<'_>,
    session: &str,
    arguments: Option<JsonObject>,
) -> Result<Invocation, RuntimeError> {
    let arguments = Value::Object(arguments.unwrap_or_default());
    let (text, data, session, origin) = match target.tool {
        Some(tool) => {
            let origin = Origin::Tool(ToolOrigin { name: tool.to_owned(), callers: Vec::new(), hops: 0 });
            (String::new(), Some(Json::from(arguments)), session.to_owned(), origin)
        }
        None => {
            let MessageArguments { text, data, session: named } = serde_path_to_error::deserialize(arguments)
                .map_err(|error| RuntimeError::InvalidMessage {
                    message: format!("the arguments are not valid at `{}`: {}", error.path(), error.inner()),
                })?;
            (text, data, named.unwrap_or_else(|| session.to_owned()), Origin::Direct)
        }
    };
    Ok(Invocation {
        principal: caller.tenant.to_string(),
        key: caller.key().map(str::to_owned),
        agent: target.agent.to_owned(),
        session: caller.tenant.session(&session)?,
        text,
        data,
        origin,
        priority: Priority::Interactive,
        deadline: None,
        idempotency_key: None,
        detached: false,
    })
}
