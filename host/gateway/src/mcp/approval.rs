//! Asks the connected client about calls that need approval, before people are waited for.
//!
//! Invariant: an answer to a question that a person has before them is recorded as the decision, also after the call that
//! asked was answered. There is one question about an approval at a time, however often its call is repeated. A question that
//! decides nothing anymore is withdrawn: at once while its call is followed, and at the approval's expiry otherwise.

use super::link::{self, NOTIFY_TIMEOUT};
use crate::{access, caller::Caller};
use rmcp::{Peer, RoleServer, ServiceError, service::RequestHandle};
use serde_json::{Value, json};
use skep_runtime::{AgentHost, ClientQuestion, Json};
use std::{
    collections::{HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{sync::oneshot, task::JoinHandle};
use tracing::Instrument;

/// Maximum length of the arguments that a form shows. A decision is about all arguments of a call, so no form asks about a
/// call with more of them.
const MAX_SHOWN: usize = 2_000;

/// A client whose key may decide about calls.
pub(super) struct Approver<'a> {
    pub(super) host: &'a AgentHost,
    pub(super) caller: &'a Caller,
    pub(super) peer: &'a Peer<RoleServer>,
    pub(super) asked: &'a AskedApprovals,
}

/// The approvals that the person at a client has questions about. Clones share them.
#[derive(Clone, Default)]
pub(super) struct AskedApprovals(Arc<Mutex<HashSet<String>>>);

/// An approval with a question, until this is dropped.
struct AskedApproval {
    id: String,
    asked: AskedApprovals,
}

/// A call that waits for a decision.
pub(super) struct WaitingCall {
    /// The id of the approval.
    pub(super) id: String,
    pub(super) tool: String,
    pub(super) arguments: Json,
    pub(super) expires_at_ms: u64,
}

/// The questions about calls of one turn. The client is asked one after the other.
pub(super) struct Questions<'a> {
    approver: Approver<'a>,
    /// Calls that the client has not been asked about yet.
    next: VecDeque<WaitingCall>,
    open: Option<OpenQuestion>,
}

/// A question that the person at the client has before them. Dropping it withdraws the question.
pub(super) struct OpenQuestion {
    approval: String,
    /// Ends when the decision is recorded, or when there will be none.
    answered: JoinHandle<()>,
    keep: oneshot::Sender<()>,
}

/// Records the answer to the question about one call.
struct Recorder {
    host: AgentHost,
    caller: Caller,
    approval: AskedApproval,
    tool: String,
}

