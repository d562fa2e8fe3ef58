//! What a call is answered with: the outcome of its turn, what went wrong, or that a person has not decided yet.

use super::catalog::Target;
use futures::FutureExt;
use rmcp::{
    Peer, RoleServer,
    model::{CallToolResult, ContentBlock, MetaObject, ProgressNotificationParam, ProgressToken},
};
use serde_json::{Value, json};
use skep_runtime::{Outcome, RunEvent, RunHandle, RuntimeError};
use std::time::Duration;
use tokio::time::Instant;

/// Names the session in a request's `_meta`, and in a result's.
pub(super) const SESSION: &str = "skep.dev/session";
/// Calls with the same one in the same session are the same turn. Of a request, and of a result that is not there yet.
pub(super) const KEY: &str = "skep.dev/idempotency_key";
const TURN: &str = "skep.dev/turn";
/// By which a turn is known over HTTP.
const TURN_ID: &str = "skep.dev/turn_id";
/// What a person is asked: an id, and until when.
const APPROVAL: &str = "skep.dev/approval";
/// A stable name for what went wrong.
const CODE: &str = "skep.dev/code";
/// How long a client may take to read what it is told of progress.
const TELLING: Duration = Duration::from_secs(10);

/// How far a call has come.
pub(super) enum Answer {
    Outcome(Outcome),
    Asked(Asked),
}

/// A person is asked, and has not decided.
pub(super) struct Asked {
    approval_id: String,
    tool: String,
    expires_at_ms: u64,
}

/// How the client finds a turn again that goes on without it.
pub(super) struct Again {
    pub(super) key: String,
    pub(super) turn_id: String,
}

/// The end of the turn; or that a person is asked, after so much patience with that, if there is a bound to it.
pub(super) async fn follow(
    mut run: RunHandle,
    mut progress: Option<Progress>,
    patience: Option<Duration>,
) -> Result<Answer, RuntimeError> {
    let mut waits: Option<(Asked, Instant)> = None;
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
                match waits.take() {
                    None => run.next().await,
                    Some((asked, until)) => match tokio::time::timeout_at(until, run.next()).await {
                        Err(_elapsed) => return Ok(Answer::Asked(asked)),
                        Ok(event) => {
                            waits = Some((asked, until));
                            event
                        }
                    },
                }
            }
        };
        match event {
            Some(Ok(RunEvent::Delta { text })) => {
                if let Some(progress) = &mut progress {
                    progress.unsaid.push_str(&text);
                }
            }
            Some(Ok(RunEvent::ApprovalRequired { id, tool, expires_at_ms, .. })) => {
                if let Some(progress) = &mut progress {
                    progress.unsaid.push_str(&format!("{tool} waits for a person's word; approval {id}\n"));
                }
                let asked = Asked { approval_id: id, tool, expires_at_ms };
                waits = patience.map(|patience| (asked, Instant::now() + patience));
            }
            Some(Ok(RunEvent::ApprovalDecided { .. })) => waits = None,
            Some(Ok(RunEvent::Done(outcome))) => return Ok(Answer::Outcome(outcome)),
            Some(Ok(_)) => {}
            Some(Err(error)) => return Err(error),
            None => return Err(RuntimeError::Cancelled),
        }
    }
}

pub(super) fn result(outcome: Outcome, session: String, is_tool: bool, is_object: bool) -> CallToolResult {
    let Outcome { text, data, turn, .. } = outcome;
    let meta = json!({ SESSION: session, TURN: turn });
    let (text, structured) = if is_tool {
        let data = data.map(|data| data.value()).unwrap_or_default();
        let text = data.as_str().map_or_else(|| data.to_string(), str::to_owned);
        (text, if is_object { data } else { json!({ "result": data }) })
    } else {
        let mut structured = json!({"text": text, "session": session, "turn": turn});
        if let Some(data) = data {
            structured["data"] = data.value();
        }
        (text, structured)
    };
    let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
    result.structured_content = Some(structured);
    result.meta = meta_object(meta);
    result
}

/// No error of the turn, but there is no result either, and clients hold what is no error to the tool's output schema.
pub(super) fn not_yet(asked: &Asked, target: &Target<'_>, session: &str, again: &Again) -> CallToolResult {
    let Asked { approval_id, tool, expires_at_ms } = asked;
    let Again { key, turn_id } = again;
    let text = format!(
        "{tool} was not called yet: a person decides about it first, with `skep approval approve {approval_id}` or a POST of \
         {{\"decision\": \"approve\"}} to /v1/approvals/{approval_id}. Make the same call with {KEY:?}: {key:?} and \
         {SESSION:?}: {session:?} in its `_meta` to get the result, or read \
         /v1/agents/{}/sessions/{session}/turns/{turn_id}",
        target.agent
    );
    let mut result = CallToolResult::error(vec![ContentBlock::text(text)]);
    result.meta = meta_object(json!({
        CODE: "approval_required",
        APPROVAL: {"id": approval_id, "tool": tool, "expires_at_ms": expires_at_ms},
        SESSION: session,
        TURN_ID: turn_id,
        KEY: key,
    }));
    result
}

pub(super) fn refusal(error: &RuntimeError) -> CallToolResult {
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
pub(super) struct Progress {
    token: ProgressToken,
    peer: Peer<RoleServer>,
    unsaid: String,
    /// Characters so far.
    said: usize,
}

impl Progress {
    pub(super) fn new(token: ProgressToken, peer: Peer<RoleServer>) -> Self {
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
