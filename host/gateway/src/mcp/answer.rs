//! Builds the result of a call: the outcome of its turn, an error, or the report that an approval is pending.

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

/// The key of `_meta` that names the session, in requests and results.
pub(super) const SESSION: &str = "skep.dev/session";
/// The key of `_meta` for an idempotency key. Calls with the same one in the same session are the same turn. It is in
/// requests, and in results that are not available yet.
pub(super) const KEY: &str = "skep.dev/idempotency_key";
const TURN: &str = "skep.dev/turn";
/// The key of `_meta` for the turn's id in the HTTP API.
const TURN_ID: &str = "skep.dev/turn_id";
/// The key of `_meta` for a pending approval: its id, tool and expiry.
const APPROVAL: &str = "skep.dev/approval";
/// The key of `_meta` for a stable error code.
const CODE: &str = "skep.dev/code";
/// Timeout of sending a progress notification.
const TELLING: Duration = Duration::from_secs(10);

/// The state of a call when it is answered.
pub(super) enum CallOutcome {
    Outcome(Outcome),
    PendingApproval(PendingApproval),
}

/// An approval that is still pending.
pub(super) struct PendingApproval {
    approval_id: String,
    tool: String,
    expires_at_ms: u64,
}

/// The key and the id by which the client finds a turn that continues without it.
pub(super) struct RetryKey {
    pub(super) key: String,
    pub(super) turn_id: String,
}

/// Follows a turn to its end, or until an approval has been pending for `patience`, if that is set.
pub(super) async fn follow(
    mut run: RunHandle,
    mut progress: Option<Progress>,
    patience: Option<Duration>,
) -> Result<CallOutcome, RuntimeError> {
    let mut waits: Option<(PendingApproval, Instant)> = None;
    loop {
        // Text that arrived in the meantime is sent in one notification.
        let event = match run.next().now_or_never() {
            Some(event) => event,
            None => {
                if let Some(notifier) = &mut progress
                    && notifier.notify().await.is_err()
                {
                    progress = None;
                }
                match waits.take() {
                    None => run.next().await,
                    Some((approval, until)) => match tokio::time::timeout_at(until, run.next()).await {
                        Err(_elapsed) => return Ok(CallOutcome::PendingApproval(approval)),
                        Ok(event) => {
                            waits = Some((approval, until));
                            event
                        }
                    },
                }
            }
        };
        match event {
            Some(Ok(RunEvent::Delta { text })) => {
                if let Some(progress) = &mut progress {
                    progress.unsent.push_str(&text);
                }
            }
            Some(Ok(RunEvent::ApprovalRequired { id, tool, expires_at_ms, .. })) => {
                if let Some(progress) = &mut progress {
                    progress.unsent.push_str(&format!("{tool} is waiting for approval {id}\n"));
                }
                let approval = PendingApproval { approval_id: id, tool, expires_at_ms };
                waits = patience.map(|patience| (approval, Instant::now() + patience));
            }
            Some(Ok(RunEvent::ApprovalDecided { .. })) => waits = None,
            Some(Ok(RunEvent::Done(outcome))) => return Ok(CallOutcome::Outcome(outcome)),
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

/// Returns an error result for a pending approval. The turn has not failed, but there is no result yet, and clients
/// validate results that are not errors against the tool's output schema.
pub(super) fn not_yet(
    approval: &PendingApproval,
    target: &Target<'_>,
    session: &str,
    again: &RetryKey,
) -> CallToolResult {
    let PendingApproval { approval_id, tool, expires_at_ms } = approval;
    let RetryKey { key, turn_id } = again;
    let text = format!(
        "{tool} has not been called yet: a person must approve it first, with `skep approval approve {approval_id}` or a POST of \
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

/// Sends generated text to the client as progress notifications.
pub(super) struct Progress {
    token: ProgressToken,
    peer: Peer<RoleServer>,
    unsent: String,
    /// Number of characters sent so far.
    sent_chars: usize,
}

impl Progress {
    pub(super) fn new(token: ProgressToken, peer: Peer<RoleServer>) -> Self {
        Progress { token, peer, unsent: String::new(), sent_chars: 0 }
    }

    /// Sends the pending text. Fails if the client does not read it.
    async fn notify(&mut self) -> Result<(), ()> {
        if self.unsent.is_empty() {
            return Ok(());
        }
        let text = std::mem::take(&mut self.unsent);
        self.sent_chars += text.chars().count();
        let progress =
            ProgressNotificationParam::new(self.token.clone(), self.sent_chars as f64).with_message(text);
        let notified = tokio::time::timeout(TELLING, self.peer.notify_progress(progress)).await;
        notified.map_err(|_elapsed| ())?.map_err(|_closed| ())
    }
}