impl AskedApprovals {
    /// Adds an approval. Returns `None` if there is a question about it.
    fn add(&self, id: &str) -> Option<AskedApproval> {
        let is_new = self.lock().insert(id.to_owned());
        is_new.then(|| AskedApproval { id: id.to_owned(), asked: self.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AskedApproval {
    fn drop(&mut self) {
        self.asked.lock().remove(&self.id);
    }
}

impl<'a> Questions<'a> {
    pub(super) fn new(approver: Approver<'a>) -> Self {
        Questions { approver, next: VecDeque::new(), open: None }
    }

    /// Adds a call, unless a form cannot show all of its arguments.
    pub(super) fn add(&mut self, call: WaitingCall) {
        if call.arguments.get().len() <= MAX_SHOWN {
            self.next.push_back(call);
        }
    }

    /// Removes a call that somebody has decided about. A question about it that is open is withdrawn.
    pub(super) fn decided(&mut self, id: &str) {
        self.next.retain(|call| call.id != id);
        self.open.take_if(|open| open.approval == id);
    }

    /// Asks the next question, after the answer to the one that is open. It does not resolve as long as there is none. The
    /// task of the client's request has to poll it.
    pub(super) async fn ask(&mut self) {
        if let Some(open) = &mut self.open {
            if let Err(error) = (&mut open.answered).await {
                tracing::error!("the answer of a client about an approval was lost: {error}");
            }
            self.open = None;
        }
        let Some(call) = self.next.front() else { return std::future::pending().await };
        self.open = self.approver.ask(call).await;
        self.next.pop_front();
    }

    /// Returns the question that is open, and drops the others.
    pub(super) fn into_open(self) -> Option<OpenQuestion> {
        self.open
    }
}

impl OpenQuestion {
    /// Lets the person decide as long as the call waits for a decision.
    pub(super) fn keep(self) {
        // The question may have been answered meanwhile.
        let _ = self.keep.send(());
    }
}

impl Approver<'_> {
    /// Asks the person at the client about a call, unless an earlier question about it is open. Without a decision, the call keeps
    /// waiting.
    async fn ask(&self, call: &WaitingCall) -> Option<OpenQuestion> {
        let WaitingCall { id, tool, expires_at_ms, .. } = call;
        let approval = self.asked.add(id)?;
        let sent = match link::send(self.peer, question(call)).await {
            Ok(sent) => sent,
            Err(error) => {
                tracing::debug!("a client was not asked about approval {id}: {error}");
                return None;
            }
        };
        let (host, caller) = (self.host.clone(), self.caller.clone());
        let recorder = Recorder { host, caller, approval, tool: tool.clone() };
        let (keep, kept) = oneshot::channel();
        let answered = tokio::spawn(answered(sent, kept, *expires_at_ms, recorder).in_current_span());
        Some(OpenQuestion { approval: id.clone(), answered, keep })
    }
}

fn question(call: &WaitingCall) -> ClientQuestion {
    let message = format!("May {} be called with {}?", call.tool, call.arguments.get());
    let form = json!({
        "type": "object",
        "properties": {
            "decision": {"type": "string", "enum": ["approve", "deny"], "description": "Whether the call is made."},
            "reason": {"type": "string", "description": "Reason for a refusal, shown to the agent."},
        },
        "required": ["decision"],
    });
    ClientQuestion::Elicit(json!({"message": message, "requestedSchema": form}))
}

/// Waits for the answer to a question, and records it. Withdraws the question when it is not kept, or when a kept one has
/// expired.
async fn answered(
    mut sent: RequestHandle<RoleServer>,
    kept: oneshot::Receiver<()>,
    expires_at_ms: u64,
    recorder: Recorder,
) {
    let is_over = async {
        if kept.await.is_ok() {
            let expires_at = UNIX_EPOCH + Duration::from_millis(expires_at_ms);
            tokio::time::sleep(expires_at.duration_since(SystemTime::now()).unwrap_or_default()).await;
        }
    };
    let answer = tokio::select! {
        biased;
        answer = &mut sent.rx => Some(answer.unwrap_or(Err(ServiceError::TransportClosed))),
        () = is_over => None,
    };
    match answer {
        Some(answer) => match link::answer(answer) {
            Ok(answer) => recorder.record(&answer).await,
            Err(error) => {
                tracing::debug!("a client did not decide about approval {}: {error}", recorder.approval.id)
            }
        },
        None => {
            let withdrawn = sent.cancel(Some("the call does not wait for this decision anymore".to_owned()));
            if !matches!(tokio::time::timeout(NOTIFY_TIMEOUT, withdrawn).await, Ok(Ok(()))) {
                tracing::debug!("the question about approval {} was not withdrawn", recorder.approval.id);
            }
        }
    }
}

impl Recorder {
    async fn record(self, answer: &Value) {
        let Recorder { host, caller, approval: AskedApproval { id, .. }, tool } = &self;
        let content = &answer["content"];
        let approve = match content["decision"].as_str() {
            Some("approve") if answer["action"] == "accept" => true,
            Some("deny") if answer["action"] == "accept" => false,
            _ => return,
        };
        let reason = content["reason"].as_str().filter(|reason| !approve && !reason.is_empty());
        let decided = host.decide(id, approve, reason.map(str::to_owned), &caller.name()).await;
        let decision = if approve { "approve" } else { "deny" };
        access::audit_decision(caller, id, &format!("decision={decision} tool={tool}"), decided.is_ok());
        if let Err(error) = decided {
            tracing::debug!("the decision of a client about approval {id} was not recorded: {error}");
        }
    }
}
