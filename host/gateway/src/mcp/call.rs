//! A call of a tool, which is a turn of the agent.
//!
//! An unknown name is a protocol error. All other errors are results that the client's model can read: invalid
//! arguments, a failed turn, a busy host.
//!
//! A call that needs an approval is a durable turn. Its client waits for the decision for a limited time; then it is
//! told which approval is pending and which key the same call can use to get the result.

use super::{
    RequestSpan,
    answer::{self, CallOutcome, KEY, Progress, RetryKey, SESSION},
    catalog::{self, Target},
    durable::{DurableCalls, DurableTurn},
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
use skep_runtime::{AgentHost, Invocation, Json, Origin, RuntimeError, ToolOrigin, plain_session};
use std::{fmt::Display, time::Duration};
use tracing::{Instrument, Span, field::Empty};

/// The client of a call, and its options.
pub(super) struct Client<'a> {
    pub(super) host: &'a AgentHost,
    /// The session of calls that do not name one.
    pub(super) session: &'a str,
    pub(super) approval_wait: Duration,
    pub(super) durable: &'a DurableCalls,
}

/// Properties of the called tool.
struct Shape {
    /// Whether its result is an object that is returned unwrapped.
    is_object: bool,
    needs_approval: bool,
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
    let caller = caller(&context)?;
    let name = request.name.clone();
    let target = Target::of(&name);
    let shape = match caller.reaches(target.agent) {
        true => shape(client.host, &target).map_err(|error| unknown(&name, &error))?,
        false => return Err(unknown(&name, &"this key is not for this agent")),
    };
    let kind = if target.tool.is_some() { "tool" } else { "message" };
    let span = span(&name, &context);
    let work = make(&client, &caller, &target, &shape, request.arguments, &context);
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
    Ok(ended.unwrap_or_else(|error| answer::refusal(&error)))
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
    let minted = || uuid::Uuid::now_v7().simple().to_string();
    let key = meta(KEY)?.map(str::to_owned).or_else(|| shape.needs_approval.then(minted));
    invocation.idempotency_key = key.clone();
    let place = invocation.session.clone();
    let session = plain_session(&place).to_owned();
    let run = client.host.invoke(invocation).await?;
    let token = context.meta.get_progress_token();
    let progress = token.map(|token| Progress::new(token, context.peer.clone()));
    let again = key.map(|key| RetryKey { key, turn_id: run.turn_id().to_owned() });
    let answered = match &again {
        None => answer::follow(run, progress, None).await?,
        Some(RetryKey { turn_id, .. }) => {
            let turn = DurableTurn { agent: target.agent.to_owned(), session: place, id: turn_id.clone() };
            client.durable.begin(&context.id, turn);
            let answered = answer::follow(run, progress, Some(client.approval_wait)).await;
            client.durable.end(&context.id);
            answered?
        }
    };
    Ok(match (answered, again) {
        (CallOutcome::Outcome(outcome), _) => {
            caller.spent().add(&outcome.usage);
            answer::result(outcome, session, target.tool.is_some(), shape.is_object)
        }
        (CallOutcome::PendingApproval(approval), again) => {
            let again = again.expect("only durable turns, which have a key, limit how long the client waits");
            answer::not_yet(&approval, target, &session, &again)
        }
    })
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

fn shape(host: &AgentHost, target: &Target<'_>) -> Result<Shape, RuntimeError> {
    match target.tool {
        None => host.agent(target.agent).map(|_| Shape { is_object: true, needs_approval: false }),
        Some(tool) => host.tool(target.agent, tool).map(|tool| Shape {
            is_object: catalog::is_object(tool.output_schema.as_ref()),
            needs_approval: tool.needs_approval,
        }),
    }
}

/// Returns the caller of the HTTP request that the call was received in.
pub(super) fn caller(context: &RequestContext<RoleServer>) -> Result<Caller, ErrorData> {
    let caller = context.extensions.get::<Parts>().and_then(|parts| parts.extensions.get::<Caller>());
    caller.cloned().ok_or_else(|| ErrorData::internal_error("the request was not authenticated", None))
}

fn unknown(name: &str, error: &dyn Display) -> ErrorData {
    let name: String = name.chars().take(160).collect();
    ErrorData::invalid_params(
        format!("unknown tool {name:?}: {error}; tools/list lists the available tools"),
        None,
    )
}

fn span(name: &str, context: &RequestContext<RoleServer>) -> Span {
    let request = context.extensions.get::<Parts>().and_then(|parts| parts.extensions.get::<RequestSpan>());
    let parent = request.map_or_else(Span::current, |RequestSpan(span)| span.clone());
    tracing::info_span!(
        parent: &parent,
        "mcp_call",
        otel.name = %format_args!("tools/call {name}"),
        mcp.method.name = "tools/call",
        gen_ai.operation.name = "execute_tool",
        gen_ai.tool.name = name,
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
