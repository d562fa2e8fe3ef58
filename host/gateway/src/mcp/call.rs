//! A call of a tool: a turn of the agent.
//!
//! A name that is none is an error of the protocol. Everything else that goes wrong is a result that says so, which the
//! client's model can read: arguments that do not fit, a turn that failed, a host that is busy.

use super::{
    RequestSpan,
    catalog::{self, Target},
};
use crate::{access::Caller, metrics::MCP_CALLS};
use axum::http::request::Parts;
use futures::FutureExt;
use rmcp::{
    ErrorData, Peer, RoleServer,
    model::{
        CallToolRequestParams, CallToolResult, ContentBlock, JsonObject, MetaObject,
        ProgressNotificationParam, ProgressToken,
    },
    service::RequestContext,
};
use serde::Deserialize;
use serde_json::{Value, json};
use skep_engine::Priority;
use skep_runtime::{
    AgentHost, Invocation, Origin, Outcome, RunEvent, RunHandle, RuntimeError, ToolOrigin, plain_session,
};
use std::{fmt::Display, time::Duration};
use tracing::{Instrument, Span, field::Empty};

/// Names the session in a request's `_meta`, and in a result's.
const SESSION: &str = "skep.dev/session";
const TURN: &str = "skep.dev/turn";
/// A stable name for what went wrong.
const CODE: &str = "skep.dev/code";
/// How long a client may take to read what it is told of progress.
const TELLING: Duration = Duration::from_secs(10);

/// Arguments of a message.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageArguments {
    text: String,
    data: Option<Value>,
    session: Option<String>,
}

pub(super) async fn call(
    host: &AgentHost,
    own_session: &str,
    request: CallToolRequestParams,
    context: RequestContext<RoleServer>,
) -> Result<CallToolResult, ErrorData> {
    let caller = caller(&context)?;
    let name = request.name.clone();
    let target = Target::of(&name);
    let is_object = match caller.reaches(target.agent) {
        true => shape_of_result(host, &target).map_err(|error| unknown(&name, &error))?,
        false => return Err(unknown(&name, &"this key is for other agents")),
    };
    let kind = if target.tool.is_some() { "tool" } else { "message" };
    let span = span(&name, &context);
    let work = async {
        let session = context.meta.0.0.get(SESSION).and_then(Value::as_str).unwrap_or(own_session);
        let invocation = invocation(&caller, &target, session, request.arguments)?;
        let session = plain_session(&invocation.session).to_owned();
        let run = host.invoke(invocation).await?;
        let progress =
            context.meta.get_progress_token().map(|token| Progress::new(token, context.peer.clone()));
        let outcome = outcome(run, progress).await?;
        Ok(result(outcome, session, target.tool.is_some(), is_object))
    };
    let ended = tokio::select! {
        ended = work.instrument(span.clone()) => ended,
        // Dropping the work cancels the turn.
        () = context.ct.cancelled() => Err(RuntimeError::Cancelled),
    };
    let outcome = ended.as_ref().map_or_else(RuntimeError::code, |_| "ok");
    metrics::counter!(MCP_CALLS, "kind" => kind, "outcome" => outcome).increment(1);
    if outcome != "ok" {
        span.record("error.type", outcome);
    }
    Ok(ended.unwrap_or_else(|error| refusal(&error)))
}

/// Whether the target's result is an object as it is.
fn shape_of_result(host: &AgentHost, target: &Target<'_>) -> Result<bool, RuntimeError> {
    match target.tool {
        None => host.agent(target.agent).map(|_| true),
        Some(tool) => {
            host.tool(target.agent, tool).map(|tool| catalog::is_object(tool.output_schema.as_ref()))
        }
    }
}

/// Who sent the request that the call came with.
pub(super) fn caller(context: &RequestContext<RoleServer>) -> Result<Caller, ErrorData> {
    let caller = context.extensions.get::<Parts>().and_then(|parts| parts.extensions.get::<Caller>());
    caller.cloned().ok_or_else(|| ErrorData::internal_error("nobody asked who asks", None))
}

fn unknown(name: &str, error: &dyn Display) -> ErrorData {
    let name: String = name.chars().take(160).collect();
    ErrorData::invalid_params(
        format!("unknown tool {name:?}: {error}; tools/list names those that there are"),
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
            (String::new(), Some(arguments), session.to_owned(), origin)
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

async fn outcome(mut run: RunHandle, mut progress: Option<Progress>) -> Result<Outcome, RuntimeError> {
    loop {
        // What was said meanwhile is told together.
        let event = match run.next().now_or_never() {
            Some(event) => event,
            None => {
                if let Some(telling) = &mut progress
                    && telling.tell().await.is_err()
                {
                    progress = None;
                }
                run.next().await
            }
        };
        match event {
            Some(Ok(RunEvent::Delta { text })) => {
                if let Some(progress) = &mut progress {
                    progress.unsaid.push_str(&text);
                }
            }
            Some(Ok(RunEvent::Done(outcome))) => return Ok(outcome),
            Some(Ok(_)) => {}
            Some(Err(error)) => return Err(error),
            None => return Err(RuntimeError::Cancelled),
        }
    }
}

fn result(outcome: Outcome, session: String, is_tool: bool, is_object: bool) -> CallToolResult {
    let Outcome { text, data, turn, .. } = outcome;
    let meta = json!({ SESSION: session, TURN: turn });
    let (text, structured) = if is_tool {
        let data = data.unwrap_or_default();
        let text = data.as_str().map_or_else(|| data.to_string(), str::to_owned);
        (text, if is_object { data } else { json!({ "result": data }) })
    } else {
        let mut structured = json!({"text": text, "session": session, "turn": turn});
        if let Some(data) = data {
            structured["data"] = data;
        }
        (text, structured)
    };
    let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
    result.structured_content = Some(structured);
    result.meta = meta_object(meta);
    result
}

fn refusal(error: &RuntimeError) -> CallToolResult {
    let mut result = CallToolResult::error(vec![ContentBlock::text(error.to_string())]);
    result.meta = meta_object(json!({ CODE: error.code() }));
    result
}

fn meta_object(meta: Value) -> Option<MetaObject> {
    match meta {
        Value::Object(members) => Some(MetaObject(members)),
        _ => None,
    }
}

/// Tells the client what is generated while it is.
struct Progress {
    token: ProgressToken,
    peer: Peer<RoleServer>,
    unsaid: String,
    /// Characters so far.
    said: usize,
}

impl Progress {
    fn new(token: ProgressToken, peer: Peer<RoleServer>) -> Self {
        Progress { token, peer, unsaid: String::new(), said: 0 }
    }

    /// An error if nobody reads it.
    async fn tell(&mut self) -> Result<(), ()> {
        if self.unsaid.is_empty() {
            return Ok(());
        }
        let text = std::mem::take(&mut self.unsaid);
        self.said += text.chars().count();
        let progress =
            ProgressNotificationParam::new(self.token.clone(), self.said as f64).with_message(text);
        let told = tokio::time::timeout(TELLING, self.peer.notify_progress(progress)).await;
        told.map_err(|_elapsed| ())?.map_err(|_closed| ())
    }
}
