//! Builds the result of a call: the outcome of its turn, an error, or the report that an approval is pending.

use super::{
    approval::{Approver, OpenQuestion, Questions, WaitingCall},
    catalog::Target,
    content,
    link::Link,
};
use futures::FutureExt;
use rmcp::model::{CallToolResult, ContentBlock, MetaObject};
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
pub(super) const CODE: &str = "skep.dev/code";

/// The state of a call when it is answered.
pub(super) enum CallOutcome {
    Outcome(Outcome),
    PendingApproval {
        approval: PendingApproval,
        /// The question that the person at the client still has before them.
        question: Option<OpenQuestion>,
    },
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

/// The client that waits for a turn.
pub(super) struct Follower<'a> {
    /// Maximum time that an approval may be pending, if there is one.
    pub(super) patience: Option<Duration>,
    /// Set if the client may decide about calls and can be asked.
    pub(super) approver: Option<Approver<'a>>,
    /// The connection over which the client gets progress, and messages of the turn itself.
    pub(super) link: Option<&'a Link>,
}

/// The approvals that are pending, the oldest first, and until when the client waits for each of them.
struct Waits {
    patience: Option<Duration>,
    pending: Vec<(PendingApproval, Instant)>,
}

/// Follows a turn to its end, or until an approval has been pending for too long.
pub(super) async fn follow(mut run: RunHandle, client: Follower<'_>) -> Result<CallOutcome, RuntimeError> {
    let Follower { patience, approver, link } = client;
    let mut waits = Waits { patience, pending: Vec::new() };
    let mut questions = approver.map(Questions::new);
    let mut unsent = String::new();
    loop {
        // Text that arrived in the meantime is sent in one notification.
        let event = match run.next().now_or_never() {
            Some(event) => event,
            None => {
                if let Some(link) = link {
                    link.text(std::mem::take(&mut unsent)).await;
                }
                tokio::select! {
                    event = run.next() => event,
                    () = asked(&mut questions) => continue,
                    approval = waits.expired() => {
                        let question = questions.and_then(Questions::into_open);
                        return Ok(CallOutcome::PendingApproval { approval, question });
                    }
                }
            }
        };
        match event {
            Some(Ok(RunEvent::Delta { text })) if link.is_some() => unsent.push_str(&text),
            Some(Ok(RunEvent::ApprovalRequired { id, tool, expires_at_ms, arguments })) => {
                unsent.push_str(&format!("{tool} is waiting for approval {id}\n"));
                if let Some(questions) = &mut questions {
                    let (id, tool) = (id.clone(), tool.clone());
                    questions.add(WaitingCall { id, tool, arguments, expires_at_ms });
                }
                waits.begin(PendingApproval { approval_id: id, tool, expires_at_ms });
            }
            Some(Ok(RunEvent::ApprovalDecided { id, .. })) => {
                if let Some(questions) = &mut questions {
                    questions.decided(&id);
                }
                waits.end(&id);
            }
            Some(Ok(RunEvent::Done(outcome))) => return Ok(CallOutcome::Outcome(outcome)),
            Some(Ok(_)) => {}
            Some(Err(error)) => return Err(error),
            None => return Err(RuntimeError::Cancelled),
        }
    }
}

/// Resolves when the client was asked a question.
async fn asked(questions: &mut Option<Questions<'_>>) {
    match questions {
        Some(questions) => questions.ask().await,
        None => std::future::pending().await,
    }
}

impl Waits {
    fn begin(&mut self, approval: PendingApproval) {
        if let Some(patience) = self.patience {
            self.pending.push((approval, Instant::now() + patience));
        }
    }

    fn end(&mut self, approval_id: &str) {
        self.pending.retain(|(approval, _)| approval.approval_id != approval_id);
    }

    /// Resolves with an approval that has been pending for too long.
    async fn expired(&mut self) -> PendingApproval {
        let Some((_, until)) = self.pending.first() else { return std::future::pending().await };
        tokio::time::sleep_until(*until).await;
        self.pending.remove(0).0
    }
}

/// The form of a call's result.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// The reply to a message.
    Reply,
    /// A value that is not an object, and becomes a member of one.
    Value,
    /// An object, which stays as it is.
    Object,
    /// Parts that are not structured.
    Parts,
}

pub(super) fn result(outcome: Outcome, session: String, form: Form) -> Result<CallToolResult, RuntimeError> {
    let Outcome { text, data, turn, .. } = outcome;
    let meta = json!({ SESSION: session, TURN: turn });
    if form == Form::Parts {
        let parts = content::parts(&data.map(|data| data.value()).unwrap_or_default())?;
        let mut result = CallToolResult::success(parts.into_iter().map(|part| part.block).collect());
        result.meta = meta_object(meta);
        return Ok(result);
    }
    let (text, structured) = if form != Form::Reply {
        let data = data.map(|data| data.value()).unwrap_or_default();
        let text = data.as_str().map_or_else(|| data.to_string(), str::to_owned);
        (text, if form == Form::Object { data } else { json!({ "result": data }) })
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
    Ok(result)
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

/// Returns the error result of a call that nothing is stored about.
pub(super) fn unknown_outcome() -> CallToolResult {
    let text = format!(
        "it is not known whether this call was made: the host that had it is gone, and nothing is stored about the call. Make it \
         again if making it twice does no harm; calls with the same {KEY:?} in their `_meta` are made once"
    );
    let mut result = CallToolResult::error(vec![ContentBlock::text(text)]);
    result.meta = meta_object(json!({ CODE: "outcome_unknown" }));
    result
}

fn meta_object(meta: Value) -> Option<MetaObject> {
    match meta {
        Value::Object(members) => Some(MetaObject(members)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_approval_stays_pending_when_another_one_is_decided() {
        let mut waits = Waits { patience: Some(Duration::ZERO), pending: Vec::new() };
        for id in ["t-1", "t-2", "t-3"] {
            let (approval_id, tool) = (id.to_owned(), "pay".to_owned());
            waits.begin(PendingApproval { approval_id, tool, expires_at_ms: 1 });
        }
        waits.end("t-1");
        assert_eq!(waits.expired().await.approval_id, "t-2");
        waits.end("t-3");
        assert!(waits.expired().now_or_never().is_none(), "nothing is pending");
    }
}
